// Bodies of graph.h. Specifications are in Python: `Step::run` is Engine.step, `grow` is step/draft.py `grow_reference`, `verify_costs` FixedShape's.
#include "graph.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

namespace ygg {

namespace {

// Milliseconds of the clock that is Python's time.perf_counter.
double now_ms() { return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Whether a tree that grew to `length` nodes is deep enough; `tokens` is what it was worth before, and becomes what it is worth.
bool ends(const at::Tensor& log_prob, int64_t length, const Growth& growth, double& tokens) {
  if (growth.least == -std::numeric_limits<double>::infinity()) return false;
  if (growth.prices.numel()) {
    const double before = std::exchange(tokens, worth(log_prob, length, growth.prices));
    return tokens - before < growth.least;
  }
  const float* values = log_prob.const_data_ptr<float>();
  return values[length - 1] - values[length - 2] < growth.least;
}

// `Curve.at`: of the smallest measured size that holds `num_tokens`, linear between contexts, clamped at both ends.
double curve_at(const at::Tensor& table, int64_t num_tokens, int64_t context_len) {
  const int64_t contexts = table.size(0) - 1, row_len = table.size(1);
  const double* sizes = table.const_data_ptr<double>();
  const int64_t column = std::min<int64_t>(std::lower_bound(sizes + 1, sizes + row_len, double(num_tokens)) - sizes, row_len - 1);
  const auto context = [&](int64_t row) { return sizes[(row + 1) * row_len]; };
  const auto ms = [&](int64_t row) { return sizes[(row + 1) * row_len + column]; };
  int64_t place = 0;
  while (place < contexts && context(place) < double(context_len)) ++place;
  if (place == 0 || place == contexts) return ms(std::min(place, contexts - 1));
  const double share = (double(context_len) - context(place - 1)) / (context(place) - context(place - 1));
  return ms(place - 1) * (1 - share) + ms(place) * share;
}

// Keeps the slots at `offsets`, ascending, behind `length` in a cache: `KVCache.commit_`.
void keep_(const at::Tensor& storage, const std::vector<int64_t>& offsets, int64_t length) {
  size_t moved = 0;
  while (moved < offsets.size() && offsets[moved] == int64_t(moved)) ++moved;
  std::vector<int64_t> source;
  for (size_t i = moved; i < offsets.size(); ++i) source.push_back(length + offsets[i]);
  if (!source.empty()) move_slots_(storage, source, length + int64_t(moved));
}

// The arrays one after another: `TokenTree.unpacked`.
void pack_tree_(const TreeArrays& tree, int32_t* to, int64_t max_words) {
  const auto& [token, parent, depth, log_prob, path] = tree;
  TORCH_CHECK(4 * token.size(0) + path.numel() <= max_words, "a tree of ", token.size(0), " nodes in ", max_words, " words");
  for (const at::Tensor* array : {&token, &parent, &depth, &log_prob, &path}) {
    std::memcpy(to, array->const_data_ptr(), array->nbytes());
    to += array->numel();
  }
}

// Consecutive tokens of the only row, of which the last `num_read` are read.
void pack_chain_(const at::Tensor& meta, at::IntArrayRef tokens, int64_t start_pos, int64_t num_read) {
  pack_chains_(meta, tokens, {int64_t(tokens.size())}, {start_pos}, {0}, {num_read});
}

}  // namespace

Graph::Graph(const std::string& path, int64_t device, const c10::Dict<std::string, at::Tensor>& given)
    : loader_(path, "model", true, 1, c10::DeviceIndex(device)) {
  for (const std::string& name : loader_.get_constant_fqns()) {
    const auto found = given.find(name);
    TORCH_CHECK(found != given.end(), "it asks for ", name);
    constants_.emplace(name, found->value());
  }
  loader_.load_constants(constants_, false, true, true);
}

std::tuple<at::Tensor, at::Tensor> Graph::run(const at::Tensor& meta) {
  std::vector<at::Tensor> outputs = loader_.run({meta});
  return {outputs[0], outputs[1]};
}

std::tuple<TreeArrays, int64_t, std::vector<double>> grow(Graph& graph, const at::Tensor& meta, const std::tuple<at::Tensor, at::Tensor>& head, int64_t head_row,
                                                          int64_t token, int64_t capacity, int64_t path_width, int64_t root_pos, int64_t width, int64_t depth,
                                                          int64_t candidates, const Growth& growth) {
  TreeArrays tree = root(token, capacity, path_width);
  auto& [tokens, parents, depths, log_probs, paths] = tree;
  at::Tensor next = std::get<0>(head).narrow(0, head_row, 1), next_log_probs = std::get<1>(head).narrow(0, head_row, 1);
  const at::Tensor frontier = empty({capacity, candidates}, log_probs.options()), frontier_token = empty({capacity, candidates}, next.options());
  std::vector<double> times;
  int64_t known = 0, length = 1;
  double tokens_worth = growth.prices.numel() ? worth(log_probs, length, growth.prices) : 0.0;
  for (int64_t step = 1;; ++step) {
    grow_(frontier, frontier_token, next_log_probs, next, known, length - known, tokens, parents, depths, log_probs, paths, length, width, meta, root_pos,
          growth.slope, growth.offset);
    known = length;
    length += width;
    if (step == depth || ends(log_probs, length, growth, tokens_worth)) return {tree, length, times};
    times.push_back(now_ms());
    std::tie(next, next_log_probs) = graph.run(meta);
    times.push_back(now_ms());
  }
}

std::tuple<std::vector<int64_t>, std::vector<double>> verify_costs(const Costs& costs, int64_t verify, int64_t width, int64_t depth, int64_t num_nodes,
                                                                   int64_t context_len, int64_t lag) {
  if (verify) return {{std::min(verify, num_nodes)}, {1.0}};
  const int64_t most = std::min(num_nodes, costs.sizes[costs.sizes.size() - 2]);  // behind the verified widths stands the greatest graph
  const double drafting_ms = curve_at(costs.draft_ms, 2, context_len) + double(depth - 1) * curve_at(costs.draft_ms, width, context_len);
  const double settled_ms = drafting_ms + double(depth) * costs.growth_host_ms + costs.step_host_ms;
  std::vector<int64_t> widths;
  std::vector<double> costs_ms;
  for (const int64_t size : costs.sizes) {
    const int64_t wide = std::min(size - lag, most);
    if (size <= lag || (!widths.empty() && wide <= widths.back())) continue;
    widths.push_back(wide);
    costs_ms.push_back(settled_ms + curve_at(costs.verify_ms, lag + wide, context_len));
  }
  return {widths, costs_ms};
}

size_t Step::Model::bucket(int64_t num_tokens) const {
  const auto found = std::find_if(metas.begin(), metas.end(), [&](const at::Tensor& meta) { return meta.size(0) >= num_tokens; });
  TORCH_CHECK(found != metas.end(), "no graph for ", num_tokens, " tokens");
  return size_t(found - metas.begin());
}

Step::Step(Graphs target, std::vector<at::Tensor> target_metas, at::Tensor target_storage, Graphs draft, std::vector<at::Tensor> draft_metas,
           at::Tensor draft_storage, int64_t path_width, int64_t candidates)
    : target_{std::move(target), std::move(target_metas), std::move(target_storage)},
      draft_{std::move(draft), std::move(draft_metas), std::move(draft_storage)},
      path_width_(path_width),
      candidates_(candidates) {}

void Step::follow_policy_(double slope, double offset, at::Tensor prices, double least, at::Tensor knots, at::Tensor draft_ms, at::Tensor verify_ms,
                          double growth_host_ms, double step_host_ms, std::vector<int64_t> verify_sizes) {
  growth_ = {slope, offset, std::move(prices), least};
  knots_ = std::move(knots);
  costs_ = {std::move(draft_ms), std::move(verify_ms), growth_host_ms, step_host_ms, std::move(verify_sizes)};
}

const Step::Said& Step::run(at::IntArrayRef tail, int64_t first, int64_t target_len, int64_t draft_len, int64_t width, int64_t depth, int64_t verify, bool says) {
  const int64_t root_pos = first + int64_t(tail.size()) - 1, lag = root_pos - target_len;
  std::vector<double> stages{now_ms()}, draft_times, target_times;
  TreeArrays tree;
  int64_t num_nodes = 1;
  if (depth == 0) {
    tree = root(tail.back(), 1, path_width_);
  } else {
    const at::IntArrayRef chain = tail.slice(draft_len - first);
    const size_t head_size = draft_.bucket(int64_t(chain.size())), size = draft_.bucket(width);
    pack_chain_(draft_.metas[head_size], chain, draft_len, 1);
    const double begin = now_ms();
    const auto head = draft_.graphs[head_size]->run(draft_.metas[head_size]);
    const double end = now_ms();
    std::tie(tree, num_nodes, draft_times) = grow(*draft_.graphs[size], draft_.metas[size], head, int64_t(chain.size()) - 1, tail.back(), 1 + width * depth,
                                                  path_width_, root_pos, width, depth, width == 1 ? 1 : candidates_, growth_);
    draft_times.insert(draft_times.begin(), {begin, end});
  }
  stages.push_back(now_ms());

  std::vector<int64_t> keep{0};
  double expected = 1.0;
  if (num_nodes > 1) {
    const auto [widths, costs_ms] = verify_costs(costs_, verify, width, (num_nodes - 1) / width, num_nodes, root_pos, lag);
    const auto& [token, parent, node_depth, log_prob, path] = tree;
    at::Tensor kept_token, kept_parent, kept_depth, kept_log_prob, kept_path;
    std::tie(kept_token, kept_parent, kept_depth, kept_log_prob, kept_path, keep, expected) =
        prune(token, parent, node_depth, log_prob, path, num_nodes, knots_, widths, costs_ms);
    tree = {kept_token, kept_parent, kept_depth, kept_log_prob, kept_path};
  }
  stages.push_back(now_ms());

  const auto& [token, parent, node_depth, log_prob, path] = tree;
  const int64_t verified = int64_t(keep.size());
  const size_t size = target_.bucket(lag + verified);
  const at::Tensor& meta = target_.metas[size];
  if (lag) pack_chain_(meta, tail.slice(target_len - first, lag), target_len, 0);
  pack_nodes_(lag ? meta.narrow(0, lag, meta.size(0) - lag) : meta, token, node_depth, path, 0, verified, root_pos, 0);
  target_times.push_back(now_ms());
  auto [logits, hidden] = target_.graphs[size]->run(meta);
  target_times.push_back(now_ms());
  if (meta.size(0) != verified) logits = logits.narrow(0, lag, verified), hidden = hidden.narrow(0, lag, verified);
  stages.push_back(now_ms());

  int64_t draft_kept = root_pos;
  std::vector<int64_t> nodes;
  if (says) {
    const auto [accepted, emitted] = follow(logits, parent, token);
    stages.push_back(now_ms());
    keep_(target_.storage, accepted, root_pos);
    std::vector<int64_t> drafted;
    for (const int64_t node : accepted)
      if (keep[node] < num_nodes - width) drafted.push_back(keep[node]);  // the last growth step's nodes have not run
    if (depth) keep_(draft_.storage, drafted, root_pos);
    draft_kept += int64_t(drafted.size());
    nodes = accepted;
    nodes.insert(nodes.end(), emitted.begin(), emitted.end());
    stages.push_back(now_ms());
  } else {
    nodes = keep;
  }
  std::vector<double>& numbers = said_.numbers;
  numbers = {expected, double(num_nodes), double(verified), double(draft_kept), double(nodes.size())};
  numbers.insert(numbers.end(), nodes.begin(), nodes.end());
  for (const auto* times : {&target_times, &stages, &draft_times}) numbers.insert(numbers.end(), times->begin(), times->end());
  said_.tree = std::move(tree);
  said_.logits = std::move(logits);
  said_.hidden = std::move(hidden);
  return said_;
}

}  // namespace ygg

int64_t ygg_step_run(ygg::Step* step, const int64_t* tail, int64_t tail_len, int64_t first, int64_t target_len, int64_t draft_len, int64_t width, int64_t depth,
                     int64_t verify, int64_t says, double* numbers, int64_t max_numbers, int32_t* tree, int64_t max_words, char* error, int64_t max_error) noexcept {
  try {
    const ygg::Step::Said& said = step->run({tail, size_t(tail_len)}, first, target_len, draft_len, width, depth, verify, says != 0);
    const int64_t count = int64_t(said.numbers.size());
    TORCH_CHECK(count <= max_numbers, count, " numbers in ", max_numbers);
    std::copy(said.numbers.begin(), said.numbers.end(), numbers);
    ygg::pack_tree_(said.tree, tree, max_words);
    return count;
  } catch (const std::exception& failure) {
    error[std::string_view(failure.what()).copy(error, size_t(max_error - 1))] = 0;
    return -1;
  }
}

// Bodies of graph.h. Python has the specifications: `Step::run` is Engine.step, `grow` is in step/draft.py,
// `verify_costs` is that of FixedShape.
#include "graph.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

namespace ygg {

namespace {

// Milliseconds of the clock of Python's time.perf_counter.
double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Whether growth stops at `length` nodes. `value` is the tree's value before the last step, and becomes its
// value now.
bool is_enough(const at::Tensor& log_prob, int64_t length, const GrowthPolicy& policy, double& value) {
  if (policy.least == -std::numeric_limits<double>::infinity()) return false;
  if (policy.node_costs.numel()) {
    const double before = std::exchange(value, value_of(log_prob, length, policy.node_costs));
    return value - before < policy.least;
  }
  const float* values = log_prob.const_data_ptr<float>();
  return values[length - 1] - values[length - 2] < policy.least;
}

// `Curve.at`: the latency of the smallest measured size that holds `num_tokens`, linear between contexts,
// clamped at both ends.
double curve_at(const at::Tensor& table, int64_t num_tokens, int64_t context_len) {
  const int64_t contexts = table.size(0) - 1, row_len = table.size(1);
  const double* sizes = table.const_data_ptr<double>();
  const int64_t column = std::min<int64_t>(
      std::lower_bound(sizes + 1, sizes + row_len, double(num_tokens)) - sizes, row_len - 1);
  const auto context = [&](int64_t row) { return sizes[(row + 1) * row_len]; };
  const auto ms = [&](int64_t row) { return sizes[(row + 1) * row_len + column]; };
  int64_t place = 0;
  while (place < contexts && context(place) < double(context_len)) ++place;
  if (place == 0 || place == contexts) return ms(std::min(place, contexts - 1));
  const double share = (double(context_len) - context(place - 1)) / (context(place) - context(place - 1));
  return ms(place - 1) * (1 - share) + ms(place) * share;
}

// Moves the slots at `offsets`, ascending, to the first ones after `length`, as `KVCache.commit_` does.
void keep_(const at::Tensor& storage, const std::vector<int64_t>& offsets, int64_t length) {
  size_t in_place = 0;
  while (in_place < offsets.size() && offsets[in_place] == int64_t(in_place)) ++in_place;
  std::vector<int64_t> source;
  for (size_t i = in_place; i < offsets.size(); ++i) source.push_back(length + offsets[i]);
  if (!source.empty()) move_slots_(storage, source, length + int64_t(in_place));
}

// Writes the arrays one after another, as `TokenTree.unpacked` reads them.
void pack_tree_(const Tree& tree, int32_t* to, int64_t max_words) {
  TORCH_CHECK(4 * tree.capacity() + tree.path.numel() <= max_words, "a tree of ", tree.capacity(),
              " nodes in ", max_words, " words");
  for (const at::Tensor* array : {&tree.token, &tree.parent, &tree.depth, &tree.log_prob, &tree.path}) {
    std::memcpy(to, array->const_data_ptr(), array->nbytes());
    to += array->numel();
  }
}

// Consecutive tokens of the only row, of which the last `num_read` are read.
void pack_chain_(const at::Tensor& meta, at::IntArrayRef tokens, int64_t start_pos, int64_t num_read) {
  pack_chains_(meta, {tokens, {int64_t(tokens.size())}, {start_pos}, {0}, {num_read}});
}

template <class... Lists>
void append_(std::vector<double>& numbers, const Lists&... lists) {
  (numbers.insert(numbers.end(), lists.begin(), lists.end()), ...);
}

}  // namespace

Graph::Graph(const std::string& path, int64_t device, const c10::Dict<std::string, at::Tensor>& weights)
    : loader_(path, "model", true, 1, c10::DeviceIndex(device)) {
  for (const std::string& name : loader_.get_constant_fqns()) {
    const auto found = weights.find(name);
    TORCH_CHECK(found != weights.end(), "it asks for ", name);
    constants_.emplace(name, found->value());
  }
  loader_.load_constants(constants_, false, true, true);
}

std::tuple<at::Tensor, at::Tensor> Graph::run(const at::Tensor& meta) {
  std::vector<at::Tensor> outputs = loader_.run({meta});
  return {outputs[0], outputs[1]};
}

Drafted grow(Graph& graph, const at::Tensor& meta, const Head& head, const TreeSize& size,
             const GrowthPolicy& policy) {
  Drafted drafted{root(head.token, size.capacity, size.path_width), 1, {}};
  const at::Tensor& log_prob = drafted.tree.log_prob;
  Candidates next{head.candidates.log_probs.narrow(0, head.row, 1),
                  head.candidates.tokens.narrow(0, head.row, 1)};
  const Frontier frontier{empty({size.capacity, size.candidates}, log_prob.options()),
                          empty({size.capacity, size.candidates}, next.tokens.options())};
  int64_t& num_nodes = drafted.num_nodes;
  int64_t num_known = 0;
  double value = policy.node_costs.numel() ? value_of(log_prob, num_nodes, policy.node_costs) : 0.0;
  for (int64_t step = 1;; ++step) {
    grow_(frontier, next, drafted.tree, meta,
          {num_known, num_nodes - num_known, num_nodes, size.width, head.root_pos}, policy.platt);
    num_known = num_nodes;
    num_nodes += size.width;
    if (step == size.depth || is_enough(log_prob, num_nodes, policy, value)) return drafted;
    drafted.times_ms.push_back(now_ms());
    std::tie(next.tokens, next.log_probs) = graph.run(meta);
    drafted.times_ms.push_back(now_ms());
  }
}

VerifyCosts verify_costs(const Costs& costs, const Shape& shape, int64_t num_nodes, int64_t context_len,
                         int64_t lag) {
  if (shape.verify) return {{std::min(shape.verify, num_nodes)}, {1.0}};
  // the last size is the largest graph, which comes after the widths of verification
  const int64_t most = std::min(num_nodes, costs.sizes[costs.sizes.size() - 2]);
  const double head_ms = curve_at(costs.draft_ms, 2, context_len);
  const double drafting_ms =
      head_ms + double(shape.depth - 1) * curve_at(costs.draft_ms, shape.width, context_len);
  const double fixed_ms = drafting_ms + double(shape.depth) * costs.growth_host_ms + costs.step_host_ms;
  VerifyCosts choices;
  for (const int64_t size : costs.sizes) {
    const int64_t width = std::min(size - lag, most);
    if (size <= lag || (!choices.widths.empty() && width <= choices.widths.back())) continue;
    choices.widths.push_back(width);
    choices.costs_ms.push_back(fixed_ms + curve_at(costs.verify_ms, lag + width, context_len));
  }
  return choices;
}

size_t Step::Model::bucket(int64_t num_tokens) const {
  const auto found = std::find_if(metas.begin(), metas.end(),
                                  [&](const at::Tensor& meta) { return meta.size(0) >= num_tokens; });
  TORCH_CHECK(found != metas.end(), "no graph for ", num_tokens, " tokens");
  return size_t(found - metas.begin());
}

Step::Step(Model target, Model draft, int64_t path_width, int64_t candidates)
    : target_(std::move(target)),
      draft_(std::move(draft)),
      path_width_(path_width),
      candidates_(candidates) {}

// Runs the draft over the tokens that it lacks, then grows a tree.
Drafted Step::draft_tree(const Text& text, const Shape& shape) {
  if (shape.depth == 0) return {root(text.tail.back(), 1, path_width_), 1, {}};
  const at::IntArrayRef chain = text.tail.slice(text.draft_len - text.first);
  const size_t head_size = draft_.bucket(int64_t(chain.size())), size = draft_.bucket(shape.width);
  pack_chain_(draft_.metas[head_size], chain, text.draft_len, 1);
  const double begin = now_ms();
  const auto [tokens, log_probs] = draft_.graphs[head_size]->run(draft_.metas[head_size]);
  const double end = now_ms();
  const Head head{{log_probs, tokens}, int64_t(chain.size()) - 1, text.tail.back(), text.root_pos()};
  const int64_t candidates = shape.width == 1 ? 1 : candidates_;
  const TreeSize tree_size{1 + shape.width * shape.depth, path_width_, shape.width, shape.depth,
                           candidates};
  Drafted drafted = grow(*draft_.graphs[size], draft_.metas[size], head, tree_size, policy_.growth);
  drafted.times_ms.insert(drafted.times_ms.begin(), {begin, end});
  return drafted;
}

Pruned Step::prune_tree(const Drafted& drafted, const Text& text, const Shape& shape) const {
  if (drafted.num_nodes == 1) return {drafted.tree, {0}, 1.0};
  const Shape grown{shape.width, (drafted.num_nodes - 1) / shape.width, shape.verify};
  const auto [widths, costs_ms] =
      verify_costs(policy_.costs, grown, drafted.num_nodes, text.root_pos(), text.lag());
  return prune(drafted.tree, drafted.num_nodes, policy_.knots, widths, costs_ms);
}

// Runs the target over the tokens that it lacks and the tree; returns when its forward began and ended.
std::vector<double> Step::verify(const Tree& tree, const Text& text) {
  const int64_t lag = text.lag(), num_nodes = tree.capacity();
  const size_t size = target_.bucket(lag + num_nodes);
  const at::Tensor& meta = target_.metas[size];
  if (lag) pack_chain_(meta, text.tail.slice(text.target_len - text.first, lag), text.target_len, 0);
  const at::Tensor nodes_meta = lag ? meta.narrow(0, lag, meta.size(0) - lag) : meta;
  pack_nodes_(nodes_meta, tree.token, tree.depth, tree.path, {0, num_nodes, text.root_pos(), 0});
  const double begin = now_ms();
  std::tie(result_.logits, result_.hidden) = target_.graphs[size]->run(meta);
  const double end = now_ms();
  if (meta.size(0) != num_nodes) {
    result_.logits = result_.logits.narrow(0, lag, num_nodes);
    result_.hidden = result_.hidden.narrow(0, lag, num_nodes);
  }
  return {begin, end};
}

// Keeps the accepted path in both caches, of the draft's the nodes among the first `num_run` of its tree,
// which it has run. Returns how many those are.
int64_t Step::commit_(const std::vector<int64_t>& path, const std::vector<int64_t>& drafted_ids,
                      int64_t num_run, int64_t root_pos) {
  keep_(target_.storage, path, root_pos);
  std::vector<int64_t> drafted;
  for (const int64_t node : path)
    if (drafted_ids[node] < num_run) drafted.push_back(drafted_ids[node]);
  keep_(draft_.storage, drafted, root_pos);
  return int64_t(drafted.size());
}

const Step::Result& Step::run(const Text& text, const Shape& shape, bool is_greedy) {
  std::vector<double> stages_ms{now_ms()};
  const Drafted drafted = draft_tree(text, shape);
  stages_ms.push_back(now_ms());
  Pruned pruned = prune_tree(drafted, text, shape);
  stages_ms.push_back(now_ms());
  const std::vector<double> target_ms = verify(pruned.tree, text);
  stages_ms.push_back(now_ms());

  int64_t draft_len = text.root_pos();
  std::vector<int64_t> nodes = pruned.keep;
  if (is_greedy) {
    Accepted accepted = follow(result_.logits, pruned.tree.parent, pruned.tree.token);
    stages_ms.push_back(now_ms());
    // the nodes of the last growth step have not run
    const int64_t num_run = shape.depth ? drafted.num_nodes - shape.width : 0;
    draft_len += commit_(accepted.path, pruned.keep, num_run, text.root_pos());
    stages_ms.push_back(now_ms());
    nodes = std::move(accepted.path);
    nodes.insert(nodes.end(), accepted.tokens.begin(), accepted.tokens.end());
  }
  std::vector<double>& numbers = result_.numbers;
  numbers = {pruned.expected, double(drafted.num_nodes), double(pruned.keep.size()), double(draft_len),
             double(nodes.size())};
  append_(numbers, nodes, target_ms, stages_ms, drafted.times_ms);
  result_.tree = std::move(pruned.tree);
  return result_;
}

}  // namespace ygg

int64_t ygg_step_run(ygg::Step* step, const int64_t* tail, int64_t tail_len, int64_t first,
                     int64_t target_len, int64_t draft_len, int64_t width, int64_t depth, int64_t verify,
                     int64_t is_greedy, double* numbers, int64_t max_numbers, int32_t* tree,
                     int64_t max_words, char* error, int64_t max_error) noexcept {
  try {
    const ygg::Text text{{tail, size_t(tail_len)}, first, target_len, draft_len};
    const ygg::Step::Result& result = step->run(text, {width, depth, verify}, is_greedy != 0);
    const int64_t count = int64_t(result.numbers.size());
    TORCH_CHECK(count <= max_numbers, count, " numbers in ", max_numbers);
    std::copy(result.numbers.begin(), result.numbers.end(), numbers);
    ygg::pack_tree_(result.tree, tree, max_words);
    return count;
  } catch (const std::exception& failure) {
    error[std::string_view(failure.what()).copy(error, size_t(max_error - 1))] = 0;
    return -1;
  }
}

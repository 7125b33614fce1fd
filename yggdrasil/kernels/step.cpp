// Bodies of step.h. The functions have the names of the stages; step/rows.py specifies them.
#include "step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

namespace ygg {

namespace {

constexpr int64_t kTarget = 0, kDraft = 1;
// Up to 3 forwards of the draft's widest graph cost less than one of its prompt chunk.
constexpr int64_t kMostWidestForwards = 3;

// Milliseconds of the clock of Python's time.perf_counter.
double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Writes the arrays one after another, as `TokenTree.unpacked` reads them.
int64_t pack_tree(const Tree& tree, int32_t* to) {
  const int32_t* begin = to;
  for (const at::Tensor* array : {&tree.token, &tree.parent, &tree.depth, &tree.log_prob, &tree.path}) {
    std::memcpy(to, array->const_data_ptr(), array->nbytes());
    to += array->numel();
  }
  return to - begin;
}

// Moves the slots of the tokens at start + offsets[i] of a row to start + i.
void keep_(const Step::Model& model, int64_t place, int64_t start, const std::vector<int64_t>& offsets) {
  size_t moved = 0;
  while (moved < offsets.size() && offsets[moved] == int64_t(moved)) ++moved;
  const int32_t* pages = model.pages.const_data_ptr<int32_t>() + place * model.pages.size(1);
  const auto slot = [&](int64_t index) {
    return int64_t(pages[index / kPageLen]) * kPageLen + index % kPageLen;
  };
  std::vector<int64_t> source, target;
  for (size_t i = moved; i < offsets.size(); ++i) {
    source.push_back(slot(start + offsets[i]));
    target.push_back(slot(start + int64_t(i)));
  }
  if (!source.empty()) copy_slots_(model.storage, source, target);
}

// The place of the menu that emits the most tokens per millisecond, and its number of nodes, at most all.
int64_t best_of(const Menu& menu, const std::vector<double>& sums, int64_t num_rows, int64_t depth) {
  const int64_t drafted = int64_t(sums.size()) - 1;
  const auto speed = [&](int64_t entry) {
    const double extra = menu.extra ? menu.extra[entry] : 0.0;
    const double tokens =
        double(num_rows) + extra + menu.scale * sums[std::min(menu.nodes[entry], drafted)];
    return tokens / (menu.ms[entry] + double(depth) * menu.growth_ms);
  };
  int64_t best = 0;
  for (int64_t entry = 1; entry < menu.len; ++entry)
    if (speed(entry) > speed(best)) best = entry;
  return std::min(menu.nodes[best], drafted);
}

// Candidates of several forwards as one.
Candidates joined(std::vector<Candidates> parts) {
  if (parts.size() < 2) return parts.empty() ? Candidates{} : std::move(parts[0]);
  int64_t rows = 0;
  for (const Candidates& part : parts) rows += part.tokens.size(0);
  const int64_t count = parts[0].tokens.size(1);
  Candidates all{empty({rows, count}, parts[0].log_probs.options()),
                 empty({rows, count}, parts[0].tokens.options())};
  int64_t first = 0;
  for (const Candidates& part : parts) {
    const int64_t num = part.tokens.size(0);
    rows_of(all.log_probs, first, num).copy_(part.log_probs);
    rows_of(all.tokens, first, num).copy_(part.tokens);
    first += num;
  }
  return all;
}

// A drafted node in the competition for verification.
struct Node {
  size_t row;
  int64_t id;
  double value;
};

// The tokens on the path from the root, which is left out, to a node.
std::vector<int64_t> path_tokens(const Tree& tree, int64_t node) {
  const int32_t* path = tree.path.const_data_ptr<int32_t>() + node * tree.path_width();
  std::vector<int64_t> tokens;
  for (int64_t depth = 1; depth <= tree.depth.const_data_ptr<int32_t>()[node]; ++depth)
    tokens.push_back(tree.token.const_data_ptr<int32_t>()[path[depth]]);
  return tokens;
}

// By falling value; among equals the lower id, so a parent before its child, then the earlier row.
void by_value_(std::vector<Node>& nodes) {
  std::sort(nodes.begin(), nodes.end(), [](const Node& a, const Node& b) {
    if (a.value != b.value) return a.value > b.value;
    return a.id != b.id ? a.id < b.id : a.row < b.row;
  });
}

}  // namespace

size_t Step::Model::bucket(int64_t num_tokens) const {
  const auto found = std::find_if(metas.begin(), metas.end(),
                                  [&](const at::Tensor& meta) { return meta.size(0) >= num_tokens; });
  TORCH_CHECK(found != metas.end(), "no graph for ", num_tokens, " tokens");
  return size_t(found - metas.begin());
}

int64_t Step::Model::chunk(int64_t num_tokens) const {
  const int64_t widest = metas[metas.size() < 2 ? 0 : metas.size() - 2].size(0);
  return num_tokens <= kMostWidestForwards * widest ? widest : most_tokens();
}

Step::Step(Model target, Model draft, int64_t path_width, int64_t candidates)
    : target_(std::move(target)),
      draft_(std::move(draft)),
      path_width_(path_width),
      candidates_(candidates),
      nodes_meta_(empty(draft_.metas.back().sizes(), draft_.metas.back().options())) {}

int64_t Step::add_calibration(PlattScale platt, at::Tensor knots) {
  calibrations_.push_back({platt, std::move(knots)});
  return int64_t(calibrations_.size()) - 1;
}

int64_t Step::add_stop(at::Tensor node_costs, double minimum) {
  stops_.push_back({std::move(node_costs), minimum});
  return int64_t(stops_.size()) - 1;
}

int64_t Step::add_levels(std::vector<std::vector<int64_t>> parents,
                         std::vector<std::vector<int64_t>> ranks) {
  levels_.push_back({std::move(parents), std::move(ranks)});
  return int64_t(levels_.size()) - 1;
}

int64_t Step::add_processors(Processors processors) {
  processors_.push_back(std::move(processors));
  return int64_t(processors_.size()) - 1;
}

void Step::forget_() {
  calibrations_.clear();
  stops_.clear();
  levels_.clear();
  processors_.clear();
}

// A row before its step.
Step::Growing Step::growing(const Row& row, int64_t capacity, const Reply& reply) const {
  Growing growing{row, root(row.tokens[row.root_pos()], capacity, path_width_), {}, {}, {}};
  if (row.processors >= 0)
    growing.text =
        std::make_unique<ProcessedText>(processors_[row.processors], row.text(0, row.root_pos() + 1),
                                        row.prompt_len, Grammar{reply.mask, row.grammar, reply.vocab});
  return growing;
}

std::tuple<at::Tensor, at::Tensor> Step::forward(int64_t model, size_t size, int64_t num_tokens) {
  const Model& run = model == kTarget ? target_ : draft_;
  const double begin = now_ms();
  auto outputs = run.graphs[size]->run(run.metas[size]);
  forwards_.push_back({model, num_tokens, begin, now_ms()});
  return outputs;
}

// ---- draft ----

// Runs chunks of texts in forwards of the draft; one that does not fit is split. Returns the candidates
// after the tokens of each that are read.
std::vector<Candidates> Step::run_chunks_(const std::vector<Chunk>& chunks) {
  int64_t num_left = 0;
  for (const Chunk& chunk : chunks) num_left += int64_t(chunk.tokens.size());
  const int64_t limit = draft_.chunk(num_left);
  std::vector<std::vector<Candidates>> found(chunks.size());
  std::vector<int64_t> tokens, lens, starts, places, nums_read, reads;
  std::vector<size_t> of_part;
  const auto flush = [&] {
    const int64_t count = int64_t(tokens.size());
    if (count == 0) return;
    const size_t size = draft_.bucket(count);
    pack_chains_(draft_.metas[size], {tokens, lens, starts, places, nums_read, reads});
    const auto [best, log_probs] = forward(kDraft, size, count);
    int64_t end = 0;
    for (size_t part = 0; part < lens.size(); ++part) {
      end += lens[part];
      const int64_t count_read = nums_read[part], first = end - count_read;
      if (count_read)
        found[of_part[part]].push_back(
            {rows_of(log_probs, first, count_read), rows_of(best, first, count_read)});
    }
    for (std::vector<int64_t>* list : {&tokens, &lens, &starts, &places, &nums_read, &reads}) list->clear();
    of_part.clear();
  };
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    for (size_t from = 0; from < chunk.tokens.size();) {
      const size_t len = std::min(chunk.tokens.size() - from, size_t(limit) - tokens.size());
      // the last `num_read` tokens of the chunk are read
      const int64_t num_after = int64_t(chunk.tokens.size() - from - len);
      const int64_t num_read = std::clamp(chunk.num_read - num_after, int64_t(0), int64_t(len));
      tokens.insert(tokens.end(), chunk.tokens.begin() + from, chunk.tokens.begin() + from + len);
      lens.push_back(int64_t(len));
      starts.push_back(chunk.start + int64_t(from));
      places.push_back(chunk.place);
      nums_read.push_back(num_read);
      reads.push_back(chunk.read);
      of_part.push_back(i);
      from += len;
      if (int64_t(tokens.size()) == limit) flush();
    }
  }
  flush();
  std::vector<Candidates> read;
  for (std::vector<Candidates>& parts : found) read.push_back(joined(std::move(parts)));
  return read;
}

// Runs the text that the draft lacks by more than a token.
void Step::catch_up_(std::vector<Growing>& rows) {
  std::vector<Chunk> chunks;
  for (Growing& each : rows) {
    Row& row = each.row;
    if (row.depth == 0 || row.root_pos() - row.draft_len <= 1) continue;
    chunks.push_back(
        {row.text(row.draft_len, row.root_pos()).vec(), row.draft_len, row.place, 0, kReadBest});
    row.draft_len = row.root_pos();
  }
  run_chunks_(chunks);
}

// Grafts on a row's root what its grammar forces, or else what repeats its text. A path has room for it, a
// growth step and a head draft.
void Step::graft_(Growing& each) const {
  const Row& row = each.row;
  each.last_depth = row.depth;
  const int64_t most = std::min(row.graft, path_width_ - 3);
  if (most <= 0) return;
  if (const int64_t num_forced = std::min(row.num_forced, most); num_forced > 0) {
    each.graft.tokens.assign(row.forced, row.forced + num_forced);
    each.graft.log_probs.assign(num_forced, 0.0);  // certain
  } else {
    each.graft = graft(row.tokens, row.len, *row.evidence, most, row.depth ? kMinEdge : 0.0);
  }
  if (each.graft.tokens.empty()) return;
  grow_chain_(each.tree, each.graft.tokens, each.graft.log_probs);
  each.num_nodes += int64_t(each.graft.tokens.size());
  each.last_depth = std::min(row.depth, path_width_ - 1 - each.num_nodes);
}

// Runs the draft over every root and its graft, and over the token before it where it lacks that.
void Step::head_(std::vector<Growing>& rows) {
  std::vector<Chunk> chunks;
  for (const Growing& each : rows) {
    const Row& row = each.row;
    if (row.depth == 0) continue;
    std::vector<int64_t> tokens = row.text(row.draft_len, row.len).vec();
    tokens.insert(tokens.end(), each.graft.tokens.begin(), each.graft.tokens.end());
    chunks.push_back({std::move(tokens), row.draft_len, row.place, each.num_nodes, each.read()});
  }
  const std::vector<Candidates> heads = run_chunks_(chunks);
  auto head = heads.begin();
  for (Growing& each : rows) {
    if (each.row.depth == 0) continue;
    record_forward_(each, *head++);
    each.row.draft_len = each.row.root_pos();
    each.num_run = each.num_nodes;
  }
}

// Takes the candidates after a row's nodes from `num_known` on, which have run: those that processors and
// noise prefer.
void Step::record_forward_(Growing& row, const Candidates& candidates) {
  row.next = candidates;
  if (!row.is_ranked_again()) return;
  const int32_t* depth = row.tree.depth.const_data_ptr<int32_t>();
  std::vector<int64_t> positions;
  std::vector<std::vector<int64_t>> paths;
  for (int64_t node = row.num_known; node < row.num_nodes; ++node) {
    positions.push_back(row.row.root_pos() + 1 + depth[node]);
    if (row.text) paths.push_back(path_tokens(row.tree, node));
  }
  if (row.text) row.next = row.text->process(row.next, paths, row.row.top_logit);
  row.next = coupled(row.next, positions, row.row.sampling(), row.is_chain() ? 1 : candidates_);
}

int64_t Step::next_width(const Growing& row) const {
  return row.row.levels < 0 ? row.row.width : int64_t(levels_[row.row.levels].parents[row.depth].size());
}

// Whether a row's stop rule ends its growth.
bool Step::stops(Growing& row) const {
  if (row.row.stop < 0) return false;
  const Stop& stop = stops_[row.row.stop];
  const float* log_prob = row.tree.log_prob.const_data_ptr<float>();
  if (stop.node_costs.numel() == 0)
    return log_prob[row.num_nodes - 1] - log_prob[row.num_nodes - 2] < stop.minimum;
  const double before =
      std::exchange(row.value, value_of(row.tree.log_prob, row.num_nodes, stop.node_costs));
  return row.value - before < stop.minimum;
}

// One growth step of a row; `meta` receives its new nodes.
void Step::attach_(Growing& row, const at::Tensor& meta) {
  const int64_t width = meta.size(0);
  const Growth growth{
      row.num_known, row.num_nodes - row.num_known, row.num_nodes, width, row.row.root_pos(), row.row.place,
      row.read()};
  const PlattScale& platt = calibrations_[row.row.calibration].platt;
  if (row.depth == 0 && !row.graft.tokens.empty()) {
    grow_grafted_(row.frontier, row.next, row.tree, meta, growth, platt, row.graft.log_probs);
  } else if (row.row.levels < 0) {
    ygg::grow_(row.frontier, row.next, row.tree, meta, growth, platt);
  } else {
    const Levels& levels = levels_[row.row.levels];
    grow_level_(row.frontier, row.next, row.tree, meta, growth, platt, levels.parents[row.depth],
                levels.ranks[row.depth]);
  }
  if (row.depth == 0 && row.row.stop >= 0 && stops_[row.row.stop].node_costs.numel())
    row.value = value_of(row.tree.log_prob, row.num_nodes, stops_[row.row.stop].node_costs);
  row.num_known = row.num_nodes;
  row.num_nodes += width;
  ++row.depth;
  row.is_grown = row.depth == row.last_depth || stops(row);
}

// Runs the draft over the nodes that the rows of a batch have just attached.
void Step::run_nodes_(const std::vector<Growing*>& batch, int64_t num_tokens) {
  if (batch.empty()) return;
  const size_t size = draft_.bucket(num_tokens);
  const at::Tensor& meta = draft_.metas[size];
  std::memcpy(meta.mutable_data_ptr(), nodes_meta_.const_data_ptr(),
              size_t(num_tokens * meta.size(1)) * sizeof(int32_t));
  pad_(meta, num_tokens);
  const auto [tokens, log_probs] = forward(kDraft, size, num_tokens);
  int64_t first = 0;
  for (Growing* row : batch) {
    const int64_t width = row->num_nodes - row->num_known;
    record_forward_(*row, {rows_of(log_probs, first, width), rows_of(tokens, first, width)});
    row->num_run = row->num_nodes;
    first += width;
  }
}

// Grows all trees; every forward runs the newest nodes of as many rows as fit.
void Step::grow_(std::vector<Growing>& rows) {
  std::vector<Growing*> live;
  for (Growing& row : rows) {
    const int64_t capacity = row.tree.capacity(), per_node = row.is_chain() ? 1 : candidates_;
    if (row.row.depth == 0) continue;
    row.frontier = {empty({capacity, per_node}, row.tree.log_prob.options()),
                    empty({capacity, per_node}, row.next.tokens.options())};
    live.push_back(&row);
  }
  while (!live.empty()) {
    std::vector<Growing*> batch, growing;
    int64_t num_tokens = 0;
    for (Growing* row : live) {
      const int64_t width = next_width(*row);
      if (num_tokens + width > nodes_meta_.size(0)) {
        run_nodes_(batch, num_tokens);
        batch.clear();
        num_tokens = 0;
      }
      attach_(*row, rows_of(nodes_meta_, num_tokens, width));
      if (row->is_grown) continue;
      batch.push_back(row);
      growing.push_back(row);
      num_tokens += width;
    }
    run_nodes_(batch, num_tokens);
    live = std::move(growing);
  }
}

// ---- prune ----

// Keeps the best nodes of the whole batch, as many as emit the most tokens per millisecond.
void Step::prune_(const Menu& menu, Reply& reply) {
  std::vector<Node> nodes;
  int64_t depth = 0, num_values = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    Growing& row = rows_[i];
    depth = std::max(depth, row.depth);
    TORCH_CHECK(num_values + row.num_nodes - 1 <= reply.max_values, "no place for the values of all nodes");
    double* values = reply.values + num_values;
    const at::Tensor& knots = calibrations_[row.row.calibration].knots;
    acceptance_of(row.tree.log_prob, row.num_nodes, knots, values);
    const float* log_prob = row.tree.log_prob.const_data_ptr<float>();
    std::vector<Node> own;
    for (int64_t id = 1; id < row.num_nodes; ++id) {
      if (!(log_prob[id] > kLowestPath)) continue;  // padding
      own.push_back({i, id, values[id - 1]});
      values[own.size() - 1] = own.back().value;
      row.drafted.push_back(id);
    }
    if (row.row.verify && row.row.verify <= int64_t(own.size())) {
      by_value_(own);
      own.resize(size_t(row.row.verify - 1));
    }
    nodes.insert(nodes.end(), own.begin(), own.end());
    reply.results[i].values_at = num_values;
    num_values += int64_t(row.drafted.size()) - 1;
  }
  by_value_(nodes);
  std::vector<double> sums{0.0};
  for (const Node& node : nodes) sums.push_back(sums.back() + node.value);
  nodes.resize(size_t(best_of(menu, sums, int64_t(rows_.size()), depth)));

  for (Growing& row : rows_) row.pruned = {{}, {0}, 0.0};
  for (const Node& node : nodes) {
    rows_[node.row].pruned.keep.push_back(node.id);
    rows_[node.row].pruned.expected += node.value;
  }
  for (Growing& row : rows_) {
    row.pruned.expected += 1.0;
    std::sort(row.pruned.keep.begin(), row.pruned.keep.end());
    row.pruned.tree = row.tree.capacity() == 1 ? row.tree : subtree(row.tree, row.pruned.keep);
  }
}

void Step::draft(at::ArrayRef<Row> rows, const Menu& menu, Reply& reply) {
  TORCH_CHECK(int64_t(rows.size()) <= reply.max_results, "no place for the results of ", rows.size(),
              " rows");
  reply.draft_ms[0] = now_ms();
  forwards_.clear();
  rows_.clear();
  for (const Row& row : rows) {
    int64_t capacity = 1 + row.width * row.depth + row.graft;
    if (row.levels >= 0) {
      capacity = 1;
      for (const auto& level : levels_[row.levels].parents) capacity += int64_t(level.size());
    }
    rows_.push_back(growing(row, capacity, reply));
  }
  for (Growing& row : rows_) graft_(row);
  catch_up_(rows_);
  reply.draft_ms[1] = now_ms();
  head_(rows_);
  reply.draft_ms[2] = now_ms();
  grow_(rows_);
  reply.draft_ms[3] = now_ms();
  prune_(menu, reply);
  reply.draft_ms[4] = now_ms();
  reply.num_tokens = 0;
  for (const Growing& row : rows_) reply.num_tokens += int64_t(row.pruned.keep.size());
}

// ---- verify, accept, commit ----

// One forward of the target over the trees of all rows, the text before them that it lacks, and prompts.
void Step::run_target_(at::ArrayRef<Prompt> prompts) {
  int64_t count = 0;
  for (Growing& row : rows_) {
    row.root_at = count + row.row.lag();
    count = row.root_at + row.pruned.tree.capacity();
  }
  const int64_t num_nodes = count;
  for (const Prompt& prompt : prompts) count += prompt.len;
  const size_t size = target_.bucket(count);
  const at::Tensor& meta = target_.metas[size];
  for (const Growing& row : rows_) {
    const int64_t lag = row.row.lag(), kept = row.pruned.tree.capacity(), root_pos = row.row.root_pos();
    const Tree& tree = row.pruned.tree;
    if (lag)
      pack_chains_(rows_of(meta, row.root_at - lag, lag), {row.row.text(row.row.target_len, root_pos),
                                                           {lag},
                                                           {row.row.target_len},
                                                           {row.row.place},
                                                           {0},
                                                           {kReadBest}});
    pack_nodes_(rows_of(meta, row.root_at, kept), tree.token, tree.depth, tree.path,
                {0, kept, root_pos, row.row.place, kReadBest});
  }
  int64_t first = num_nodes;
  for (const Prompt& prompt : prompts) {
    pack_chains_(rows_of(meta, first, prompt.len), {{prompt.tokens, size_t(prompt.len)},
                                                    {prompt.len},
                                                    {prompt.start},
                                                    {prompt.place},
                                                    {0},
                                                    {kReadBest}});
    first += prompt.len;
  }
  pad_(meta, count);
  std::tie(logits_, hidden_) = forward(kTarget, size, count);
}

// The accepted path of every row.
void Step::accept_() {
  const bool any_greedy =
      std::any_of(rows_.begin(), rows_.end(), [](const Growing& row) { return row.row.temperature == 0; });
  const int64_t num_nodes = rows_.empty() ? 0 : rows_.back().root_at + rows_.back().pruned.tree.capacity();
  const Largest best = any_greedy ? largest(rows_of(logits_, 0, num_nodes)) : Largest{};
  for (Growing& each : rows_) {
    const Row& row = each.row;
    const Tree& tree = each.pruned.tree;
    const int64_t kept = tree.capacity();
    if (row.temperature == 0 && row.processors < 0) {
      each.accepted =
          walk({rows_of(best.values, each.root_at, kept), rows_of(best.tokens, each.root_at, kept)},
               tree.parent, tree.token);
    } else {
      each.accepted = follow_sampling(rows_of(logits_, each.root_at, kept), tree.parent, tree.token,
                                      row.root_pos(), row.sampling(), each.text.get());
      if (each.text && !each.accepted.path.empty()) {
        const int64_t last = each.root_at + each.accepted.path.back();
        each.row.top_logit = largest(rows_of(logits_, last, 1)).values.const_data_ptr<float>()[0];
      }
    }
  }
}

// Keeps the accepted path in both caches: of the draft's the nodes that it has run.
void Step::commit_(Growing& each) {
  Row& row = each.row;
  const std::vector<int64_t>& path = each.accepted.path;
  keep_(target_, row.place, row.root_pos(), path);
  row.target_len = row.root_pos() + int64_t(path.size());
  if (each.num_run == 0) return;
  std::vector<int64_t> drafted;
  for (const int64_t node : path)
    if (each.pruned.keep[node] < each.num_run) drafted.push_back(each.pruned.keep[node]);
  keep_(draft_, row.place, row.root_pos(), drafted);
  row.draft_len = row.root_pos() + int64_t(drafted.size());
}

namespace {

// Writes the lists and numbers of one row's result.
void write_(RowResult& result, const Accepted& accepted, const Tree& tree, Reply& reply, int64_t& num_ids,
            int64_t& num_words) {
  const int64_t path_len = int64_t(accepted.path.size());
  TORCH_CHECK(num_ids + 2 * path_len <= reply.max_ids &&
                  num_words + 4 * tree.capacity() + tree.path.numel() <= reply.max_words,
              "no place for the results of all rows");
  std::copy(accepted.path.begin(), accepted.path.end(), reply.ids + num_ids);
  std::copy(accepted.tokens.begin(), accepted.tokens.end(), reply.ids + num_ids + path_len);
  result.path_len = path_len;
  result.ids_at = num_ids;
  result.words_at = num_words;
  num_ids += 2 * path_len;
  num_words += pack_tree(tree, reply.words + num_words);
}

// Writes the drafted tree after the verified one, and the id there of every verified node.
void write_drafted_(const Tree& tree, const std::vector<int64_t>& ids, const std::vector<int64_t>& keep,
                    Reply& reply, int64_t& num_words) {
  const Tree drafted = subtree(tree, ids);
  const int64_t needed = 4 * drafted.capacity() + drafted.path.numel() + int64_t(keep.size());
  TORCH_CHECK(num_words + needed <= reply.max_words, "no place for the drafted trees of all rows");
  num_words += pack_tree(drafted, reply.words + num_words);
  for (const int64_t node : keep)
    reply.words[num_words++] = int32_t(std::lower_bound(ids.begin(), ids.end(), node) - ids.begin());
}

}  // namespace

void Step::verify(at::ArrayRef<Row> joining, at::ArrayRef<Prompt> prompts, Reply& reply) {
  reply.verify_ms[0] = now_ms();
  for (const Row& row : joining) {
    rows_.push_back(growing(row, 1, reply));
    rows_.back().pruned = {rows_.back().tree, {0}, 1.0};
  }
  TORCH_CHECK(int64_t(rows_.size()) <= reply.max_results, "no place for ", rows_.size(), " results");
  run_target_(prompts);
  reply.verify_ms[1] = now_ms();
  accept_();
  reply.verify_ms[2] = now_ms();
  int64_t num_ids = 0, num_words = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    Growing& row = rows_[i];
    if (!row.accepted.path.empty()) commit_(row);
    RowResult& result = reply.results[i];
    result.drafted = int64_t(row.drafted.size());
    result.depth = row.depth;
    result.verified = row.pruned.tree.capacity();
    result.root_at = row.root_at;
    result.target_len = row.row.target_len;
    result.draft_len = row.row.draft_len;
    result.expected = row.pruned.expected;
    result.top_logit = row.row.top_logit;
    if (!row.accepted.path.empty()) {
      const at::Tensor hidden = rows_of(hidden_, row.root_at + row.accepted.path.back(), 1);
      result.hidden = hidden.const_data_ptr();
      result.hidden_bytes = int64_t(hidden.element_size());
    }
    write_(result, row.accepted, row.pruned.tree, reply, num_ids, num_words);
    if (row.row.inspect) write_drafted_(row.tree, row.drafted, row.pruned.keep, reply, num_words);
  }
  TORCH_CHECK(int64_t(forwards_.size()) <= reply.max_forwards, "no place for ", forwards_.size(),
              " forwards");
  std::copy(forwards_.begin(), forwards_.end(), reply.forwards);
  reply.num_forwards = int64_t(forwards_.size());
  reply.graph_ms[kTarget] = reply.graph_ms[kDraft] = 0.0;
  for (const Forward& each : forwards_) reply.graph_ms[each.model] += each.end_ms - each.begin_ms;
  rows_.clear();
  reply.verify_ms[3] = now_ms();
}

namespace {

// Runs `body`; writes the message of what it throws.
template <class Body>
int64_t guarded(Reply* reply, const Body& body) noexcept {
  try {
    body();
    return 0;
  } catch (const std::exception& failure) {
    reply->error[std::string_view(failure.what()).copy(reply->error, sizeof(reply->error) - 1)] = 0;
    return -1;
  }
}

}  // namespace

}  // namespace ygg

using namespace ygg;

int64_t ygg_step_draft(Step* step, const Row* rows, int64_t num_rows, const Menu* menu,
                       Reply* reply) noexcept {
  return guarded(reply, [&] { step->draft({rows, size_t(num_rows)}, *menu, *reply); });
}

int64_t ygg_step_verify(Step* step, const Row* joining, int64_t num_joining, const Prompt* prompts,
                        int64_t num_prompts, Reply* reply) noexcept {
  return guarded(
      reply, [&] { step->verify({joining, size_t(num_joining)}, {prompts, size_t(num_prompts)}, *reply); });
}

int64_t ygg_step_run(Step* step, const Row* rows, int64_t num_rows, const Menu* menu,
                     Reply* reply) noexcept {
  return guarded(reply, [&] {
    step->draft({rows, size_t(num_rows)}, *menu, *reply);
    step->verify({}, {}, *reply);
  });
}

void ygg_step_bytes(int64_t* bytes) noexcept {
  for (const size_t size :
       {sizeof(Row), sizeof(Prompt), sizeof(Menu), sizeof(RowResult), sizeof(Forward), sizeof(Reply)})
    *bytes++ = int64_t(size);
}

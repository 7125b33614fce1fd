// The host's side of a step on a CPU, in one call each. torch would need a dozen small operators, and each
// of them costs as much as a forward of the draft: the target's weights have just filled the caches.
//
// Python has the specifications: offline/forest.py of `grow_`, models/packing.py of `pack_nodes_` and
// `pack_chains_`, tree.py of `root` and `subtree`, policy/stopping.py of `value_of`, kv.py of
// `move_slots_`.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "layout.h"
#include "operators.h"
#include "page_order.h"
#include "vectors.h"

namespace {

using namespace ygg;

struct Best {
  float log_prob;
  int64_t place;
};

// The `count` largest entries, largest first; the first of equal ones comes first.
std::vector<Best> take_best(const float* values, int64_t num_values, int64_t count) {
  std::vector<Best> best;
  best.reserve(count + 1);
  for (int64_t place = 0; place < num_values; ++place) {
    if (int64_t(best.size()) == count && !(values[place] > best.back().log_prob)) continue;
    const auto after = std::find_if(best.begin(), best.end(),
                                    [&](const Best& other) { return values[place] > other.log_prob; });
    best.insert(after, {values[place], place});
    if (int64_t(best.size()) > count) best.pop_back();
  }
  return best;
}

void check_growth(const Frontier& frontier, const Candidates& candidates, const Tree& tree,
                  const at::Tensor& meta, const Growth& growth) {
  const auto& [log_probs, tokens] = candidates;
  const int64_t num_nodes = growth.num_known + growth.num_new;
  const int64_t num_candidates = num_nodes * frontier.candidates();
  TORCH_CHECK(num_nodes <= frontier.capacity() && growth.first + growth.width <= tree.capacity(),
              "grow_: more nodes than the tree holds");
  TORCH_CHECK(growth.width <= meta.size(0) && meta.size(1) == kPath + tree.path_width(),
              "grow_: metadata of another shape");
  TORCH_CHECK(growth.num_new <= log_probs.size(0) && frontier.candidates() <= log_probs.size(1) &&
                  log_probs.sizes() == tokens.sizes() && log_probs.is_contiguous() &&
                  tokens.is_contiguous(),
              "grow_: candidates of another shape");
  TORCH_CHECK(growth.width <= num_candidates, "grow_: ", growth.width, " nodes of ", num_candidates,
              " candidates");
}

// Writes the candidate children of the new nodes into the frontier.
void extend_(Frontier& frontier, const Candidates& candidates, const Tree& tree, const Growth& growth,
             const PlattScale& platt) {
  const int64_t per_node = frontier.candidates(), row_len = candidates.log_probs.size(1);
  const bool is_scaled = !platt.is_identity();
  const float* edges = candidates.log_probs.const_data_ptr<float>();
  const int64_t* tokens = candidates.tokens.const_data_ptr<int64_t>();
  const float* node_log_prob = tree.log_prob.const_data_ptr<float>();
  float* log_prob = frontier.log_prob.mutable_data_ptr<float>();
  int64_t* token = frontier.token.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < growth.num_new * per_node; ++i) {
    const int64_t place = growth.num_known * per_node + i, source = i / per_node * row_len + i % per_node;
    log_prob[place] =
        (is_scaled ? float(platt.log(edges[source])) : edges[source]) + node_log_prob[place / per_node];
    token[place] = tokens[source];
  }
}

// Writes one tree node's row of metadata.
void write_node(int32_t* fields, const NodeRange& nodes, int64_t node, int32_t token, int32_t depth,
                const int32_t* path, int64_t path_width) {
  fields[kToken] = token;
  fields[kPosition] = int32_t(nodes.root_pos + depth);
  fields[kRow] = int32_t(nodes.row);
  fields[kIndex] = int32_t(nodes.root_pos + node);
  fields[kPrefix] = int32_t(nodes.root_pos);
  fields[kRead] = int32_t(nodes.read);
  std::copy_n(path, path_width, fields + kPath);
}

}  // namespace

double ygg::PlattScale::log(double log_prob) const {
  const double complement = -std::expm1(std::min(log_prob, 0.0));
  if (complement == 0.0) return 0.0;
  const double log_odds = slope * (log_prob - std::log(complement)) + offset;
  return std::min(log_odds, 0.0) - std::log1p(std::exp(-std::abs(log_odds)));
}

// Pads the rows from `first` on: they store nothing, see nothing and are not read.
void ygg::pad_(at::Tensor meta, int64_t first) {
  const int64_t meta_width = meta.size(1);
  for (int64_t row = first; row < meta.size(0); ++row) {
    int32_t* fields = meta.mutable_data_ptr<int32_t>() + row * meta_width;
    std::fill_n(fields, int64_t(kPath), 0);
    std::fill(fields + kPath, fields + meta_width, -1);
    fields[kIndex] = -1;
  }
}

namespace {

// Attaches candidates to the tree and writes their metadata.
void attach_(const Frontier& frontier, const std::vector<Best>& taken, Tree& tree, at::Tensor& meta,
             const Growth& growth) {
  const int64_t per_node = frontier.candidates(), path_width = tree.path_width(), meta_width = meta.size(1);
  const int64_t* token = frontier.token.const_data_ptr<int64_t>();
  int32_t* depth = tree.depth.mutable_data_ptr<int32_t>();
  int32_t* path = tree.path.mutable_data_ptr<int32_t>();
  for (const Best& each : taken)
    TORCH_CHECK(depth[each.place / per_node] + 1 < path_width, "grow_: a path of more than ", path_width,
                " nodes");
  const NodeRange nodes{growth.first, growth.first + growth.width, growth.root_pos, growth.row,
                        growth.read};
  int32_t* fields = meta.mutable_data_ptr<int32_t>();
  int64_t node = growth.first;
  for (const Best& each : taken) {
    const int64_t parent = each.place / per_node;
    tree.token.mutable_data_ptr<int32_t>()[node] = int32_t(token[each.place]);
    tree.parent.mutable_data_ptr<int32_t>()[node] = int32_t(parent);
    depth[node] = depth[parent] + 1;
    tree.log_prob.mutable_data_ptr<float>()[node] = each.log_prob;
    std::copy_n(path + parent * path_width, path_width, path + node * path_width);
    path[node * path_width + depth[node]] = int32_t(node);
    write_node(fields, nodes, node, int32_t(token[each.place]), depth[node], path + node * path_width,
               path_width);
    fields += meta_width;
    ++node;
  }
  pad_(meta, growth.width);
}

}  // namespace

namespace {

// `extend_` for a root and the chain under it. The chain's next node is in the tree already. Its
// probability is the draft's or the one given, whichever is larger; then its siblings share what remains.
void extend_grafted_(Frontier& frontier, const Candidates& candidates, Tree& tree, const Growth& growth,
                     const PlattScale& platt, const std::vector<double>& log_probs) {
  const int64_t per_node = frontier.candidates(), row_len = candidates.log_probs.size(1);
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  double path = 0.0;
  for (int64_t node = 0; node < growth.num_new; ++node) {
    const bool is_last = node + 1 == growth.num_new;
    const float* edges = candidates.log_probs.const_data_ptr<float>() + node * row_len;
    const int64_t* tokens = candidates.tokens.const_data_ptr<int64_t>() + node * row_len;
    float* log_prob = frontier.log_prob.mutable_data_ptr<float>() + node * per_node;
    int64_t* token = frontier.token.mutable_data_ptr<int64_t>() + node * per_node;
    const int64_t next = is_last ? -1 : tree.token.const_data_ptr<int32_t>()[node + 1];
    const double given = is_last ? kNever : log_probs[node];
    std::vector<double> scaled(per_node);
    double drafted = kNever;
    for (int64_t i = 0; i < per_node; ++i) {
      scaled[i] = platt.is_identity() ? edges[i] : float(platt.log(edges[i]));
      if (tokens[i] == next) drafted = scaled[i];
    }
    const double rest =
        given > drafted ? std::log1p(-std::exp(given)) - std::log1p(-std::exp(drafted)) : 0.0;
    for (int64_t i = 0; i < per_node; ++i) {
      log_prob[i] = tokens[i] == next ? float(kNever) : float(scaled[i] + rest + path);
      token[i] = tokens[i];
    }
    if (is_last) return;
    path += std::max(given, drafted);
    tree.log_prob.mutable_data_ptr<float>()[node + 1] = float(path);
  }
}

void take_(Frontier& frontier, Tree& tree, at::Tensor& meta, const Growth& growth) {
  float* log_prob = frontier.log_prob.mutable_data_ptr<float>();
  const int64_t num_candidates = (growth.num_known + growth.num_new) * frontier.candidates();
  const std::vector<Best> best = take_best(log_prob, num_candidates, growth.width);
  attach_(frontier, best, tree, meta, growth);
  for (const Best& taken : best) log_prob[taken.place] = -std::numeric_limits<float>::infinity();
}

}  // namespace

// Moves the `width` best candidates from the frontier into the tree, with their metadata.
void ygg::grow_(Frontier frontier, const Candidates& candidates, Tree tree, at::Tensor meta,
                const Growth& growth, const PlattScale& platt) {
  check_growth(frontier, candidates, tree, meta, growth);
  extend_(frontier, candidates, tree, growth, platt);
  take_(frontier, tree, meta, growth);
}

void ygg::grow_grafted_(Frontier frontier, const Candidates& candidates, Tree tree, at::Tensor meta,
                        const Growth& growth, const PlattScale& platt,
                        const std::vector<double>& log_probs) {
  check_growth(frontier, candidates, tree, meta, growth);
  TORCH_CHECK(growth.num_known == 0 && growth.num_new == int64_t(log_probs.size()) + 1,
              "grow_grafted_: ", growth.num_new, " nodes have run, ", log_probs.size(), " are grafted");
  extend_grafted_(frontier, candidates, tree, growth, platt, log_probs);
  take_(frontier, tree, meta, growth);
}

// Copies the level of a static tree, the given parents' children of the given ranks, into the tree.
void ygg::grow_level_(Frontier frontier, const Candidates& candidates, Tree tree, at::Tensor meta,
                      const Growth& growth, const PlattScale& platt, at::IntArrayRef parents,
                      at::IntArrayRef ranks) {
  check_growth(frontier, candidates, tree, meta, growth);
  extend_(frontier, candidates, tree, growth, platt);
  std::vector<Best> level;
  for (size_t i = 0; i < parents.size(); ++i) {
    TORCH_CHECK(ranks[i] < frontier.candidates() && parents[i] < growth.first, "grow_level_: child ",
                ranks[i], " of node ", parents[i]);
    const int64_t place = parents[i] * frontier.candidates() + ranks[i];
    level.push_back({frontier.log_prob.const_data_ptr<float>()[place], place});
  }
  attach_(frontier, level, tree, meta, growth);
}

// The value of the first `num_nodes`: the sum of the best probabilities, each less the cost of its rank.
double ygg::value_of(const at::Tensor& log_prob, int64_t num_nodes, const at::Tensor& node_costs) {
  const double* cost = node_costs.const_data_ptr<double>();
  std::vector<float> values(log_prob.const_data_ptr<float>(), log_prob.const_data_ptr<float>() + num_nodes);
  const int64_t kept = std::min(node_costs.size(0), num_nodes);
  std::partial_sort(values.begin(), values.begin() + kept, values.end(), std::greater<float>());
  double sum = 0.0;
  for (int64_t i = 0; i < kept; ++i) sum += std::max(std::exp(double(values[i])) - cost[i], 0.0);
  return sum;
}

// Metadata of tree nodes: each sees `root_pos` indices and its path.
void ygg::pack_nodes_(at::Tensor meta, const at::Tensor& token, const at::Tensor& depth,
                      const at::Tensor& path, const NodeRange& nodes) {
  const int64_t meta_width = meta.size(1), path_width = path.size(1), count = nodes.last - nodes.first;
  TORCH_CHECK(meta_width == kPath + path_width && count <= meta.size(0) && nodes.last <= token.size(0),
              "pack_nodes_: nodes of another shape");
  int32_t* fields = meta.mutable_data_ptr<int32_t>();
  for (int64_t node = nodes.first; node < nodes.last; ++node, fields += meta_width) {
    const int32_t* node_path = path.const_data_ptr<int32_t>() + node * path_width;
    write_node(fields, nodes, node, token.const_data_ptr<int32_t>()[node],
               depth.const_data_ptr<int32_t>()[node], node_path, path_width);
  }
  pad_(meta, count);
}

// Metadata of consecutive tokens of requests, one chunk after another. Each token sees its request up to
// itself; of each chunk the last `num_read` are read.
void ygg::pack_chains_(at::Tensor meta, const Chains& chains) {
  const auto& [tokens, lens, start_positions, rows, num_read, reads] = chains;
  const int64_t count = int64_t(tokens.size()), meta_width = meta.size(1);
  TORCH_CHECK(count <= meta.size(0), "pack_chains_: ", count, " tokens for ", meta.size(0), " rows");
  TORCH_CHECK(
      lens.size() == start_positions.size() && lens.size() == rows.size() &&
          lens.size() == num_read.size() && lens.size() == reads.size(),
      "pack_chains_: every chunk has a length, a start, a row, and how many tokens are read and how");
  int32_t* fields = meta.mutable_data_ptr<int32_t>();
  int64_t token = 0;
  for (size_t chunk = 0; chunk < lens.size(); ++chunk) {
    TORCH_CHECK(token + lens[chunk] <= count, "pack_chains_: the lengths add up to more than the tokens");
    for (int64_t n = 0; n < lens[chunk]; ++n, ++token, fields += meta_width) {
      const int32_t position = int32_t(start_positions[chunk] + n);
      const int32_t read = n >= lens[chunk] - num_read[chunk] ? int32_t(reads[chunk]) : 0;
      const int32_t columns[kPath] = {int32_t(tokens[token]), position, int32_t(rows[chunk]), position,
                                      position + 1,           read};
      std::copy_n(columns, int64_t(kPath), fields);
      std::fill(fields + kPath, fields + meta_width, -1);
    }
  }
  pad_(meta, token);
}

namespace {

// A tree whose arrays are not initialised.
Tree empty_tree(int64_t capacity, int64_t path_width) {
  const auto ints = at::TensorOptions().dtype(at::kInt);
  return {empty({capacity}, ints), empty({capacity}, ints), empty({capacity}, ints),
          empty({capacity}, at::kFloat), empty({capacity, path_width}, ints)};
}

}  // namespace

ygg::Tree ygg::root(int64_t token, int64_t capacity, int64_t path_width) {
  TORCH_CHECK(capacity > 0 && path_width > 0, "root: a tree of ", capacity, " nodes and paths of ",
              path_width);
  Tree tree = empty_tree(capacity, path_width);
  tree.token.mutable_data_ptr<int32_t>()[0] = int32_t(token);
  tree.parent.mutable_data_ptr<int32_t>()[0] = -1;
  tree.depth.mutable_data_ptr<int32_t>()[0] = 0;
  tree.log_prob.mutable_data_ptr<float>()[0] = 0.0f;
  int32_t* path = tree.path.mutable_data_ptr<int32_t>();
  std::fill_n(path, path_width, -1);
  path[0] = 0;
  return tree;
}

// Attaches a chain under a root without children, with the log-probability of every token after the one
// before it.
void ygg::grow_chain_(Tree tree, at::IntArrayRef tokens, const std::vector<double>& log_probs) {
  TORCH_CHECK(int64_t(tokens.size()) < std::min(tree.capacity(), tree.path_width()), "grow_chain_: ",
              tokens.size(), " nodes");
  int32_t* path = tree.path.mutable_data_ptr<int32_t>();
  double log_prob = 0.0;
  for (int32_t node = 1; node <= int32_t(tokens.size()); ++node) {
    tree.token.mutable_data_ptr<int32_t>()[node] = int32_t(tokens[node - 1]);
    tree.parent.mutable_data_ptr<int32_t>()[node] = node - 1;
    tree.depth.mutable_data_ptr<int32_t>()[node] = node;
    log_prob += log_probs[size_t(node) - 1];
    tree.log_prob.mutable_data_ptr<float>()[node] = float(log_prob);
    int32_t* own = path + node * tree.path_width();
    std::copy_n(own - tree.path_width(), tree.path_width(), own);
    own[node] = node;
  }
}

// The nodes `keep` (ascending, connected, root first), renumbered.
ygg::Tree ygg::subtree(const Tree& tree, at::IntArrayRef keep) {
  const int64_t count = int64_t(keep.size()), path_width = tree.path_width();
  std::vector<int32_t> new_id(tree.capacity(), -1);
  for (int64_t place = 0; place < count; ++place) new_id[keep[place]] = int32_t(place);
  const auto renamed = [&](int32_t node) { return node < 0 ? -1 : new_id[node]; };
  Tree kept = empty_tree(count, path_width);
  for (int64_t place = 0; place < count; ++place) {
    const int64_t node = keep[place];
    kept.token.mutable_data_ptr<int32_t>()[place] = tree.token.const_data_ptr<int32_t>()[node];
    kept.parent.mutable_data_ptr<int32_t>()[place] = renamed(tree.parent.const_data_ptr<int32_t>()[node]);
    kept.depth.mutable_data_ptr<int32_t>()[place] = tree.depth.const_data_ptr<int32_t>()[node];
    kept.log_prob.mutable_data_ptr<float>()[place] = tree.log_prob.const_data_ptr<float>()[node];
    const int32_t* from = tree.path.const_data_ptr<int32_t>() + node * path_width;
    std::transform(from, from + path_width, kept.path.mutable_data_ptr<int32_t>() + place * path_width,
                   renamed);
  }
  return kept;
}

namespace {

// Linear between knots, clamped outside; `x` ascends.
double interpolated(double at, const double* x, const double* y, int64_t count) {
  if (!(at > x[0])) return y[0];
  if (at >= x[count - 1]) return y[count - 1];
  const int64_t low = std::upper_bound(x, x + count, at) - x - 1;
  return (y[low + 1] - y[low]) / (x[low + 1] - x[low]) * (at - x[low]) + y[low];
}

}  // namespace

// The acceptance of every node but the root, by `knots`.
void ygg::acceptance_of(const at::Tensor& log_prob, int64_t num_nodes, const at::Tensor& knots,
                        double* values) {
  const int64_t num_knots = knots.size(1);
  const double* x = knots.const_data_ptr<double>();
  for (int64_t node = 1; node < num_nodes; ++node)
    values[node - 1] = interpolated(log_prob.const_data_ptr<float>()[node], x, x + num_knots, num_knots);
}

namespace {

// Planes that are prefetched ahead. A pass over the weights has evicted them all; so the misses overlap.
constexpr int64_t kPlanesAhead = 4;

void prefetch_words(const Word* words, int64_t count) {
  for (int64_t word = 0; word < count; word += kColumns) __builtin_prefetch(words + word, 1);
}

// Copies slot source[i] to slot target[i] in every plane: the keys or the values of a layer's head.
template <class Element>
void copy_in_planes(Word* storage, int64_t num_planes, int64_t num_heads, int64_t dim,
                    at::IntArrayRef source, at::IntArrayRef target) {
  using Order = PageOrder<Element>;
  const int64_t plane_words = kPageLen * dim / Order::kPair;
  const auto is_key = [&](int64_t plane) { return plane / num_heads % 2 == 0; };
  const auto page_of = [&](int64_t slot) { return storage + slot / kPageLen * num_planes * plane_words; };
  const auto line_of = [&](int64_t slot) {
    return page_of(slot) + Order::value_line(slot % kPageLen, dim);
  };
  std::vector<int64_t> slots(source.begin(), source.end());
  slots.insert(slots.end(), target.begin(), target.end());
  std::vector<const Word*> pages;
  for (const int64_t slot : slots)
    if (std::find(pages.begin(), pages.end(), page_of(slot)) == pages.end()) pages.push_back(page_of(slot));
  const auto prefetch_plane = [&](int64_t plane) {
    if (is_key(plane))
      for (const Word* page : pages) prefetch_words(page + plane * plane_words, plane_words);
    else
      for (const int64_t slot : slots) prefetch_words(line_of(slot) + plane * plane_words, dim);
  };
  for (int64_t plane = 0; plane < num_planes; ++plane) {
    if (plane + kPlanesAhead < num_planes) prefetch_plane(plane + kPlanesAhead);
    for (size_t i = 0; i < source.size(); ++i) {
      const int64_t from = source[i] % kPageLen, to = target[i] % kPageLen, first = plane * plane_words;
      if (is_key(plane))
        Order::copy_key(page_of(target[i]) + first, to, page_of(source[i]) + first, from, dim);
      else
        Order::copy_value(line_of(target[i]) + first, to, line_of(source[i]) + first, from, dim);
    }
  }
}

}  // namespace

// Copies slot source[i] of every layer, key and value, and head to slot target[i], one after another.
void ygg::copy_slots_(at::Tensor storage, at::IntArrayRef source, at::IntArrayRef target) {
  TORCH_CHECK(storage.is_contiguous() && storage.dim() == 6 && storage.size(4) == kPageLen,
              "copy_slots_: storage is (pages, layers, 2, G, ", kPageLen, ", F)");
  const bool is_float = storage.scalar_type() == at::kFloat;
  TORCH_CHECK(is_float || storage.scalar_type() == at::kBFloat16, "copy_slots_: dtype ",
              storage.scalar_type(), " is neither float32 nor bfloat16");
  const int64_t num_heads = storage.size(3), dim = storage.size(5);
  const int64_t num_planes = storage.size(1) * 2 * num_heads, num_slots = storage.size(0) * kPageLen;
  for (size_t i = 0; i < source.size(); ++i)
    TORCH_CHECK(0 <= source[i] && source[i] < num_slots && 0 <= target[i] && target[i] < num_slots,
                "copy_slots_: slots outside the cache");
  const auto copy = is_float ? copy_in_planes<float> : copy_in_planes<uint16_t>;
  copy(static_cast<Word*>(storage.mutable_data_ptr()), num_planes, num_heads, dim, source, target);
}

// Slots source[i] become slots target + i; `source` ascends and source[i] >= target + i.
void ygg::move_slots_(at::Tensor storage, at::IntArrayRef source, int64_t target) {
  TORCH_CHECK(source.empty() || source[0] >= target, "move_slots_: slots outside the cache");
  std::vector<int64_t> targets(source.size());
  std::iota(targets.begin(), targets.end(), target);
  copy_slots_(storage, source, targets);
}

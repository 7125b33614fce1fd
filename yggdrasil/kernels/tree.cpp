// The host's side of a step on a CPU, one call where torch takes a dozen small operators: on caches that a target's weights have just swept, each of those
// costs as much as a forward of the draft. The specifications are in Python: `grow_` is step/draft.py `grow_reference_`, `pack_nodes_` and `pack_chains_` are
// `pack_nodes_reference_` and `pack_chains_reference_` in models/packing.py, `root` is TokenTree's, `prune` step/prune.py `prune_reference`, `move_slots_` is `move_slots_reference_` in kv.py.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

#include "layout.h"
#include "operators.h"

namespace {

using namespace ygg;

struct Best {
  float log_prob;
  int64_t place;
};

// Rows from `first` on store nothing, see nothing and are not read.
void pad(at::Tensor& meta, int64_t first) {
  const int64_t meta_width = meta.size(1);
  for (int64_t row = first; row < meta.size(0); ++row) {
    int32_t* fields = meta.mutable_data_ptr<int32_t>() + row * meta_width;
    std::fill_n(fields, int64_t(kPath), 0);
    std::fill(fields + kPath, fields + meta_width, -1);
    fields[kIndex] = -1;
  }
}

// The `count` greatest entries, greatest first, equal ones by place.
std::vector<Best> take_best(const float* values, int64_t num_values, int64_t count) {
  std::vector<Best> best;
  best.reserve(count + 1);
  for (int64_t place = 0; place < num_values; ++place) {
    if (int64_t(best.size()) == count && !(values[place] > best.back().log_prob)) continue;
    const auto after = std::find_if(best.begin(), best.end(), [&](const Best& other) { return values[place] > other.log_prob; });
    best.insert(after, {values[place], place});
    if (int64_t(best.size()) > count) best.pop_back();
  }
  return best;
}

// What an edge is worth to which the draft gives this log-probability: `PlattScale.log`, step/platt.py.
double platt_log(double log_prob, double slope, double offset) {
  const double complement = -std::expm1(std::min(log_prob, 0.0));
  if (complement == 0.0) return 0.0;
  const double log_odds = slope * (log_prob - std::log(complement)) + offset;
  return std::min(log_odds, 0.0) - std::log1p(std::exp(-std::abs(log_odds)));
}

}  // namespace

void ygg::grow_(at::Tensor frontier_log_prob, at::Tensor frontier_token, const at::Tensor& log_probs, const at::Tensor& tokens, int64_t num_known, int64_t num_new,
           at::Tensor token, at::Tensor parent, at::Tensor depth, at::Tensor log_prob, at::Tensor path, int64_t first, int64_t width, at::Tensor meta,
           int64_t root_pos, double slope, double offset) {
  const bool is_scaled = slope != 1.0 || offset != 0.0;
  const int64_t candidates = frontier_log_prob.size(1), path_width = path.size(1), meta_width = meta.size(1);
  TORCH_CHECK(num_known + num_new <= frontier_log_prob.size(0) && first + width <= token.size(0), "grow_: more nodes than the tree holds");
  TORCH_CHECK(width <= meta.size(0) && meta_width == kPath + path_width, "grow_: metadata of another shape");
  TORCH_CHECK(num_new <= log_probs.size(0) && candidates <= log_probs.size(1) && log_probs.sizes() == tokens.sizes() && log_probs.is_contiguous() &&
                  tokens.is_contiguous(),
              "grow_: candidates of another shape");
  TORCH_CHECK(width <= (num_known + num_new) * candidates, "grow_: ", width, " nodes of ", (num_known + num_new) * candidates, " candidates");
  float* frontier = frontier_log_prob.mutable_data_ptr<float>();
  int64_t* frontier_ids = frontier_token.mutable_data_ptr<int64_t>();
  float* node_log_prob = log_prob.mutable_data_ptr<float>();
  for (int64_t i = 0; i < num_new * candidates; ++i) {
    const int64_t place = num_known * candidates + i, named = i / candidates * log_probs.size(1) + i % candidates;
    const float edge = log_probs.const_data_ptr<float>()[named];
    frontier[place] = (is_scaled ? float(platt_log(edge, slope, offset)) : edge) + node_log_prob[place / candidates];
    frontier_ids[place] = tokens.const_data_ptr<int64_t>()[named];
  }
  int32_t* rows = meta.mutable_data_ptr<int32_t>();
  int32_t* node_depth = depth.mutable_data_ptr<int32_t>();
  int32_t* paths = path.mutable_data_ptr<int32_t>();
  const std::vector<Best> best = take_best(frontier, (num_known + num_new) * candidates, width);
  for (const Best& taken : best) TORCH_CHECK(node_depth[taken.place / candidates] + 1 < path_width, "grow_: a path of more than ", path_width, " nodes");
  int64_t node = first;
  for (const Best& taken : best) {
    const int64_t above = taken.place / candidates;
    frontier[taken.place] = -std::numeric_limits<float>::infinity();
    token.mutable_data_ptr<int32_t>()[node] = int32_t(frontier_ids[taken.place]);
    parent.mutable_data_ptr<int32_t>()[node] = int32_t(above);
    node_depth[node] = node_depth[above] + 1;
    node_log_prob[node] = taken.log_prob;
    std::copy_n(paths + above * path_width, path_width, paths + node * path_width);
    paths[node * path_width + node_depth[node]] = int32_t(node);
    int32_t* fields = rows + (node - first) * meta_width;
    fields[kToken] = int32_t(frontier_ids[taken.place]);
    fields[kPosition] = int32_t(root_pos + node_depth[node]);
    fields[kRow] = 0;
    fields[kIndex] = int32_t(root_pos + node);
    fields[kPrefix] = int32_t(root_pos);
    fields[kRead] = 1;
    std::copy_n(paths + node * path_width, path_width, fields + kPath);
    ++node;
  }
  pad(meta, width);
}

// What the first `num_nodes` are worth: the probabilities of the best, less prices by rank.
double ygg::worth(const at::Tensor& log_prob, int64_t num_nodes, const at::Tensor& prices) {
  const double* price = prices.const_data_ptr<double>();
  std::vector<float> values(log_prob.const_data_ptr<float>(), log_prob.const_data_ptr<float>() + num_nodes);
  const int64_t kept = std::min(prices.size(0), num_nodes);
  std::partial_sort(values.begin(), values.begin() + kept, values.end(), std::greater<float>());
  double sum = 0.0;
  for (int64_t i = 0; i < kept; ++i) sum += std::max(std::exp(double(values[i])) - price[i], 0.0);
  return sum;
}

// What the last `width` of the first `num_nodes` add to that: `last_gain_reference`, policy/stopping.py.
double ygg::last_gain(const at::Tensor& log_prob, int64_t num_nodes, int64_t width, const at::Tensor& prices) {
  TORCH_CHECK(0 < width && width <= num_nodes && num_nodes <= log_prob.size(0), "last_gain: ", width, " of ", num_nodes, " nodes");
  return worth(log_prob, num_nodes, prices) - worth(log_prob, num_nodes - width, prices);
}

// Tree nodes [first, last), each of which sees `root_pos` indices and its path.
void ygg::pack_nodes_(at::Tensor meta, const at::Tensor& token, const at::Tensor& depth, const at::Tensor& path, int64_t first, int64_t last, int64_t root_pos,
                 int64_t row) {
  const int64_t meta_width = meta.size(1), path_width = path.size(1);
  TORCH_CHECK(meta_width == kPath + path_width && last - first <= meta.size(0) && last <= token.size(0), "pack_nodes_: nodes of another shape");
  int32_t* fields = meta.mutable_data_ptr<int32_t>();
  for (int64_t node = first; node < last; ++node, fields += meta_width) {
    const int32_t columns[kPath] = {token.const_data_ptr<int32_t>()[node], int32_t(root_pos + depth.const_data_ptr<int32_t>()[node]), int32_t(row),
                                    int32_t(root_pos + node), int32_t(root_pos), 1};
    std::copy_n(columns, int64_t(kPath), fields);
    std::copy_n(path.const_data_ptr<int32_t>() + node * path_width, path_width, fields + kPath);
  }
  pad(meta, last - first);
}

// Pieces of rows, one after another: consecutive tokens of one row, each of which sees everything of it up to itself. Of
// each piece the last `num_read` are read.
void ygg::pack_chains_(at::Tensor meta, at::IntArrayRef tokens, at::IntArrayRef lens, at::IntArrayRef start_positions,
                       at::IntArrayRef rows, at::IntArrayRef num_read) {
  const int64_t count = int64_t(tokens.size()), meta_width = meta.size(1);
  TORCH_CHECK(count <= meta.size(0), "pack_chains_: ", count, " tokens for ", meta.size(0), " rows");
  TORCH_CHECK(lens.size() == start_positions.size() && lens.size() == rows.size() && lens.size() == num_read.size(),
              "pack_chains_: as many lengths as starts, rows and numbers of tokens that are read");
  int32_t* fields = meta.mutable_data_ptr<int32_t>();
  int64_t token = 0;
  for (size_t piece = 0; piece < lens.size(); ++piece) {
    TORCH_CHECK(token + lens[piece] <= count, "pack_chains_: more tokens in the lengths than there are");
    for (int64_t n = 0; n < lens[piece]; ++n, ++token, fields += meta_width) {
      const int32_t position = int32_t(start_positions[piece] + n);
      const int32_t is_read = n >= lens[piece] - num_read[piece];
      const int32_t columns[kPath] = {int32_t(tokens[token]), position, int32_t(rows[piece]), position, position + 1, is_read};
      std::copy_n(columns, int64_t(kPath), fields);
      std::fill(fields + kPath, fields + meta_width, -1);
    }
  }
  pad(meta, token);
}

namespace {

// Uninitialised.
ygg::TreeArrays arrays(int64_t capacity, int64_t path_width) {
  const auto ints = at::TensorOptions().dtype(at::kInt);
  return {ygg::empty({capacity}, ints), ygg::empty({capacity}, ints), ygg::empty({capacity}, ints), ygg::empty({capacity}, at::kFloat),
          ygg::empty({capacity, path_width}, ints)};
}

}  // namespace

ygg::TreeArrays ygg::root(int64_t token, int64_t capacity, int64_t path_width) {
  TORCH_CHECK(capacity > 0 && path_width > 0, "root: a tree of ", capacity, " nodes and paths of ", path_width);
  TreeArrays tree = arrays(capacity, path_width);
  auto& [tokens, parents, depths, log_probs, paths] = tree;
  tokens.mutable_data_ptr<int32_t>()[0] = int32_t(token);
  parents.mutable_data_ptr<int32_t>()[0] = -1;
  depths.mutable_data_ptr<int32_t>()[0] = 0;
  log_probs.mutable_data_ptr<float>()[0] = 0.0f;
  int32_t* path = paths.mutable_data_ptr<int32_t>();
  std::fill_n(path, path_width, -1);
  path[0] = 0;
  return tree;
}

namespace {

// The nodes `keep` (ascending, connected, root first), renumbered.
ygg::TreeArrays subtree(const at::Tensor& token, const at::Tensor& parent, const at::Tensor& depth, const at::Tensor& log_prob, const at::Tensor& path,
                        const std::vector<int64_t>& keep) {
  const int64_t count = int64_t(keep.size()), path_width = path.size(1);
  std::vector<int32_t> renamed(token.size(0), -1);
  for (int64_t place = 0; place < count; ++place) renamed[keep[place]] = int32_t(place);
  const auto name = [&](int32_t node) { return node < 0 ? -1 : renamed[node]; };
  ygg::TreeArrays kept = arrays(count, path_width);
  auto& [tokens, parents, depths, log_probs, paths] = kept;
  for (int64_t place = 0; place < count; ++place) {
    const int64_t node = keep[place];
    tokens.mutable_data_ptr<int32_t>()[place] = token.const_data_ptr<int32_t>()[node];
    parents.mutable_data_ptr<int32_t>()[place] = name(parent.const_data_ptr<int32_t>()[node]);
    depths.mutable_data_ptr<int32_t>()[place] = depth.const_data_ptr<int32_t>()[node];
    log_probs.mutable_data_ptr<float>()[place] = log_prob.const_data_ptr<float>()[node];
    const int32_t* from = path.const_data_ptr<int32_t>() + node * path_width;
    std::transform(from, from + path_width, paths.mutable_data_ptr<int32_t>() + place * path_width, name);
  }
  return kept;
}

// Linear between knots, clamped outside; `x` ascends.
double interpolated(double at, const double* x, const double* y, int64_t count) {
  if (!(at > x[0])) return y[0];
  if (at >= x[count - 1]) return y[count - 1];
  const int64_t low = std::upper_bound(x, x + count, at) - x - 1;
  return (y[low + 1] - y[low]) / (x[low + 1] - x[low]) * (at - x[low]) + y[low];
}

}  // namespace

// The best nodes, as many as Eq. 3 likes best of `widths`, and the emitted tokens that are expected of them: `prune_reference`, step/prune.py.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::vector<int64_t>, double> ygg::prune(
    const at::Tensor& token, const at::Tensor& parent, const at::Tensor& depth, const at::Tensor& log_prob, const at::Tensor& path, int64_t num_nodes,
    const at::Tensor& knots, at::IntArrayRef widths, at::ArrayRef<double> costs_ms) {
  TORCH_CHECK(0 < num_nodes && num_nodes <= token.size(0), "prune: ", num_nodes, " of ", token.size(0), " nodes");
  TORCH_CHECK(!widths.empty() && widths.size() == costs_ms.size(), "prune: ", widths.size(), " widths and ", costs_ms.size(), " costs");
  for (const int64_t width : widths) TORCH_CHECK(0 < width && width <= num_nodes, "prune: ", width, " of ", num_nodes, " nodes");
  const int64_t num_knots = knots.size(1);
  const double *x = knots.const_data_ptr<double>(), *y = x + num_knots;
  std::vector<double> values(num_nodes), expected{1.0};
  for (int64_t node = 1; node < num_nodes; ++node) values[node] = interpolated(log_prob.const_data_ptr<float>()[node], x, y, num_knots);
  std::vector<int64_t> order(num_nodes);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin() + 1, order.end(), [&](int64_t a, int64_t b) { return values[a] > values[b]; });
  double sum = 0.0;
  for (int64_t place = 1; place < num_nodes; ++place) expected.push_back(1.0 + (sum += values[order[place]]));
  size_t best = 0;
  const auto speed = [&](size_t choice) { return expected[widths[choice] - 1] / costs_ms[choice]; };
  for (size_t choice = 1; choice < widths.size(); ++choice)
    if (speed(choice) > speed(best)) best = choice;
  order.resize(widths[best]);
  std::sort(order.begin(), order.end());
  return std::tuple_cat(subtree(token, parent, depth, log_prob, path, order), std::make_tuple(order, expected[order.size() - 1]));
}

// Slots source[i] of every layer, key and value, and head become slots target + i; `source` ascends and source[i] >= target + i.
void ygg::move_slots_(at::Tensor storage, at::IntArrayRef source, int64_t target) {
  TORCH_CHECK(storage.is_contiguous() && storage.dim() == 6, "move_slots_: storage is (pages, layers, 2, G, slots of a page, F)");
  const int64_t page_len = storage.size(4), slot_bytes = storage.size(5) * storage.element_size(), count = int64_t(source.size());
  const int64_t planes = storage.size(1) * storage.size(2) * storage.size(3), plane_bytes = page_len * slot_bytes;
  TORCH_CHECK(count == 0 || (target >= 0 && source[0] >= target && source[count - 1] < storage.size(0) * page_len), "move_slots_: slots outside the cache");
  char* first = static_cast<char*>(storage.mutable_data_ptr());
  const auto at = [&](int64_t slot) { return first + slot / page_len * planes * plane_bytes + slot % page_len * slot_bytes; };
  for (int64_t i = 0; i < count; ++i) {
    const char* from = at(source[i]);
    char* to = at(target + i);
    for (int64_t plane = 0; plane < planes; ++plane) {
      // Every plane is a miss or two, behind a pass over the weights; asked for ahead they do not wait for each other.
      for (int64_t byte = 0; byte < slot_bytes; byte += 64) __builtin_prefetch(from + (plane + 8) * plane_bytes + byte), __builtin_prefetch(to + (plane + 8) * plane_bytes + byte, 1);
      std::memmove(to + plane * plane_bytes, from + plane * plane_bytes, slot_bytes);
    }
  }
}

// The CPU bodies of `ygg::candidates` (specification: candidates.py, `reference`), of `ygg::largest`, which
// is `max(dim=-1)`, and of `ygg::follow`, greedy acceptance (specification: step/accept.py).
//
// Equal logits are ordered by token, so that a tree is the same in every run.
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "layout.h"
#include "operators.h"
#include "threads.h"
#include "vectors.h"

namespace {

using Vec = at::vec::Vectorized<float>;

// log(sum(exp(row))), relative to the maximum.
float log_sum_exp(const float* row, int64_t vocab) {
  Vec highest_vec(-std::numeric_limits<float>::infinity());
  int64_t v = 0;
  for (; v + Vec::size() <= vocab; v += Vec::size())
    highest_vec = at::vec::maximum(highest_vec, Vec::loadu(row + v));
  float lanes[Vec::size()];
  highest_vec.store(lanes);
  float highest = *std::max_element(lanes, lanes + Vec::size());
  for (int64_t i = v; i < vocab; ++i) highest = std::max(highest, row[i]);
  Vec sum_vec(0.0f);
  for (v = 0; v + Vec::size() <= vocab; v += Vec::size())
    sum_vec = sum_vec + (Vec::loadu(row + v) - Vec(highest)).exp_u20();
  sum_vec.store(lanes);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  for (; v < vocab; ++v) sum += std::exp(row[v] - highest);
  return highest + std::log(sum);
}

// The first token from `v` on whose logit is above `bound`, or `vocab`.
int64_t next_above(const float* row, int64_t v, int64_t vocab, float bound) {
  constexpr int kNone = (1 << Vec::size()) - 1;
  while (v + Vec::size() <= vocab && (Vec::loadu(row + v) > Vec(bound)).zero_mask() == kNone)
    v += Vec::size();
  while (v < vocab && !(row[v] > bound)) ++v;
  return v;
}

constexpr int64_t kFew = 16;  // longer lists are not sorted by insertion

// Inserts into a short sorted list: few logits are above its last entry.
void best(const float* row, int64_t vocab, int64_t count, float* values, int64_t* tokens) {
  std::fill(values, values + count, -std::numeric_limits<float>::infinity());
  std::fill(tokens, tokens + count, 0);
  int64_t kept = 0;
  for (int64_t v = 0; v < vocab; ++v) {
    if (kept == count) {
      v = next_above(row, v, vocab, values[count - 1]);
      if (v == vocab) break;
    }
    int64_t place = std::min(kept, count - 1);
    for (; place > 0 && row[v] > values[place - 1]; --place) {
      values[place] = values[place - 1];
      tokens[place] = tokens[place - 1];
    }
    values[place] = row[v];
    tokens[place] = v;
    kept = std::min(kept + 1, count);
  }
}

// One thread reads fewer logits than this before another one has started.
constexpr int64_t kTaskPlaces = 16 << 10;

// A row in fp32, in memory of the calling thread until its next call.
template <class Dtype>
const float* widened(const typename Dtype::Element* row, int64_t places) {
  thread_local std::vector<float> wide;
  wide.resize(places);
  int64_t place = 0;
  for (; place + ygg::kLanes <= places; place += ygg::kLanes) {
    const ygg::Vec numbers = Dtype::widen_all(row + place);
    std::memcpy(wide.data() + place, &numbers, sizeof numbers);
  }
  for (; place < places; ++place) wide[place] = Dtype::widen(row[place]);
  return wide.data();
}

// Tokens with their logits, in the order of the tokens.
struct Found {
  std::vector<float> values;
  std::vector<int64_t> tokens;

  void clear() {
    values.clear();
    tokens.clear();
  }
  void add(const float* row, int64_t token) {
    values.push_back(row[token]);
    tokens.push_back(token);
  }
};

// Changes the bits of floats into integers of the same order, and back.
template <class Int>
Int in_order(Int bits) {
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// A logit that at least `count` tokens reach, and few more: the row is cut into about 4 * count blocks, and
// a few more than `count` of their maxima reach it.
float reached(const float* row, int64_t vocab, int64_t count) {
  thread_local std::vector<int32_t> highest;
  highest.clear();
  // a block of every lane
  const int64_t block_len = std::max<int64_t>(1, vocab / (4 * count)) * ygg::kLanes;
  for (int64_t begin = 0; begin + block_len <= vocab; begin += block_len) {
    ygg::Vec lanes = ygg::load(row + begin);
    for (int64_t v = ygg::kLanes; v < block_len; v += ygg::kLanes) {
      const ygg::Vec others = ygg::load(row + begin + v);
      lanes = lanes > others ? lanes : others;
    }
    const ygg::IntVec ordered = in_order((ygg::IntVec)lanes);
    const size_t num = highest.size();
    highest.resize(num + ygg::kLanes);
    std::memcpy(highest.data() + num, &ordered, sizeof ordered);
  }
  if (int64_t(highest.size()) < count) return -std::numeric_limits<float>::infinity();
  int64_t low = *std::min_element(highest.begin(), highest.end());
  int64_t high = int64_t(*std::max_element(highest.begin(), highest.end())) + 1;
  int64_t num_reach = int64_t(highest.size());
  while (high - low > 1 && num_reach > count + count / 8) {
    const int32_t middle = int32_t((low + high) >> 1);
    const int64_t num =
        std::count_if(highest.begin(), highest.end(), [&](int32_t value) { return value >= middle; });
    if (num < count) {
      high = middle;
    } else {
      low = middle;
      num_reach = num;
    }
  }
  return std::bit_cast<float>(in_order(int32_t(low)));
}

// The tokens whose logits are at least `bound`.
void find_(const float* row, int64_t vocab, float bound, Found& found) {
  constexpr uint32_t kAll = (1u << Vec::size()) - 1;
  const auto reach = [&](int64_t v) {
    return ~uint32_t((Vec::loadu(row + v) >= Vec(bound)).zero_mask()) & kAll;
  };
  thread_local std::vector<int64_t> vecs;  // that have such a token
  vecs.resize(vocab / Vec::size() + 1);
  size_t num_vecs = 0;
  int64_t v = 0;
  for (; v + Vec::size() <= vocab; v += Vec::size()) {
    vecs[num_vecs] = v;
    num_vecs += reach(v) != 0;
  }
  for (size_t i = 0; i < num_vecs; ++i)
    for (uint32_t lanes = reach(vecs[i]); lanes; lanes &= lanes - 1)
      found.add(row, vecs[i] + std::countr_zero(lanes));
  for (; v < vocab; ++v)
    if (row[v] >= bound) found.add(row, v);
}

// The place of every token in the order of the logits: the number of those before it.
void rank_(const std::vector<float>& values, std::vector<int32_t>& ranks) {
  const int64_t num = int64_t(values.size());
  ranks.resize(num + ygg::kLanes);
  ygg::IntVec places;
  for (int lane = 0; lane < ygg::kLanes; ++lane) places[lane] = lane;
  for (int64_t first = 0; first < num; first += ygg::kLanes, places += ygg::kLanes) {
    ygg::Vec own{};
    std::memcpy(&own, values.data() + first, std::min<int64_t>(ygg::kLanes, num - first) * sizeof(float));
    ygg::IntVec rank{};
    for (int32_t other = 0; other < num; ++other) {
      const ygg::Vec value = ygg::Vec{} + values[other];
      rank -= (ygg::IntVec)(own < value) | ((ygg::IntVec)(own == value) & (ygg::IntVec)(places > other));
    }
    std::memcpy(ranks.data() + first, &rank, sizeof rank);
  }
}

// `best` for a long list. Its branches do not depend on the logits, since a wrong guess of the processor
// takes as long as twenty comparisons.
void best_of_many(const float* row, int64_t vocab, int64_t count, float* values, int64_t* tokens) {
  thread_local Found found;
  thread_local std::vector<int32_t> ranks;
  found.clear();
  find_(row, vocab, reached(row, vocab, count), found);
  const int64_t num = int64_t(found.values.size());
  if (num > 4 * count) return best(row, vocab, count, values, tokens);  // many equal logits
  rank_(found.values, ranks);
  for (int64_t i = 0; i < num; ++i) {
    if (ranks[i] >= count) continue;
    values[ranks[i]] = found.values[i];
    tokens[ranks[i]] = found.tokens[i];
  }
}

template <class Dtype>
ygg::Candidates candidates_of_rows(const at::Tensor& logits, const at::Tensor& meta, int64_t count,
                                   int64_t few) {
  const int64_t rows = logits.size(0), vocab = logits.size(1), meta_width = meta.size(1);
  at::Tensor log_probs = ygg::empty({rows, count}, logits.options().dtype(at::kFloat));
  at::Tensor tokens = ygg::empty({rows, count}, logits.options().dtype(at::kLong));
  const auto* from = static_cast<const typename Dtype::Element*>(logits.const_data_ptr());
  const int32_t* fields = meta.const_data_ptr<int32_t>();
  float* values = log_probs.mutable_data_ptr<float>();
  int64_t* ids = tokens.mutable_data_ptr<int64_t>();
  std::fill_n(values, rows * count, -std::numeric_limits<float>::infinity());
  std::fill_n(ids, rows * count, 0);
  ygg::parallel_for(rows, std::max<int64_t>(1, kTaskPlaces / 4 / vocab), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int32_t read = fields[r * meta_width + ygg::kRead];
      if (!read) continue;
      const int64_t wanted = read == ygg::kReadWide ? count : few;
      const float* row = widened<Dtype>(from + r * logits.stride(0), vocab);
      (wanted > kFew ? best_of_many : best)(row, vocab, wanted, values + r * count, ids + r * count);
      const float normaliser = log_sum_exp(row, vocab);
      for (int64_t i = 0; i < wanted; ++i) values[r * count + i] -= normaliser;
    }
  });
  return {log_probs, tokens};
}

}  // namespace

ygg::Candidates ygg::candidates(const at::Tensor& logits, const at::Tensor& meta, int64_t count,
                                int64_t few) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1,
              "candidates: logits are (rows, V) with contiguous rows");
  TORCH_CHECK(meta.is_contiguous() && meta.size(0) == logits.size(0),
              "candidates: every row of logits has a row of metadata");
  TORCH_CHECK(0 < few && few <= count && count <= logits.size(1), "candidates: counts ", few, " and ",
              count, " are not in 1..", logits.size(1));
  if (logits.scalar_type() == at::kBFloat16) return candidates_of_rows<BFloat16>(logits, meta, count, few);
  TORCH_CHECK(logits.scalar_type() == at::kFloat, "candidates: dtype ", logits.scalar_type(),
              " is neither float32 nor bfloat16");
  return candidates_of_rows<Float32>(logits, meta, count, few);
}

namespace {

// The largest number of a row, NaN if it has one, and its first place.
template <class Dtype>
std::pair<float, int64_t> largest_of(const typename Dtype::Element* row, int64_t places) {
  const auto wide = [&](int64_t place) {
    const ygg::Vec numbers = Dtype::widen_all(row + place);
    return Vec::loadu(&numbers);
  };
  float value = -std::numeric_limits<float>::infinity();
  int64_t place = 0;
  if (places >= Vec::size()) {
    Vec highest = wide(0);
    for (place = Vec::size(); place + Vec::size() <= places; place += Vec::size())
      highest = at::vec::maximum(highest, wide(place));
    value = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, highest);
  }
  for (; place < places; ++place) {
    const float number = Dtype::widen(row[place]);
    if (number > value || std::isnan(number)) value = number;
  }
  constexpr int kNone = (1 << Vec::size()) - 1;
  for (place = 0; place + Vec::size() <= places && (wide(place) == Vec(value)).zero_mask() == kNone;)
    place += Vec::size();
  while (place + 1 < places && Dtype::widen(row[place]) != value) ++place;
  return {value, place};
}

template <class Dtype>
ygg::Largest largest_of_rows(const at::Tensor& scores) {
  const int64_t rows = scores.size(0), places = scores.size(1);
  at::Tensor values = ygg::empty({rows}, scores.options().dtype(at::kFloat));
  at::Tensor tokens = ygg::empty({rows}, scores.options().dtype(at::kLong));
  const auto* from = static_cast<const typename Dtype::Element*>(scores.const_data_ptr());
  float* value = values.mutable_data_ptr<float>();
  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  ygg::parallel_for(rows, std::max<int64_t>(1, kTaskPlaces / places), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      std::tie(value[r], token[r]) = largest_of<Dtype>(from + r * scores.stride(0), places);
  });
  return {values, tokens};
}

}  // namespace

ygg::Largest ygg::largest(const at::Tensor& scores) {
  TORCH_CHECK(scores.dim() == 2 && scores.size(1) > 0, "largest: scores are (rows, places)");
  if (scores.scalar_type() == at::kBFloat16 && scores.stride(1) == 1)
    return largest_of_rows<ygg::BFloat16>(scores);
  return largest_of_rows<ygg::Float32>(scores.to(at::kFloat).contiguous());
}

// The path whose every node holds the target's best token after its parent, and the best tokens along it.
// Entry i of `best` belongs to node i. Both are empty if the largest logit of any node is not finite.
ygg::Accepted ygg::walk(const Largest& best, const at::Tensor& parent, const at::Tensor& token) {
  const int64_t num_nodes = best.values.size(0);
  for (int64_t node = 0; node < num_nodes; ++node)
    if (!std::isfinite(best.values.const_data_ptr<float>()[node])) return {};
  const int64_t* emitted = best.tokens.const_data_ptr<int64_t>();
  std::vector<int64_t> path{0}, tokens{emitted[0]};
  // a child's id is above its parent's, so one pass is enough
  for (int64_t node = 1; node < num_nodes; ++node) {
    if (parent.const_data_ptr<int32_t>()[node] != path.back() ||
        token.const_data_ptr<int32_t>()[node] != tokens.back())
      continue;
    path.push_back(node);
    tokens.push_back(emitted[node]);
  }
  return {path, tokens};
}

// `walk` by the logits of every node.
ygg::Accepted ygg::follow(const at::Tensor& logits, const at::Tensor& parent, const at::Tensor& token) {
  const int64_t num_nodes = logits.size(0);
  TORCH_CHECK(0 < num_nodes && num_nodes <= parent.size(0) && num_nodes <= token.size(0),
              "follow: ", num_nodes, " rows of logits for ", token.size(0), " nodes");
  return walk(largest(logits), parent, token);
}

// The target's own token, sampled. step/sampling.py explains and specifies it: the largest of the processed
// logits plus Gumbel noise, whose numbers are keyed by seed and position.
//
// Most tokens cannot win whatever their noise is. A draw u gives the noise -log(-log u), which is at most
// -log(1 - u). So a token needs its two logarithms only where 1 - u is small against its probability.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/div.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/topk.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "operators.h"
#include "philox.h"
#include "processors.h"
#include "threads.h"
#include "vectors.h"

namespace {

using Vec = at::vec::Vectorized<float>;

constexpr double kLowestTemperature = 1e-30;  // below it a quotient of float32 logits may overflow
constexpr float kFiltered = -std::numeric_limits<float>::infinity();
constexpr double kMinScore = -1e4;  // for candidates that a filter drops
constexpr double kDropped = -std::numeric_limits<double>::infinity();
constexpr int64_t kFewKeys = 4096;      // up to here a sort by comparison is faster
constexpr int64_t kBlockTokens = 256;   // tokens whose bounds are computed together
constexpr float kMinRest = 0x1p-53f;  // 1 - u is never smaller
static_assert(kBlockTokens % ygg::kBatchTokens == 0);
constexpr int64_t kTaskTokens = 16 << 10;  // one thread draws fewer before another one has started

struct Winner {
  float score;
  int64_t token;

  // whether it comes before another: the first token among equal scores
  bool beats(const Winner& other) const {
    return score > other.score || (score == other.score && token < other.token);
  }
};

// The scores of a row: its logits, in fp32 or bf16, divided by the temperature as at::div does.
class Scores {
 public:
  Scores(at::Tensor row, double temperature)
      : row_(std::move(row)),
        is_narrow_(row_.scalar_type() == at::kBFloat16),
        temperature_(float(temperature)) {}

  void read(int64_t begin, int64_t count, float* to) const {
    if (is_narrow_)
      read<ygg::BFloat16>(begin, count, to);
    else
      read<ygg::Float32>(begin, count, to);
  }
  float of(int64_t token) const {
    float score;
    read(token, 1, &score);
    return score;
  }

 private:
  template <class Dtype>
  void read(int64_t begin, int64_t count, float* to) const {
    const auto* from = static_cast<const typename Dtype::Element*>(row_.const_data_ptr()) + begin;
    int64_t i = 0;
    for (; i + ygg::kLanes <= count; i += ygg::kLanes) {
      const ygg::Vec scores = Dtype::widen_all(from + i) / temperature_;
      std::memcpy(to + i, &scores, sizeof scores);
    }
    for (; i < count; ++i) to[i] = Dtype::widen(from[i]) / temperature_;
  }

  at::Tensor row_;
  bool is_narrow_;
  float temperature_;
};

// The upper halves of two words as one.
inline ygg::WideVec upper_halves(ygg::WideVec a, ygg::WideVec b) {
  return a >> 32 | (b & 0xffffffff00000000);
}

// Words of a and b in turns, from the first or the second half of each.
template <int kHalf>
inline ygg::WideVec in_turns(ygg::WideVec a, ygg::WideVec b) {
  ygg::WideVec places;
  for (int i = 0; i < ygg::kWideLanes; ++i)
    places[i] = uint64_t(kHalf * ygg::kWideLanes / 2 + i / 2 + i % 2 * ygg::kWideLanes);
  return __builtin_shuffle(a, b, places);
}

// Where 1 - u may be within the bounds, by the upper 30 bits of the draws.
inline ygg::IntVec within(ygg::WideVec upper, const float* bounds) {
  constexpr float kOne = 0x1p30f;
  const ygg::Vec scaled = ygg::load(bounds) * kOne;
  const ygg::IntVec limit =
      __builtin_convertvector(scaled < kOne ? scaled : ygg::Vec{} + kOne, ygg::IntVec);
  return (ygg::IntVec)(~(ygg::WordVec)upper >> 2) <= limit;
}

// Whether a comparison holds in any lane.
bool any(ygg::IntVec found) {
  constexpr int kNone = (1 << Vec::size()) - 1;
  return Vec::loadu(&found).zero_mask() != kNone;
}

// Whether any draw of a batch may have a 1 - u within its token's bound.
bool any_within(const ygg::Draws& draws, const float* bounds) {
  ygg::IntVec found{};
  for (int v = 0; v < ygg::kBatchVecs; ++v) {
    const ygg::WideVec first = upper_halves(draws.words[0][v], draws.words[1][v]);
    const ygg::WideVec second = upper_halves(draws.words[2][v], draws.words[3][v]);
    const float* own = bounds + 2 * v * ygg::kLanes;
    found |=
        within(in_turns<0>(first, second), own) | within(in_turns<1>(first, second), own + ygg::kLanes);
  }
  return any(found);
}

// Whether any token of a batch has a bound that a draw can meet.
bool any_possible(const float* bounds) {
  ygg::IntVec found{};
  for (int i = 0; i < ygg::kBatchTokens; i += ygg::kLanes)
    found |= (ygg::IntVec)(ygg::load(bounds + i) >= kMinRest);
  return any(found);
}

// The largest perturbed score of tokens [begin, end), or `winner`; `begin` is a multiple of 4. A batch of
// draws is looked at one by one only if one of them may win.
Winner best_of(const Scores& row, int64_t begin, int64_t end, ygg::PhiloxKeys keys, Winner winner) {
  float scores[kBlockTokens], bounds[kBlockTokens];
  for (int64_t block = begin; block < end; block += kBlockTokens) {
    const int64_t count = std::min(kBlockTokens, end - block);
    row.read(block, count, scores);
    std::fill(scores + count, scores + kBlockTokens, kFiltered);
    // of the winner at the start of the block; the rest covers rounding of score, sum and exponential
    const float lowest = winner.score - (1e-3f + 1e-6f * std::abs(winner.score));
    for (int64_t i = 0; i < kBlockTokens; i += Vec::size())
      (Vec::loadu(scores + i) - Vec(lowest)).exp_u20().store(bounds + i);
    for (int64_t i = 0; i < count; i += ygg::kBatchTokens) {
      if (!any_possible(bounds + i)) continue;
      const ygg::Draws draws = ygg::draws_of(block + i, keys);
      if (!any_within(draws, bounds + i)) continue;
      for (int64_t place = i; place < std::min(count, i + ygg::kBatchTokens); ++place) {
        const uint64_t draw = draws.of(int(place - i));
        if (ygg::rest_of(draw) > double(bounds[place])) continue;
        const Winner found{scores[place] + ygg::gumbel(draw), block + place};
        if (found.beats(winner)) winner = found;
      }
    }
  }
  return winner;
}

// The token with the largest perturbed score, the first among equals. The search starts from `likeliest`.
int64_t sampled_of(const Scores& scores, int64_t vocab, int64_t likeliest, ygg::PhiloxKeys keys) {
  const float noise = ygg::gumbel(ygg::philox(uint64_t(likeliest) / 4 + 1, keys)[likeliest % 4]);
  const Winner first{scores.of(likeliest) + noise, likeliest};
  const int64_t num_tasks = (vocab + kTaskTokens - 1) / kTaskTokens;
  std::vector<Winner> winners(num_tasks, first);
  ygg::parallel_for(num_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task)
      winners[task] =
          best_of(scores, task * kTaskTokens, std::min(vocab, (task + 1) * kTaskTokens), keys, first);
  });
  Winner winner = first;
  for (const Winner& other : winners)
    if (other.beats(winner)) winner = other;
  return winner.token;
}

// A score and its token as one number: larger scores first, then lower tokens.
uint64_t sort_key(float score, int64_t token) {
  uint32_t bits = std::bit_cast<uint32_t>(score);
  if (bits == 0x80000000) bits = 0;  // -0 is 0; the compiler may leave out an addition of 0
  const uint32_t rising = bits ^ (bits >> 31 ? 0xFFFFFFFF : 0x80000000);
  return uint64_t(~rising) << 32 | uint32_t(token);
}

// Sorts by the upper half, 11 bits at a time; keys come in the order of their lower halves.
void radix_sort_(std::vector<uint64_t>& keys) {
  std::vector<uint64_t> sorted(keys.size());
  for (int shift = 32; shift < 64; shift += 11) {
    std::array<int64_t, 1 << 11> starts{};
    const auto digit = [&](uint64_t key) { return key >> shift & (starts.size() - 1); };
    for (const uint64_t key : keys) ++starts[digit(key)];
    std::exclusive_scan(starts.begin(), starts.end(), starts.begin(), int64_t(0));
    for (const uint64_t key : keys) sorted[starts[digit(key)]++] = key;
    keys.swap(sorted);
  }
}

// The scores of a row, (1, V), in falling order, and their tokens: at::sort, which takes ten times as long.
std::pair<at::Tensor, at::Tensor> falling(const at::Tensor& row) {
  const int64_t vocab = row.size(1);
  const float* scores = row.const_data_ptr<float>();
  std::vector<uint64_t> keys;
  keys.reserve(vocab);
  for (int64_t token = 0; token < vocab; ++token)
    if (scores[token] != kFiltered) keys.push_back(sort_key(scores[token], token));
  if (int64_t(keys.size()) < kFewKeys)
    std::sort(keys.begin(), keys.end());
  else
    radix_sort_(keys);
  at::Tensor ordered = at::full_like(row, kFiltered);
  at::Tensor order = ygg::empty(row.sizes(), row.options().dtype(at::kLong));
  int64_t* tokens = order.mutable_data_ptr<int64_t>();
  for (size_t place = 0; place < keys.size(); ++place) {
    tokens[place] = int64_t(uint32_t(keys[place]));
    ordered.mutable_data_ptr<float>()[place] = scores[tokens[place]];
  }
  tokens += keys.size();
  for (int64_t token = 0; token < vocab; ++token)
    if (scores[token] == kFiltered) *tokens++ = token;
  return {ordered, order};
}

// A block in which ATen runs on the calling thread: see `one_torch_thread` of threads.py.
class OneThread {
 public:
  OneThread() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }

 private:
  int before_;
};

// `process_logits` of step/sampling.py for one row, (1, V), by the same operators of ATen.
at::Tensor filtered(const at::Tensor& logits, const ygg::Sampling& sampling) {
  const OneThread guard;
  at::Tensor row = logits;
  double temperature = sampling.temperature;
  if (temperature < kLowestTemperature) {
    row = at::sub(row, at::amax(row, -1, true));
    temperature = std::max(temperature, double(std::numeric_limits<float>::min()));
  }
  row = at::div(row, temperature);
  const int64_t vocab = row.size(1);
  if (0 < sampling.top_k && sampling.top_k < vocab) {
    const at::Tensor best = std::get<0>(at::topk(row, sampling.top_k, -1));
    row = at::masked_fill(row, at::lt(row, best.narrow(1, sampling.top_k - 1, 1)), kFiltered);
  }
  if (sampling.top_p < 1) {
    const auto [ordered, order] = falling(row);
    const at::Tensor probability = at::softmax(ordered, -1);
    const at::Tensor before = at::sub(at::cumsum(probability, -1), probability);
    row = at::scatter(row, -1, order, at::masked_fill(ordered, at::ge(before, sampling.top_p), kFiltered));
  }
  if (sampling.min_p > 0) {
    const at::Tensor share = at::softmax(row, -1);
    row =
        at::masked_fill(row, at::lt(share, at::mul(at::amax(share, -1, true), sampling.min_p)), kFiltered);
  }
  return row.contiguous();
}

}  // namespace

// (V) standard Gumbel noise of one position.
at::Tensor ygg::gumbel_noise(int64_t seed, int64_t position, int64_t vocab) {
  at::Tensor noise = empty({vocab}, at::TensorOptions().dtype(at::kFloat));
  float* to = noise.mutable_data_ptr<float>();
  const PhiloxKeys keys{uint64_t(seed), uint64_t(position)};
  parallel_for((vocab + kBatchTokens - 1) / kBatchTokens, kTaskTokens / 4 / kBatchTokens,
               [&](int64_t begin, int64_t end) {
                 for (int64_t first = begin * kBatchTokens; first < std::min(vocab, end * kBatchTokens);
                      first += kBatchTokens) {
                   const Draws draws = draws_of(first, keys);
                   for (int64_t i = 0; i < std::min<int64_t>(kBatchTokens, vocab - first); ++i)
                     to[first + i] = gumbel(draws.of(int(i)));
                 }
               });
  return noise;
}

namespace {

// The log-probabilities of one row of candidates, best first; -inf where a filter drops one. The filters'
// sums run over the candidates only.
void filtered_(const float* log_probs, int64_t num, const ygg::Sampling& sampling, double* scores) {
  for (int64_t i = 0; i < num; ++i)
    scores[i] = sampling.temperature > 0 && 0 < sampling.top_k && sampling.top_k <= i
                    ? kDropped
                    : double(log_probs[i]);
  if (sampling.temperature == 0 || (sampling.top_p == 1.0 && sampling.min_p == 0.0)) return;
  const double temperature = std::max(sampling.temperature, double(std::numeric_limits<float>::min()));
  const auto share = [&](int64_t i) { return std::exp((scores[i] - double(log_probs[0])) / temperature); };
  double sum = 0.0, before = 0.0;
  for (int64_t i = 0; i < num; ++i) sum += share(i);
  for (int64_t i = 0; i < num; ++i) {
    const double own = share(i);
    if ((sampling.top_p < 1.0 && before >= sampling.top_p * sum) || own < sampling.min_p)
      scores[i] = kDropped;
    before += own;
  }
}

// The noise of some tokens. The vectors' logarithms may differ from those of `gumbel` in the last bit. That
// can change a draft, never a text.
void noise_of_(const int64_t* tokens, int64_t num, ygg::PhiloxKeys keys, float* noise) {
  using Doubles = at::vec::Vectorized<double>;
  double uniform[ygg::kBatchCounters];
  for (int64_t first = 0; first < num; first += ygg::kBatchCounters) {
    const int64_t count = std::min<int64_t>(ygg::kBatchCounters, num - first);
    ygg::Counters counters{};
    for (int64_t i = 0; i < count; ++i)
      counters[i / ygg::kWideLanes][i % ygg::kWideLanes] = uint64_t(tokens[first + i]) / 4 + 1;
    const ygg::Draws draws = ygg::philox_batch(counters, keys);
    for (int i = 0; i < ygg::kBatchCounters; ++i)
      uniform[i] = ygg::uniform_of(draws.of(i, i < count ? int(tokens[first + i] % 4) : 0));
    for (int i = 0; i < ygg::kBatchCounters; i += Doubles::size())
      Doubles::loadu(uniform + i).log().neg().log().neg().store(uniform + i);
    for (int64_t i = 0; i < count; ++i) noise[first + i] = float(uniform[i]);
  }
}

}  // namespace

// The `count` candidates of every row that are best after filters and noise, and their shares of the
// perturbed probabilities. The noise is that of the candidates' positions. step/coupling.py specifies it.
ygg::Candidates ygg::coupled(const Candidates& drafted, at::IntArrayRef positions, const Sampling& sampling,
                             int64_t count) {
  const int64_t rows = drafted.tokens.size(0), num = drafted.tokens.size(1);
  TORCH_CHECK(count <= num && int64_t(positions.size()) == rows && drafted.log_probs.is_contiguous() &&
                  drafted.tokens.is_contiguous(),
              "coupled: ", count, " of ", num, " candidates at ", positions.size(), " positions");
  Candidates best{empty({rows, count}, drafted.log_probs.options()),
                  empty({rows, count}, drafted.tokens.options())};
  std::vector<double> scores(num);
  std::vector<float> noise(num);
  std::vector<int64_t> order(num);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t* tokens = drafted.tokens.const_data_ptr<int64_t>() + row * num;
    const float* log_probs = drafted.log_probs.const_data_ptr<float>() + row * num;
    filtered_(log_probs, num, sampling, scores.data());
    if (sampling.temperature > 0) {
      noise_of_(tokens, num, {uint64_t(sampling.seed), uint64_t(positions[row])}, noise.data());
      for (int64_t i = 0; i < num; ++i) scores[i] += sampling.temperature * double(noise[i]);
    }
    const double highest = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (const double score : scores) sum += std::exp(score - highest);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    const double normaliser = highest + std::log(sum);
    for (int64_t i = 0; i < count; ++i) {
      const double log_share = scores[order[i]] - normaliser;
      best.log_probs.mutable_data_ptr<float>()[row * count + i] =
          log_probs[order[i]] <= ygg::kForbidden ? ygg::kForbidden : float(std::max(log_share, kMinScore));
      best.tokens.mutable_data_ptr<int64_t>()[row * count + i] = tokens[order[i]];
    }
  }
  return best;
}

namespace {

// The target's token at `position` by one row of logits, whose largest is that of `likeliest`.
int64_t token_of(const at::Tensor& row, int64_t likeliest, const ygg::Sampling& sampling,
                 int64_t position) {
  if (sampling.temperature == 0) return likeliest;
  const bool is_unfiltered = sampling.temperature >= kLowestTemperature && sampling.top_k == 0 &&
                             sampling.top_p == 1.0 && sampling.min_p == 0.0;
  const bool is_readable = row.scalar_type() == at::kBFloat16 || row.scalar_type() == at::kFloat;
  const Scores scores = is_unfiltered && is_readable && row.stride(1) == 1
                            ? Scores(row, sampling.temperature)
                            : Scores(filtered(row.to(at::kFloat), sampling), 1.0);
  return sampled_of(scores, row.size(1), likeliest, {uint64_t(sampling.seed), uint64_t(position)});
}

}  // namespace

// The path whose every node holds the token that the target emits after its parent, and these tokens. Row i
// of the logits belongs to node i; `text`, if there is one, processes it. Both are empty if the largest
// logit of any node is not finite.
ygg::Accepted ygg::follow_sampling(const at::Tensor& logits, const at::Tensor& parent,
                                   const at::Tensor& token, int64_t root_pos, const Sampling& sampling,
                                   const ProcessedText* text) {
  const Largest best = largest(logits);
  for (int64_t node = 0; node < logits.size(0); ++node)
    if (!std::isfinite(best.values.const_data_ptr<float>()[node])) return {};
  Accepted accepted;
  int64_t node = 0;
  while (node >= 0) {
    accepted.path.push_back(node);
    at::Tensor row = rows_of(logits, node, 1);
    int64_t likeliest = best.tokens.const_data_ptr<int64_t>()[node];
    if (text != nullptr) {
      const at::Tensor changed = empty(row.sizes(), row.options().dtype(at::kFloat));
      row = changed.copy_(row);
      text->process_(row.mutable_data_ptr<float>(), row.size(1), accepted.tokens);
      likeliest = largest(row).tokens.const_data_ptr<int64_t>()[0];
    }
    const int64_t emitted = token_of(row, likeliest, sampling, root_pos + int64_t(accepted.path.size()));
    accepted.tokens.push_back(emitted);
    const int64_t reached = node;
    node = -1;
    // a child's id is above its parent's
    for (int64_t child = reached + 1; child < logits.size(0) && node < 0; ++child)
      if (parent.const_data_ptr<int32_t>()[child] == reached &&
          token.const_data_ptr<int32_t>()[child] == emitted)
        node = child;
  }
  return accepted;
}

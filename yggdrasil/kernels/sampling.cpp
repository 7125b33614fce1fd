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
#include "processors.h"
#include "threads.h"
#include "vectors.h"

namespace {

using Vec = at::vec::Vectorized<float>;

constexpr double kLowestTemperature = 1e-30;  // below it a quotient of float32 logits may overflow
constexpr float kFiltered = -std::numeric_limits<float>::infinity();
constexpr double kLeast = -1e4;  // for candidates that a filter drops
constexpr double kDropped = -std::numeric_limits<double>::infinity();
constexpr int64_t kFewKeys = 4096;          // up to here a sort by comparison is faster
constexpr int64_t kBlockTokens = 256;       // tokens whose bounds are computed together
constexpr int64_t kPieceTokens = 16 << 10;  // one thread draws fewer before another one has started

// Philox4x64-10, as numpy's generator uses it: four draws of a counter that starts at 1.
// Source: Salmon et al. 2011.
std::array<uint64_t, 4> philox(uint64_t counter, uint64_t key0, uint64_t key1) {
  std::array<uint64_t, 4> state{counter, 0, 0, 0};
  for (int round = 0; round < 10; ++round) {
    const auto first = static_cast<unsigned __int128>(0xD2E7470EE14C6C93) * state[0];
    const auto second = static_cast<unsigned __int128>(0xCA5A826395121157) * state[2];
    state = {uint64_t(second >> 64) ^ state[1] ^ key0, uint64_t(second),
             uint64_t(first >> 64) ^ state[3] ^ key1, uint64_t(first)};
    key0 += 0x9E3779B97F4A7C15;
    key1 += 0xBB67AE8584CAA73B;
  }
  return state;
}

// The noise of a draw.
float gumbel(uint64_t bits) {
  const double uniform = std::max(double(bits >> 11) * 0x1p-53, std::numeric_limits<double>::min());
  return float(-std::log(-std::log(uniform)));
}

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

// The largest perturbed score of tokens [begin, end), or `winner`; `begin` is a multiple of 4.
Winner best_of(const Scores& row, int64_t begin, int64_t end, int64_t seed, int64_t position,
               Winner winner) {
  float scores[kBlockTokens], bounds[kBlockTokens];
  for (int64_t block = begin; block < end; block += kBlockTokens) {
    const int64_t count = std::min(kBlockTokens, end - block);
    row.read(block, count, scores);
    // of the winner at the start of the block; the rest covers rounding of score, sum and exponential
    const float least = winner.score - (1e-3f + 1e-6f * std::abs(winner.score));
    for (int64_t i = 0; i < count; i += Vec::size()) {
      const int64_t lanes = std::min<int64_t>(Vec::size(), count - i);
      (Vec::loadu(scores + i, lanes) - Vec(least)).exp_u20().store(bounds + i, lanes);
    }
    for (int64_t i = 0; i < count; i += 4) {
      const std::array<uint64_t, 4> draws = philox(uint64_t(block + i) / 4 + 1, seed, position);
      for (int64_t lane = 0; lane < std::min<int64_t>(4, count - i); ++lane) {
        if (1.0 - double(draws[lane] >> 11) * 0x1p-53 > double(bounds[i + lane])) continue;
        const int64_t token = block + i + lane;
        const Winner found{scores[i + lane] + gumbel(draws[lane]), token};
        if (found.beats(winner)) winner = found;
      }
    }
  }
  return winner;
}

// The token with the largest perturbed score, the first among equals. The search starts from `likeliest`.
int64_t sampled_of(const Scores& scores, int64_t vocab, int64_t likeliest, int64_t seed, int64_t position) {
  const float noise = gumbel(philox(uint64_t(likeliest) / 4 + 1, seed, position)[likeliest % 4]);
  const Winner first{scores.of(likeliest) + noise, likeliest};
  const int64_t num_pieces = (vocab + kPieceTokens - 1) / kPieceTokens;
  std::vector<Winner> winners(num_pieces, first);
  ygg::parallel_for(num_pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece)
      winners[piece] = best_of(scores, piece * kPieceTokens, std::min(vocab, (piece + 1) * kPieceTokens),
                               seed, position, first);
  });
  Winner winner = first;
  for (const Winner& other : winners)
    if (other.beats(winner)) winner = other;
  return winner.token;
}

// A score and its token as one number: larger scores first, then lower tokens.
uint64_t sort_key(float score, int64_t token) {
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes 0, its equal
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
  parallel_for((vocab + 3) / 4, kPieceTokens / 16, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const std::array<uint64_t, 4> draws = philox(uint64_t(block) + 1, seed, position);
      for (int64_t lane = 0; lane < std::min<int64_t>(4, vocab - 4 * block); ++lane)
        to[4 * block + lane] = gumbel(draws[lane]);
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
  std::vector<int64_t> order(num);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t* tokens = drafted.tokens.const_data_ptr<int64_t>() + row * num;
    filtered_(drafted.log_probs.const_data_ptr<float>() + row * num, num, sampling, scores.data());
    for (int64_t i = 0; i < num; ++i) {
      if (scores[i] == kDropped || sampling.temperature == 0) continue;
      const uint64_t token = uint64_t(tokens[i]);
      const float noise = gumbel(philox(token / 4 + 1, sampling.seed, positions[row])[token % 4]);
      scores[i] += sampling.temperature * double(noise);
    }
    const double highest = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (const double score : scores) sum += std::exp(score - highest);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    for (int64_t i = 0; i < count; ++i) {
      const double log_share = scores[order[i]] - highest - std::log(sum);
      best.log_probs.mutable_data_ptr<float>()[row * count + i] = float(std::max(log_share, kLeast));
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
  const bool is_plain = sampling.temperature >= kLowestTemperature && sampling.top_k == 0 &&
                        sampling.top_p == 1.0 && sampling.min_p == 0.0;
  const bool is_readable = row.scalar_type() == at::kBFloat16 || row.scalar_type() == at::kFloat;
  const Scores scores = is_plain && is_readable && row.stride(1) == 1
                            ? Scores(row, sampling.temperature)
                            : Scores(filtered(row.to(at::kFloat), sampling), 1.0);
  return sampled_of(scores, row.size(1), likeliest, sampling.seed, position);
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
    at::Tensor row = logits.narrow(0, node, 1);
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

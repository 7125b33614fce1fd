// Bodies of prediction.h. A call follows a pass over the target's weights, so all that it reads comes from
// memory. Most of that is the first layer, which is read once, in order.
#include "prediction.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace ygg {

namespace {

using Numbers = std::vector<float>;

// Adds x @ weights to the sums, for `inputs` numbers that `x(i)` gives.
template <class Input>
Numbers layer(Numbers sums, const Input& x, int64_t inputs, const float* weights) {
  const int64_t outputs = int64_t(sums.size());
  float* __restrict sum = sums.data();
  for (int64_t i = 0; i < inputs; ++i) {
    const float number = x(i);
    const float* __restrict row = weights + i * outputs;
    for (int64_t j = 0; j < outputs; ++j) sum[j] += number * row[j];
  }
  return sums;
}

// The input of the next layer.
auto rectified(const Numbers& numbers) {
  return [&](int64_t i) { return std::max(numbers[size_t(i)], 0.0f); };
}

// The first layer's bias and what the root adds; a token beyond the vocabulary adds nothing.
Numbers of_root(const Predictor& of, int64_t root) {
  Numbers sums(of.first_bias, of.first_bias + of.hidden);
  if (root < 0 || root >= of.vocab) return sums;
  const uint16_t* row = of.of_root + root * of.hidden;
  for (int64_t j = 0; j < of.hidden; ++j) sums[size_t(j)] += c10::detail::fp16_ieee_to_fp32_value(row[j]);
  return sums;
}

void grow_(const Predictor& of, const Numbers& encoded, float* growth) {
  const Numbers bias(of.heads_bias, of.heads_bias + of.depths);
  const Numbers log_odds = layer(bias, rectified(encoded), of.hidden, of.heads);
  float lowest = std::numeric_limits<float>::infinity(), sum = 0.0f;
  for (int64_t d = 0; d < of.depths; ++d) {
    lowest = std::min(lowest, std::tanh(log_odds[size_t(d)]));
    sum += lowest;
    growth[d] = sum * of.share[d] + of.rest[d];
  }
}

int64_t best(const Arms& arms, const float* growth) {
  int64_t found = 0;
  double most = -std::numeric_limits<double>::infinity();
  for (int64_t m = 0; m < arms.len; ++m) {
    const double grown = arms.depth[m] ? growth[arms.depth[m] - 1] : 1.0;
    const double score = 1.0 + arms.gain[m] * grown - arms.rate * arms.cost[m];
    if (score > most) {
      most = score;
      found = m;
    }
  }
  return found;
}

}  // namespace

}  // namespace ygg

using namespace ygg;

int64_t ygg_best_arm(const Predictor* predictor, const Arms* arms, const void* state, int64_t item_bytes,
                     int64_t root, float* growth) noexcept {
  const Predictor& of = *predictor;
  const auto* wide = static_cast<const float*>(state);
  const auto* narrow = static_cast<const uint16_t*>(state);
  const auto number = [&](int64_t i) {
    return item_bytes == 4 ? wide[i] : std::bit_cast<float>(uint32_t(narrow[i]) << 16);
  };
  const Numbers first = layer(of_root(of, root), number, of.inputs, of.first);
  const Numbers bias(of.second_bias, of.second_bias + of.hidden);
  const Numbers second = layer(bias, rectified(first), of.hidden, of.second);
  grow_(of, second, growth);
  return best(*arms, growth);
}

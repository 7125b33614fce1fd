// The `count` likeliest next tokens of every row with their log-probabilities: CPU body of `ygg::candidates`
// (specification: candidates.py, `reference`). Equal logits are ordered by token, so a tree never depends on luck. `ygg::greatest` is `max(dim=-1)`.
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "operators.h"

namespace {

using Vec = at::vec::Vectorized<float>;

// log(sum(exp(row))), with the maximum taken out first.
float log_sum_exp(const float* row, int64_t vocab) {
  Vec highest_vec(-std::numeric_limits<float>::infinity());
  int64_t v = 0;
  for (; v + Vec::size() <= vocab; v += Vec::size()) highest_vec = at::vec::maximum(highest_vec, Vec::loadu(row + v));
  float lanes[Vec::size()];
  highest_vec.store(lanes);
  float highest = *std::max_element(lanes, lanes + Vec::size());
  for (int64_t i = v; i < vocab; ++i) highest = std::max(highest, row[i]);
  Vec sum_vec(0.0f);
  for (v = 0; v + Vec::size() <= vocab; v += Vec::size()) sum_vec = sum_vec + (Vec::loadu(row + v) - Vec(highest)).exp_u20();
  sum_vec.store(lanes);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  for (; v < vocab; ++v) sum += std::exp(row[v] - highest);
  return highest + std::log(sum);
}

// The first token from `v` on whose logit is above `least`, or `vocab`.
int64_t next_above(const float* row, int64_t v, int64_t vocab, float least) {
  constexpr int kNone = (1 << Vec::size()) - 1;
  while (v + Vec::size() <= vocab && (Vec::loadu(row + v) > Vec(least)).zero_mask() == kNone) v += Vec::size();
  while (v < vocab && !(row[v] > least)) ++v;
  return v;
}

// Insertion into a short sorted list: a vocabulary row rarely beats the current last entry.
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
    for (; place > 0 && row[v] > values[place - 1]; --place) values[place] = values[place - 1], tokens[place] = tokens[place - 1];
    values[place] = row[v], tokens[place] = v;
    kept = std::min(kept + 1, count);
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> ygg::candidates(const at::Tensor& logits, int64_t count) {
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  TORCH_CHECK(count > 0 && count <= vocab, "candidates: count ", count, " is not in 1..", vocab);
  const at::Tensor wide = logits.to(at::kFloat).contiguous();
  at::Tensor log_probs = at::empty({rows, count}, wide.options());
  at::Tensor tokens = at::empty({rows, count}, wide.options().dtype(at::kLong));
  const float* from = wide.const_data_ptr<float>();
  float* values = log_probs.mutable_data_ptr<float>();
  int64_t* ids = tokens.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = from + r * vocab;
      best(row, vocab, count, values + r * count, ids + r * count);
      const float normaliser = log_sum_exp(row, vocab);
      for (int64_t i = 0; i < count; ++i) values[r * count + i] -= normaliser;
    }
  });
  return {log_probs, tokens};
}

namespace {

// Of every row its greatest value and the first place that has it; NaN where the row has one.
std::tuple<at::Tensor, at::Tensor> greatest(const at::Tensor& scores) {
  TORCH_CHECK(scores.dim() == 2 && scores.size(1) > 0, "greatest: scores are (rows, places)");
  const at::Tensor wide = scores.to(at::kFloat).contiguous();
  const int64_t rows = wide.size(0), places = wide.size(1);
  at::Tensor values = at::empty({rows}, wide.options()), tokens = at::empty({rows}, wide.options().dtype(at::kLong));
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = wide.const_data_ptr<float>() + r * places;
    const float value = at::vec::reduce_all<float>([](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }, row, places);
    values.mutable_data_ptr<float>()[r] = value;
    tokens.mutable_data_ptr<int64_t>()[r] = std::find(row, row + places, value) - row;
  }
  return {values, tokens};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ygg, library) {
  library.def("candidates(Tensor logits, int count) -> (Tensor log_probs, Tensor tokens)");
  library.def("greatest(Tensor scores) -> (Tensor values, Tensor tokens)");
}
TORCH_LIBRARY_IMPL(ygg, CPU, library) {
  library.impl("candidates", &ygg::candidates);
  library.impl("greatest", &greatest);
}

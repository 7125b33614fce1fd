// How deep the next tree should be: the depth predictor, and Eq. 3 with its prediction, for one position.
// policy/depth.py and `Arms.best` of policy/shape.py are the specification.
#pragma once

#include <cstdint>

namespace ygg {

// `DepthPredictor` at one temperature. Matrices are (inputs, outputs), row by row; `of_root` has a row of
// fp16 for every token of the vocabulary.
struct Predictor {
  const float *first, *first_bias, *second, *second_bias, *heads, *heads_bias, *share, *rest;
  const uint16_t* of_root;
  int64_t inputs, hidden, depths, vocab;
};

// Every (W, D, K) of the menu, and the tokens per millisecond of the whole run.
struct Arms {
  const int64_t* depth;
  const double *gain, *cost;
  int64_t len;
  double rate;
};

}  // namespace ygg

// The index of the best arm; the first among equals. `state` is the hidden state before the token `root`;
// its numbers have 2 bytes (bf16) or 4. `growth` gets the predicted growth by depth.
extern "C" int64_t ygg_best_arm(const ygg::Predictor* predictor, const ygg::Arms* arms, const void* state,
                                int64_t item_bytes, int64_t root, float* growth) noexcept;

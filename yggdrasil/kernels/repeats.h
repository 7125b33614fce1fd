// What repeats in a text. text/repeats.py is the specification; the structs have its fields in its order.
#pragma once

#include <cstdint>
#include <vector>

namespace ygg {

constexpr int64_t kLongestMatch = 16, kBands = 5;

// How matches predicted the emitted tokens of a text: by band of match lengths, and all together.
struct Evidence {
  int64_t num_read;
  double hits[kBands], seen[kBands];
  double num_seen, num_hits, missed_tokens;
};

// A chain of tokens that may follow a text, and the log-probability of each after those before it.
struct Graft {
  std::vector<int64_t> tokens;
  std::vector<double> log_probs;
};

// A chain next to a draft ends before a token that is less likely: the draft's own candidates are better.
constexpr double kMinEdge = 0.6;

// The likeliest chain after a text, at most `most` tokens; counts what the text has gained.
Graft graft(const int64_t* tokens, int64_t len, Evidence& evidence, int64_t most, double min_edge);

}  // namespace ygg

// The same for callers that have its address: fills `found` and `log_probs`, returns their length.
extern "C" int64_t ygg_graft(const int64_t* tokens, int64_t len, ygg::Evidence* evidence, int64_t most,
                             double min_edge, int64_t* found, double* log_probs) noexcept;

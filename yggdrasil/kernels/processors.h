// Logits processors of a request over its text and the paths of a tree.
#pragma once

#include <unordered_map>
#include <vector>

#include "operators.h"

namespace ygg {

// ProcessorConfig of config.py.
struct Processors {
  std::vector<int64_t> bias_tokens;
  std::vector<double> bias;
  double repetition, presence, frequency;
  int64_t ngram;
  std::vector<std::vector<int64_t>> banned;
  int64_t min_tokens;
  std::vector<int64_t> ends;
};

// Returns a bit for every token: whether it may follow the text of the row at a place of the step, and a
// path. They stay valid until the step ends. Null if that failed.
using Mask = const int32_t*(int64_t place, const int64_t* path, int64_t len);

// What a request's grammar allows.
struct Grammar {
  Mask* mask = nullptr;
  int64_t place = -1;  // without a grammar
  int64_t vocab = 0;

  // The bits after a path; null without a grammar.
  const int32_t* after(at::IntArrayRef path) const;
};

// A text and its processors. A path is a continuation of the text. Processors and text must stay alive.
class ProcessedText {
 public:
  ProcessedText(const Processors& processors, at::IntArrayRef text, int64_t prompt_len, Grammar grammar);

  // Changes the (V) logits after a path.
  void process_(float* scores, int64_t vocab, at::IntArrayRef path) const;
  Candidates process(const Candidates& drafted, at::ArrayRef<std::vector<int64_t>> paths,
                     double top_logit) const;

 private:
  struct Count {
    int64_t seen = 0, emitted = 0;
  };

  Count count(int64_t token, at::IntArrayRef path) const;
  float penalised(float score, const Count& count) const;
  std::vector<int64_t> banned(at::IntArrayRef path) const;
  void keep_allowed_(float* scores, int64_t vocab, at::IntArrayRef path) const;
  void replace_(int64_t* tokens, float* log_probs, int64_t num, const int32_t* allowed) const;

  const Processors* processors_;
  at::IntArrayRef text_;
  int64_t prompt_len_;
  Grammar grammar_;
  std::unordered_map<int64_t, Count> counts_;
};

}  // namespace ygg

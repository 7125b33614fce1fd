// Our operators, as C++ calls them. operators.cpp unpacks the arguments of torch's dispatcher into these
// records.
//
// The files of the operators include only the header of at::Tensor. The headers that register operators and
// create tensors take the compiler 5 s per file, so only operators.cpp includes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace ygg {

// at::empty.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);
// Views that share a tensor's storage. After a forward, torch's own take 5 us: their code is in no cache.
// A contiguous tensor from its element `first` on:
at::Tensor view(const at::Tensor& tensor, int64_t first, at::IntArrayRef sizes);
// `count` rows of a tensor, as Tensor::narrow:
at::Tensor rows_of(const at::Tensor& tensor, int64_t first, int64_t count);

// ---- linear.cpp ----

// While one lives with `is_streamed`, the forward on this thread reads more weights than caches hold.
class StreamedWeights {
 public:
  explicit StreamedWeights(bool is_streamed);
  ~StreamedWeights();
  StreamedWeights(const StreamedWeights&) = delete;

 private:
  bool before_;
};

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed,
                         const std::optional<at::Tensor>& bias, int64_t out_features);
at::Tensor packed_linears(const at::Tensor& x, at::ArrayRef<at::Tensor> packed,
                          const std::vector<std::optional<at::Tensor>>& bias, at::IntArrayRef out_features);
at::Tensor read_linear(const at::Tensor& x, const at::Tensor& meta, const at::Tensor& packed,
                       const std::optional<at::Tensor>& bias, int64_t out_features);
at::Tensor gated_linear(const at::Tensor& x, const at::Tensor& gate,
                        const std::optional<at::Tensor>& gate_bias, const at::Tensor& up,
                        const std::optional<at::Tensor>& up_bias, int64_t out_features);

// ---- attention.cpp ----

// Arguments of `attend`; attention.py has their shapes.
struct Attention {
  const at::Tensor &query, &key, &value;
  at::Tensor &key_cache, &value_cache;
  const at::Tensor &meta, &pages;
  double scale;
};

at::Tensor attend(const Attention& attention);

// ---- candidates.cpp ----

// The best next tokens of every row, best first: both (rows, C).
struct Candidates {
  at::Tensor log_probs, tokens;
};

// The largest score of every row and its column: both (rows).
struct Largest {
  at::Tensor values, tokens;
};

// The accepted nodes, root first, and the tokens that the target emits at each of them.
struct Accepted {
  std::vector<int64_t> path, tokens;
};

Candidates candidates(const at::Tensor& logits, const at::Tensor& meta, int64_t count, int64_t few);
Largest largest(const at::Tensor& scores);
Accepted walk(const Largest& best, const at::Tensor& parent, const at::Tensor& token);
Accepted follow(const at::Tensor& logits, const at::Tensor& parent, const at::Tensor& token);

// ---- sampling.cpp ----

class ProcessedText;

// Of step/coupling.py: the score of a candidate that may not come next, and what no other path is below.
constexpr float kForbidden = -1e30f, kLowestPath = -1e20f;

// SamplingConfig of config.py; temperature 0 is greedy.
struct Sampling {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  int64_t seed;
};

at::Tensor gumbel_noise(int64_t seed, int64_t position, int64_t vocab);
Candidates coupled(const Candidates& drafted, at::IntArrayRef positions, const Sampling& sampling,
                   int64_t count);
Accepted follow_sampling(const at::Tensor& logits, const at::Tensor& parent, const at::Tensor& token,
                         int64_t root_pos, const Sampling& sampling, const ProcessedText* text = nullptr);

// ---- tree.cpp ----

// The arrays of a TokenTree (tree.py): all (capacity), the paths (capacity, path width).
struct Tree {
  at::Tensor token, parent, depth, log_prob, path;

  int64_t capacity() const { return token.size(0); }
  int64_t path_width() const { return path.size(1); }
};

// The candidate children of the nodes drafted so far: both (capacity, C). The log-probabilities are those
// of whole paths, -inf once a candidate is in the tree.
struct Frontier {
  at::Tensor log_prob, token;

  int64_t capacity() const { return log_prob.size(0); }
  int64_t candidates() const { return log_prob.size(1); }
};

// One growth step: `num_new` nodes enter a frontier of `num_known`; nodes [first, first + width) join the
// tree. `row` is that of the page table; `read` is how the forward reads the nodes.
struct Growth {
  int64_t num_known, num_new, first, width, root_pos, row, read;
};

// PlattScale of step/platt.py.
struct PlattScale {
  double slope, offset;

  bool is_identity() const { return slope == 1.0 && offset == 0.0; }
  double log(double log_prob) const;
};

// Tree nodes [first, last) of request `row`, whose committed tokens end before `root_pos`.
struct NodeRange {
  int64_t first, last, root_pos, row, read;
};

// Chunks of requests, one element per chunk in each list; `tokens` holds the tokens of all chunks in order.
struct Chains {
  at::IntArrayRef tokens, lens, start_positions, rows, num_read, reads;
};

// The subtree to verify, the ids its nodes had before, and the number of emitted tokens expected of it.
struct Pruned {
  Tree tree;
  std::vector<int64_t> keep;
  double expected;
};

void grow_(Frontier frontier, const Candidates& candidates, Tree tree, at::Tensor meta,
           const Growth& growth, const PlattScale& platt);
// The same for the first step of a tree with a chain under its root; its edges have these
// log-probabilities.
void grow_grafted_(Frontier frontier, const Candidates& candidates, Tree tree, at::Tensor meta,
                   const Growth& growth, const PlattScale& platt, const std::vector<double>& log_probs);
void grow_level_(Frontier frontier, const Candidates& candidates, Tree tree, at::Tensor meta,
                 const Growth& growth, const PlattScale& platt, at::IntArrayRef parents,
                 at::IntArrayRef ranks);
void pad_(at::Tensor meta, int64_t first);
double value_of(const at::Tensor& log_prob, int64_t num_nodes, const at::Tensor& node_costs);
void pack_nodes_(at::Tensor meta, const at::Tensor& token, const at::Tensor& depth, const at::Tensor& path,
                 const NodeRange& nodes);
void pack_chains_(at::Tensor meta, const Chains& chains);
Tree root(int64_t token, int64_t capacity, int64_t path_width);
void grow_chain_(Tree tree, at::IntArrayRef tokens, const std::vector<double>& log_probs);
Tree subtree(const Tree& tree, at::IntArrayRef keep);
void acceptance_of(const at::Tensor& log_prob, int64_t num_nodes, const at::Tensor& knots, double* values);
void copy_slots_(at::Tensor storage, at::IntArrayRef source, at::IntArrayRef target);
void move_slots_(at::Tensor storage, at::IntArrayRef source, int64_t target);

}  // namespace ygg

// The parts of a step on a CPU that run in one call from Python: a compiled graph, the growth of a tree
// with it, and the whole step.
//
// Between two forwards Python runs code that is no longer in the caches, which the target's weights have
// filled. It takes ten times as long as usual, longer than a forward of the draft.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "operators.h"

namespace ygg {

// A compiled graph bound to its caller's weights.
class Graph : public torch::CustomClassHolder {
 public:
  // `weights` holds every constant that the package names. Device -1 is the current one. Calls are not
  // locked: a graph has one caller.
  Graph(const std::string& path, int64_t device, const c10::Dict<std::string, at::Tensor>& weights);

  // Returns a draft's best tokens and their log-probabilities, or a target's logits and last hidden states.
  std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& meta);

 private:
  // declared first: the loader borrows these tensors
  std::unordered_map<std::string, at::Tensor> constants_;
  torch::inductor::AOTIModelPackageLoader loader_;
};

// How a policy scales edges and when it stops growth: `node_costs` and `least` of `StopRule.native`.
struct GrowthPolicy {
  PlattScale platt;
  at::Tensor node_costs;
  double least;
};

// The size of a tree: `depth` steps of `width` nodes with `candidates` children each. `capacity` and
// `path_width` are those of its arrays.
struct TreeSize {
  int64_t capacity, path_width, width, depth, candidates;
};

// The root of a tree, and its children: row `row` of the candidates of a forward.
struct Head {
  Candidates candidates;
  int64_t row, token, root_pos;
};

// A drafted tree, the number of its nodes, and when each forward of the draft began and ended, in
// milliseconds.
struct Drafted {
  Tree tree;
  int64_t num_nodes;
  std::vector<double> times_ms;
};

// Latencies of a step, as `Curve.table` has them, and the sizes of the target's graphs, the largest last.
struct Costs {
  at::Tensor draft_ms, verify_ms;
  double growth_host_ms, step_host_ms;
  std::vector<int64_t> sizes;
};

// A policy's settings for all its trees; `knots` map log-probabilities to acceptance.
struct Policy {
  GrowthPolicy growth;
  at::Tensor knots;
  Costs costs;
};

// A `Shape` (state.py) without levels; `verify` is 0 where the step chooses the number of verified nodes.
struct Shape {
  int64_t width, depth, verify;
};

// A text before a step: `tail` are its tokens from position `first` on, the root last. The caches hold the
// tokens before these lengths.
struct Text {
  at::IntArrayRef tail;
  int64_t first, target_len, draft_len;

  int64_t root_pos() const { return first + int64_t(tail.size()) - 1; }
  // the tokens that the target computes together with the tree
  int64_t lag() const { return root_pos() - target_len; }
};

// A target and a draft, and a whole step with them over one request.
class Step : public torch::CustomClassHolder {
 public:
  using Graphs = std::vector<c10::intrusive_ptr<Graph>>;

  // A graph for every size, its metadata, and the storage of the keys and values of one request.
  struct Model {
    Graphs graphs;
    std::vector<at::Tensor> metas;
    at::Tensor storage;

    size_t bucket(int64_t num_tokens) const;
  };

  // The result of a step, which the next step overwrites. The numbers are, in this order:
  //   - emitted tokens expected of the verified tree
  //   - nodes of the drafted tree
  //   - nodes of the verified tree
  //   - committed tokens of the draft
  //   - the length of the next list
  //   - in a greedy step the accepted path and the emitted tokens, none if a logit is not finite; else the
  //     ids that the verified nodes had in the drafted tree
  //   - in milliseconds: begin and end of the target's forward; begin of the step and end of each stage;
  //     begin and end of each forward of the draft
  struct Result {
    std::vector<double> numbers;
    Tree tree;                  // the verified one
    at::Tensor logits, hidden;  // of its nodes
  };

  Step(Model target, Model draft, int64_t path_width, int64_t candidates);

  // One step. A greedy step accepts the path of the target's best tokens and keeps it in both caches, after
  // the root's position. Earlier slots are written only where a cache lacked them.
  const Result& run(const Text& text, const Shape& shape, bool is_greedy);

  // The outputs of the target in the last step.
  std::tuple<at::Tensor, at::Tensor> logits_and_hidden() const { return {result_.logits, result_.hidden}; }

  // Sets the policy of all further steps.
  void follow_policy_(Policy policy) { policy_ = std::move(policy); }

 private:
  Drafted draft_tree(const Text& text, const Shape& shape);
  Pruned prune_tree(const Drafted& drafted, const Text& text, const Shape& shape) const;
  std::vector<double> verify(const Tree& tree, const Text& text);
  int64_t commit_(const std::vector<int64_t>& path, const std::vector<int64_t>& drafted_ids,
                  int64_t num_run, int64_t root_pos);

  Model target_, draft_;
  int64_t path_width_, candidates_;
  Policy policy_;
  Result result_;
};

// Grows a tree from its head. Growth stops after a step that gained less than `least` over `node_costs`;
// without costs, after a step whose last edge is below `least`.
Drafted grow(Graph& graph, const at::Tensor& meta, const Head& head, const TreeSize& size,
             const GrowthPolicy& policy);

// The widths that a tree may be verified with, only `shape.verify` if that is set, and the cost of the step
// with each.
VerifyCosts verify_costs(const Costs& costs, const Shape& shape, int64_t num_nodes, int64_t context_len,
                         int64_t lag);

}  // namespace ygg

// `Step::run` for callers that have its address: after a pass over the weights, torch's way from Python and
// back takes 0.1 ms. `tree` receives the arrays of the verified tree one after another, as
// `TokenTree.unpacked` reads them. Returns the count of numbers, or -1 and a message in `error`.
extern "C" int64_t ygg_step_run(ygg::Step* step, const int64_t* tail, int64_t tail_len, int64_t first,
                                int64_t target_len, int64_t draft_len, int64_t width, int64_t depth,
                                int64_t verify, int64_t is_greedy, double* numbers, int64_t max_numbers,
                                int32_t* tree, int64_t max_words, char* error, int64_t max_error) noexcept;

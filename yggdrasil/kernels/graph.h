// What of a step on a CPU takes one call: a compiled graph, a tree grown with it, and the step itself. Python's own work between two forwards is cold code, for a
// target's weights have swept the caches: it takes ten times what the work is, and more than a draft's forward.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "operators.h"

namespace ygg {

// A compiled graph bound to its caller's weights.
class Graph : public torch::CustomClassHolder {
 public:
  // One caller, so no lock per call; a device of -1 is the current one. Every constant that the package names is among `given`.
  Graph(const std::string& path, int64_t device, const c10::Dict<std::string, at::Tensor>& given);

  std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& meta);

 private:
  std::unordered_map<std::string, at::Tensor> constants_;  // the runner borrows these very tensors: they go after it
  torch::inductor::AOTIModelPackageLoader loader_;
};

// What a tree grows by: what a policy says of edges and of when to stop.
struct Growth {
  double slope, offset;  // PlattScale
  at::Tensor prices;     // StopRule.native
  double least;
};

// What a step takes, by latencies as `Curve.table` has them, and the sizes of a target's graphs, the greatest last.
struct Costs {
  at::Tensor draft_ms, verify_ms;
  double growth_host_ms, step_host_ms;
  std::vector<int64_t> sizes;
};

// Both models of a pair, each a graph for every size with its metadata, and the storage of one request's keys and values.
class Step : public torch::CustomClassHolder {
 public:
  using Graphs = std::vector<c10::intrusive_ptr<Graph>>;

  Step(Graphs target, std::vector<at::Tensor> target_metas, at::Tensor target_storage, Graphs draft, std::vector<at::Tensor> draft_metas, at::Tensor draft_storage,
       int64_t path_width, int64_t candidates);

  // What an iteration has to say, behind which the next one writes. The numbers: emitted tokens expected of the verified tree; the nodes of the drafted tree and of
  // the verified one; the draft's committed tokens; how many follow: where `says` the accepted path and what is emitted along it, nothing when a logit is not finite,
  // else the ids that the verified nodes had in the drafted tree; in milliseconds, when the target's forward began and ended, when the step began and every stage ended,
  // when each of the draft's forwards began and ended.
  struct Said {
    std::vector<double> numbers;
    TreeArrays tree;             // the verified one
    at::Tensor logits, hidden;  // after its nodes
  };

  // One iteration over a text, of which `tail` are the tokens from `first` on, the root last, and whose beginning is in both caches up to the lengths given. Caches
  // keep the accepted path behind the root's position, where `says`; nothing before that position is written to but what they lacked. Width, depth and
  // `verify`, 0 where K is to be chosen, are of a `Shape`.
  const Said& run(at::IntArrayRef tail, int64_t first, int64_t target_len, int64_t draft_len, int64_t width, int64_t depth, int64_t verify, bool says);

  // Of the last iteration.
  std::tuple<at::Tensor, at::Tensor> logits_and_hidden() const { return {said_.logits, said_.hidden}; }

  // What a policy says of all its trees, until it or another says something else: PlattScale, `StopRule.native`, knots, and the arguments of `verify_costs`.
  void follow_policy_(double slope, double offset, at::Tensor prices, double least, at::Tensor knots, at::Tensor draft_ms, at::Tensor verify_ms,
                      double growth_host_ms, double step_host_ms, std::vector<int64_t> verify_sizes);

 private:
  struct Model {
    Graphs graphs;
    std::vector<at::Tensor> metas;
    at::Tensor storage;

    size_t bucket(int64_t num_tokens) const;
  };

  Model target_, draft_;
  int64_t path_width_, candidates_;
  Growth growth_;
  at::Tensor knots_;
  Costs costs_;
  Said said_;
};

// A tree of up to `depth` steps of `width` nodes from the root's candidates, row `head_row` of a forward's; how many nodes it has, and when every forward began and
// ended. It ends after a step that gained less than `least` over `prices`, or without prices one whose last edge is below it: `grow_reference`, step/draft.py.
std::tuple<TreeArrays, int64_t, std::vector<double>> grow(Graph& graph, const at::Tensor& meta, const std::tuple<at::Tensor, at::Tensor>& head, int64_t head_row,
                                                          int64_t token, int64_t capacity, int64_t path_width, int64_t root_pos, int64_t width, int64_t depth,
                                                          int64_t candidates, const Growth& growth);

// The K that a tree may be verified with, `verify` where that is set, and what the step takes with each: `FixedShape.verify_costs`, policy/shape.py.
std::tuple<std::vector<int64_t>, std::vector<double>> verify_costs(const Costs& costs, int64_t verify, int64_t width, int64_t depth, int64_t num_nodes,
                                                                   int64_t context_len, int64_t lag);

}  // namespace ygg

// `Step::run` for whoever has its address: torch's way from Python and back takes 0.1 ms behind a pass over the weights. `tree` gets the arrays of the verified tree one
// after another, `TokenTree.unpacked`. Returns how many numbers there are, or -1 and what is wrong in `error`.
extern "C" int64_t ygg_step_run(ygg::Step* step, const int64_t* tail, int64_t tail_len, int64_t first, int64_t target_len, int64_t draft_len, int64_t width,
                                int64_t depth, int64_t verify, int64_t says, double* numbers, int64_t max_numbers, int32_t* tree, int64_t max_words, char* error,
                                int64_t max_error) noexcept;

// A decode step over rows on a CPU, in one or two calls from Python. step/rows.py is its specification.
//
// Between two forwards Python runs code that is no longer in the caches, which the target's weights have
// filled. It takes ten times as long as usual, longer than a forward of the draft.
//
// The structs of the border are shared with Python; step/border.py has the same fields in the same order.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "graph.h"
#include "layout.h"
#include "operators.h"
#include "processors.h"
#include "repeats.h"

namespace ygg {

// ---- the border ----

// One request before a step. `tokens` are its text, the root last. The caches hold the tokens before
// `target_len` and `draft_len`. At most `graft` nodes are grafted: the tokens `forced` by the grammar, or,
// if it forces none, what repeats the text, by `evidence`. `verify` is 0 without a limit; `stop` and
// `levels` are -1 where the shape has none. Temperature 0 is greedy. `processors` is -1 without any; with
// them `top_logit` is the target's largest logit before the root. `grammar` is the place that `Reply::mask`
// gets, -1 without a grammar; a row with one has processors. `inspect` is 1 where the result has the
// drafted tree, too.
struct Row {
  const int64_t* tokens;
  Evidence* evidence;
  const int64_t* forced;
  int64_t len, place, target_len, draft_len;
  int64_t width, depth, verify, calibration, stop, levels, graft;
  int64_t num_forced, top_k, seed, processors, prompt_len, grammar, inspect;
  double temperature, top_p, min_p, top_logit;

  Sampling sampling() const { return {temperature, top_k, top_p, min_p, seed}; }
  int64_t root_pos() const { return len - 1; }
  // the tokens before the root that the target computes together with the tree
  int64_t lag() const { return root_pos() - target_len; }
  at::IntArrayRef text(int64_t from, int64_t to) const { return {tokens + from, size_t(to - from)}; }
};

// Tokens of a prompt whose root this step does not reach.
struct Prompt {
  const int64_t* tokens;
  int64_t len, start, place;
};

// `VerifyMenu` of step/choice.py; `extra` may be null.
struct Menu {
  const int64_t* nodes;
  const double *ms, *extra;
  int64_t len;
  double growth_ms, scale;
};

// What one row did. Its path and the tokens that it emits, `path_len` each, are at `ids_at` of the ids; its
// verified tree at `words_at` of the words, as `TokenTree.unpacked` reads it; after it, for a row to
// inspect, the drafted tree and the id there of every verified node; the acceptance of its drafted nodes
// but the root at `values_at` of the values. `path_len` is 0 where a logit is not finite; `top_logit` is
// the largest of the path's last node, for a row with processors. `hidden` is the target's hidden state
// there, until its next forward, and has numbers of `hidden_bytes`.
struct RowResult {
  const void* hidden;
  int64_t hidden_bytes;
  int64_t drafted, depth, verified, root_at, target_len, draft_len, path_len;
  int64_t ids_at, words_at, values_at;
  double expected, top_logit;
};

// One forward: of the target (0) or the draft (1), its tokens, and its times in milliseconds.
struct Forward {
  int64_t model, num_tokens;
  double begin_ms, end_ms;
};

// Buffers that the calls fill, with their capacities, and what they have written. `mask` answers for the
// grammars of all rows, over `vocab` tokens. The times are the begin of each call, then the ends of its
// stages: catching up, the draft's first forward, growth, pruning; verifying, accepting, committing; and
// milliseconds in the graphs of both models.
struct Reply {
  RowResult* results;
  int64_t* ids;
  int32_t* words;
  double* values;
  Forward* forwards;
  Mask* mask;
  int64_t max_results, max_ids, max_words, max_values, max_forwards, vocab;
  int64_t num_tokens, num_forwards;
  double draft_ms[5], verify_ms[4], graph_ms[2];
  char error[512];
};

// ---- the step ----

// A target and a draft, and steps with them over the rows of one page table.
class Step : public torch::CustomClassHolder {
 public:
  using Graphs = std::vector<c10::intrusive_ptr<Graph>>;

  // A graph for every size, its metadata, the storage of keys and values, and the page table.
  struct Model {
    Graphs graphs;
    std::vector<at::Tensor> metas;
    at::Tensor storage, pages;

    size_t bucket(int64_t num_tokens) const;
    int64_t most_tokens() const { return metas.back().size(0); }
    // the limit of a forward over the texts that rows lack
    int64_t chunk(int64_t num_tokens) const;
  };

  Step(Model target, Model draft, int64_t path_width, int64_t candidates);

  // Records that rows refer to by their number, from 0 on.
  int64_t add_calibration(PlattScale platt, at::Tensor knots);
  int64_t add_stop(at::Tensor node_costs, double minimum);
  int64_t add_levels(std::vector<std::vector<int64_t>> parents, std::vector<std::vector<int64_t>> ranks);
  int64_t add_processors(Processors processors);
  void forget_();

  // Drafts and prunes a tree for every row.
  void draft(at::ArrayRef<Row> rows, const Menu& menu, Reply& reply);
  // Verifies, accepts and commits the trees of the last `draft`, and `joining` rows without a tree.
  void verify(at::ArrayRef<Row> joining, at::ArrayRef<Prompt> prompts, Reply& reply);

  // The outputs of the target in the last step.
  std::tuple<at::Tensor, at::Tensor> logits_and_hidden() const { return {logits_, hidden_}; }

 private:
  struct Calibration {
    PlattScale platt;
    at::Tensor knots;
  };
  struct Stop {
    at::Tensor node_costs;
    double minimum;
  };
  struct Levels {
    std::vector<std::vector<int64_t>> parents, ranks;
  };
  // A chunk of a row's text that runs as a chain.
  struct Chunk {
    std::vector<int64_t> tokens;
    int64_t start, place, num_read, read;
  };
  // A row and its tree, from its root to what is verified.
  struct Growing {
    Row row;
    Tree tree;
    Frontier frontier;
    Candidates next;
    Graft graft;
    int64_t num_nodes = 1, num_known = 0, num_run = 0, depth = 0, last_depth = 0;
    std::vector<int64_t> drafted{0};  // ids of the nodes that are not padding
    double value = 0.0;
    bool is_grown = false;
    Pruned pruned;
    Accepted accepted;
    int64_t root_at = 0;
    std::unique_ptr<ProcessedText> text;  // null without processors

    bool is_chain() const { return row.width == 1 && row.levels < 0; }
    // whether noise or processors rank the candidates
    bool is_ranked_again() const { return row.temperature > 0 || row.processors >= 0; }
    int64_t read() const { return is_ranked_again() ? kReadWide : kReadBest; }
  };

  Growing growing(const Row& row, int64_t capacity, const Reply& reply) const;
  void catch_up_(std::vector<Growing>& rows);
  void graft_(Growing& row) const;
  void head_(std::vector<Growing>& rows);
  void grow_(std::vector<Growing>& rows);
  void attach_(Growing& row, const at::Tensor& meta);
  int64_t next_width(const Growing& row) const;
  void record_forward_(Growing& row, const Candidates& candidates);
  bool stops(Growing& row) const;
  void run_nodes_(const std::vector<Growing*>& batch, int64_t num_tokens);
  void prune_(const Menu& menu, Reply& reply);
  void run_target_(at::ArrayRef<Prompt> prompts);
  void accept_();
  void commit_(Growing& row);
  std::vector<Candidates> run_chunks_(const std::vector<Chunk>& chunks);
  std::tuple<at::Tensor, at::Tensor> forward(int64_t model, size_t size, int64_t num_tokens);

  Model target_, draft_;
  int64_t path_width_, candidates_;
  std::deque<Calibration> calibrations_;
  std::deque<Stop> stops_;
  std::deque<Levels> levels_;
  std::deque<Processors> processors_;
  at::Tensor nodes_meta_;  // of the draft's next forward, until its graph is known
  std::vector<Growing> rows_;
  std::vector<Forward> forwards_;
  at::Tensor logits_, hidden_;
};

}  // namespace ygg

// `Step::draft` and `Step::verify` for callers that have its address: after a pass over the weights, the
// way of torch from Python and back takes 0.1 ms. They return 0, or -1 with a message in `reply->error`.
extern "C" int64_t ygg_step_draft(ygg::Step* step, const ygg::Row* rows, int64_t num_rows,
                                  const ygg::Menu* menu, ygg::Reply* reply) noexcept;
extern "C" int64_t ygg_step_verify(ygg::Step* step, const ygg::Row* joining, int64_t num_joining,
                                   const ygg::Prompt* prompts, int64_t num_prompts,
                                   ygg::Reply* reply) noexcept;
// Both, for a step without prompts.
extern "C" int64_t ygg_step_run(ygg::Step* step, const ygg::Row* rows, int64_t num_rows,
                                const ygg::Menu* menu, ygg::Reply* reply) noexcept;
// The bytes of Row, Prompt, Menu, RowResult, Forward and Reply, in this order.
extern "C" void ygg_step_bytes(int64_t* bytes) noexcept;

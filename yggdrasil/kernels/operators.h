// Our operators. Their files include of torch what a tensor is and no more: what registers operators and makes tensors takes a compiler 5 s a file, and is
// included by operators.cpp alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace ygg {

// at::empty.
at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);

// ---- linear.cpp ----

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t out_features);
at::Tensor packed_linears(const at::Tensor& x, at::ArrayRef<at::Tensor> packed, const std::vector<std::optional<at::Tensor>>& bias,
                          at::IntArrayRef out_features);
at::Tensor read_linear(const at::Tensor& x, const at::Tensor& meta, const at::Tensor& packed,
                       const std::optional<at::Tensor>& bias, int64_t out_features);
at::Tensor gated_linear(const at::Tensor& x, const at::Tensor& gate, const std::optional<at::Tensor>& gate_bias, const at::Tensor& up,
                        const std::optional<at::Tensor>& up_bias, int64_t out_features);

// ---- attention.cpp ----

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor key_cache, at::Tensor value_cache,
                  const at::Tensor& meta, const at::Tensor& pages, double scale);

// ---- candidates.cpp ----

std::tuple<at::Tensor, at::Tensor> candidates(const at::Tensor& logits, const at::Tensor& meta, int64_t count);
std::tuple<at::Tensor, at::Tensor> greatest(const at::Tensor& scores);
std::tuple<std::vector<int64_t>, std::vector<int64_t>> follow(const at::Tensor& logits, const at::Tensor& parent, const at::Tensor& token);

// ---- tree.cpp ----

using TreeArrays = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // token, parent, depth, log_prob, path

void grow_(at::Tensor frontier_log_prob, at::Tensor frontier_token, const at::Tensor& log_probs, const at::Tensor& tokens, int64_t num_known, int64_t num_new,
           at::Tensor token, at::Tensor parent, at::Tensor depth, at::Tensor log_prob, at::Tensor path, int64_t first, int64_t width, at::Tensor meta,
           int64_t root_pos, double slope, double offset);
double worth(const at::Tensor& log_prob, int64_t num_nodes, const at::Tensor& prices);
double last_gain(const at::Tensor& log_prob, int64_t num_nodes, int64_t width, const at::Tensor& prices);
void pack_nodes_(at::Tensor meta, const at::Tensor& token, const at::Tensor& depth, const at::Tensor& path, int64_t first, int64_t last, int64_t root_pos,
                 int64_t row);
void pack_chains_(at::Tensor meta, at::IntArrayRef tokens, at::IntArrayRef lens, at::IntArrayRef start_positions, at::IntArrayRef rows,
                  at::IntArrayRef num_read);
TreeArrays root(int64_t token, int64_t capacity, int64_t path_width);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::vector<int64_t>, double> prune(
    const at::Tensor& token, const at::Tensor& parent, const at::Tensor& depth, const at::Tensor& log_prob, const at::Tensor& path, int64_t num_nodes,
    const at::Tensor& knots, at::IntArrayRef widths, at::ArrayRef<double> costs_ms);
void move_slots_(at::Tensor storage, at::IntArrayRef source, int64_t target);

}  // namespace ygg

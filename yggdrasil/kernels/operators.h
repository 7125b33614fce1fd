// The operators that compiled graphs call; each is defined and specified in the file of its name.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace ygg {

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t out_features);
at::Tensor packed_linears(const at::Tensor& x, at::ArrayRef<at::Tensor> packed, const std::vector<std::optional<at::Tensor>>& bias,
                          at::IntArrayRef out_features);
at::Tensor gated_linear(const at::Tensor& x, const at::Tensor& gate, const std::optional<at::Tensor>& gate_bias, const at::Tensor& up,
                        const std::optional<at::Tensor>& up_bias, int64_t out_features);
at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor key_cache, at::Tensor value_cache,
                  const at::Tensor& meta, const at::Tensor& pages, double scale);
std::tuple<at::Tensor, at::Tensor> candidates(const at::Tensor& logits, int64_t count);

}  // namespace ygg

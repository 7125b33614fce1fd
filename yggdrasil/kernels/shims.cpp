// C entry points of our operators, so that AOTInductor's code calls them directly: through the dispatcher a call costs
// about 5 us, as much as a small linear layer. Declared to the compiler in shims.py.
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include "operators.h"

using torch::aot_inductor::new_tensor_handle;
using torch::aot_inductor::tensor_handle_to_tensor_pointer;

namespace {
at::Tensor& tensor(AtenTensorHandle handle) { return *tensor_handle_to_tensor_pointer(handle); }
std::optional<at::Tensor> maybe(const AtenTensorHandle* handle) { return handle ? std::optional<at::Tensor>(tensor(*handle)) : std::nullopt; }
}  // namespace

extern "C" {

AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(ygg::packed_linear(tensor(x), tensor(packed), maybe(bias), out_features));
  });
}

AOTITorchError aoti_torch_cpu_packed_linears(AtenTensorHandle x, const AtenTensorHandle* packed, int64_t num_packed, const AtenTensorHandle** bias,
                                             int64_t num_bias, const int64_t* out_features, int64_t num_out_features, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    std::vector<at::Tensor> weights;
    for (int64_t i = 0; i < num_packed; ++i) weights.push_back(tensor(packed[i]));
    std::vector<std::optional<at::Tensor>> biases;
    for (int64_t i = 0; i < num_bias; ++i) biases.push_back(maybe(bias[i]));
    *out = new_tensor_handle(ygg::packed_linears(tensor(x), weights, biases, at::IntArrayRef(out_features, num_out_features)));
  });
}

AOTITorchError aoti_torch_cpu_gated_linear(AtenTensorHandle x, AtenTensorHandle gate, AtenTensorHandle* gate_bias, AtenTensorHandle up,
                                           AtenTensorHandle* up_bias, int64_t out_features, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(ygg::gated_linear(tensor(x), tensor(gate), maybe(gate_bias), tensor(up), maybe(up_bias), out_features));
  });
}

AOTITorchError aoti_torch_cpu_attend(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle key_cache,
                                     AtenTensorHandle value_cache, AtenTensorHandle meta, AtenTensorHandle pages, double scale, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(
        ygg::attend(tensor(query), tensor(key), tensor(value), tensor(key_cache), tensor(value_cache), tensor(meta), tensor(pages), scale));
  });
}

AOTITorchError aoti_torch_cpu_candidates(AtenTensorHandle logits, int64_t count, AtenTensorHandle* log_probs, AtenTensorHandle* tokens) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto [first, second] = ygg::candidates(tensor(logits), count);
    *log_probs = new_tensor_handle(std::move(first));
    *tokens = new_tensor_handle(std::move(second));
  });
}
}

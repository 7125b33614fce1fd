// C entry points of our operators, so that AOTInductor's code calls them directly: through the dispatcher a call costs
// about 5 us, as much as a small linear layer. Declared to the compiler in shims.py.
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include "operators.h"

using torch::aot_inductor::new_tensor_handle;
using torch::aot_inductor::tensor_handle_to_tensor_pointer;

namespace {
at::Tensor& tensor(AtenTensorHandle handle) { return *tensor_handle_to_tensor_pointer(handle); }
}  // namespace

extern "C" {

AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t out_features, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(ygg::packed_linear(tensor(x), tensor(packed), bias ? std::optional<at::Tensor>(tensor(*bias)) : std::nullopt, out_features));
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

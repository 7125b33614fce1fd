// Bodies of graph.h.
#include "graph.h"

#include <vector>

namespace ygg {

Graph::Graph(const std::string& path, int64_t device, const c10::Dict<std::string, at::Tensor>& weights)
    : loader_(path, "model", true, 1, c10::DeviceIndex(device)) {
  for (const std::string& name : loader_.get_constant_fqns()) {
    const auto found = weights.find(name);
    TORCH_CHECK(found != weights.end(), "it asks for ", name);
    constants_.emplace(name, found->value());
  }
  loader_.load_constants(constants_, false, true, true);
}

std::tuple<at::Tensor, at::Tensor> Graph::run(const at::Tensor& meta) {
  std::vector<at::Tensor> outputs = loader_.run({meta});
  return {outputs[0], outputs[1]};
}

}  // namespace ygg

// A compiled graph.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <string>
#include <tuple>
#include <unordered_map>

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

}  // namespace ygg

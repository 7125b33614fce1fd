// A compiled graph.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace ygg {

// The regions of a package that was compiled by region; compiler/regions.py explains them.
struct Regions {
  std::vector<int64_t> kinds;
  std::vector<std::vector<std::string>> inputs, outputs;
};

// A compiled graph bound to its caller's weights.
class Graph : public torch::CustomClassHolder {
 public:
  // `weights` holds every constant that the package names; they are streamed if no cache keeps them until
  // the next forward. Device -1 is the current one. Without regions the package is one model. Calls are not
  // locked: a graph has one caller.
  Graph(const std::string& path, int64_t device, const c10::Dict<std::string, at::Tensor>& weights,
        bool is_streamed, const Regions& regions);

  // Returns a draft's best tokens and their log-probabilities, or a target's logits and last hidden states.
  std::tuple<at::Tensor, at::Tensor> run(const at::Tensor& meta);

 private:
  using Loader = torch::inductor::AOTIModelPackageLoader;
  // The model of a region, and the places of its tensors.
  struct Call {
    Loader* loader;
    std::vector<size_t> inputs, outputs;
  };

  void bind_(const c10::Dict<std::string, at::Tensor>& weights);
  void bind_(const Regions& regions, const c10::Dict<std::string, at::Tensor>& weights);

  bool is_streamed_;
  // declared before the loaders, which borrow these tensors
  std::unordered_map<std::string, at::Tensor> constants_;
  std::vector<std::unique_ptr<Loader>> loaders_;
  std::vector<Call> calls_;
  std::vector<at::Tensor> tensors_;  // the input, then weights and what one region leaves to the next
};

}  // namespace ygg

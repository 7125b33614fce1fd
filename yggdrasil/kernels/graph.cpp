// Bodies of graph.h.
#include "graph.h"

#include "operators.h"

#include <algorithm>
#include <utility>

namespace ygg {

namespace {

using Weights = c10::Dict<std::string, at::Tensor>;

const std::string kInput = "meta";  // NAME_OF_INPUT of compiler/regions.py

at::Tensor weight_of(const Weights& weights, const std::string& name) {
  const auto found = weights.find(name);
  TORCH_CHECK(found != weights.end(), "it asks for ", name);
  return found->value();
}

}  // namespace

Graph::Graph(const std::string& path, int64_t device, const Weights& weights, bool is_streamed,
             const Regions& regions)
    : is_streamed_(is_streamed) {
  const auto load = [&](const std::string& model) {
    loaders_.push_back(std::make_unique<Loader>(path, model, true, 1, c10::DeviceIndex(device)));
  };
  if (regions.kinds.empty()) {
    load("model");
    bind_(weights);
  } else {
    const int64_t last = *std::max_element(regions.kinds.begin(), regions.kinds.end());
    for (int64_t kind = 0; kind <= last; ++kind) load("region_" + std::to_string(kind));
    bind_(regions, weights);
  }
}

// Makes the weights the constants of the only model.
void Graph::bind_(const Weights& weights) {
  Loader& loader = *loaders_[0];
  for (const std::string& name : loader.get_constant_fqns())
    constants_.emplace(name, weight_of(weights, name));
  loader.load_constants(constants_, false, true, true);
}

// Gives every weight, and every tensor that one region leaves to others, a place.
void Graph::bind_(const Regions& regions, const Weights& weights) {
  std::unordered_map<std::string, size_t> places{{kInput, 0}};
  tensors_.resize(1);
  for (size_t region = 0; region < regions.kinds.size(); ++region) {
    Call call{loaders_[size_t(regions.kinds[region])].get(), {}, {}};
    for (const std::string& name : regions.inputs[region]) {
      const auto [place, is_new] = places.emplace(name, tensors_.size());
      if (is_new) tensors_.push_back(weight_of(weights, name));
      call.inputs.push_back(place->second);
    }
    for (const std::string& name : regions.outputs[region]) {
      places[name] = tensors_.size();
      call.outputs.push_back(tensors_.size());
      tensors_.emplace_back();
    }
    calls_.push_back(std::move(call));
  }
}

std::tuple<at::Tensor, at::Tensor> Graph::run(const at::Tensor& meta) {
  const StreamedWeights streamed(is_streamed_);
  if (calls_.empty()) {
    std::vector<at::Tensor> outputs = loaders_[0]->run({meta});
    return {outputs[0], outputs[1]};
  }
  tensors_[0] = meta;
  for (const Call& call : calls_) {
    std::vector<at::Tensor> inputs;
    inputs.reserve(call.inputs.size());
    for (const size_t place : call.inputs) inputs.push_back(tensors_[place]);
    std::vector<at::Tensor> outputs = call.loader->boxed_run(std::move(inputs));
    for (size_t i = 0; i < outputs.size(); ++i) tensors_[call.outputs[i]] = std::move(outputs[i]);
  }
  const std::vector<size_t>& last = calls_.back().outputs;
  std::tuple<at::Tensor, at::Tensor> results{tensors_[last[0]], tensors_[last[1]]};
  for (const Call& call : calls_)
    for (const size_t place : call.outputs) tensors_[place].reset();
  return results;
}

}  // namespace ygg

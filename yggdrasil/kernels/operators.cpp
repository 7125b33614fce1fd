// Registers our operators and the classes of graph.h and step.h with torch, and defines the C entry points
// that the code of AOTInductor calls directly: through torch's dispatcher a call costs about 5 us, as much
// as a small linear layer.
//
// Only this file has the schemas. shims.py derives the declarations of the entry points from them, and a
// test compares those with the definitions below.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include "graph.h"
#include "step.h"

at::Tensor ygg::empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::detail::empty_cpu(sizes, options);
}

namespace {
// A tensor without sizes that begins at element `first` of a tensor's storage.
at::Tensor alias_of(const at::Tensor& tensor, int64_t first) {
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset() + first);
  return alias;
}
}  // namespace

at::Tensor ygg::view(const at::Tensor& tensor, int64_t first, at::IntArrayRef sizes) {
  const int64_t last = first + c10::multiply_integers(sizes);
  TORCH_CHECK(tensor.is_contiguous() && 0 <= first && last <= tensor.numel(), "elements ", first, " to ",
              last, " are no contiguous part of a tensor of ", tensor.sizes());
  at::Tensor part = alias_of(tensor, first);
  part.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return part;
}

at::Tensor ygg::rows_of(const at::Tensor& tensor, int64_t first, int64_t count) {
  TORCH_CHECK(0 <= first && 0 <= count && first + count <= tensor.size(0), "no rows ", first, " to ",
              first + count, " of a tensor of ", tensor.sizes());
  c10::SmallVector<int64_t, 4> sizes(tensor.sizes());
  sizes[0] = count;
  at::Tensor rows = alias_of(tensor, first * tensor.stride(0));
  rows.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, tensor.strides());
  return rows;
}

// ---- arguments and results as torch passes them ----

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Numbers = std::vector<int64_t>;

Tensor packed_linears(const Tensor& x, at::TensorList packed, const c10::List<std::optional<Tensor>>& bias,
                      at::IntArrayRef out_features) {
  return ygg::packed_linears(x, packed, bias.vec(), out_features);
}

Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, Tensor key_cache,
              Tensor value_cache, const Tensor& meta, const Tensor& pages, double scale) {
  return ygg::attend({query, key, value, key_cache, value_cache, meta, pages, scale});
}

std::tuple<Tensor, Tensor> candidates(const Tensor& logits, const Tensor& meta, int64_t count,
                                      int64_t few) {
  auto [log_probs, tokens] = ygg::candidates(logits, meta, count, few);
  return {log_probs, tokens};
}

std::tuple<Tensor, Tensor> largest(const Tensor& scores) {
  auto [values, tokens] = ygg::largest(scores);
  return {values, tokens};
}

std::tuple<Numbers, Numbers> follow(const Tensor& logits, const Tensor& parent, const Tensor& token) {
  auto [path, tokens] = ygg::follow(logits, parent, token);
  return {path, tokens};
}

std::tuple<Numbers, Numbers> follow_sampling(const Tensor& logits, const Tensor& parent,
                                             const Tensor& token, int64_t root_pos, double temperature,
                                             int64_t top_k, double top_p, double min_p, int64_t seed) {
  const ygg::Sampling sampling{temperature, top_k, top_p, min_p, seed};
  auto [path, tokens] = ygg::follow_sampling(logits, parent, token, root_pos, sampling);
  return {path, tokens};
}

std::tuple<Tensor, Tensor> coupled(const Tensor& log_probs, const Tensor& tokens, at::IntArrayRef positions,
                                   double temperature, int64_t top_k, double top_p, double min_p,
                                   int64_t seed, int64_t count) {
  const ygg::Sampling sampling{temperature, top_k, top_p, min_p, seed};
  auto [best_log_probs, best_tokens] = ygg::coupled({log_probs, tokens}, positions, sampling, count);
  return {best_log_probs, best_tokens};
}

void grow_(Tensor frontier_log_prob, Tensor frontier_token, const Tensor& log_probs, const Tensor& tokens,
           int64_t num_known, int64_t num_new, Tensor token, Tensor parent, Tensor depth, Tensor log_prob,
           Tensor path, int64_t first, int64_t width, Tensor meta, int64_t root_pos, int64_t row,
           int64_t read, double slope, double offset) {
  const ygg::Frontier frontier{frontier_log_prob, frontier_token};
  const ygg::Tree tree{token, parent, depth, log_prob, path};
  ygg::grow_(frontier, {log_probs, tokens}, tree, meta,
             {num_known, num_new, first, width, root_pos, row, read}, {slope, offset});
}

void pack_nodes_(Tensor meta, const Tensor& token, const Tensor& depth, const Tensor& path, int64_t first,
                 int64_t last, int64_t root_pos, int64_t row, int64_t read) {
  ygg::pack_nodes_(meta, token, depth, path, {first, last, root_pos, row, read});
}

void pack_chains_(Tensor meta, at::IntArrayRef tokens, at::IntArrayRef lens,
                  at::IntArrayRef start_positions, at::IntArrayRef rows, at::IntArrayRef num_read,
                  at::IntArrayRef reads) {
  ygg::pack_chains_(meta, {tokens, lens, start_positions, rows, num_read, reads});
}

using Names = std::vector<std::vector<std::string>>;

c10::intrusive_ptr<ygg::Graph> make_graph(const std::string& path, int64_t device,
                                          const c10::Dict<std::string, Tensor>& weights,
                                          bool is_streamed, std::vector<int64_t> kinds, Names inputs,
                                          Names outputs) {
  return c10::make_intrusive<ygg::Graph>(
      path, device, weights, is_streamed,
      ygg::Regions{std::move(kinds), std::move(inputs), std::move(outputs)});
}

using StepPointer = c10::intrusive_ptr<ygg::Step>;

StepPointer make_step(ygg::Step::Graphs target, Tensors target_metas, Tensor target_storage,
                      Tensor target_pages, ygg::Step::Graphs draft, Tensors draft_metas,
                      Tensor draft_storage, Tensor draft_pages, int64_t path_width, int64_t candidates) {
  return c10::make_intrusive<ygg::Step>(
      ygg::Step::Model{target, target_metas, target_storage, target_pages},
      ygg::Step::Model{draft, draft_metas, draft_storage, draft_pages}, path_width, candidates);
}

int64_t add_calibration(const StepPointer& step, double slope, double offset, Tensor knots) {
  return step->add_calibration({slope, offset}, knots);
}

int64_t add_processors(const StepPointer& step, std::vector<int64_t> bias_tokens, std::vector<double> bias,
                       double repetition, double presence, double frequency, int64_t ngram,
                       std::vector<std::vector<int64_t>> banned, int64_t min_tokens,
                       std::vector<int64_t> ends) {
  return step->add_processors({std::move(bias_tokens), std::move(bias), repetition, presence, frequency,
                               ngram, std::move(banned), min_tokens, std::move(ends)});
}

int64_t address(const StepPointer& step) { return int64_t(reinterpret_cast<intptr_t>(step.get())); }

}  // namespace

// ---- the dispatcher ----

namespace {

void define_classes(torch::Library& library) {
  library.class_<ygg::Graph>("Graph")
      .def(torch::init(make_graph))
      .def("run", &ygg::Graph::run);
  library.class_<ygg::Step>("Step")
      .def(torch::init(make_step))
      .def("add_calibration", add_calibration)
      .def("add_stop", &ygg::Step::add_stop)
      .def("add_levels", &ygg::Step::add_levels)
      .def("add_processors", add_processors)
      .def("forget_", &ygg::Step::forget_)
      .def("logits_and_hidden", &ygg::Step::logits_and_hidden)
      .def("address", address);
}

// The operators of graphs, which have C entry points, too.
void define_layers(torch::Library& library) {
  library.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
  library.def(
      "read_linear(Tensor x, Tensor meta, Tensor packed, Tensor? bias, int out_features) "
      "-> Tensor");
  library.def(
      "packed_linears(Tensor x, Tensor[] packed, Tensor?[] bias, int[] out_features) "
      "-> Tensor");
  library.def(
      "gated_linear(Tensor x, Tensor gate, Tensor? gate_bias, Tensor up, Tensor? up_bias, "
      "int out_features) -> Tensor");
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, "
      "Tensor(b!) value_cache, Tensor meta, Tensor pages, float scale) -> Tensor",
      {at::Tag::flexible_layout});
  library.def(
      "candidates(Tensor logits, Tensor meta, int count, int few) -> (Tensor log_probs, Tensor tokens)");
}

// The operators of the host's side of a step.
void define_step(torch::Library& library) {
  library.def("largest(Tensor scores) -> (Tensor values, Tensor tokens)");
  library.def("follow(Tensor logits, Tensor parent, Tensor token) -> (int[] path, int[] tokens)");
  library.def(
      "coupled(Tensor log_probs, Tensor tokens, int[] positions, float temperature, int top_k, "
      "float top_p, float min_p, int seed, int count) -> (Tensor log_probs, Tensor tokens)");
  library.def("gumbel_noise(int seed, int position, int vocab) -> Tensor");
  library.def(
      "follow_sampling(Tensor logits, Tensor parent, Tensor token, int root_pos, float temperature, "
      "int top_k, float top_p, float min_p, int seed) -> (int[] path, int[] tokens)");
  library.def(
      "grow_(Tensor(a!) frontier_log_prob, Tensor(b!) frontier_token, Tensor log_probs, "
      "Tensor tokens, int num_known, int num_new, Tensor(c!) token, Tensor(d!) parent, "
      "Tensor(e!) depth, Tensor(f!) log_prob, Tensor(g!) path, int first, int width, "
      "Tensor(h!) meta, int root_pos, int row, int read, float slope, float offset) -> ()");
  library.def(
      "pack_nodes_(Tensor(a!) meta, Tensor token, Tensor depth, Tensor path, int first, int last, "
      "int root_pos, int row, int read) -> ()");
  library.def(
      "pack_chains_(Tensor(a!) meta, int[] tokens, int[] lens, int[] start_positions, int[] rows, "
      "int[] num_read, int[] reads) -> ()");
  library.def("move_slots_(Tensor(a!) storage, int[] source, int target) -> ()");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ygg, library) {
  define_classes(library);
  define_layers(library);
  define_step(library);
  // without a tensor argument that could select a device
  library.impl("gumbel_noise", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(ygg::gumbel_noise));
}

TORCH_LIBRARY_IMPL(ygg, CPU, library) {
  library.impl("packed_linear", &ygg::packed_linear);
  library.impl("read_linear", &ygg::read_linear);
  library.impl("packed_linears", &packed_linears);
  library.impl("gated_linear", &ygg::gated_linear);
  library.impl("attend", &attend);
  library.impl("candidates", &candidates);
  library.impl("coupled", &coupled);
  library.impl("largest", &largest);
  library.impl("follow", &follow);
  library.impl("follow_sampling", &follow_sampling);
  library.impl("grow_", &grow_);
  library.impl("pack_nodes_", &pack_nodes_);
  library.impl("pack_chains_", &pack_chains_);
  library.impl("move_slots_", &ygg::move_slots_);
}

// ---- C entry points ----

using torch::aot_inductor::new_tensor_handle;
using torch::aot_inductor::tensor_handle_to_tensor_pointer;

namespace {
Tensor& tensor(AtenTensorHandle handle) { return *tensor_handle_to_tensor_pointer(handle); }
std::optional<Tensor> optional_tensor(const AtenTensorHandle* handle) {
  return handle ? std::optional<Tensor>(tensor(*handle)) : std::nullopt;
}
}  // namespace

extern "C" {

AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle x, AtenTensorHandle packed,
                                            AtenTensorHandle* bias, int64_t out_features,
                                            AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(
        ygg::packed_linear(tensor(x), tensor(packed), optional_tensor(bias), out_features));
  });
}

AOTITorchError aoti_torch_cpu_read_linear(AtenTensorHandle x, AtenTensorHandle meta,
                                          AtenTensorHandle packed, AtenTensorHandle* bias,
                                          int64_t out_features, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(
        ygg::read_linear(tensor(x), tensor(meta), tensor(packed), optional_tensor(bias), out_features));
  });
}

AOTITorchError aoti_torch_cpu_packed_linears(AtenTensorHandle x, const AtenTensorHandle* packed,
                                             int64_t num_packed, const AtenTensorHandle** bias,
                                             int64_t num_bias, const int64_t* out_features,
                                             int64_t num_out_features, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    Tensors weights;
    for (int64_t i = 0; i < num_packed; ++i) weights.push_back(tensor(packed[i]));
    std::vector<std::optional<Tensor>> biases;
    for (int64_t i = 0; i < num_bias; ++i) biases.push_back(optional_tensor(bias[i]));
    *out = new_tensor_handle(
        ygg::packed_linears(tensor(x), weights, biases, at::IntArrayRef(out_features, num_out_features)));
  });
}

AOTITorchError aoti_torch_cpu_gated_linear(AtenTensorHandle x, AtenTensorHandle gate,
                                           AtenTensorHandle* gate_bias, AtenTensorHandle up,
                                           AtenTensorHandle* up_bias, int64_t out_features,
                                           AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(ygg::gated_linear(tensor(x), tensor(gate), optional_tensor(gate_bias),
                                               tensor(up), optional_tensor(up_bias), out_features));
  });
}

AOTITorchError aoti_torch_cpu_attend(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                                     AtenTensorHandle key_cache, AtenTensorHandle value_cache,
                                     AtenTensorHandle meta, AtenTensorHandle pages, double scale,
                                     AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(ygg::attend({tensor(query), tensor(key), tensor(value), tensor(key_cache),
                                          tensor(value_cache), tensor(meta), tensor(pages), scale}));
  });
}

AOTITorchError aoti_torch_cpu_candidates(AtenTensorHandle logits, AtenTensorHandle meta, int64_t count,
                                         int64_t few, AtenTensorHandle* log_probs,
                                         AtenTensorHandle* tokens) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto [first, second] = ygg::candidates(tensor(logits), tensor(meta), count, few);
    *log_probs = new_tensor_handle(std::move(first));
    *tokens = new_tensor_handle(std::move(second));
  });
}
}

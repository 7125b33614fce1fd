// The ways to our operators: torch's dispatcher, which has the classes of graph.h, too, and C entry points, which AOTInductor's code calls directly, for through the
// dispatcher a call costs about 5 us, as much as a small linear layer. The entry points are declared to the compiler in shims.py.
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include "graph.h"
#include "operators.h"

at::Tensor ygg::empty(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }

// ---- the dispatcher ----

namespace {
std::tuple<ygg::TreeArrays, int64_t, std::vector<double>> grow(const c10::intrusive_ptr<ygg::Graph>& graph, const at::Tensor& meta, const at::Tensor& head_tokens,
                                                               const at::Tensor& head_log_probs, int64_t head_row, int64_t token, int64_t capacity,
                                                               int64_t path_width, int64_t root_pos, int64_t width, int64_t depth, int64_t candidates, double slope,
                                                               double offset, const at::Tensor& prices, double least) {
  return ygg::grow(*graph, meta, {head_tokens, head_log_probs}, head_row, token, capacity, path_width, root_pos, width, depth, candidates,
                   {slope, offset, prices, least});
}

std::tuple<std::vector<int64_t>, std::vector<double>> verify_costs(const at::Tensor& draft_ms, const at::Tensor& verify_ms, double growth_host_ms,
                                                                   double step_host_ms, at::IntArrayRef sizes, int64_t verify, int64_t width, int64_t depth,
                                                                   int64_t num_nodes, int64_t context_len, int64_t lag) {
  return ygg::verify_costs({draft_ms, verify_ms, growth_host_ms, step_host_ms, sizes.vec()}, verify, width, depth, num_nodes, context_len, lag);
}
}  // namespace

TORCH_LIBRARY_FRAGMENT(ygg, library) {
  library.class_<ygg::Graph>("Graph")
      .def(torch::init<const std::string&, int64_t, const c10::Dict<std::string, at::Tensor>&>())
      .def("run", &ygg::Graph::run)
      .def("grow", grow);
  library.class_<ygg::Step>("Step")
      .def(torch::init<ygg::Step::Graphs, std::vector<at::Tensor>, at::Tensor, ygg::Step::Graphs, std::vector<at::Tensor>, at::Tensor, int64_t, int64_t>())
      .def("follow_policy_", &ygg::Step::follow_policy_)
      .def("logits_and_hidden", &ygg::Step::logits_and_hidden)
      .def("address", [](const c10::intrusive_ptr<ygg::Step>& step) { return int64_t(reinterpret_cast<intptr_t>(step.get())); });
  library.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
  library.def("read_linear(Tensor x, Tensor meta, Tensor packed, Tensor? bias, int out_features) -> Tensor");
  library.def("packed_linears(Tensor x, Tensor[] packed, Tensor?[] bias, int[] out_features) -> Tensor");
  library.def("gated_linear(Tensor x, Tensor gate, Tensor? gate_bias, Tensor up, Tensor? up_bias, int out_features) -> Tensor");
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor meta, Tensor pages, float scale) -> Tensor",
      {at::Tag::flexible_layout});
  library.def("candidates(Tensor logits, Tensor meta, int count) -> (Tensor log_probs, Tensor tokens)");
  library.def("greatest(Tensor scores) -> (Tensor values, Tensor tokens)");
  library.def("follow(Tensor logits, Tensor parent, Tensor token) -> (int[] path, int[] tokens)");
  library.def(
      "grow_(Tensor(a!) frontier_log_prob, Tensor(b!) frontier_token, Tensor log_probs, Tensor tokens, int num_known, int num_new, Tensor(c!) token, "
      "Tensor(d!) parent, Tensor(e!) depth, Tensor(f!) log_prob, Tensor(g!) path, int first, int width, Tensor(h!) meta, int root_pos, float slope, float offset) -> "
      "()");
  library.def("last_gain(Tensor log_prob, int num_nodes, int width, Tensor prices) -> float");
  library.def("pack_nodes_(Tensor(a!) meta, Tensor token, Tensor depth, Tensor path, int first, int last, int root_pos, int row) -> ()");
  library.def("pack_chains_(Tensor(a!) meta, int[] tokens, int[] lens, int[] start_positions, int[] rows, int[] num_read) -> ()");
  library.def("root(int token, int capacity, int path_width) -> (Tensor token, Tensor parent, Tensor depth, Tensor log_prob, Tensor path)");
  library.def(
      "prune(Tensor token, Tensor parent, Tensor depth, Tensor log_prob, Tensor path, int num_nodes, Tensor knots, int[] widths, float[] costs_ms) -> "
      "(Tensor token, Tensor parent, Tensor depth, Tensor log_prob, Tensor path, int[] keep, float expected)");
  library.def("move_slots_(Tensor(a!) storage, int[] source, int target) -> ()");
  library.def(
      "verify_costs(Tensor draft_ms, Tensor verify_ms, float growth_host_ms, float step_host_ms, int[] sizes, int verify, int width, int depth, int num_nodes, "
      "int context_len, int lag) -> (int[] widths, float[] costs_ms)");
  library.impl("root", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(ygg::root));  // no tensor says where it runs
}

namespace {
at::Tensor packed_linears_from_list(const at::Tensor& x, at::TensorList packed, const c10::List<std::optional<at::Tensor>>& bias, at::IntArrayRef out_features) {
  return ygg::packed_linears(x, packed, bias.vec(), out_features);
}
}  // namespace

TORCH_LIBRARY_IMPL(ygg, CPU, library) {
  library.impl("packed_linear", &ygg::packed_linear);
  library.impl("read_linear", &ygg::read_linear);
  library.impl("packed_linears", &packed_linears_from_list);
  library.impl("gated_linear", &ygg::gated_linear);
  library.impl("attend", &ygg::attend);
  library.impl("candidates", &ygg::candidates);
  library.impl("greatest", &ygg::greatest);
  library.impl("follow", &ygg::follow);
  library.impl("grow_", &ygg::grow_);
  library.impl("last_gain", &ygg::last_gain);
  library.impl("pack_nodes_", &ygg::pack_nodes_);
  library.impl("pack_chains_", &ygg::pack_chains_);
  library.impl("prune", &ygg::prune);
  library.impl("move_slots_", &ygg::move_slots_);
  library.impl("verify_costs", &verify_costs);
}

// ---- C entry points ----

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

AOTITorchError aoti_torch_cpu_read_linear(AtenTensorHandle x, AtenTensorHandle meta, AtenTensorHandle packed,
                                          AtenTensorHandle* bias, int64_t out_features, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(ygg::read_linear(tensor(x), tensor(meta), tensor(packed), maybe(bias), out_features));
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

AOTITorchError aoti_torch_cpu_candidates(AtenTensorHandle logits, AtenTensorHandle meta, int64_t count, AtenTensorHandle* log_probs, AtenTensorHandle* tokens) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto [first, second] = ygg::candidates(tensor(logits), tensor(meta), count);
    *log_probs = new_tensor_handle(std::move(first));
    *tokens = new_tensor_handle(std::move(second));
  });
}
}

// One growth step on the host in one call: enter fresh candidates, take the best, attach them, fill the next forward's
// metadata. CPU body of `ygg::grow_`; its specification is `_grow_plain` in step/draft.py, a dozen small torch operators.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace {

enum Column { kToken, kPosition, kRow, kIndex, kPrefix, kPath };  // layout.py says the same

struct Best {
  float log_prob;
  int64_t place;
};

// The `count` greatest entries, greatest first, equal ones by place.
std::vector<Best> take_best(const float* values, int64_t num_values, int64_t count) {
  std::vector<Best> best;
  best.reserve(count + 1);
  for (int64_t place = 0; place < num_values; ++place) {
    if (int64_t(best.size()) == count && !(values[place] > best.back().log_prob)) continue;
    const auto after = std::find_if(best.begin(), best.end(), [&](const Best& other) { return values[place] > other.log_prob; });
    best.insert(after, {values[place], place});
    if (int64_t(best.size()) > count) best.pop_back();
  }
  return best;
}

void grow_(at::Tensor frontier_log_prob, at::Tensor frontier_token, const at::Tensor& log_probs, const at::Tensor& tokens, int64_t num_known, int64_t num_new,
           at::Tensor token, at::Tensor parent, at::Tensor depth, at::Tensor log_prob, at::Tensor path, int64_t first, int64_t width, at::Tensor meta,
           int64_t root_pos) {
  const int64_t candidates = frontier_log_prob.size(1), path_width = path.size(1), meta_width = meta.size(1);
  TORCH_CHECK(num_known + num_new <= frontier_log_prob.size(0) && first + width <= token.size(0), "grow_: more nodes than the tree holds");
  TORCH_CHECK(width <= meta.size(0) && meta_width == kPath + path_width, "grow_: metadata of another shape");
  float* frontier = frontier_log_prob.mutable_data_ptr<float>();
  int64_t* frontier_ids = frontier_token.mutable_data_ptr<int64_t>();
  float* node_log_prob = log_prob.mutable_data_ptr<float>();
  for (int64_t i = 0; i < num_new * candidates; ++i) {
    const int64_t place = num_known * candidates + i;
    frontier[place] = log_probs.const_data_ptr<float>()[i] + node_log_prob[place / candidates];
    frontier_ids[place] = tokens.const_data_ptr<int64_t>()[i];
  }
  int32_t* rows = meta.mutable_data_ptr<int32_t>();
  int32_t* node_depth = depth.mutable_data_ptr<int32_t>();
  int32_t* paths = path.mutable_data_ptr<int32_t>();
  int64_t node = first;
  for (const Best& taken : take_best(frontier, (num_known + num_new) * candidates, width)) {
    const int64_t above = taken.place / candidates;
    frontier[taken.place] = -std::numeric_limits<float>::infinity();
    token.mutable_data_ptr<int32_t>()[node] = int32_t(frontier_ids[taken.place]);
    parent.mutable_data_ptr<int32_t>()[node] = int32_t(above);
    node_depth[node] = node_depth[above] + 1;
    node_log_prob[node] = taken.log_prob;
    std::copy_n(paths + above * path_width, path_width, paths + node * path_width);
    paths[node * path_width + node_depth[node]] = int32_t(node);
    int32_t* fields = rows + (node - first) * meta_width;
    fields[kToken] = int32_t(frontier_ids[taken.place]);
    fields[kPosition] = int32_t(root_pos + node_depth[node]);
    fields[kRow] = 0;
    fields[kIndex] = int32_t(root_pos + node);
    fields[kPrefix] = int32_t(root_pos);
    std::copy_n(paths + node * path_width, path_width, fields + kPath);
    ++node;
  }
  for (int64_t row = width; row < meta.size(0); ++row) {
    std::fill_n(rows + row * meta_width, int64_t(kPath), 0);
    std::fill_n(rows + row * meta_width + kPath, path_width, -1);
    rows[row * meta_width + kIndex] = -1;
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ygg, library) {
  library.def(
      "grow_(Tensor(a!) frontier_log_prob, Tensor(b!) frontier_token, Tensor log_probs, Tensor tokens, int num_known, int num_new, Tensor(c!) token, "
      "Tensor(d!) parent, Tensor(e!) depth, Tensor(f!) log_prob, Tensor(g!) path, int first, int width, Tensor(h!) meta, int root_pos) -> ()");
}
TORCH_LIBRARY_IMPL(ygg, CPU, library) { library.impl("grow_", &grow_); }

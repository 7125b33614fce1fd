// Tree attention over a paged KV cache: CPU body of `ygg::attend` (specification: attention.py, `reference`).
//
// A query token attends to one flat sequence of keys in position order: indices 0..prefix-1 of its row, then its path (its
// ancestors in the tree and itself, root first, counted from `prefix`). The row's page table turns an index into a slot. Scores,
// the softmax denominator and the weighted sum of values are accumulated over the index in that sequence and nothing
// else, so the result's bits depend neither on where the keys lie, nor on the other tokens, nor on how many there are.
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

using at::vec::Vectorized;
using Vec = Vectorized<float>;

constexpr int64_t kLanes = 16;      // keys scored together; also the page length, so a block never straddles two pages
constexpr int64_t kRowsTogether = 4;  // query rows that share one read of a value
enum Column { kToken, kPosition, kRow, kIndex, kPrefix, kPath };  // layout.py says the same

#if defined(__AVX512F__)
inline __m512 widen(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 widen(const at::BFloat16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

// One partial-sum vector of a dot product over `dim` (a multiple of 16).
inline __m512 partial_dot(const float* a, const float* b, int64_t dim) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t f = 0; f < dim; f += 16) sum = _mm512_fmadd_ps(widen(a + f), widen(b + f), sum);
  return sum;
}
inline __m512 partial_dot(const at::BFloat16* a, const at::BFloat16* b, int64_t dim) {
  __m512 sum = _mm512_setzero_ps();
  int64_t f = 0;
#if defined(__AVX512BF16__)
  for (; f + 32 <= dim; f += 32) sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + f), (__m512bh)_mm512_loadu_si512(b + f));
#endif
  for (; f < dim; f += 16) sum = _mm512_fmadd_ps(widen(a + f), widen(b + f), sum);
  return sum;
}

// Lane i of the result is the sum of the 16 lanes of v[i]: a transposing tree of adds.
inline __m512 sum_each(__m512* v) {
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(v[2 * i]), high = _mm512_castps_pd(v[2 * i + 1]);
    v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  for (int i = 0; i < 2; ++i) {
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88), _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xDD));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xDD));
}

template <typename T>
inline void score_block(const T* query, const T* const* keys, int64_t dim, float scale, float* scores) {
  __m512 partial[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) partial[lane] = partial_dot(query, keys[lane], dim);
  _mm512_storeu_ps(scores, _mm512_mul_ps(sum_each(partial), _mm512_set1_ps(scale)));
}
#else
template <typename T>
inline void score_block(const T* query, const T* const* keys, int64_t dim, float scale, float* scores) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    float partial[kLanes] = {};
    for (int64_t f = 0; f < dim; f += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) partial[i] += float(query[f + i]) * float(keys[lane][f + i]);
    }
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t i = 0; i < width; ++i) partial[i] += partial[i + width];
    }
    scores[lane] = partial[0] * scale;
  }
}
#endif

inline Vec widen_vec(const float* p) { return Vec::loadu(p); }
inline Vec widen_vec(const at::BFloat16* p) {
#if defined(__AVX512F__)
  return Vec(widen(p));
#else
  float widened[Vec::size()];
  for (int64_t i = 0; i < Vec::size(); ++i) widened[i] = float(p[i]);
  return Vec::loadu(widened);
#endif
}

// In place: scores become softmax numerators; returns 1 / denominator. `scores` is padded to a multiple of 16.
inline float softmax_(float* scores, int64_t len) {
  const int64_t padded = (len + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + len, scores + padded, -std::numeric_limits<float>::infinity());
  float highest = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < len; ++j) highest = std::max(highest, scores[j]);
  float sums[kLanes] = {};
  for (int64_t j = 0; j < padded; j += kLanes) {
    for (int64_t i = 0; i < kLanes; i += Vec::size()) {
      const Vec weight = (Vec::loadu(scores + j + i) - Vec(highest)).exp_u20();
      weight.store(scores + j + i);
      (Vec::loadu(sums + i) + weight).store(sums + i);
    }
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return 1.0f / sums[0];
}

// Everything one call reads; strides in elements.
template <typename T>
struct Call {
  const T* query;
  int64_t query_head_stride, query_token_stride;
  T* out;
  const T* key_cache;
  const T* value_cache;
  const int32_t* meta;
  const int32_t* pages;
  int64_t num_tokens, num_heads, num_kv_heads, dim, meta_width, pages_per_row;
  float scale;

  const int32_t* token(int64_t n) const { return meta + n * meta_width; }
  int64_t slot(int64_t row, int64_t index) const { return int64_t(pages[row * pages_per_row + index / kLanes]) * kLanes + index % kLanes; }
  int64_t path_len(int64_t n) const {
    int64_t len = 0;
    while (kPath + len < meta_width && token(n)[kPath + len] >= 0) ++len;
    return len;
  }
  int64_t longest() const { return pages_per_row * kLanes + (meta_width + kLanes - 1) / kLanes * kLanes; }
};

// The cache offsets of one token's keys in position order. Tokens of one row share the prefix, so it is kept between them.
template <typename T>
class Sequence {
 public:
  Sequence(const Call<T>& call, int64_t kv_head) : call_(call), kv_head_(kv_head), offsets_(call.longest()) {}

  void point_at(int64_t n) {
    const int32_t* fields = call_.token(n);
    if (fields[kRow] != row_) row_ = fields[kRow], prefix_ = 0;
    for (int64_t j = prefix_; j < fields[kPrefix]; ++j) offsets_[j] = offset(j);
    prefix_ = fields[kPrefix];
    len_ = prefix_ + call_.path_len(n);
    for (int64_t j = prefix_; j < len_; ++j) offsets_[j] = offset(prefix_ + fields[kPath + j - prefix_]);
  }
  int64_t len() const { return len_; }
  int64_t prefix() const { return prefix_; }
  int64_t row() const { return row_; }
  const int64_t* offsets() const { return offsets_.data(); }

 private:
  int64_t offset(int64_t index) const { return (call_.slot(row_, index) * call_.num_kv_heads + kv_head_) * call_.dim; }
  const Call<T>& call_;
  int64_t kv_head_, row_ = -1, prefix_ = 0, len_ = 0;
  std::vector<int64_t> offsets_;
};

// The query heads of one KV head for a few neighbouring tokens: rows that may read one prefix together.
template <typename T>
class Group {
 public:
  Group(const Call<T>& call, int64_t kv_head)
      : call_(call), heads_(call.num_heads / call.num_kv_heads), kv_head_(kv_head), sequence_(call, kv_head),
        scores_(kTokens * heads_ * call.longest()), sums_(kTokens * heads_ * call.dim), inverse_(kTokens * heads_) {}

  static constexpr int64_t kTokens = 8;

  void run(int64_t begin, int64_t end) {
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    int64_t shared = std::numeric_limits<int64_t>::max();
    for (int64_t n = begin; n < end; ++n) {
      const int64_t previous_row = sequence_.row();
      sequence_.point_at(n);
      shared = n > begin && sequence_.row() != previous_row ? 0 : std::min(shared, sequence_.prefix());
      for (int64_t h = 0; h < heads_; ++h) weigh(n, h, (n - begin) * heads_ + h);
    }
    const int64_t rows = (end - begin) * heads_;
    int64_t r = 0;
    for (; shared > 0 && r + kRowsTogether <= rows; r += kRowsTogether) add_values<kRowsTogether>(r, 0, shared);
    for (; shared > 0 && r < rows; ++r) add_values<1>(r, 0, shared);
    for (int64_t n = begin; n < end; ++n) finish(n, (n - begin) * heads_, shared);
  }

 private:
  float* scores(int64_t r) { return scores_.data() + r * call_.longest(); }
  float* sums(int64_t r) { return sums_.data() + r * call_.dim; }

  // scores(r) := exp(score - max) of one query row over its sequence; the denominator waits in inverse_.
  void weigh(int64_t n, int64_t h, int64_t r) {
    inverse_[r] = 0.0f;
    const int64_t len = sequence_.len();
    if (len == 0) return;
    const T* query = call_.query + (kv_head_ * heads_ + h) * call_.query_head_stride + n * call_.query_token_stride;
    const T* keys[kLanes];
    for (int64_t start = 0; start < len; start += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) keys[lane] = call_.key_cache + sequence_.offsets()[std::min(start + lane, len - 1)];
      score_block(query, keys, call_.dim, call_.scale, scores(r) + start);
    }
    inverse_[r] = softmax_(scores(r), len);
  }

  // sums(r..r+rows) += scores[j] * value[j] for j in [begin, end), ascending.
  template <int rows>
  void add_values(int64_t r, int64_t begin, int64_t end) {
    const int64_t* offsets = sequence_.offsets();
    for (int64_t f = 0; f < call_.dim; f += Vec::size()) {
      Vec sum[rows];
      for (int i = 0; i < rows; ++i) sum[i] = Vec::loadu(sums(r + i) + f);
      for (int64_t j = begin; j < end; ++j) {
        const Vec value = widen_vec(call_.value_cache + offsets[j] + f);
        for (int i = 0; i < rows; ++i) sum[i] = at::vec::fmadd(Vec(scores(r + i)[j]), value, sum[i]);
      }
      for (int i = 0; i < rows; ++i) sum[i].store(sums(r + i) + f);
    }
  }

  void finish(int64_t n, int64_t first_row, int64_t shared) {
    sequence_.point_at(n);
    for (int64_t h = 0; h < heads_; ++h) {
      const int64_t r = first_row + h;
      add_values<1>(r, shared, sequence_.len());
      T* out = call_.out + (n * call_.num_heads + kv_head_ * heads_ + h) * call_.dim;
      for (int64_t f = 0; f < call_.dim; ++f) out[f] = T(sums(r)[f] * inverse_[r]);
    }
  }

  const Call<T>& call_;
  int64_t heads_, kv_head_;
  Sequence<T> sequence_;
  std::vector<float> scores_, sums_, inverse_;
};

// Padding has no index and is not stored.
template <typename T>
void append_(const Call<T>& call, const at::Tensor& fresh, at::Tensor& cache) {
  const T* from = fresh.const_data_ptr<T>();
  T* to = cache.mutable_data_ptr<T>();
  for (int64_t n = 0; n < call.num_tokens; ++n) {
    const int32_t* fields = call.token(n);
    if (fields[kIndex] < 0) continue;
    T* slot = to + call.slot(fields[kRow], fields[kIndex]) * call.num_kv_heads * call.dim;
    for (int64_t g = 0; g < call.num_kv_heads; ++g) {
      std::memcpy(slot + g * call.dim, from + g * fresh.stride(1) + n * fresh.stride(2), call.dim * sizeof(T));
    }
  }
}

template <typename T>
at::Tensor run(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor& key_cache, at::Tensor& value_cache,
               const at::Tensor& meta, const at::Tensor& pages, double scale) {
  const int64_t num_heads = query.size(1), num_tokens = query.size(2), dim = query.size(3), num_kv_heads = key.size(1);
  at::Tensor out = at::empty({1, num_tokens, num_heads, dim}, query.options());
  const Call<T> call{query.const_data_ptr<T>(), query.stride(1), query.stride(2), out.mutable_data_ptr<T>(), key_cache.const_data_ptr<T>(),
                     value_cache.const_data_ptr<T>(), meta.const_data_ptr<int32_t>(), pages.const_data_ptr<int32_t>(), num_tokens, num_heads, num_kv_heads, dim,
                     meta.size(1), pages.size(1), float(scale)};
  append_(call, key, key_cache);
  append_(call, value, value_cache);
  const int64_t chunks = (num_tokens + Group<T>::kTokens - 1) / Group<T>::kTokens;
  at::parallel_for(0, num_kv_heads * chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit % chunks * Group<T>::kTokens;
      Group<T>(call, unit / chunks).run(first, std::min(first + Group<T>::kTokens, num_tokens));
    }
  });
  return out;
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor key_cache, at::Tensor value_cache,
                  const at::Tensor& meta, const at::Tensor& pages, double scale) {
  TORCH_CHECK(query.size(0) == 1 && query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "attend: query, key and value are (1, heads, N, F)");
  TORCH_CHECK(query.size(3) % kLanes == 0, "attend: head dimension ", query.size(3), " is not a multiple of ", kLanes);
  TORCH_CHECK(key_cache.is_contiguous() && value_cache.is_contiguous() && meta.is_contiguous() && pages.is_contiguous(), "attend: caches and metadata are contiguous");
  if (query.scalar_type() == at::kFloat) return run<float>(query, key, value, key_cache, value_cache, meta, pages, scale);
  TORCH_CHECK(query.scalar_type() == at::kBFloat16, "attend: dtype ", query.scalar_type(), " is neither float32 nor bfloat16");
  return run<at::BFloat16>(query, key, value, key_cache, value_cache, meta, pages, scale);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ygg, library) {
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor meta, Tensor pages, float scale) -> Tensor",
      {at::Tag::flexible_layout});
}
TORCH_LIBRARY_IMPL(ygg, CPU, library) { library.impl("attend", &attend); }

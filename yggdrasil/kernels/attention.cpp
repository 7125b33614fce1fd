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
#include <memory>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "operators.h"

namespace {

using at::vec::Vectorized;
using Vec = Vectorized<float>;

constexpr int64_t kLanes = 16;      // keys scored together; also the page length, so a block never straddles two pages
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

// In place: scores become softmax numerators; returns 1 / denominator. `scores` has room for a multiple of 16.
inline float softmax_(float* scores, int64_t len) {
  constexpr int kParts = kLanes / Vec::size();
  const int64_t padded = (len + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + len, scores + padded, -std::numeric_limits<float>::infinity());
  Vec highest(-std::numeric_limits<float>::infinity());
  for (int64_t j = 0; j < padded; j += Vec::size()) highest = at::vec::maximum(highest, Vec::loadu(scores + j));
  float lanes[kLanes];
  highest.store(lanes);
  highest = Vec(*std::max_element(lanes, lanes + Vec::size()));
  Vec sums[kParts];  // lane j % 16 sums every sixteenth weight
  std::fill(sums, sums + kParts, Vec(0.0f));
  for (int64_t j = 0; j < padded; j += kLanes) {
    for (int i = 0; i < kParts; ++i) {
      const Vec weight = (Vec::loadu(scores + j + i * Vec::size()) - highest).exp_u20();
      weight.store(scores + j + i * Vec::size());
      sums[i] = sums[i] + weight;
    }
  }
  for (int i = 0; i < kParts; ++i) sums[i].store(lanes + i * Vec::size());
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return 1.0f / lanes[0];
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
  int64_t num_tokens, num_heads, num_kv_heads, dim, num_slots, meta_width, pages_per_row;
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
  int64_t offset(int64_t index) const { return (kv_head_ * call_.num_slots + call_.slot(row_, index)) * call_.dim; }
  const Call<T>& call_;
  int64_t kv_head_, row_ = -1, prefix_ = 0, len_ = 0;
  std::vector<int64_t> offsets_;
};

// The query heads of one KV head for a few neighbouring tokens: rows that read one prefix together.
template <typename T>
class Group {
 public:
  static constexpr int64_t kTokens = 8;

  Group(const Call<T>& call, int64_t kv_head)
      : call_(call), heads_(call.num_heads / call.num_kv_heads), kv_head_(kv_head), sequence_(call, kv_head),
        scores_(new float[kTokens * heads_ * call.longest()]), sums_(kTokens * heads_ * call.dim), inverse_(kTokens * heads_) {}

  void run(int64_t begin, int64_t end) {
    int64_t shared = shared_prefix(begin, end);
    sequence_.point_at(begin);
    const int64_t whole_blocks = shared / kLanes * kLanes;
    for (int64_t start = 0; start < whole_blocks; start += kLanes) score_rows(start, begin, begin, end);
    for (int64_t n = begin; n < end; ++n) {
      sequence_.point_at(n);
      for (int64_t start = whole_blocks; start < sequence_.len(); start += kLanes) score_rows(start, begin, n, n + 1);
      for (int64_t r = (n - begin) * heads_; r < (n + 1 - begin) * heads_; ++r) inverse_[r] = sequence_.len() ? softmax_(scores(r), sequence_.len()) : 0.0f;
    }
    add_values(0, (end - begin) * heads_, 0, shared);  // offsets below `shared` are the same for every token
    for (int64_t n = begin; n < end; ++n) {
      sequence_.point_at(n);
      add_values((n - begin) * heads_, (n + 1 - begin) * heads_, shared, sequence_.len());
      write(n, (n - begin) * heads_);
    }
  }

 private:
  float* scores(int64_t r) { return scores_.get() + r * call_.longest(); }
  float* sums(int64_t r) { return sums_.data() + r * call_.dim; }

  // Indices that all tokens see; 0 where they belong to several rows.
  int64_t shared_prefix(int64_t begin, int64_t end) const {
    int64_t shared = call_.token(begin)[kPrefix];
    for (int64_t n = begin + 1; n < end; ++n) {
      shared = call_.token(n)[kRow] == call_.token(begin)[kRow] ? std::min<int64_t>(shared, call_.token(n)[kPrefix]) : 0;
    }
    return shared;
  }

  // Scores of 16 keys from `start` of the current sequence, for every query row of tokens [first, last).
  void score_rows(int64_t start, int64_t begin, int64_t first, int64_t last) {
    const T* keys[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) keys[lane] = call_.key_cache + sequence_.offsets()[std::min(start + lane, sequence_.len() - 1)];
    for (int64_t n = first; n < last; ++n) {
      for (int64_t h = 0; h < heads_; ++h) {
        const T* query = call_.query + (kv_head_ * heads_ + h) * call_.query_head_stride + n * call_.query_token_stride;
        score_block(query, keys, call_.dim, call_.scale, scores((n - begin) * heads_ + h) + start);
      }
    }
  }

  // sums(r) += scores(r)[j] * value[j] for rows [first, last) and j in [begin, end), j ascending.
  void add_values(int64_t first, int64_t last, int64_t begin, int64_t end) {
    int64_t r = first;
    for (; r + 8 <= last; r += 8) add_rows<8>(r, begin, end);
    for (; r + 4 <= last; r += 4) add_rows<4>(r, begin, end);
    for (; r < last; ++r) add_rows<1>(r, begin, end);
  }
  template <int rows>
  void add_rows(int64_t r, int64_t begin, int64_t end) {
    int64_t f = 0;
    for (; f + 2 * Vec::size() <= call_.dim; f += 2 * Vec::size()) add_features<rows, 2>(r, f, begin, end);
    for (; f < call_.dim; f += Vec::size()) add_features<rows, 1>(r, f, begin, end);
  }
  template <int rows, int parts>
  void add_features(int64_t r, int64_t f, int64_t begin, int64_t end) {
    const int64_t* offsets = sequence_.offsets();
    const float* weights[rows];
    Vec sum[rows][parts];
    for (int i = 0; i < rows; ++i) {
      weights[i] = scores(r + i);
      for (int part = 0; part < parts; ++part) sum[i][part] = Vec::loadu(sums(r + i) + f + part * Vec::size());
    }
    for (int64_t j = begin; j < end; ++j) {
      Vec value[parts];
      for (int part = 0; part < parts; ++part) value[part] = widen_vec(call_.value_cache + offsets[j] + f + part * Vec::size());
      for (int i = 0; i < rows; ++i) {
        const Vec weight(weights[i][j]);
        for (int part = 0; part < parts; ++part) sum[i][part] = at::vec::fmadd(weight, value[part], sum[i][part]);
      }
    }
    for (int i = 0; i < rows; ++i) {
      for (int part = 0; part < parts; ++part) sum[i][part].store(sums(r + i) + f + part * Vec::size());
    }
  }

  void write(int64_t n, int64_t first_row) {
    for (int64_t h = 0; h < heads_; ++h) {
      const int64_t r = first_row + h;
      T* out = call_.out + (n * call_.num_heads + kv_head_ * heads_ + h) * call_.dim;
      for (int64_t f = 0; f < call_.dim; ++f) out[f] = T(sums(r)[f] * inverse_[r]);
    }
  }

  const Call<T>& call_;
  int64_t heads_, kv_head_;
  Sequence<T> sequence_;
  std::unique_ptr<float[]> scores_;  // left uninitialised: every score that is read was written
  std::vector<float> sums_, inverse_;
};

// Padding has no index and is not stored.
template <typename T>
void append_(const Call<T>& call, const at::Tensor& fresh, at::Tensor& cache) {
  const T* from = fresh.const_data_ptr<T>();
  T* to = cache.mutable_data_ptr<T>();
  for (int64_t n = 0; n < call.num_tokens; ++n) {
    const int32_t* fields = call.token(n);
    if (fields[kIndex] < 0) continue;
    T* slot = to + call.slot(fields[kRow], fields[kIndex]) * call.dim;
    for (int64_t g = 0; g < call.num_kv_heads; ++g) {
      std::memcpy(slot + g * call.num_slots * call.dim, from + g * fresh.stride(1) + n * fresh.stride(2), call.dim * sizeof(T));
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
                     key_cache.size(1), meta.size(1), pages.size(1), float(scale)};
  append_(call, key, key_cache);
  append_(call, value, value_cache);
  int64_t real = num_tokens;  // padding stands at the end, sees nothing and yields zeros
  while (real > 0 && call.token(real - 1)[kIndex] < 0) --real;
  std::fill(call.out + real * num_heads * dim, call.out + num_tokens * num_heads * dim, T(0));
  const int64_t chunks = (real + Group<T>::kTokens - 1) / Group<T>::kTokens;
  at::parallel_for(0, num_kv_heads * chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit % chunks * Group<T>::kTokens;
      Group<T>(call, unit / chunks).run(first, std::min(first + Group<T>::kTokens, real));
    }
  });
  return out;
}

}  // namespace

at::Tensor ygg::attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor key_cache, at::Tensor value_cache,
                  const at::Tensor& meta, const at::Tensor& pages, double scale) {
  TORCH_CHECK(query.size(0) == 1 && query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "attend: query, key and value are (1, heads, N, F)");
  TORCH_CHECK(query.size(3) % kLanes == 0, "attend: head dimension ", query.size(3), " is not a multiple of ", kLanes);
  TORCH_CHECK(key_cache.size(0) == key.size(1) && key_cache.size(2) == key.size(3) && key_cache.sizes() == value_cache.sizes(),
              "attend: caches are (KV heads, slots, F), got ", key_cache.sizes(), " and ", value_cache.sizes());
  TORCH_CHECK(key_cache.is_contiguous() && value_cache.is_contiguous() && meta.is_contiguous() && pages.is_contiguous(), "attend: caches and metadata are contiguous");
  if (query.scalar_type() == at::kFloat) return run<float>(query, key, value, key_cache, value_cache, meta, pages, scale);
  TORCH_CHECK(query.scalar_type() == at::kBFloat16, "attend: dtype ", query.scalar_type(), " is neither float32 nor bfloat16");
  return run<at::BFloat16>(query, key, value, key_cache, value_cache, meta, pages, scale);
}

TORCH_LIBRARY_FRAGMENT(ygg, library) {
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor meta, Tensor pages, float scale) -> Tensor",
      {at::Tag::flexible_layout});
}
TORCH_LIBRARY_IMPL(ygg, CPU, library) { library.impl("attend", &ygg::attend); }

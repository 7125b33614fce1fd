// Tree attention over a paged KV cache: the CPU body of `ygg::attend` (specification: attention.py,
// `reference`).
//
// A query token attends to one flat sequence of keys in position order: indices 0..prefix-1 of its row,
// then its path (its ancestors in the tree and itself, root first, counted from `prefix`). The row's page
// table maps an index to a slot.
//
// Up to 16 query rows (of neighbouring tokens and of the heads that share a KV head) are the lanes of one
// block:
//
//   scores   S[lane][j] = Q[lane] . K[j]                    four pages of 16 keys at a time
//   weights  P[lane][j] = exp(S[lane][j] - max of lane)     rounded to the dtype of the cache
//   sums     O[lane]   += P[lane][j] V[j]
//
// Exactness: a score is the product of one key and one query, feature after feature. A sum adds the keys of
// its sequence one after another from the first, with weight zero past its end. The keys that all lanes
// share are multiplied for all lanes together; later keys are multiplied for each token alone, gathered in
// the order of its path. So the bits of a query row depend neither on where its keys lie, nor on the other
// tokens, nor on their number.
//
// How the products were chosen. Up to 16 query rows make a block. Their scores with four pages of keys are
// one product: of tiles on AMX; on vectors with the keys transposed, so that keys fill the vector even for
// one query. A weighted sum takes the keys in the order of the sequence, with weight zero past the end.
// Keys that all rows of a block share are multiplied once for all of them; the last keys of a tree node are
// gathered in the order of its path and multiplied for it alone, by the same instructions. Softmax
// numerators are rounded to the cache's dtype. Slower or inexact: all tree nodes as columns with zero
// weights (pairs of keys share an instruction, so a node's place would change bits).
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "layout.h"
#include "operators.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace ygg;

constexpr int64_t kPages = 4;     // pages scored together
constexpr int64_t kL1Words = 64;  // words of a sum whose values stay in L1 while lane after lane takes them
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// ---- products: sums += a b, where b is lines of words and a is words (fp32 numbers for two products) ----

constexpr int kHeld = 8;  // vectors of sums in registers; fewer do not hide the latency of an addition

// Rows of the matrices start `..._stride` elements apart. Strides are arguments of their own, not fields of
// a record: so GCC compiles these functions for constant strides, which saves 4 % of attention's time.

// kRows rows times kUsed vectors of a line.
template <class Dtype, int kUsed, int kRows>
void multiply_rows(float* sums, int64_t sums_stride, const Word* a, int64_t a_stride, const Word* b,
                   int64_t b_stride, int64_t steps) {
  Vec sum[kRows][kUsed];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kUsed; ++v) sum[r][v] = load(sums + r * sums_stride + v * kLanes);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 2
    for (int i = 0; i < Dtype::kParts; ++i) {
      Vec number[kRows];
      for (int r = 0; r < kRows; ++r) number[r] = broadcast(a[r * a_stride + s * Dtype::kParts + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kUsed; ++v) {
        const Vec line = Dtype::part(load(b + s * b_stride + v * kLanes), i);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sum[r][v] = Dtype::multiply(sum[r][v], number[r], line);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) std::memcpy(sums + r * sums_stride, sum[r], sizeof sum[r]);
}

// sums (rows, columns) += a (rows, steps) b (steps, columns); the number of columns is a multiple of 16.
template <class Dtype, int kRows = std::bit_floor(unsigned(kMaxRows))>
void multiply(int64_t rows, int64_t columns, float* sums, int64_t sums_stride, const Word* a,
              int64_t a_stride, const Word* b, int64_t b_stride, int64_t steps) {
  constexpr int kUsed = std::clamp(kHeld / kRows, kVecs, int(kPages) * kVecs);
  for (; rows >= kRows; rows -= kRows, sums += kRows * sums_stride, a += kRows * a_stride) {
    int64_t c = 0;
    for (; c + kUsed * kLanes <= columns; c += kUsed * kLanes)
      multiply_rows<Dtype, kUsed, kRows>(sums + c, sums_stride, a, a_stride, b + c, b_stride, steps);
    for (; c < columns; c += kColumns)
      multiply_rows<Dtype, kVecs, kRows>(sums + c, sums_stride, a, a_stride, b + c, b_stride, steps);
  }
  if constexpr (kRows > 1)
    multiply<Dtype, kRows - 1>(rows, columns, sums, sums_stride, a, a_stride, b, b_stride, steps);
}

#if defined(__AVX512F__)
// Word s of 16 rows becomes line s, for 16 words; ATen's function takes three times as long.
void transpose_block(float* lines, int64_t lines_stride, const float* rows, int64_t rows_stride) {
  __m512i a[16], b[16];
  for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_si512(rows + r * rows_stride);
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
  }
  for (int r = 0; r < 16; r += 4) {
    for (int i = 0; i < 2; ++i) {
      a[r + 2 * i] = _mm512_unpacklo_epi64(b[r + i], b[r + i + 2]);
      a[r + 2 * i + 1] = _mm512_unpackhi_epi64(b[r + i], b[r + i + 2]);
    }
  }
  // quarter q of a[4 i + j] holds word 4 q + j of rows 4 i to 4 i + 3
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_si512(lines + j * lines_stride, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    _mm512_storeu_si512(lines + (4 + j) * lines_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_si512(lines + (8 + j) * lines_stride, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    _mm512_storeu_si512(lines + (12 + j) * lines_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
}
#endif

// Word s of 16 rows becomes line s; the length of a row is a multiple of 8 words.
void transpose(float* lines, int64_t lines_stride, const float* rows, int64_t words, int64_t rows_stride) {
  int64_t s = 0;
#if defined(__AVX512F__)
  for (; s + 16 <= words; s += 16)
    transpose_block(lines + s * lines_stride, lines_stride, rows + s, rows_stride);
  if (s < words)
    at::vec::transpose_mxn<float, 16, 8>(rows + s, rows_stride, lines + s * lines_stride, lines_stride);
#else
  for (; s < words; s += 8)
    for (int64_t r = 0; r < 16; r += 8)
      at::vec::transpose_mxn<float, 8, 8>(rows + r * rows_stride + s, rows_stride,
                                          lines + s * lines_stride + r, lines_stride);
#endif
}

#if defined(__AMX_BF16__)
// Tiles 0 to 3 accumulate, 4 and 5 hold a and b; 6 and 7 hold the last half tile of a key that has one.
void configure_scores() {
  TileConfig config;
  config.set(0, 6, kTileRows, 64);
  config.set(6, 1, kTileRows, 32);
  config.set(7, 1, kTileRows / 2, 64);
  config.load();
}

void configure_sums(int64_t rows) {
  TileConfig config;
  config.set(0, 5, rows, 64);
  config.set(5, 1, kTileRows, 64);
  config.load();
}

// Scores of four pages, 64 x 16.
void score_tiles(float* scores, const Word* const* pages, const Word* query, int64_t steps) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t stride = steps * 4;
  int64_t s = 0;
  for (; s + kColumns <= steps; s += kColumns) {
    _tile_loadd(5, query + s * kColumns, 64);
    _tile_loadd(4, pages[0] + s, stride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(4, pages[1] + s, stride);
    _tile_dpbf16ps(1, 4, 5);
    _tile_loadd(4, pages[2] + s, stride);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(4, pages[3] + s, stride);
    _tile_dpbf16ps(3, 4, 5);
  }
  if (s < steps) {
    _tile_loadd(7, query + s * kColumns, 64);
    _tile_loadd(6, pages[0] + s, stride);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(6, pages[1] + s, stride);
    _tile_dpbf16ps(1, 6, 7);
    _tile_loadd(6, pages[2] + s, stride);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(6, pages[3] + s, stride);
    _tile_dpbf16ps(3, 6, 7);
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + kTileWords, 64);
  _tile_stored(2, scores + 2 * kTileWords, 64);
  _tile_stored(3, scores + 3 * kTileWords, 64);
}

// sums (rows, dim) += weights (rows, words) values (words, dim), up to 64 features at a time; the number of
// words is a multiple of 16.
void add_tiles(float* sums, const Word* weights, int64_t weights_stride, const Word* values, int64_t words,
               int64_t dim) {
  const int64_t stride = dim * 4;
  for (int64_t f = 0; f < dim; f += 64) {
    const int64_t tiles = std::min<int64_t>(4, (dim - f) / kColumns);
    float* sum = sums + f;
    _tile_loadd(0, sum, stride);
    if (tiles > 1) _tile_loadd(1, sum + kColumns, stride);
    if (tiles > 2) _tile_loadd(2, sum + 2 * kColumns, stride);
    if (tiles > 3) _tile_loadd(3, sum + 3 * kColumns, stride);
    for (int64_t w = 0; w < words; w += kColumns) {
      const Word* lines = values + w * dim + f;
      _tile_loadd(4, weights + w, weights_stride * 4);
      _tile_loadd(5, lines, stride);
      _tile_dpbf16ps(0, 4, 5);
      if (tiles > 1) {
        _tile_loadd(5, lines + kColumns, stride);
        _tile_dpbf16ps(1, 4, 5);
      }
      if (tiles > 2) {
        _tile_loadd(5, lines + 2 * kColumns, stride);
        _tile_dpbf16ps(2, 4, 5);
      }
      if (tiles > 3) {
        _tile_loadd(5, lines + 3 * kColumns, stride);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, sum, stride);
    if (tiles > 1) _tile_stored(1, sum + kColumns, stride);
    if (tiles > 2) _tile_stored(2, sum + 2 * kColumns, stride);
    if (tiles > 3) _tile_stored(3, sum + 3 * kColumns, stride);
  }
}
#endif

// ---- one call ----

// All inputs of a call; strides in elements.
template <class Dtype>
struct Call {
  using Element = typename Dtype::Element;
  const Element* query;
  int64_t query_head_stride, query_token_stride;
  Element* out;
  const Element* key_cache;
  const Element* value_cache;
  const int32_t* meta;
  const int32_t* pages;
  int64_t num_tokens, num_heads, num_kv_heads, dim, page_stride, meta_width, pages_per_row;
  float scale;

  int64_t group() const { return num_heads / num_kv_heads; }  // query heads that share a KV head
  int64_t steps() const { return dim / Dtype::kPair; }        // words of a key
  const int32_t* token(int64_t n) const { return meta + n * meta_width; }
  // The offset in a cache of the key or value of an index of a row: a page holds 16 of them, head after
  // head.
  int64_t place(int64_t row, uint64_t index, int64_t kv_head) const {
    return pages[row * pages_per_row + index / kPageLen] * page_stride +
           (kv_head * kPageLen + index % kPageLen) * dim;
  }
  int64_t len(int64_t n) const {
    int64_t path = 0;
    while (kPath + path < meta_width && token(n)[kPath + path] >= 0) ++path;
    return token(n)[kPrefix] + path;
  }
  // The index of the j-th key that a token sees.
  int64_t index(int64_t n, int64_t j) const {
    const int32_t* fields = token(n);
    return j < fields[kPrefix] ? j : fields[kPrefix] + fields[kPath + j - fields[kPrefix]];
  }
};

// Query rows [begin, end) of a KV head, counted token by token, all of one request.
struct Lanes {
  int64_t begin, end;
};

// Blocks of whole tokens of one request, up to 16 lanes; a token of more heads takes several blocks.
template <class Dtype>
std::vector<Lanes> blocks_of(const Call<Dtype>& call, int64_t num_tokens) {
  const int64_t group = call.group(), tokens = std::max<int64_t>(1, kColumns / group);
  std::vector<Lanes> blocks;
  for (int64_t n = 0; n < num_tokens;) {
    int64_t last = n + 1;
    while (last < std::min(n + tokens, num_tokens) && call.token(last)[kRow] == call.token(n)[kRow]) ++last;
    for (int64_t row = n * group; row < last * group; row += kColumns)
      blocks.push_back({row, std::min(row + kColumns, last * group)});
    n = last;
  }
  return blocks;
}

// Runs one block of one KV head after another. It keeps its memory, and the values that blocks of one head
// share.
template <class Dtype>
class Block {
  using Element = typename Dtype::Element;
  // the elements of a in `multiply`
  using Number = std::conditional_t<Dtype::kParts == Dtype::kPair, float, Element>;
  static constexpr int64_t kKeys = kColumns * Dtype::kPair;  // keys of 16 words
  static constexpr int64_t kGroup = kPages * kPageLen;       // keys scored together

 public:
  void run(const Call<Dtype>& call, int64_t kv_head, Lanes lanes, bool is_first) {
    const int64_t row = call.token(lanes.begin / call.group())[kRow];
    if (is_first || kv_head != kv_head_ || row != row_) laid_out_ = 0;
    call_ = &call;
    kv_head_ = kv_head;
    row_ = row;
    lanes_ = lanes;
    num_lanes_ = lanes.end - lanes.begin;
    is_tiled_ = std::is_same_v<Dtype, BFloat16> && amx_granted();
    measure();
    prefetch_first_pages();
    lay_out_queries();
    score();
    weigh();
    add_values();
    write();
#if defined(__AMX_BF16__)
    if (is_tiled_) _tile_release();
#endif
  }

 private:
  // Finds how many keys the lanes share, how many the longest lane sees, and the last index that any lane
  // sees.
  void measure() {
    shared_ = 0;
    longest_ = 0;
    last_index_ = -1;
    for (int64_t n = token_of(0); n <= token_of(num_lanes_ - 1); ++n) {
      const int64_t prefix = call_->token(n)[kPrefix], len = call_->len(n);
      shared_ = n == token_of(0) ? prefix : std::min(shared_, prefix);
      longest_ = std::max(longest_, len);
      last_index_ = std::max<int64_t>(last_index_, prefix - 1);
      for (int64_t j = prefix; j < len; ++j) last_index_ = std::max(last_index_, call_->index(n, j));
    }
    shared_ = shared_ / kKeys * kKeys;
    longest_ = round_up(longest_, kKeys);
  }

  int64_t token_of(int64_t lane) const { return (lanes_.begin + lane) / call_->group(); }
  const Element* at(const Element* cache, int64_t index) const {
    return cache + call_->place(row_, index, kv_head_);
  }
  // Prefetches the page that starts at `index`, if that is before `end`: pages lie apart, so the processor
  // does not do it by itself. Always inlined, because GCC 12 removes a call that only prefetches.
  [[gnu::always_inline]] void prefetch(const Element* cache, int64_t index, int64_t end) const {
    if (index >= end) return;
    const char* page = reinterpret_cast<const char*>(at(cache, index));
    for (int64_t byte = 0; byte < kPageLen * call_->dim * int64_t(sizeof(Element)); byte += 64)
      __builtin_prefetch(page + byte, 0, 2);
  }

  // Prefetches what `score_indices` and `lay_out_values` read before they prefetch for themselves.
  [[gnu::always_inline]] void prefetch_first_pages() const {
    if (laid_out_ > 0) return;
    for (const Element* cache : {call_->key_cache, call_->value_cache})
      for (int64_t p = 0; p < kPages; ++p) prefetch(cache, p * kPageLen, last_index_ + 1);
  }

  // Copies the queries lane after lane; for tiles, word s of all lanes becomes a line.
  void lay_out_queries() {
    const int64_t steps = call_->steps(), dim = call_->dim;
    query_.assign(steps * Dtype::kParts * kColumns, 0);
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const int64_t head = kv_head_ * call_->group() + (lanes_.begin + lane) % call_->group();
      const Element* from =
          call_->query + head * call_->query_head_stride + token_of(lane) * call_->query_token_stride;
      if (is_tiled_) {
        for (int64_t s = 0; s < steps; ++s)
          std::memcpy(&query_[s * kColumns + lane], from + s * Dtype::kPair, sizeof(Word));
      } else {
        copy_numbers(reinterpret_cast<Number*>(query_.data() + lane * steps * Dtype::kParts), from, dim);
      }
    }
  }

  static void copy_numbers(Number* to, const Element* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (std::is_same_v<Number, Element>)
        to[i] = from[i];
      else
        to[i] = Dtype::widen(from[i]);
    }
  }

  void score() {
#if defined(__AMX_BF16__)
    if (is_tiled_) configure_scores();
#endif
    scores_stride_ = padded(longest_);
    scores_.resize(std::max<size_t>(scores_.size(), scores_stride_ * kColumns));
    score_indices(scores_.data(), scores_stride_, 0, shared_);
    if (shared_ == longest_) return;
    const int64_t tail_stride = padded(last_index_ + 1 - shared_);
    tail_.resize(std::max<size_t>(tail_.size(), tail_stride * kColumns));
    score_indices(tail_.data(), tail_stride, shared_, last_index_ + 1);
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const int64_t n = token_of(lane), len = call_->len(n);
      float* scores = scores_.data() + lane * scores_stride_;
      for (int64_t j = shared_; j < len; ++j)
        scores[j] = tail_[lane * tail_stride + call_->index(n, j) - shared_];
      std::fill(scores + len, scores + longest_, -kInfinity);
    }
  }

  // A row length of at least `keys`: whole groups and some more, so that rows start in different cache
  // lines.
  static int64_t padded(int64_t keys) { return round_up(keys, kGroup) + kColumns; }

  // Scores the keys at indices [begin, end), where `begin` starts a page; writes up to a page more.
  void score_indices(float* scores, int64_t stride, int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; index += kGroup, scores += kGroup) {
      const Word* pages[kPages];
      for (int64_t p = 0; p < kPages; ++p) {
        pages[p] = reinterpret_cast<const Word*>(
            at(call_->key_cache, std::min(index + p * kPageLen, (end - 1) / kPageLen * kPageLen)));
        prefetch(call_->key_cache, index + (kPages + p) * kPageLen, end);
      }
      score_pages(scores, stride, pages, std::min(kPages, (end - index + kPageLen - 1) / kPageLen));
    }
  }

  void score_pages(float* scores, int64_t stride, const Word* const* pages, int64_t num_pages) {
    const int64_t steps = call_->steps();
#if defined(__AMX_BF16__)
    if (is_tiled_) {
      alignas(64) float by_key[kGroup * kColumns];
      score_tiles(by_key, pages, query_.data(), steps);
      for (int64_t p = 0; p < num_pages; ++p)
        transpose(scores + p * kPageLen, stride, by_key + p * kTileWords, kColumns, kColumns);
      return;
    }
#endif
    keys_.resize(std::max<size_t>(keys_.size(), steps * kGroup));
    for (int64_t p = 0; p < num_pages; ++p)
      transpose(keys_.data() + p * kPageLen, kGroup, reinterpret_cast<const float*>(pages[p]), steps,
                steps);
    for (int64_t lane = 0; lane < num_lanes_; ++lane)
      std::fill_n(scores + lane * stride, num_pages * kPageLen, 0.0f);
    const auto* keys = reinterpret_cast<const Word*>(keys_.data());
    multiply<Dtype>(num_lanes_, num_pages * kPageLen, scores, stride, query_.data(), steps * Dtype::kParts,
                    keys, kGroup, steps);
  }

  // Computes the weights of every lane and their total.
  void weigh() {
    const Vec scale = Vec{} + call_->scale;
    weights_stride_ = scores_stride_ / Dtype::kPair * Dtype::kParts;
    weights_.resize(std::max<size_t>(weights_.size(), weights_stride_ * kColumns));
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const float* scores = scores_.data() + lane * scores_stride_;
      Number* weights = reinterpret_cast<Number*>(weights_.data() + lane * weights_stride_);
      Vec highest = Vec{} + std::numeric_limits<float>::lowest();
      for (int64_t j = 0; j < longest_; j += kLanes) highest = maximum(highest, load(scores + j) * scale);
      const auto larger = [](float a, float b) { return a > b || a != a ? a : b; };  // keeps NaN
      const Vec most = Vec{} + of_all(highest, larger);
      Vec total = {}, other = {};  // in turns, so that no addition waits for the one before
      for (int64_t j = 0; j < longest_; j += kLanes) {
        const Vec weight = Dtype::nearest(exp_u20(load(scores + j) * scale - most));
        if constexpr (std::is_same_v<Number, float>)
          std::memcpy(weights + j, &weight, sizeof weight);
        else
          store_rounded(weights + j, weight);
        const Vec sum = total + weight;
        total = other;
        other = sum;
      }
      totals_[lane] = of_all(total + other, std::plus<float>());
    }
  }

  static void store_rounded(Element* to, Vec value) {
    const auto rounded = Dtype::round(value);
    std::memcpy(to, &rounded, sizeof rounded);
  }

  void add_values() {
    sums_.assign(num_lanes_ * call_->dim, 0.0f);
    values_.resize(std::max<size_t>(values_.size(), shared_ * words_per_key()));
    lay_out_values(values_.data() + laid_out_ * words_per_key(), token_of(0), laid_out_, shared_);
    laid_out_ = std::max(laid_out_, shared_);
    add_words(0, num_lanes_, 0, values_.data(), shared_ / Dtype::kPair);
    tail_values_.resize(std::max<size_t>(tail_values_.size(), (longest_ - shared_) * words_per_key()));
    for (int64_t lane = 0; lane < num_lanes_ && shared_ < longest_;) {
      const int64_t n = token_of(lane), len = call_->len(n);
      const int64_t next = std::min(num_lanes_, (n + 1) * call_->group() - lanes_.begin);
      lay_out_values(tail_values_.data(), n, shared_, len);
      add_words(lane, next, shared_ / Dtype::kPair, tail_values_.data(),
                round_up(len - shared_, kKeys) / Dtype::kPair);
      lane = next;
    }
  }

  int64_t words_per_key() const { return call_->dim / Dtype::kPair; }

  // Lays out the values of keys [begin, end) of a token's sequence as lines of words, with zeros to the end
  // of the last block; `begin` starts a block.
  void lay_out_values(Word* values, int64_t n, int64_t begin, int64_t end) {
    const int64_t in_pages = std::min<int64_t>(end, call_->token(n)[kPrefix]) / kPageLen * kPageLen;
    for (; begin < in_pages; begin += kPageLen, values += kPageLen * words_per_key()) {
      prefetch(call_->value_cache, begin + kPages * kPageLen, in_pages);
      const Element* page = at(call_->value_cache, begin);
      for (int64_t j = 0; j < kPageLen; j += Dtype::kPair)
        lay_out_words(values + j * words_per_key(), [&](int64_t i) { return page + (j + i) * call_->dim; });
    }
    zeros_.resize(std::max<size_t>(zeros_.size(), call_->dim));
    for (int64_t j = begin; j < round_up(end, kKeys);
         j += Dtype::kPair, values += Dtype::kPair * words_per_key())
      lay_out_words(values, [&](int64_t i) {
        return j + i < end ? at(call_->value_cache, call_->index(n, j + i)) : zeros_.data();
      });
  }

  // One line of words: of each feature the value `row(0)` and, in bf16, `row(1)`.
  template <class Row>
  void lay_out_words(Word* values, Row row) {
    const Element* rows[Dtype::kPair];
    for (int i = 0; i < Dtype::kPair; ++i) rows[i] = row(i);
    for (int64_t f = 0, dim = call_->dim; f < dim; f += kLanes) {
      const WordVec words = Dtype::line(rows, f);
      std::memcpy(values + f, &words, sizeof words);
    }
  }

  // Adds values to the sums of lanes [first, last); their weights start at word `begin`.
  void add_words(int64_t first, int64_t last, int64_t begin, const Word* values, int64_t words) {
    const int64_t dim = call_->dim;
    const Word* weights = weights_.data() + first * weights_stride_ + begin * Dtype::kParts;
    float* sums = sums_.data() + first * dim;
#if defined(__AMX_BF16__)
    if (is_tiled_) {
      configure_sums(last - first);
      return add_tiles(sums, weights, weights_stride_, values, words, dim);
    }
#endif
    for (int64_t w = 0; w < words; w += kL1Words) {
      const int64_t steps = std::min(kL1Words, words - w);
      multiply<Dtype>(last - first, dim, sums, dim, weights + w * Dtype::kParts, weights_stride_,
                      values + w * dim, dim, steps);
    }
  }

  void write() {
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const int64_t head = kv_head_ * call_->group() + (lanes_.begin + lane) % call_->group();
      Element* out = call_->out + (token_of(lane) * call_->num_heads + head) * call_->dim;
      // a token that sees nothing yields zeros
      const Vec inverse = Vec{} + (totals_[lane] == 0.0f ? 0.0f : 1.0f / totals_[lane]);
      for (int64_t f = 0; f < call_->dim; f += kLanes)
        store_rounded(out + f, load(sums_.data() + lane * call_->dim + f) * inverse);
    }
  }

  const Call<Dtype>* call_ = nullptr;
  Lanes lanes_ = {};
  int64_t kv_head_ = 0, num_lanes_ = 0, row_ = 0, last_index_ = 0;
  int64_t laid_out_ = 0;  // keys of this head and row whose values are laid out already
  int64_t shared_ = 0;    // keys that all lanes see, in whole blocks
  int64_t longest_ = 0;   // keys that the longest lane sees, in whole blocks
  int64_t scores_stride_ = 0, weights_stride_ = 0;
  bool is_tiled_ = false;
  std::vector<Word> query_, weights_, values_, tail_values_;
  std::vector<float> keys_, scores_, tail_, sums_;
  std::vector<Element> zeros_;
  float totals_[kColumns];
};

// Not inlined: GCC would look up the thread's block at every access, in the innermost loops.
template <class Dtype>
[[gnu::noipa]] Block<Dtype>& block_of_thread() {
  thread_local Block<Dtype> block;
  return block;
}

// Stores fresh keys or values in a cache. Padding has no index and is not stored.
template <class Dtype>
void append_(const Call<Dtype>& call, const at::Tensor& fresh, at::Tensor& cache) {
  using Element = typename Dtype::Element;
  const Element* from = static_cast<const Element*>(fresh.const_data_ptr());
  Element* to = static_cast<Element*>(cache.mutable_data_ptr());
  for (int64_t n = 0; n < call.num_tokens; ++n) {
    const int32_t* fields = call.token(n);
    if (fields[kIndex] < 0) continue;
    Element* slot = to + call.place(fields[kRow], fields[kIndex], 0);
    for (int64_t g = 0; g < call.num_kv_heads; ++g) {
      std::memcpy(slot + g * kPageLen * call.dim, from + g * fresh.stride(1) + n * fresh.stride(2),
                  call.dim * sizeof(Element));
    }
  }
}

template <class Dtype>
at::Tensor run(const Attention& attention) {
  const auto& [query, key, value, key_cache, value_cache, meta, pages, scale] = attention;
  using Element = typename Dtype::Element;
  const int64_t num_heads = query.size(1);
  const int64_t num_tokens = query.size(2);
  const int64_t dim = query.size(3);
  const int64_t num_kv_heads = key.size(1);
  at::Tensor out = empty({1, num_tokens, num_heads, dim}, query.options());
  const Call<Dtype> call{
      .query = static_cast<const Element*>(query.const_data_ptr()),
      .query_head_stride = query.stride(1),
      .query_token_stride = query.stride(2),
      .out = static_cast<Element*>(out.mutable_data_ptr()),
      .key_cache = static_cast<const Element*>(key_cache.const_data_ptr()),
      .value_cache = static_cast<const Element*>(value_cache.const_data_ptr()),
      .meta = meta.const_data_ptr<int32_t>(),
      .pages = pages.const_data_ptr<int32_t>(),
      .num_tokens = num_tokens,
      .num_heads = num_heads,
      .num_kv_heads = num_kv_heads,
      .dim = dim,
      .page_stride = key_cache.stride(0),
      .meta_width = meta.size(1),
      .pages_per_row = pages.size(1),
      .scale = float(scale),
  };
  append_(call, key, key_cache);
  append_(call, value, value_cache);
  int64_t real = num_tokens;  // padding comes last, sees nothing and yields zeros
  while (real > 0 && call.token(real - 1)[kIndex] < 0) --real;
  std::fill(call.out + real * num_heads * dim, call.out + num_tokens * num_heads * dim, Element(0));
  const std::vector<Lanes> blocks = blocks_of(call, real);
  const int64_t num_blocks = int64_t(blocks.size());
  parallel_for(num_kv_heads * num_blocks, std::max<int64_t>(1, num_blocks / 4),
               [&](int64_t begin, int64_t end) {
                 Block<Dtype>& block = block_of_thread<Dtype>();
                 for (int64_t unit = begin; unit < end; ++unit)
                   block.run(call, unit / num_blocks, blocks[unit % num_blocks], unit == begin);
               });
  return out;
}

}  // namespace

at::Tensor ygg::attend(const Attention& attention) {
  const auto& [query, key, value, key_cache, value_cache, meta, pages, scale] = attention;
  TORCH_CHECK(query.size(0) == 1 && query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1,
              "attend: query, key and value are (1, heads, N, F)");
  TORCH_CHECK(query.size(3) % kPageLen == 0, "attend: head dimension ", query.size(3),
              " is not a multiple of ", kPageLen);
  const at::IntArrayRef page = key_cache.sizes().slice(1), strides = key_cache.strides().slice(1);
  TORCH_CHECK(page.equals({key.size(1), kPageLen, key.size(3)}) && key_cache.sizes() == value_cache.sizes(),
              "attend: caches are (pages, KV heads, ", kPageLen, ", F), got ", key_cache.sizes(), " and ",
              value_cache.sizes());
  TORCH_CHECK(strides.equals({kPageLen * key.size(3), key.size(3), 1}) &&
                  key_cache.strides() == value_cache.strides(),
              "attend: pages are contiguous");
  TORCH_CHECK(meta.is_contiguous() && pages.is_contiguous(),
              "attend: metadata and page tables are contiguous");
  if (query.scalar_type() == at::kFloat) return run<Float32>(attention);
  TORCH_CHECK(query.scalar_type() == at::kBFloat16, "attend: dtype ", query.scalar_type(),
              " is neither float32 nor bfloat16");
  return run<BFloat16>(attention);
}

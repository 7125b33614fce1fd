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
// How the products were chosen. Up to 16 query rows make a block. Pages hold keys and values in the order
// in which the products read them (page_order.py), so keys fill the vector even for one query. A weighted
// sum takes the keys in the order of the sequence, with weight zero past the end. Keys that all rows of a
// block share are multiplied once for all of them; the last keys of a tree node are gathered in the order
// of its path and multiplied for it alone, by the same instructions. Softmax numerators are rounded to the
// cache's dtype. Slower or inexact: all tree nodes as columns with zero weights (pairs of keys share an
// instruction, so a node's place would change bits).
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
#include "page_order.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace ygg;

constexpr int64_t kPages = 4;  // pages that are multiplied together
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// ---- products: sums += a b, where b is lines of words and a is words (fp32 numbers for two products) ----

// Vectors of sums in registers; fewer do not hide the latency of an addition.
constexpr int kHeld = kMaxRows >= 8 ? 16 : 8;

// The keys of several pages: line s has the s-th word of every key.
struct KeyLines {
  const Word* const* pages;
  const Word* at(int64_t s, int64_t column) const {
    return pages[column / kColumns] + s * kColumns + column % kColumns;
  }
};

// The values of several pages: line s has the features of the s-th value, or in bf16 of the s-th pair.
template <class Dtype>
struct ValueLines {
  static constexpr int64_t kPerPage = kPageLen / Dtype::kPair;
  const Word* const* pages;
  int64_t dim;
  const Word* at(int64_t s, int64_t column) const {
    return pages[s / kPerPage] + s % kPerPage * dim + column;
  }
};

// Rows of `sums` and `a` start `..._stride` elements apart. Strides are arguments of their own, not fields
// of a record: so GCC compiles these functions for constant strides, which saves 4 % of attention's time.

// kRows rows times kUsed vectors of each line, from `column` on.
template <class Dtype, int kUsed, int kRows, class Lines>
void multiply_rows(float* sums, int64_t sums_stride, const Word* a, int64_t a_stride, Lines b,
                   int64_t column, int64_t steps) {
  Vec sum[kRows][kUsed];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kUsed; ++v) sum[r][v] = load(sums + r * sums_stride + column + v * kLanes);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 2
    for (int i = 0; i < Dtype::kParts; ++i) {
      Vec number[kRows];
      for (int r = 0; r < kRows; ++r) number[r] = broadcast(a[r * a_stride + s * Dtype::kParts + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kUsed; ++v) {
        const Vec line = Dtype::part(load(b.at(s, column + v * kLanes)), i);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sum[r][v] = Dtype::multiply(sum[r][v], number[r], line);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) std::memcpy(sums + r * sums_stride + column, sum[r], sizeof sum[r]);
}

// sums (rows, columns) += a (rows, steps) b (steps, columns); the number of columns is a multiple of 16.
template <class Dtype, int kRows = std::bit_floor(unsigned(kMaxRows)), class Lines>
void multiply(int64_t rows, int64_t columns, float* sums, int64_t sums_stride, const Word* a,
              int64_t a_stride, Lines b, int64_t steps) {
  constexpr int kUsed = std::clamp(kHeld / kRows, kVecs, int(kPages) * kVecs);
  for (; rows >= kRows; rows -= kRows, sums += kRows * sums_stride, a += kRows * a_stride) {
    int64_t c = 0;
    for (; c + kUsed * kLanes <= columns; c += kUsed * kLanes)
      multiply_rows<Dtype, kUsed, kRows>(sums, sums_stride, a, a_stride, b, c, steps);
    for (; c < columns; c += kColumns)
      multiply_rows<Dtype, kVecs, kRows>(sums, sums_stride, a, a_stride, b, c, steps);
  }
  if constexpr (kRows > 1)
    multiply<Dtype, kRows - 1>(rows, columns, sums, sums_stride, a, a_stride, b, steps);
}

#if defined(__AMX_BF16__)
// Tiles 0 to 3 accumulate, 4 and 5 hold b and a; 6 and 7 hold them where a key ends with half a tile.
void configure_scores(int64_t rows) {
  TileConfig config;
  config.set(0, 4, rows, 64);
  config.set(4, 1, kTileRows, 64);
  config.set(5, 1, rows, 64);
  config.set(6, 1, kTileRows / 2, 64);
  config.set(7, 1, rows, 32);
  config.load();
}

void configure_sums(int64_t rows) {
  TileConfig config;
  config.set(0, 5, rows, 64);
  config.set(5, 1, kTileRows, 64);
  config.load();
}

// Scores of the lanes with four pages, (rows, 64).
void score_tiles(float* scores, int64_t scores_stride, const Word* const* pages, const Word* query,
                 int64_t steps) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t stride = steps * 4;
  int64_t s = 0;
  for (; s + kColumns <= steps; s += kColumns) {
    _tile_loadd(5, query + s, stride);
    _tile_loadd(4, pages[0] + s * kColumns, 64);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(4, pages[1] + s * kColumns, 64);
    _tile_dpbf16ps(1, 5, 4);
    _tile_loadd(4, pages[2] + s * kColumns, 64);
    _tile_dpbf16ps(2, 5, 4);
    _tile_loadd(4, pages[3] + s * kColumns, 64);
    _tile_dpbf16ps(3, 5, 4);
  }
  if (s < steps) {
    _tile_loadd(7, query + s, stride);
    _tile_loadd(6, pages[0] + s * kColumns, 64);
    _tile_dpbf16ps(0, 7, 6);
    _tile_loadd(6, pages[1] + s * kColumns, 64);
    _tile_dpbf16ps(1, 7, 6);
    _tile_loadd(6, pages[2] + s * kColumns, 64);
    _tile_dpbf16ps(2, 7, 6);
    _tile_loadd(6, pages[3] + s * kColumns, 64);
    _tile_dpbf16ps(3, 7, 6);
  }
  _tile_stored(0, scores, scores_stride * 4);
  _tile_stored(1, scores + kColumns, scores_stride * 4);
  _tile_stored(2, scores + 2 * kColumns, scores_stride * 4);
  _tile_stored(3, scores + 3 * kColumns, scores_stride * 4);
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
  // The offset in a cache of the page of an index of a row, for one head.
  int64_t page(int64_t row, uint64_t index, int64_t kv_head) const {
    return pages[row * pages_per_row + index / kPageLen] * page_stride + kv_head * kPageLen * dim;
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

// Runs one block of one KV head after another. It keeps its memory, and for tiles the values that blocks of
// one head share.
template <class Dtype>
class Block {
  using Element = typename Dtype::Element;
  using Order = PageOrder<Element>;
  // the elements of a in `multiply`
  using Number = std::conditional_t<Dtype::kParts == Dtype::kPair, float, Element>;
  static constexpr int64_t kKeys = kColumns * Dtype::kPair;  // keys of 16 words
  static constexpr int64_t kGroup = kPages * kPageLen;
  static constexpr int64_t kLines = ValueLines<Dtype>::kPerPage;

 public:
  void run(const Call<Dtype>& call, int64_t kv_head, Lanes lanes, bool is_first) {
    const int64_t row = call.token(lanes.begin / call.group())[kRow];
    if (is_first || kv_head != kv_head_ || row != row_) copied_ = 0;
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
  const Word* page(const Element* cache, int64_t index) const {
    return reinterpret_cast<const Word*>(cache + call_->page(row_, index, kv_head_));
  }
  // Prefetches the page that starts at `index`, if that is before `end`: pages lie apart, so the processor
  // does not do it by itself. Always inlined, because GCC 12 removes a call that only prefetches.
  [[gnu::always_inline]] void prefetch(const Element* cache, int64_t index, int64_t end) const {
    if (index >= end) return;
    const char* first = reinterpret_cast<const char*>(page(cache, index));
    for (int64_t byte = 0; byte < kPageLen * call_->dim * int64_t(sizeof(Element)); byte += 64)
      prefetch_line(first + byte);
  }

  // Prefetches what `score_indices` and `add_shared` read before they prefetch for themselves.
  [[gnu::always_inline]] void prefetch_first_pages() const {
    for (const Element* cache : {call_->key_cache, call_->value_cache})
      for (int64_t p = 0; p < kPages; ++p) prefetch(cache, p * kPageLen, last_index_ + 1);
  }

  // Copies the queries lane after lane.
  void lay_out_queries() {
    const int64_t steps = call_->steps(), dim = call_->dim;
    query_.resize(steps * Dtype::kParts * kColumns);
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const int64_t head = kv_head_ * call_->group() + (lanes_.begin + lane) % call_->group();
      const Element* from =
          call_->query + head * call_->query_head_stride + token_of(lane) * call_->query_token_stride;
      copy_numbers(reinterpret_cast<Number*>(query_.data() + lane * steps * Dtype::kParts), from, dim);
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
    if (is_tiled_) configure_scores(num_lanes_);
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

  // Scores the keys at indices [begin, end), where `begin` starts a page; writes whole groups of pages.
  void score_indices(float* scores, int64_t stride, int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; index += kGroup, scores += kGroup) {
      const Word* pages[kPages];
      for (int64_t p = 0; p < kPages; ++p) {
        pages[p] = page(call_->key_cache, std::min(index + p * kPageLen, end - 1));
        prefetch(call_->key_cache, index + (kPages + p) * kPageLen, end);
      }
      score_pages(scores, stride, pages, std::min(kPages, (end - index + kPageLen - 1) / kPageLen));
    }
  }

  void score_pages(float* scores, int64_t stride, const Word* const* pages, int64_t num_pages) {
    const int64_t steps = call_->steps();
#if defined(__AMX_BF16__)
    if (is_tiled_) return score_tiles(scores, stride, pages, query_.data(), steps);
#endif
    for (int64_t lane = 0; lane < num_lanes_; ++lane)
      std::fill_n(scores + lane * stride, num_pages * kPageLen, 0.0f);
    multiply<Dtype>(num_lanes_, num_pages * kPageLen, scores, stride, query_.data(), steps * Dtype::kParts,
                    KeyLines{pages}, steps);
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
    add_shared();
    for (int64_t lane = 0; lane < num_lanes_ && shared_ < longest_;) {
      const int64_t n = token_of(lane), len = call_->len(n);
      const int64_t next = std::min(num_lanes_, (n + 1) * call_->group() - lanes_.begin);
      gather_tail(n, len);
      add_lines(lane, next, shared_, tail_values_.data(), round_up(len - shared_, kKeys) / Dtype::kPair);
      lane = next;
    }
  }

  // Adds the values of the keys that all lanes share.
  void add_shared() {
#if defined(__AMX_BF16__)
    if (is_tiled_) {
      copy_shared();
      return add_lines(0, num_lanes_, 0, values_.data(), shared_ / Dtype::kPair);
    }
#endif
    for (int64_t index = 0; index < shared_; index += kGroup) {
      const Word* pages[kPages];
      const int64_t count = std::min(kPages, (shared_ - index) / kPageLen);
      for (int64_t p = 0; p < count; ++p) {
        pages[p] = page(call_->value_cache, index + p * kPageLen);
        prefetch(call_->value_cache, index + (kPages + p) * kPageLen, shared_);
      }
      add_pages(0, num_lanes_, index, pages, count * kLines);
    }
  }

  // Copies pages of values one after another: a tile takes those of two pages. Blocks of one head share the
  // copy.
  void copy_shared() {
    const int64_t page_words = kLines * call_->dim;
    values_.resize(std::max<size_t>(values_.size(), shared_ / kPageLen * page_words));
    for (; copied_ < shared_; copied_ += kPageLen) {
      prefetch(call_->value_cache, copied_ + kPages * kPageLen, shared_);
      std::memcpy(values_.data() + copied_ / kPageLen * page_words, page(call_->value_cache, copied_),
                  page_words * sizeof(Word));
    }
  }

  // Copies the values of a token's keys from `shared_` to `len` in the order of its sequence, with zeros to
  // the end of the last block.
  void gather_tail(int64_t n, int64_t len) {
    const int64_t dim = call_->dim, in_lines = std::min<int64_t>(len, call_->token(n)[kPrefix]);
    tail_values_.assign(round_up(len - shared_, kKeys) / Dtype::kPair * dim, 0);
    Word* to = tail_values_.data();
    int64_t j = shared_;
    for (; j + Dtype::kPair <= in_lines; j += Dtype::kPair, to += dim)
      std::memcpy(to, value_line(j), dim * sizeof(Word));
    for (; j < len; ++j) {
      const int64_t index = call_->index(n, j);
      Order::copy_value(to, j % kPageLen, value_line(index), index % kPageLen, dim);
      if (j % Dtype::kPair == Dtype::kPair - 1) to += dim;
    }
  }

  // The line that has the value of an index.
  const Word* value_line(int64_t index) const {
    return page(call_->value_cache, index) + Order::value_line(index % kPageLen, call_->dim);
  }

  // Adds lines of values, one after another in memory, to the sums of lanes [first, last); their weights
  // start at key `begin`.
  void add_lines(int64_t first, int64_t last, int64_t begin, const Word* values, int64_t lines) {
#if defined(__AMX_BF16__)
    if (is_tiled_) {
      configure_sums(last - first);
      return add_tiles(sums_.data() + first * call_->dim, weights_of(first, begin), weights_stride_, values,
                       lines, call_->dim);
    }
#endif
    for (int64_t line = 0; line < lines; line += kPages * kLines) {
      const Word* pages[kPages];
      const int64_t count = std::min(kPages * kLines, lines - line);
      for (int64_t p = 0; p < count / kLines; ++p) pages[p] = values + (line + p * kLines) * call_->dim;
      add_pages(first, last, begin + line * Dtype::kPair, pages, count);
    }
  }

  // The same for lines in up to four pages, on vectors.
  void add_pages(int64_t first, int64_t last, int64_t begin, const Word* const* pages, int64_t lines) {
    const int64_t dim = call_->dim;
    multiply<Dtype>(last - first, dim, sums_.data() + first * dim, dim, weights_of(first, begin),
                    weights_stride_, ValueLines<Dtype>{pages, dim}, lines);
  }

  const Word* weights_of(int64_t lane, int64_t key) const {
    return weights_.data() + lane * weights_stride_ + key / Dtype::kPair * Dtype::kParts;
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
  int64_t copied_ = 0;    // keys of this head and row whose values `values_` has
  int64_t shared_ = 0;    // keys that all lanes see, in whole blocks
  int64_t longest_ = 0;   // keys that the longest lane sees, in whole blocks
  int64_t scores_stride_ = 0, weights_stride_ = 0;
  bool is_tiled_ = false;
  std::vector<Word> query_, weights_, values_, tail_values_;
  std::vector<float> scores_, tail_, sums_;
  float totals_[kColumns];
};

// Not inlined: GCC would look up the thread's block at every access, in the innermost loops.
template <class Dtype>
[[gnu::noipa]] Block<Dtype>& block_of_thread() {
  thread_local Block<Dtype> block;
  return block;
}

// Stores fresh keys and values in their pages. Padding has no index and is not stored.
template <class Dtype>
void append_(const Call<Dtype>& call, const Attention& attention) {
  using Element = typename Dtype::Element;
  using Order = PageOrder<Element>;
  const auto* keys = static_cast<const Element*>(attention.key.const_data_ptr());
  const auto* values = static_cast<const Element*>(attention.value.const_data_ptr());
  auto* key_cache = static_cast<Element*>(attention.key_cache.mutable_data_ptr());
  auto* value_cache = static_cast<Element*>(attention.value_cache.mutable_data_ptr());
  for (int64_t n = 0; n < call.num_tokens; ++n) {
    const int32_t* fields = call.token(n);
    if (fields[kIndex] < 0) continue;
    const int64_t slot = fields[kIndex] % kPageLen;
    for (int64_t g = 0; g < call.num_kv_heads; ++g) {
      const int64_t page = call.page(fields[kRow], fields[kIndex], g);
      const Element* key = keys + g * attention.key.stride(1) + n * attention.key.stride(2);
      Order::store_key(reinterpret_cast<Word*>(key_cache + page), slot, key, call.dim);
      const Element* value = values + g * attention.value.stride(1) + n * attention.value.stride(2);
      Order::store_value(reinterpret_cast<Word*>(value_cache + page), slot, value, call.dim);
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
  append_(call, attention);
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

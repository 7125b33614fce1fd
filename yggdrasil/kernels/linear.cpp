// ygg::packed_linear: x W^T + b over a weight packed once, with rows that are bitwise independent of how many rows there are.
//
// A packed weight is a sequence of panels of 16 output columns. A panel holds one line of 16 words (64 bytes) per step of k; a word is 32 bits: one fp32
// weight, or two bf16 weights of consecutive k. `x` is read in the same words, so one loop serves both dtypes. bf16 pads k to 32: 16 lines are one AMX tile.
//
//            panel 0 (columns 0..15)      panel 1 (columns 16..31)
//   step 0   [ c0 | c1 | ... | c15 ]      [ c16 | ... | c31 ]
//   step 1   [ c0 | c1 | ... | c15 ]      ...
//
// Exactness: each output element is one accumulator that takes the steps in order, through one instruction sequence chosen when this file is compiled (and, for
// AMX, once per process). Row blocks, panel groups and threads only decide which elements are computed side by side. Where the rows do not fill the last block,
// the block moves up and computes some rows twice, to the same bits.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "operators.h"

namespace {

constexpr int kColumns = 16;      // output columns of a panel
constexpr int kBf16Padding = 32;  // k of a bf16 weight is padded to this
constexpr int64_t kMinThreadBytes = 512 << 10;  // one thread reads less than this from L2 faster than two share it

typedef uint32_t Word __attribute__((may_alias));

struct Product {
  const Word* x;       // (rows, steps), or tiled for AMX: (tiles of rows, steps / 16, rows of a tile, 16)
  const Word* packed;  // (panels, steps, 16)
  const void* bias;    // (out_features) in the dtype of the product, or null
  void* out;           // (rows, out_features)
  int64_t rows, steps, out_features;

  int64_t panel_words() const { return steps * kColumns; }
};

// ---- vectors of the native width ----

#if defined(__AVX512F__)
constexpr int kLanes = 16, kMaxRows = 8;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8, kMaxRows = 4;
#else
constexpr int kLanes = 4, kMaxRows = 2;
#endif
constexpr int kVecs = kColumns / kLanes;  // vectors per line of a panel
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));

inline Vec load(const void* address) {
  Vec value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

inline Vec broadcast(uint32_t bits) { return Vec{} + std::bit_cast<float>(bits); }

inline Vec multiply_add(Vec a, Vec b, Vec sum) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, sum);
#else
  return a * b + sum;
#endif
}

struct Float32 {
  using Element = float;
  static Vec round(Vec value) { return value; }
  static float widen(Element value) { return value; }
  static Vec step(Vec sum, uint32_t x, Vec weight) { return multiply_add(broadcast(x), weight, sum); }
};

struct BFloat16 {
  using Element = uint16_t;
  typedef Element Narrow __attribute__((vector_size(2 * kLanes)));
  static Narrow round(Vec value) {  // to nearest even
    const WordVec bits = (WordVec)value;
    const WordVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? WordVec{} + 0x7fc0 : rounded, Narrow);
  }
  static float widen(Element value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }
  static Vec step(Vec sum, uint32_t x, Vec weight) {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)weight);
#else
    sum = multiply_add(broadcast(x << 16), (Vec)((WordVec)weight << 16), sum);
    return multiply_add(broadcast(x & 0xffff0000u), (Vec)((WordVec)weight & 0xffff0000u), sum);
#endif
  }
};

// Adds the bias to `rows` x 16 sums, `stride` floats apart, and writes them rounded; a panel's padding is dropped.
template <class Dtype>
void store_panel(const Product& product, const float* sums, int64_t stride, int64_t row, int64_t rows, int64_t panel) {
  using Element = typename Dtype::Element;
  const int64_t first = panel * kColumns, columns = std::min<int64_t>(kColumns, product.out_features - first);
  alignas(64) float bias[kColumns] = {};
  if (product.bias)
    for (int64_t c = 0; c < columns; ++c) bias[c] = Dtype::widen(static_cast<const Element*>(product.bias)[first + c]);
  Element* out = static_cast<Element*>(product.out) + row * product.out_features + first;
  for (int64_t r = 0; r < rows; ++r, sums += stride, out += product.out_features) {
    Element rounded[kColumns];
    for (int v = 0; v < kVecs; ++v) {
      const auto part = Dtype::round(load(sums + v * kLanes) + load(bias + v * kLanes));
      std::memcpy(rounded + v * kLanes, &part, sizeof part);
    }
    std::memcpy(out, rounded, columns == kColumns ? sizeof rounded : columns * sizeof(Element));
  }
}

// ---- body for vector registers: kRows x kPanels accumulators ----

template <class Dtype, int kRows, int kPanels>
void compute_block(const Product& product, int64_t row, int64_t panel, const Word* ahead, int ahead_panels) {
  const int64_t steps = product.steps, stride = product.panel_words();
  const Word* x = product.x + row * steps;
  const Word* weight = product.packed + panel * stride;
  Vec sums[kRows][kPanels][kVecs] = {};
  for (int64_t s = 0; s < steps; ++s) {
    for (int p = 0; p < ahead_panels; ++p) __builtin_prefetch(ahead + p * stride + s * kColumns, 0, 2);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec line = load(weight + p * stride + s * kColumns + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r][p][v] = Dtype::step(sums[r][p][v], x[r * steps + s], line);
      }
    }
  }
  for (int p = 0; p < kPanels; ++p)
    store_panel<Dtype>(product, reinterpret_cast<const float*>(sums[0][p]), kPanels * kColumns, row, kRows, panel + p);
}

// Every row over the panels [panel, end), kPanels at a time. A group is read from memory by its first row block and from L2 by the others, which meanwhile
// fetch the next group, so that memory is never idle.
template <class Dtype, int kRows, int kPanels>
void compute_panels(const Product& product, int64_t panel, int64_t end) {
  const int64_t blocks = (product.rows + kRows - 1) / kRows;
  const int share = static_cast<int>((kPanels + blocks - 1) / blocks);
  for (; panel + kPanels <= end; panel += kPanels) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t row = std::min(b * kRows, product.rows - kRows), next = panel + kPanels + b * share;
      const int ahead_panels = static_cast<int>(std::clamp<int64_t>(std::min(end, panel + 2 * kPanels) - next, 0, share));
      compute_block<Dtype, kRows, kPanels>(product, row, panel, product.packed + next * product.panel_words(), ahead_panels);
    }
  }
  if constexpr (kPanels > 1) compute_panels<Dtype, kRows, kPanels / 2>(product, panel, end);
}

template <class Dtype, int kRows = kMaxRows>
void compute_vectors(const Product& product, int64_t begin, int64_t end) {
  constexpr int kPanels = kLanes < 16 ? 1 : kRows > 6 ? 3 : 4;
  const int64_t blocks = (product.rows + kMaxRows - 1) / kMaxRows, rows_per_block = (product.rows + blocks - 1) / blocks;
  if (kRows == rows_per_block) return compute_panels<Dtype, kRows, kPanels>(product, begin, end);
  if constexpr (kRows > 1) compute_vectors<Dtype, kRows - 1>(product, begin, end);
}

// ---- body for AMX tiles: 16 rows x 4 panels, or 32 rows x 2 panels ----

constexpr int kTileRows = 16, kTileWords = kTileRows * kColumns;

#if defined(__AMX_BF16__)
bool amx_granted() {  // Linux grants the tile registers per process, on request
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// Tiles 0-3 accumulate, 4-5 hold x, 6-7 hold weights.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};

  explicit TileConfig(int64_t x_rows) {
    std::fill_n(rows, 6, static_cast<uint8_t>(x_rows));
    std::fill_n(rows + 6, 2, static_cast<uint8_t>(kTileRows));
  }
};

struct TileSums {
  alignas(64) float tile[4][kTileWords];

  void store() {
    _tile_stored(0, tile[0], 64);
    _tile_stored(1, tile[1], 64);
    _tile_stored(2, tile[2], 64);
    _tile_stored(3, tile[3], 64);
  }
};

// One touch per tile, two tiles ahead, wakes the processor's own prefetcher; touching every line is slower, since the touches compete with the tile loads for
// the same line buffers (measured on Granite Rapids).
inline void prefetch(const Word* weight) { __builtin_prefetch(weight + 2 * kTileWords, 0, 2); }

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// All rows (at most 16) of the panels [panel, min(panel + 4, end)); a missing panel repeats the last.
void compute_16_rows(const Product& product, int64_t panel, int64_t end) {
  const int64_t stride = product.panel_words(), last = std::min<int64_t>(3, end - panel - 1);
  const Word* x = product.x;
  const Word* weight = product.packed + panel * stride;
  const int64_t second = std::min<int64_t>(1, last) * stride, third = std::min<int64_t>(2, last) * stride, fourth = last * stride;
  zero_sums();
  for (const Word* stop = weight + stride; weight < stop; weight += kTileWords, x += product.rows * kColumns) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, weight, 64);
    _tile_dpbf16ps(0, 4, 6);
    prefetch(weight);
    _tile_loadd(7, weight + second, 64);
    _tile_dpbf16ps(1, 4, 7);
    prefetch(weight + second);
    _tile_loadd(6, weight + third, 64);
    _tile_dpbf16ps(2, 4, 6);
    prefetch(weight + third);
    _tile_loadd(7, weight + fourth, 64);
    _tile_dpbf16ps(3, 4, 7);
    prefetch(weight + fourth);
  }
  TileSums sums;
  sums.store();
  for (int64_t p = 0; p <= last; ++p) store_panel<BFloat16>(product, sums.tile[p], kColumns, 0, product.rows, panel + p);
}

// 32 rows of two panels; a missing second tile of rows or second panel repeats the first.
void compute_32_rows(const Product& product, int64_t row, int64_t panel, int64_t end) {
  const int64_t stride = product.panel_words(), row1 = row + kTileRows < product.rows ? row + kTileRows : row, panel1 = std::min(panel + 1, end - 1);
  const Word *x = product.x + row * product.steps, *weight = product.packed + panel * stride;
  const int64_t second_x = (row1 - row) * product.steps, second_weight = (panel1 - panel) * stride;
  zero_sums();
  for (const Word* stop = weight + stride; weight < stop; weight += kTileWords, x += kTileWords) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, weight, 64);
    _tile_loadd(5, x + second_x, 64);
    _tile_loadd(7, weight + second_weight, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    prefetch(weight);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
    prefetch(weight + second_weight);
  }
  TileSums sums;
  sums.store();
  for (int i = 0; i < 4; ++i) {
    const int64_t first = i & 1 ? row1 : row;
    store_panel<BFloat16>(product, sums.tile[i], kColumns, first, std::min<int64_t>(kTileRows, product.rows - first), i & 2 ? panel1 : panel);
  }
}

void compute_tiles(const Product& product, int64_t begin, int64_t end) {
  alignas(64) const TileConfig config(std::min<int64_t>(product.rows, kTileRows));
  asm volatile("" : : "r"(&config) : "memory");  // GCC does not know that the tile instructions read memory
  _tile_loadconfig(&config);
  if (product.rows <= kTileRows) {
    for (int64_t panel = begin; panel < end; panel += 4) compute_16_rows(product, panel, end);
  } else {
    for (int64_t panel = begin; panel < end; panel += 2)
      for (int64_t row = 0; row < product.rows; row += 2 * kTileRows) compute_32_rows(product, row, panel, end);
  }
  _tile_release();
}
#else
bool amx_granted() { return false; }
#endif

template <class Dtype>
void compute(const Product& product, int64_t begin, int64_t end) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Dtype, BFloat16>) {
    if (amx_granted()) return compute_tiles(product, begin, end);
  }
#endif
  compute_vectors<Dtype>(product, begin, end);
}

// ---- operator ----

// Copies x into tiles of `tile_rows` rows x 64 bytes, tile after tile along k; zero padded along k, unset in the missing rows of the last tile.
at::Tensor tiled(const at::Tensor& x, int64_t rows, int64_t padded_features, int64_t tile_rows) {
  constexpr int64_t kLine = 64;
  const int64_t row_bytes = x.size(-1) * x.element_size(), lines = padded_features * x.element_size() / kLine;
  at::Tensor tiles = at::empty({(rows + tile_rows - 1) / tile_rows * tile_rows, padded_features}, x.options());
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(tiles.data_ptr());
  at::parallel_for(0, rows, std::max<int64_t>(1, kMinThreadBytes / (lines * kLine + 1)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const char* row = from + r * row_bytes;
      char* line = to + (r / tile_rows * lines * tile_rows + r % tile_rows) * kLine;
      const int64_t whole = row_bytes / kLine, rest = row_bytes % kLine;
      for (int64_t i = 0; i < whole; ++i, line += tile_rows * kLine) std::memcpy(line, row + i * kLine, kLine);
      if (rest) {
        std::memcpy(line, row + whole * kLine, rest);
        std::memset(line + rest, 0, kLine - rest);
      }
    }
  });
  return tiles;
}

}  // namespace

at::Tensor ygg::packed_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t out_features) {
  const at::ScalarType dtype = packed.scalar_type();
  const bool is_bf16 = dtype == at::kBFloat16;
  TORCH_CHECK(is_bf16 || dtype == at::kFloat, "packed_linear takes bfloat16 or float32 weights, got ", dtype);
  TORCH_CHECK(x.scalar_type() == dtype, "packed_linear: x is ", x.scalar_type(), " but the packed weight is ", dtype);
  TORCH_CHECK(x.dim() >= 1, "packed_linear: x needs at least one dimension");
  const int64_t in_features = x.size(-1), pair = is_bf16 ? 2 : 1;
  const int64_t padded_features = is_bf16 ? (in_features + kBf16Padding - 1) / kBf16Padding * kBf16Padding : in_features;
  const int64_t steps = padded_features / pair, panels = (out_features + kColumns - 1) / kColumns;
  TORCH_CHECK(packed.sizes() == at::IntArrayRef({panels, steps, kColumns, pair}) && packed.is_contiguous(), "packed_linear: a weight of ", out_features, " x ",
              in_features, " packs to ", at::IntArrayRef({panels, steps, kColumns, pair}), ", got ", packed.sizes());
  if (bias) {
    TORCH_CHECK(bias->scalar_type() == dtype && bias->sizes() == at::IntArrayRef({out_features}) && bias->is_contiguous(),
                "packed_linear: bias must be ", dtype, " of ", out_features, " elements, got ", bias->scalar_type(), " ", bias->sizes());
  }

  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out_features;
  at::Tensor out = at::empty(shape, x.options());
  if (out.numel() == 0) return out;
  const int64_t rows = out.numel() / out_features;
  at::Tensor words = x.contiguous();
  if (is_bf16 && amx_granted()) {
    words = tiled(words, rows, padded_features, std::min<int64_t>(rows, kTileRows));
  } else if (padded_features != in_features) {
    words = tiled(words, rows, padded_features, 1);
  }
  const Product product{static_cast<const Word*>(words.const_data_ptr()), static_cast<const Word*>(packed.const_data_ptr()),
                        bias ? bias->const_data_ptr() : nullptr, out.data_ptr(), rows, steps, out_features};
  const int64_t panel_bytes = product.panel_words() * 4 * ((rows + 31) / 32);  // read anew for every 32 rows
  const int64_t grain = std::max<int64_t>(1, kMinThreadBytes / std::max<int64_t>(1, panel_bytes));
  at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    is_bf16 ? compute<BFloat16>(product, begin, end) : compute<Float32>(product, begin, end);
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(ygg, m) { m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor"); }

TORCH_LIBRARY_IMPL(ygg, CPU, m) { m.impl("packed_linear", &ygg::packed_linear); }

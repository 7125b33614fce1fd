// Linear layers on weights packed once. The bits of a row do not depend on the number of rows.
//
//   ygg::packed_linear    x W^T + b
//   ygg::packed_linears   several weights of one x in one pass, their outputs side by side
//   ygg::gated_linear     silu(gate(x)) * up(x) in one pass, rounded once
//   ygg::read_linear      packed_linear for the rows that metadata marks as read
//
// A packed weight is a sequence of panels of 16 output columns. A panel holds one line of 16 words (64
// bytes) per step of k. A word is 32 bits: one fp32 weight, or two bf16 weights of consecutive k. `x` is
// read in the same words, so one loop serves both dtypes. If the processor has no product of bf16 words,
// `x` is widened to fp32 before the loop, and a line of the weight inside it, one k after the other. bf16
// pads k to 32: 16 lines are one AMX tile.
//
//            panel 0 (columns 0..15)      panel 1 (columns 16..31)
//   step 0   [ c0 | c1 | ... | c15 ]      [ c16 | ... | c31 ]
//   step 1   [ c0 | c1 | ... | c15 ]      ...
//
// A packed bf16 weight may be compressed (compression.h). Its panels are expanded to the original bits
// while they are multiplied, tile after tile. A weight may also be quantised (quantisation.h): then x is
// rounded to int8, and products are exact.
//
// Exactness: each output element is one accumulator that adds the steps in order, with one sequence of
// instructions chosen when this file is compiled (and, for AMX, once per process). Row blocks, panel groups
// and threads only decide which elements are computed together. If the rows do not fill the last block, the
// block moves up and computes some rows twice, with the same bits.
//
// How the loops were chosen, and what was slower (bench/LOG.md has the measurements).
//
// AMX. Up to 16 rows read four panels next to each other over all of k. Every line is prefetched two tiles
// ahead; from there the processor's own prefetcher continues. With more rows, x comes from L2 again for
// every panel. So two panels are multiplied in chunks of 128 of k: their weights and the sums of all rows
// stay in L1, x is read once for both, and the next chunk arrives meanwhile. Six of the eight tile
// registers are used: while the core's other hardware thread is busy, every register that is in use makes a
// load slower. Hence 32 rows by two panels load one panel's tile twice, from L1. Slower: 33 to 48 rows by
// one panel over all of k; x prefetched into L1; chunks of 256 of k or more; lines prefetched further ahead
// or for the next panel; all eight registers. No difference: weights that begin at cache lines, tiles of
// four panels interleaved.
//
// Vectors. Up to six rows multiply four panels side by side, eight rows three, up to 24 rows one: a wide
// block loads every line once. The rows of a wide block are first copied step after step, by each thread
// for itself, because otherwise their addresses do not fit the registers. A line is prefetched 16 lines
// ahead where memory is the limit, 64 or 96 where arithmetic is. Further ahead, the processor's own
// prefetcher stops. Slower: chunks of k, lines prefetched into L1, eight rows by one or two panels.
// On Zen 5 lines come into L1, 64 ahead, or 192 in a single panel, and up to six rows take two panels.
// Weights of 8 and 4 bits are one stream there, 32 groups ahead, while one block has all rows, with 8 bits
// up to eight. If one block has all rows and the model is larger than any cache, the lines leave no copy in
// L2 and L3: forwards take 0.94 to 0.99 of the time, and the code and data of everything else stay there.
//
// Processors without products of bf16 (AVX2, AVX-512 before bf16) widen rows once and weights in registers:
// two products per word, even k before odd, the order of an fp32 sum. Sixteen registers of eight lanes
// hold six rows of one panel; one or two rows take four or two panels, to have enough sums in flight. Five
// or six rows are copied step after step, as those of a wide block. Several blocks share the prefetching.
// Slower: splitting a broadcast word inside the loop; two panels next to three rows.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "compression.h"
#include "layout.h"
#include "operators.h"
#include "quantisation.h"
#include "threads.h"
#include "vectors.h"

namespace {

using namespace ygg;

constexpr int kBf16Padding = 32;  // k of a bf16 weight is padded to a multiple of this
constexpr int64_t kGroup = 4;     // the most panels that a body computes together

// One thread reads less than two of these from L2 faster than two threads.
constexpr int64_t kTaskBytes = 64 << 10;
constexpr int64_t kRoundedNumbers = 1 << 10;  // of x that a thread rounds, or more (by measurement)

// The products of this many rows take at least as long as reading their weights from L2.
constexpr int64_t kRowsOfRead = kLanes < 16 ? 1 : 32;

enum class Format { kWords, kCompressed, kInt8, kInt4 };

bool is_quantised(Format format) { return format == Format::kInt8 || format == Format::kInt4; }

struct Weight {
  const char* packed;  // (panels, bytes of a panel): (steps, 16) words, or as its format has it
  int64_t panel_bytes;
  Format format;
  const void* bias;  // (out_features) in the dtype of the product, or null
  int64_t out_features;

  int64_t panels() const { return (out_features + kColumns - 1) / kColumns; }
};

// Sixteen output columns, fewer in a weight's last panel.
struct Panel {
  const Word* words;
  Format format;
  const void* bias;
  int64_t index, out_column, columns;  // index among its weight's panels
};

// Panels are numbered weight after weight; in a gated product the panels of the two weights alternate, gate
// first.
struct Product {
  // (rows, steps), in fp32 if a word takes two products; or tiled for AMX: (tiles of rows, steps / 16, rows
  // of a tile, 16); or rounded, as quantisation.h has it
  const Word* x;
  void* out;  // (rows, row_len)
  int64_t rows, steps, row_len;
  std::vector<Weight> weights;
  bool is_gated;
  int64_t number;    // unique in this process
  bool is_streamed;  // no cache keeps the weights until the next forward
  int64_t end = 0;   // panels from here on are not prefetched
  // the panels from `first_expanded` on, for a body that reads them more than once
  const Word* expanded = nullptr;
  int64_t first_expanded = 0;

  int64_t panel_words() const { return steps * kColumns; }
  int64_t tile_rows() const { return std::min<int64_t>(rows, kTileRows); }
  int64_t row_tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  int64_t num_panels() const {
    const auto add = [](int64_t sum, const Weight& weight) { return sum + weight.panels(); };
    return std::accumulate(weights.begin(), weights.end(), int64_t(0), add);
  }
  Panel panel(int64_t number) const {
    Panel found = packed_panel(number);
    if (expanded) found.words = expanded + (number - first_expanded) * panel_words();
    return found;
  }
  Panel packed_panel(int64_t number) const {
    if (is_gated) return panel_of(weights[number % 2], number / 2, 0);
    int64_t column = 0;
    auto weight = weights.begin();
    for (; number >= weight->panels(); ++weight) {
      number -= weight->panels();
      column += weight->out_features;
    }
    return panel_of(*weight, number, column);
  }
  Panel panel_of(const Weight& weight, int64_t index, int64_t column) const {
    const int64_t first = index * kColumns;
    const auto* words = reinterpret_cast<const Word*>(weight.packed + index * weight.panel_bytes);
    const int64_t columns = std::min<int64_t>(kColumns, weight.out_features - first);
    return {words, weight.format, weight.bias, index, column + first, columns};
  }
  PanelTiles tiles_of(int64_t number, int64_t at_once) const {
    const Panel from = panel(number);
    return {from.words, from.format == Format::kCompressed, panel_words() / kTileWords, at_once};
  }
};

template <class Dtype>
void load_bias(float* bias, const Panel& panel) {
  std::fill_n(bias, kColumns, 0.0f);
  if (!panel.bias) return;
  const auto* from = static_cast<const typename Dtype::Element*>(panel.bias) + panel.index * kColumns;
  for (int64_t c = 0; c < panel.columns; ++c) bias[c] = Dtype::widen(from[c]);
}

template <class Dtype, class Value>
void write_panel(const Product& product, const Panel& panel, int64_t row, int64_t rows, Value value) {
  using Element = typename Dtype::Element;
  Element* out = static_cast<Element*>(product.out) + row * product.row_len + panel.out_column;
  for (int64_t r = 0; r < rows; ++r, out += product.row_len) {
    Element rounded[kColumns];
    for (int v = 0; v < kVecs; ++v) {
      const auto part = Dtype::round(value(r, v * kLanes));
      std::memcpy(rounded + v * kLanes, &part, sizeof part);
    }
    std::memcpy(out, rounded, panel.columns == kColumns ? sizeof rounded : panel.columns * sizeof(Element));
  }
}

// Adds the bias to `rows` x 16 sums, `stride` floats apart, rounds them and writes them without the panel's
// padding.
template <class Dtype>
void store_panel(const Product& product, const float* sums, int64_t stride, int64_t row, int64_t rows,
                 int64_t number) {
  const Panel panel = product.panel(number);
  alignas(64) float bias[kColumns];
  load_bias<Dtype>(bias, panel);
  const auto value = [&](int64_t r, int64_t column) {
    return load(sums + r * stride + column) + load(bias + column);
  };
  write_panel<Dtype>(product, panel, row, rows, value);
}

// The same for a panel of the gate and the panel of the up projection after it.
template <class Dtype>
void store_gated(const Product& product, const float* gates, const float* ups, int64_t stride, int64_t row,
                 int64_t rows, int64_t number) {
  const Panel gate = product.panel(number), up = product.panel(number + 1);
  alignas(64) float gate_bias[kColumns], up_bias[kColumns];
  load_bias<Dtype>(gate_bias, gate);
  load_bias<Dtype>(up_bias, up);
  write_panel<Dtype>(product, up, row, rows, [&](int64_t r, int64_t column) {
    const Vec x = load(gates + r * stride + column) + load(gate_bias + column);
    return x / (1.0f + ygg::exp(-x)) * (load(ups + r * stride + column) + load(up_bias + column));
  });
}

// ---- body for vector registers: kRows x kPanels accumulators ----

// Most rows of a block. A wide block streams a single panel, loads each line once for all rows, and reads x
// step after step. Three panels with eight rows would be read again for every further block.
constexpr int kBlockRows = kLanes < 16 ? kMaxRows : 24;
constexpr bool is_wide(int rows) { return rows > (kLanes < 16 ? 4 : 8); }

// Panels side by side: as many as the registers hold sums for; fewer on Zen 5, which reads two faster.
constexpr int held_panels(int rows) {
  if (kLanes < 16) return rows > 2 ? 1 : 4 / rows;
  if (is_wide(rows)) return 1;
  if (kReadsIntoL1 && rows <= 6) return 2;
  return rows > 6 ? 3 : 4;
}

// Lines of each panel that are prefetched before their products. With few rows memory is the limit, and
// prefetching far ahead stops the processor's own prefetcher: a whole group of panels ahead, weights
// arrived at four fifths of the rate. Wide blocks wait for lines that are prefetched too late.
constexpr int64_t lines_ahead(int panels) {
  if (kReadsIntoL1) return panels > 1 ? 64 : 192;
  return panels > 3 ? 16 : panels > 1 ? 64 : 96;
}

// Two or three blocks of few rows take about as long as the next panels need from memory. Then the first
// two share the prefetching of these, a line every second step, and memory works all the time.
constexpr int kSharing = kLanes < 16 ? 2 : 1;

// kRows rows of kPanels panels, accumulated in registers and written with rows `stride` floats apart. Near
// their end it prefetches the beginning of the `next` panels, or all the time one of their kShares parts.
template <class Dtype, int kRows, int kPanels, int kShares, bool kIsReadOnce>
void multiply_panels(float* out, int64_t stride, const Word* x, int64_t steps, const Word* const* weight,
                     const Word* const* next) {
  constexpr int64_t kAhead = lines_ahead(kPanels);
  Vec sums[kRows][kPanels][kVecs] = {};
  const int64_t ahead = kShares > 1 ? steps : std::min(steps, kAhead), turn = steps - ahead;
  int64_t s = 0;
  for (const bool is_end : {false, true}) {
    const Word* fetched[kPanels];
    for (int p = 0; p < kPanels; ++p)
      fetched[p] = is_end ? next[p] - turn * kColumns : weight[p] + ahead * kColumns;
    for (const int64_t last = is_end ? steps : turn; s < last; ++s) {
#pragma GCC unroll 2
      for (int i = 0; i < Dtype::kParts; ++i) {
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) {
          if (i == 0) prefetch_line<kIsReadOnce>(fetched[p] + s * (kColumns / kShares));
          Vec line[kVecs];
          for (int v = 0; v < kVecs; ++v)
            line[v] = Dtype::part(load(weight[p] + s * kColumns + v * kLanes), i);
#pragma GCC unroll 24
          for (int r = 0; r < kRows; ++r) {
            const Vec number = broadcast(x[is_wide(kRows) ? (s * Dtype::kParts + i) * kRows + r
                                                          : (r * steps + s) * Dtype::kParts + i]);
#pragma GCC unroll 4
            for (int v = 0; v < kVecs; ++v) sums[r][p][v] = Dtype::multiply(sums[r][p][v], number, line[v]);
          }
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) std::memcpy(out + r * stride, sums[r], sizeof sums[r]);
}

// Block number `block` of kRows rows, times kPanels panels from `panel` on. The panels from `next` on are
// computed after these.
template <class Dtype, int kRows, int kPanels, int kShares, bool kIsReadOnce>
void compute_block(const Product& product, const Word* x, int64_t block, int64_t panel, int64_t next) {
  constexpr int kHeld = std::min(kPanels, held_panels(kRows));
  constexpr int64_t stride = kPanels * kColumns;
  const int64_t row = std::min(block * kRows, product.rows - kRows);
  const int64_t part = std::min<int64_t>(block, kShares - 1) * product.steps * kColumns / kShares;
  alignas(64) float sums[kRows * stride];
  for (int p = 0; p < kPanels; p += kHeld) {
    const Word *weight[kHeld], *after[kHeld];
    for (int h = 0; h < kHeld; ++h) {
      weight[h] = product.panel(panel + p + h).words;
      after[h] = product.panel(std::min(next + p + h, product.end - 1)).words + part;
    }
    multiply_panels<Dtype, kRows, kHeld, kShares, kIsReadOnce>(sums + p * kColumns, stride, x,
                                                               product.steps, weight, after);
  }
  if (product.is_gated) {
    for (int p = 0; p + 1 < kPanels; p += 2) {
      const float* gates = sums + p * kColumns;
      store_gated<Dtype>(product, gates, gates + kColumns, stride, row, kRows, panel + p);
    }
  } else {
    for (int p = 0; p < kPanels; ++p) {
      store_panel<Dtype>(product, sums + p * kColumns, stride, row, kRows, panel + p);
    }
  }
}

// All rows of the panels [panel, end), kPanels at a time. The first row block reads a group from memory,
// the others from L2.
template <class Dtype, int kRows, int kPanels>
void compute_panels(const Product& product, const Word* x, int64_t panel, int64_t end) {
  const int64_t row_words = product.steps * Dtype::kParts, blocks = (product.rows + kRows - 1) / kRows;
  const bool is_read_once = blocks == 1 && product.is_streamed, is_shared = blocks == 2 || blocks == 3;
  const auto compute = is_read_once ? compute_block<Dtype, kRows, kPanels, 1, kReadsIntoL1>
                       : is_shared  ? compute_block<Dtype, kRows, kPanels, kSharing, false>
                                    : compute_block<Dtype, kRows, kPanels, 1, false>;
  for (; panel + kPanels <= end; panel += kPanels) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * kRows, row = std::min(first, product.rows - kRows);
      compute(product, x + (is_wide(kRows) ? first : row) * row_words, block, panel, panel + kPanels);
    }
  }
  if constexpr (kPanels > 1) compute_panels<Dtype, kRows, kPanels / 2>(product, x, panel, end);
}

// The rows of every wide block step after step, in memory of the calling thread until its next product.
template <class Dtype, int kRows>
const Word* by_step(const Product& product) {
  thread_local std::vector<Word> lines;
  thread_local int64_t number = 0;
  if (std::exchange(number, product.number) == product.number) return lines.data();
  const int64_t row_words = product.steps * Dtype::kParts, blocks = (product.rows + kRows - 1) / kRows;
  lines.resize(blocks * kRows * row_words);
  Word* to = lines.data();
  for (int64_t block = 0; block < blocks; ++block) {
    const Word* from = product.x + std::min(block * kRows, product.rows - kRows) * row_words;
    for (int64_t word = 0; word < row_words; ++word, to += kRows) {
#pragma GCC unroll 24
      for (int r = 0; r < kRows; ++r) to[r] = from[r * row_words + word];
    }
  }
  return lines.data();
}

// Rows of a block: of all sizes that are not small, the one that computes the fewest rows twice.
int64_t rows_of_block(int64_t rows) {
  const auto divided = [&](int64_t blocks) { return (rows + blocks - 1) / blocks; };
  int64_t best = divided(kBlockRows);
  const int64_t most = kLanes < 16 ? best : divided(kBlockRows * 2 / 3);
  for (int64_t blocks = best + 1; blocks <= most; ++blocks)
    if (blocks * divided(blocks) < best * divided(best)) best = blocks;
  return divided(best);
}

// Panels that stay on one thread: a multiple of those that a body computes together. A thread that has
// groups of four to itself would compute the fourth alone where a body takes three.
int64_t vector_group(const Product& product) {
  const int64_t held = held_panels(int(rows_of_block(product.rows)));
  return product.is_gated ? kGroup : kGroup / held * held;
}

// All rows of the panels [begin, end).
template <class Dtype, int kRows = kBlockRows>
void compute_vectors(const Product& product, int64_t begin, int64_t end) {
  constexpr int kPanels = held_panels(kRows), kGatedPanels = std::max(2, kPanels / 2 * 2);
  if (kRows == rows_of_block(product.rows)) {
    const Word* x = product.x;
    if constexpr (is_wide(kRows)) x = by_step<Dtype, kRows>(product);
    if (product.is_gated) return compute_panels<Dtype, kRows, kGatedPanels>(product, x, begin, end);
    return compute_panels<Dtype, kRows, kPanels>(product, x, begin, end);
  }
  if constexpr (kRows > 1) compute_vectors<Dtype, kRows - 1>(product, begin, end);
}

// The same for compressed weights: a few panels at a time are expanded for all rows.
template <class Dtype>
void compute_expanded(Product product, int64_t begin, int64_t end) {
  const int64_t words = product.panel_words(), group = vector_group(product);
  product.is_streamed = false;  // expanded panels are in L2
  thread_local std::vector<Word> panels;
  panels.resize(group * words);
  for (int64_t first = begin; first < end; first += group) {
    const int64_t last = std::min(first + group, end);
    product.expanded = nullptr;
    for (int64_t number = first; number < last; ++number) {
      PanelTiles tiles = product.tiles_of(number, 1);
      Word* panel = panels.data() + (number - first) * words;
      for (int64_t word = 0; word < words; word += kTileWords)
        std::memcpy(panel + word, tiles.take(), 4 * kTileWords);
    }
    product.expanded = panels.data();
    product.first_expanded = first;
    product.end = last;
    compute_vectors<Dtype>(product, first, last);
  }
}

// ---- body for quantised weights: up to six rows of two panels, fewer rows of more panels or of one ----

constexpr int kQuantisedRows = kLanes == 16 ? 6 : 3;

// Most rows of a single block. On Zen 5 one block of eight rows and weights of 8 bits waits for memory as
// fewer rows do; two blocks take 1.25 times as long. With 4 bits two blocks are as fast (by measurement).
constexpr int rows_at_once(int bits) { return kReadsIntoL1 && bits == 8 ? 8 : kQuantisedRows; }

// Panels at once, whose sums fit the registers. One row of x waits for memory all the time. With weights of
// 4 bits it is fastest without any prefetching, one panel after the other: the processor's own prefetcher
// reads further ahead in one stream than in four short ones (measured on Zen 4).
constexpr int quantised_panels(int bits, int rows) {
  if (kLanes < 16 || (bits == 4 && rows == 1) || rows > kQuantisedRows) return 1;
  return rows <= 2 ? 4 : 2;
}

// Groups ahead of the products that a single block prefetches in a panel (by measurement on Zen 4 and 5).
template <int kBits, int kPanels>
constexpr int64_t kGroupsAhead = kReadsIntoL1                   ? 32
                                 : kBits == 8                   ? 1
                                 : kLanes == 16 && kPanels == 1 ? 0
                                                                : 32 / kPanels;

// Rows of a block: of the sizes that are not small, the one that computes the fewest rows twice. With six
// rows of two panels and weights of 4 bits, GCC keeps some sums in memory, so there are at most five.
int64_t quantised_rows(int bits, int64_t rows) {
  if (rows <= rows_at_once(bits)) return rows;
  const auto computed = [&](int64_t size) { return (rows + size - 1) / size * size; };
  int64_t best = kLanes == 16 && bits == 4 ? kQuantisedRows - 1 : kQuantisedRows;
  for (int64_t size = best - 1; size > kQuantisedRows / 2; --size)
    if (computed(size) < computed(best)) best = size;
  return best;
}

// Writes the sums of kPanels panels for all rows; the last block moves up, as its rows of x did. A single
// block waits for memory: it reads a few groups ahead, at the end in the panels after these. Several blocks
// find the panels in L2: they divide the panels after these among them, so that memory works all the time.
template <int kBits, int kRows, int kPanels, bool kIsReadOnce>
void multiply_quantised(const Product& product, int64_t panel, float* sums) {
  constexpr int64_t kBytes = group_bytes(kBits);
  const int64_t blocks = (product.rows + kRows - 1) / kRows;
  const int64_t near = blocks == 1 ? std::min(kGroupsAhead<kBits, kPanels>, product.steps) : product.steps;
  const uint8_t* weights[kPanels];
  Ahead<kPanels> same{product.steps - near, near > 0 ? kBytes : 0};
  Ahead<kPanels> next{near, (kBytes + blocks - 1) / blocks};
  for (int p = 0; p < kPanels; ++p) {
    const auto bytes_of = [&](int64_t number) {
      return reinterpret_cast<const uint8_t*>(product.panel(std::min(number, product.end - 1)).words);
    };
    weights[p] = bytes_of(panel + p);
    same.from[p] = weights[p] + near * kBytes;
    next.from[p] = bytes_of(panel + kPanels + p);
  }
  const int64_t block_words = product.steps * group_words(kBits) * kRows;
  const Word* x = product.x;
  for (int64_t first = 0; first < product.rows; first += kRows, x += block_words) {
    const int64_t row = std::min(first, product.rows - kRows);
    multiply_groups<kBits, kRows, kPanels, kIsReadOnce>(sums + row * kColumns, product.rows * kColumns,
                                                        weights, x, {same, next});
    for (const uint8_t*& from : next.from) from += product.steps * next.bytes;
  }
}

// All rows of the panels [begin, end).
template <class Dtype, int kBits, int kRows = rows_at_once(kBits)>
void compute_quantised(const Product& product, int64_t begin, int64_t end) {
  if constexpr (kRows > 1) {
    if (kRows > quantised_rows(kBits, product.rows))
      return compute_quantised<Dtype, kBits, kRows - 1>(product, begin, end);
  }
  constexpr int kPanels = quantised_panels(kBits, kRows), kStored = std::max(2, kPanels);
  thread_local std::vector<float> sums;
  const int64_t panel_sums = product.rows * kColumns;
  sums.resize(kStored * panel_sums);
  const bool is_one_stream = kReadsIntoL1 && product.rows == kRows;  // one panel after the other
  const auto multiply_one = is_one_stream && product.is_streamed
                                ? multiply_quantised<kBits, kRows, 1, kReadsIntoL1>
                                : multiply_quantised<kBits, kRows, 1, false>;
  const auto sums_of = [&](int64_t p) { return sums.data() + p * panel_sums; };
  for (int64_t panel = begin; panel < end; panel += kStored) {
    const int64_t count = std::min<int64_t>(kStored, end - panel);
    if (count == kPanels && !is_one_stream) {
      multiply_quantised<kBits, kRows, kPanels, false>(product, panel, sums.data());
    } else {
      for (int64_t p = 0; p < count; ++p) multiply_one(product, panel + p, sums_of(p));
    }
    for (int64_t p = 0; p < count; p += product.is_gated ? 2 : 1) {
      if (product.is_gated)
        store_gated<Dtype>(product, sums_of(p), sums_of(p + 1), kColumns, 0, product.rows, panel + p);
      else
        store_panel<Dtype>(product, sums_of(p), kColumns, 0, product.rows, panel + p);
    }
  }
}

// ---- body for AMX tiles: 16 rows x 4 panels over all of k; more rows: 32 x 2 panels over chunks of k ----

#if defined(__AMX_BF16__)
// Tiles 0 to 3 accumulate, 4 holds x and 5 holds weights; two are never written. While the core's other
// hardware thread is busy, the processor seems to have few tile registers beyond the eight named ones, and
// a tile that was never written is one more to load ahead into: in a loop over L1 a product took 25 ns with
// eight tiles written, 18 with six and 13 with five. With an idle hardware thread it took 6.5 with any
// number (measured on Granite Rapids in a virtual machine).
struct alignas(64) TileSums {
  float words[kTileWords];
};

// The panel's next tile. The tile two after it is prefetched to L2; beyond that the processor's own
// prefetcher runs ahead, and prefetching further here is slower.
inline const Word* next_tile(PanelTiles& panel) {
  const Word* tile = panel.take();
  panel.prefetch_ahead();
  return tile;
}

// One tile of rows times four panels, over all of k.
void multiply_tiles(const Product& product, TileSums* sums, PanelTiles* panels) {
  const Word *x = product.x, *tiles[4];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t word = 0; word < product.panel_words();
       word += kTileWords, x += product.tile_rows() * kColumns) {
    for (int p = 0; p < 4; ++p) tiles[p] = next_tile(panels[p]);
    _tile_loadd(4, x, 64);
    _tile_loadd(5, tiles[0], 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(5, tiles[1], 64);
    _tile_dpbf16ps(1, 4, 5);
    _tile_loadd(5, tiles[2], 64);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(5, tiles[3], 64);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, sums[0].words, 64);
  _tile_stored(1, sums[1].words, 64);
  _tile_stored(2, sums[2].words, 64);
  _tile_stored(3, sums[3].words, 64);
}

// A chunk of two panels: `count` tiles of each, from word `begin` of k on.
struct Chunk {
  const Word *even, *odd;
  int64_t begin, count;
};

// kTiles tiles of rows from `first` on times a chunk, added to the sums so far. For every tile it prepares
// a part of the next chunk, from part number `part` of `parts` on.
template <int kTiles>
void multiply_chunk(const Product& product, TileSums* sums, int64_t first, const Chunk& chunk,
                    PanelTiles* panels, int64_t part, int64_t parts) {
  const int64_t row_tiles = product.row_tiles(), row_tile_words = kTileRows * product.steps;
  const int64_t last = first + kTiles - 1;
  float* const sum[] = {sums[first].words, sums[row_tiles + first].words, sums[last].words,
                        sums[row_tiles + last].words};
  _tile_loadd(0, sum[0], 64);
  _tile_loadd(1, sum[1], 64);
  if constexpr (kTiles > 1) {
    _tile_loadd(2, sum[2], 64);
    _tile_loadd(3, sum[3], 64);
  }
  const Word* x = product.x + first * row_tile_words + chunk.begin;
  for (int64_t tile = 0; tile < chunk.count; ++tile, ++part, x += kTileWords) {
    panels[0].prepare(part, parts);
    const Word* even = chunk.even + tile * kTileWords;
    const Word* odd = chunk.odd + tile * kTileWords;
    _tile_loadd(4, x, 64);
    _tile_loadd(5, even, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(5, odd, 64);
    _tile_dpbf16ps(1, 4, 5);
    panels[1].prepare(part, parts);
    if constexpr (kTiles > 1) {
      _tile_loadd(4, x + row_tile_words, 64);
      _tile_dpbf16ps(3, 4, 5);
      _tile_loadd(5, even, 64);
      _tile_dpbf16ps(2, 4, 5);
    }
  }
  _tile_stored(0, sum[0], 64);
  _tile_stored(1, sum[1], 64);
  if constexpr (kTiles > 1) {
    _tile_stored(2, sum[2], 64);
    _tile_stored(3, sum[3], 64);
  }
}

// All rows times two panels, chunk after chunk of k. Weights and sums stay in L1; only x comes from L2,
// once for two panels. While one chunk is multiplied, the next one is prepared at an even rate. A chunk of
// two panels and the sums of 128 rows fill half of L1.
void multiply_chunks(const Product& product, TileSums* sums, PanelTiles* panels) {
  const int64_t row_tiles = product.row_tiles(), blocks = (row_tiles + 1) / 2;
  const int64_t all = product.panel_words() / kTileWords;
  std::memset(sums, 0, 2 * row_tiles * sizeof *sums);
  asm volatile("" : : "r"(sums) : "memory");  // GCC does not know that the tile instructions read memory
  for (int64_t begin = 0; begin < all; begin += kMostTiles) {
    const int64_t count = std::min(kMostTiles, all - begin);
    const Word* even = panels[0].take();
    const Word* odd = panels[1].take();
    const Chunk chunk{even, odd, begin * kTileWords, count};
    for (int64_t first = 0; first < row_tiles; first += 2) {
      const auto multiply = first + 1 < row_tiles ? multiply_chunk<2> : multiply_chunk<1>;
      multiply(product, sums, first, chunk, panels, first / 2 * count, blocks * count);
    }
  }
}

// Writes the sums of `count` panels from `panel` on.
void store_tiles(const Product& product, const TileSums* sums, int64_t panel, int64_t count) {
  const int64_t row_tiles = product.row_tiles();
  for (int64_t tile = 0; tile < row_tiles; ++tile) {
    const int64_t row = tile * kTileRows, rows = std::min<int64_t>(kTileRows, product.rows - row);
    for (int64_t p = 0; p < count; p += product.is_gated ? 2 : 1) {
      const float* first = sums[p * row_tiles + tile].words;
      if (product.is_gated) {
        const float* second = sums[(p + 1) * row_tiles + tile].words;
        store_gated<BFloat16>(product, first, second, kColumns, row, rows, panel + p);
      } else {
        store_panel<BFloat16>(product, first, kColumns, row, rows, panel + p);
      }
    }
  }
}

void compute_tiles(const Product& product, int64_t begin, int64_t end) {
  TileConfig config;
  config.set(0, 5, product.tile_rows(), 64);
  config.set(5, 1, kTileRows, 64);
  config.load();
  const int64_t row_tiles = product.row_tiles();
  const int64_t group = row_tiles == 1 ? 4 : 2, at_once = row_tiles == 1 ? 1 : kMostTiles;
  thread_local std::vector<TileSums> sums;
  sums.resize(group * row_tiles);
  for (int64_t panel = begin; panel < end; panel += group) {
    const int64_t count = std::min(group, end - panel);
    const auto tiles_of = [&](int64_t p) {
      return product.tiles_of(panel + std::min(p, count - 1), at_once);
    };
    PanelTiles panels[] = {tiles_of(0), tiles_of(1), tiles_of(2), tiles_of(3)};
    row_tiles == 1 ? multiply_tiles(product, sums.data(), panels)
                   : multiply_chunks(product, sums.data(), panels);
    store_tiles(product, sums.data(), panel, count);
  }
  _tile_release();
}
#endif

template <class Dtype>
void compute(const Product& product, int64_t begin, int64_t end) {
  const auto& weights = product.weights;
  if (weights[0].format == Format::kInt8) return compute_quantised<Dtype, 8>(product, begin, end);
  if (weights[0].format == Format::kInt4) return compute_quantised<Dtype, 4>(product, begin, end);
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<Dtype, BFloat16>) {
    if (amx_granted()) return compute_tiles(product, begin, end);
  }
#endif
  const bool is_compressed = std::any_of(weights.begin(), weights.end(), [](const Weight& weight) {
    return weight.format == Format::kCompressed;
  });
  is_compressed ? compute_expanded<Dtype>(product, begin, end)
                : compute_vectors<Dtype>(product, begin, end);
}

// ---- operator ----

// The in features of x, padded as those of a packed weight are.
int64_t padded_len(const at::Tensor& x) {
  const int64_t step = x.scalar_type() == at::kBFloat16 ? kBf16Padding : 1;
  return (x.size(-1) + step - 1) / step * step;
}

// x in the form that the body for these weights reads, and the length of a row in its steps: words of k, or
// groups.
struct Rows {
  const Word* words;
  int64_t steps;
};

// Memory of the calling thread for another form of x, kept until its next call. The system clears fresh
// memory page by page at the first write, which took a twentieth of a wide graph's time.
Word* workspace(int64_t words) {
  struct alignas(64) Line {
    Word words[kColumns];
  };
  thread_local std::vector<Line> lines;
  const size_t count = (words + kColumns - 1) / kColumns;
  if (lines.size() < count) lines.resize(count);
  return lines.data()->words;
}

// Copies x into tiles of `tile_rows` rows x 64 bytes, tile after tile along k; zero padded along k, unset
// in the missing rows of the last tile.
const Word* tiled(const at::Tensor& x, int64_t rows, int64_t padded_features, int64_t tile_rows) {
  constexpr int64_t kLine = 64;
  const int64_t row_bytes = x.size(-1) * x.element_size();
  const int64_t lines = padded_features * x.element_size() / kLine;
  Word* tiles = workspace((rows + tile_rows - 1) / tile_rows * tile_rows * lines * kColumns);
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = reinterpret_cast<char*>(tiles);
  parallel_for(rows, std::max<int64_t>(1, kTaskBytes / (lines * kLine + 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t r = begin; r < end; ++r) {
                   const char* row = from + r * row_bytes;
                   char* line = to + (r / tile_rows * lines * tile_rows + r % tile_rows) * kLine;
                   const int64_t whole = row_bytes / kLine, rest = row_bytes % kLine;
                   for (int64_t i = 0; i < whole; ++i, line += tile_rows * kLine)
                     std::memcpy(line, row + i * kLine, kLine);
                   if (rest) {
                     std::memcpy(line, row + whole * kLine, rest);
                     std::memset(line + rest, 0, kLine - rest);
                   }
                 }
               });
  return tiles;
}

// Copies bf16 x as fp32, zero padded along k.
const Word* widened(const at::Tensor& x, int64_t rows, int64_t padded_features) {
  const int64_t features = x.size(-1);
  Word* wide = workspace(rows * padded_features);
  const uint16_t* from = static_cast<const uint16_t*>(x.const_data_ptr());
  float* to = reinterpret_cast<float*>(wide);
  parallel_for(rows, std::max<int64_t>(1, kTaskBytes / (padded_features * 4 + 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t r = begin; r < end; ++r) {
                   for (int64_t i = 0; i < features; ++i)
                     to[r * padded_features + i] = BFloat16::widen(from[r * features + i]);
                   std::fill(to + r * padded_features + features, to + (r + 1) * padded_features, 0.0f);
                 }
               });
  return wide;
}

// Rounds x to blocks of rows, for weights of kBits.
template <class Dtype, int kBits>
Rows quantised(const at::Tensor& x, int64_t rows) {
  using Element = typename Dtype::Element;
  constexpr int64_t kLen = group_len(kBits), kWords = group_words(kBits);
  const int64_t features = x.size(-1), groups = num_groups(kBits, features);
  const int64_t block_rows = quantised_rows(kBits, rows), blocks = (rows + block_rows - 1) / block_rows;
  const int64_t words = kWords * block_rows;  // of a group
  Word* blocked = workspace(blocks * groups * words);
  const auto* from = static_cast<const Element*>(x.const_data_ptr());
  const auto quantise_row = [&](int64_t place) {
    const int64_t first = place / block_rows * block_rows, row = std::min(first, rows - block_rows);
    const Element* numbers = from + (row + place - first) * features;
    Word* to = blocked + first * groups * kWords + place - first;
    for (int64_t done = 0; done < features; done += kLen, to += words)
      quantise_group<Dtype, kBits>(numbers + done, std::min(kLen, features - done), to, block_rows);
  };
  parallel_for(blocks * block_rows, std::max<int64_t>(1, kRoundedNumbers / (features + 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t place = begin; place < end; ++place) quantise_row(place);
               });
  return {blocked, groups};
}

// The format of a packed weight, by its dtype and its bytes.
Format format_of(const at::Tensor& packed) {
  if (packed.scalar_type() == at::kByte) return Format::kCompressed;
  if (packed.scalar_type() != at::kChar) return Format::kWords;
  return packed.size(-1) == group_bytes(4) ? Format::kInt4 : Format::kInt8;
}

// Checks a packed weight's shape against the features of x.
void check_shape(const at::Tensor& packed, Format format, int64_t out_features, const at::Tensor& x) {
  const int64_t in_features = x.size(-1), pair = packed.scalar_type() == at::kBFloat16 ? 2 : 1;
  const int64_t panels = (out_features + kColumns - 1) / kColumns;
  const std::array<int64_t, 4> sizes{panels, padded_len(x) / pair, kColumns, pair};
  const int bits = format == Format::kInt4 ? 4 : 8;
  const std::array<int64_t, 3> grouped{panels, num_groups(bits, in_features), group_bytes(bits)};
  const at::IntArrayRef expected =
      is_quantised(format) ? at::IntArrayRef(grouped) : at::IntArrayRef(sizes);
  const int64_t min_bytes = kHeaderBytes + padded_len(x) / kBf16Padding * kCompressedTileBytes;
  const bool fits_compressed =
      packed.dim() == 2 && packed.size(0) == panels && packed.size(1) >= min_bytes;
  const bool fits = format == Format::kCompressed ? fits_compressed : packed.sizes() == expected;
  TORCH_CHECK(fits && packed.is_contiguous(), "packed_linear: a weight of ", out_features, " x ",
              in_features, " packs to ", expected,
              format == Format::kCompressed ? ", compressed to rows of bytes" : "", ", got ",
              packed.sizes());
}

// One weight of an operator, checked against x.
Weight weight_of(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                 int64_t out_features) {
  TORCH_CHECK(x.dim() >= 1, "packed_linear: x needs at least one dimension");
  const Format format = format_of(packed);
  const at::ScalarType dtype = format == Format::kCompressed ? at::kBFloat16
                               : is_quantised(format)        ? x.scalar_type()
                                                             : packed.scalar_type();
  TORCH_CHECK(dtype == at::kBFloat16 || dtype == at::kFloat,
              "packed_linear takes bfloat16 or float32 weights, or compressed or quantised ones, got ",
              dtype);
  TORCH_CHECK(x.scalar_type() == dtype, "packed_linear: x is ", x.scalar_type(),
              " but the packed weight is ", dtype);
  check_shape(packed, format, out_features, x);
  if (bias) {
    TORCH_CHECK(bias->scalar_type() == dtype && bias->sizes() == at::IntArrayRef({out_features}) &&
                    bias->is_contiguous(),
                "packed_linear: bias must be ", dtype, " of ", out_features, " elements, got ",
                bias->scalar_type(), " ", bias->sizes());
  }
  const auto* bytes = static_cast<const char*>(packed.const_data_ptr());
  const int64_t panels = packed.size(0), panel_bytes = panels ? int64_t(packed.nbytes()) / panels : 0;
  return {bytes, panel_bytes, format, bias ? bias->const_data_ptr() : nullptr, out_features};
}

// An uninitialised tensor for the outputs of the weights.
at::Tensor outputs_of(const at::Tensor& x, const std::vector<Weight>& weights, bool is_gated) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = 0;
  for (const Weight& weight : weights)
    shape.back() = is_gated ? weight.out_features : shape.back() + weight.out_features;
  return empty(shape, x.options());
}

Rows rows_for(const std::vector<Weight>& weights, const at::Tensor& x, int64_t rows) {
  const bool is_bf16 = x.scalar_type() == at::kBFloat16;
  const Format format = weights[0].format;
  if (is_quantised(format)) {
    if (format == Format::kInt8)
      return is_bf16 ? quantised<BFloat16, 8>(x, rows) : quantised<Float32, 8>(x, rows);
    return is_bf16 ? quantised<BFloat16, 4>(x, rows) : quantised<Float32, 4>(x, rows);
  }
  const int64_t padded_features = padded_len(x), steps = padded_features / (is_bf16 ? 2 : 1);
  if (is_bf16 && amx_granted())
    return {tiled(x, rows, padded_features, std::min<int64_t>(rows, kTileRows)), steps};
  if (is_bf16 && BFloat16::kParts == 2) return {widened(x, rows, padded_features), steps};
  if (padded_features != x.size(-1)) return {tiled(x, rows, padded_features, 1), steps};
  return {static_cast<const Word*>(x.const_data_ptr()), steps};
}

thread_local bool weights_are_streamed = false;

// Bytes of a panel that a thread reads for these rows, or the bytes that it could read meanwhile.
int64_t read_bytes(const Product& product) {
  const Weight& weight = product.weights[0];
  const int64_t panel_bytes =
      is_quantised(weight.format) ? weight.panel_bytes : product.panel_words() * 4;
  return panel_bytes * ((product.rows + kRowsOfRead - 1) / kRowsOfRead);
}

void multiply_(const at::Tensor& out, const at::Tensor& x, std::vector<Weight> weights, bool is_gated) {
  if (out.numel() == 0) return;
  const int64_t row_len = out.size(-1), rows = out.numel() / row_len;
  for (const Weight& weight : weights)
    TORCH_CHECK(is_quantised(weight.format)
                    ? weight.format == weights[0].format
                    : !is_quantised(weights[0].format),
                "a product with quantised weights takes one format");
  const at::Tensor rows_of_x = x.contiguous();
  const auto [words, steps] = rows_for(weights, rows_of_x, rows);
  static std::atomic<int64_t> number{0};
  Product product{words, out.data_ptr(), rows, steps, row_len, std::move(weights), is_gated, ++number,
                  weights_are_streamed};
  const int64_t panels = product.end = product.num_panels();
  const bool is_bf16 = x.scalar_type() == at::kBFloat16;
  const bool is_vectors = !is_quantised(product.weights[0].format) && !(is_bf16 && amx_granted());
  const int64_t group = is_vectors ? vector_group(product) : kGroup;
  const int64_t groups = (panels + group - 1) / group;
  const int64_t group_bytes = std::max<int64_t>(1, read_bytes(product) * group);
  const int64_t min_groups = std::max<int64_t>(1, kTaskBytes / group_bytes);
  parallel_for(groups, min_groups, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * group, last = std::min(end * group, panels);
    is_bf16 ? compute<BFloat16>(product, first, last) : compute<Float32>(product, first, last);
  });
}

at::Tensor multiply(const at::Tensor& x, std::vector<Weight> weights, bool is_gated) {
  const at::Tensor out = outputs_of(x, weights, is_gated);
  multiply_(out, x, std::move(weights), is_gated);
  return out;
}

// The rows of a forward whose output is read.
std::vector<int64_t> read_rows(const at::Tensor& meta) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < meta.size(0); ++row)
    if (meta.const_data_ptr<int32_t>()[row * meta.size(1) + kRead]) rows.push_back(row);
  return rows;
}

enum class Direction { kGather, kScatter };

// Copies between the rows `rows` of `all` and the consecutive rows of `packed`.
void copy_rows(Direction direction, const at::Tensor& all, const at::Tensor& packed,
               const std::vector<int64_t>& rows) {
  const int64_t row_bytes = all.size(-1) * all.element_size();
  for (size_t i = 0; i < rows.size(); ++i) {
    char* one = static_cast<char*>(all.data_ptr()) + rows[i] * row_bytes;
    char* other = static_cast<char*>(packed.data_ptr()) + int64_t(i) * row_bytes;
    direction == Direction::kGather ? std::memcpy(other, one, row_bytes)
                                    : std::memcpy(one, other, row_bytes);
  }
}

}  // namespace

ygg::StreamedWeights::StreamedWeights(bool is_streamed)
    : before_(std::exchange(weights_are_streamed, is_streamed)) {}

ygg::StreamedWeights::~StreamedWeights() { weights_are_streamed = before_; }

at::Tensor ygg::packed_linear(const at::Tensor& x, const at::Tensor& packed,
                              const std::optional<at::Tensor>& bias, int64_t out_features) {
  return multiply(x, {weight_of(x, packed, bias, out_features)}, false);
}

at::Tensor ygg::read_linear(const at::Tensor& x, const at::Tensor& meta, const at::Tensor& packed,
                            const std::optional<at::Tensor>& bias, int64_t out_features) {
  const int64_t num_rows = x.numel() / x.size(-1);
  TORCH_CHECK(meta.is_contiguous() && meta.size(0) == num_rows,
              "read_linear: every row of x has a row of metadata");
  const std::vector<Weight> weights{weight_of(x, packed, bias, out_features)};
  const at::Tensor out = outputs_of(x, weights, false);
  const std::vector<int64_t> rows = read_rows(meta);
  if (rows.empty()) return out;
  if (int64_t(rows.size()) == num_rows) {
    multiply_(out, x, weights, false);
    return out;
  }
  const at::Tensor all = x.contiguous();
  const int64_t features = x.size(-1), first = rows.front(), count = int64_t(rows.size());
  if (rows.back() - first + 1 == count) {
    multiply_(view(out, first * out_features, {count, out_features}),
              view(all, first * features, {count, features}), weights, false);
    return out;
  }
  const at::Tensor read = empty({count, features}, x.options());
  const at::Tensor read_out = empty({count, out_features}, x.options());
  copy_rows(Direction::kGather, all, read, rows);
  multiply_(read_out, read, weights, false);
  copy_rows(Direction::kScatter, out, read_out, rows);
  return out;
}

at::Tensor ygg::packed_linears(const at::Tensor& x, at::ArrayRef<at::Tensor> packed,
                               const std::vector<std::optional<at::Tensor>>& bias,
                               at::IntArrayRef out_features) {
  TORCH_CHECK(!packed.empty() && packed.size() == bias.size() && packed.size() == out_features.size(),
              "packed_linears: ", packed.size(), " weights, ", bias.size(), " biases and ",
              out_features.size(), " sizes");
  std::vector<Weight> weights;
  for (size_t i = 0; i < packed.size(); ++i)
    weights.push_back(weight_of(x, packed[i], bias[i], out_features[i]));
  return multiply(x, std::move(weights), false);
}

at::Tensor ygg::gated_linear(const at::Tensor& x, const at::Tensor& gate,
                             const std::optional<at::Tensor>& gate_bias, const at::Tensor& up,
                             const std::optional<at::Tensor>& up_bias, int64_t out_features) {
  return multiply(x, {weight_of(x, gate, gate_bias, out_features), weight_of(x, up, up_bias, out_features)},
                  true);
}

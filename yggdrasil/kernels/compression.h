// Reads the panels of a packed weight tile after tile: directly from memory, or expanded from three
// quarters of the bytes. compression.py has the layout and the specification.
//
// Each tile is expanded into L1 right before it is multiplied, 16 instructions for 128 weights, while the
// next ones arrive from memory. A panel has the lower bytes as they are, the upper bytes as four-bit codes
// for the 16 most frequent of them, and a list of the other ones (about one weight in 10 000). Slower: all
// tiles of a chunk expanded before they are multiplied. Not decodable at memory's rate: entropy codes of 11
// bits a weight.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace ygg {

constexpr int64_t kHeaderBytes = 64;
constexpr int64_t kLowerBytes = 512;
constexpr int64_t kCompressedTileBytes = 768;
constexpr int64_t kTileWeights = 512;
constexpr int64_t kMostTiles = 4;  // most tiles taken at once

// Expands 64 lower bytes and the codes of their upper bytes to two lines.
inline void expand_lines(const uint8_t* lower, const uint8_t* codes, bool is_second, const uint8_t* table,
                         Word* to) {
  auto* lines = reinterpret_cast<uint8_t*>(to);
  for (int i = 0; i < 64; ++i) {
    uint8_t* weight = lines + i / 8 % 2 * 64 + i / 16 * 16 + i % 8 * 2;
    weight[0] = lower[i];
    weight[1] = table[is_second ? codes[i] >> 4 : codes[i] & 15];
  }
}

inline void expand_tile(const uint8_t* tile, const uint8_t* table, Word* to) {
#if defined(__AVX512BW__)
  const __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  const __m512i low_half = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (int four = 0; four < 4; ++four, to += 4 * kColumns) {
    const __m512i codes = _mm512_loadu_si512(tile + kLowerBytes + 64 * four);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const __m512i lower = _mm512_loadu_si512(tile + 128 * four + 64 * pair);
      const __m512i index = _mm512_and_si512(pair ? _mm512_srli_epi16(codes, 4) : codes, low_half);
      const __m512i found = _mm512_shuffle_epi8(upper, index);
      _mm512_storeu_si512(to + 2 * pair * kColumns, _mm512_unpacklo_epi8(lower, found));
      _mm512_storeu_si512(to + (2 * pair + 1) * kColumns, _mm512_unpackhi_epi8(lower, found));
    }
  }
#else
  for (int two = 0; two < 8; ++two) {
    const uint8_t* codes = tile + kLowerBytes + 64 * (two / 2);
    expand_lines(tile + 64 * two, codes, two % 2, table, to + 2 * two * kColumns);
  }
#endif
}

// The tiles of a panel in order. The caller takes some at once and meanwhile prepares those after them.
class PanelTiles {
 public:
  // The panel begins at `panel` and has `num_tiles` tiles; `at_once` of them are taken at once, at most
  // kMostTiles.
  PanelTiles(const void* panel, bool is_compressed, int64_t num_tiles, int64_t at_once)
      : tile_(static_cast<const uint8_t*>(panel)),
        num_tiles_(num_tiles),
        at_once_(at_once),
        is_compressed_(is_compressed) {
    if (!is_compressed) return;
    uint32_t num_escapes;
    std::memcpy(table_, panel, sizeof table_);
    std::memcpy(&num_escapes, tile_ + sizeof table_, sizeof num_escapes);
    tile_ += kHeaderBytes;
    escape_ = tile_ + num_tiles * kCompressedTileBytes;
    last_escape_ = escape_ + 4 * int64_t(num_escapes);
  }

  // The next tiles, one after another. Expanded tiles are overwritten by what `prepare` expands after the
  // next call.
  const Word* take() {
    const int64_t first = taken_;
    taken_ = std::min(taken_ + at_once_, num_tiles_);
    if (!is_compressed_) return reinterpret_cast<const Word*>(tile_) + first * kTileWords;
    while (expanded_ < taken_) expand();
    return slot(first);
  }

  // Prepares part number `part` of `parts` of the tiles that are taken next: prefetches its lines, or
  // expands it and prefetches what comes after it.
  void prepare(int64_t part, int64_t parts) {
    const int64_t tiles = std::min(at_once_, num_tiles_ - taken_);
    if (is_compressed_) {
      for (const int64_t due = taken_ + (part + 1) * tiles / parts; expanded_ < due;) expand();
    } else {
      const int64_t lines = tiles * kTileRows;
      prefetch(tile_ + taken_ * 4 * kTileWords, part * lines / parts, (part + 1) * lines / parts);
    }
  }

  // Prefetches the tile after the next one.
  void prefetch_ahead() const {
    const int64_t bytes = is_compressed_ ? kCompressedTileBytes : 4 * kTileWords;
    prefetch(tile_ + (taken_ + 1) * bytes, 0, bytes / 64);
  }

 private:
  static void prefetch(const uint8_t* from, int64_t line, int64_t end) {
    for (; line < end; ++line) __builtin_prefetch(from + 64 * line, 0, 2);
  }

  // The tiles taken at once fill one half of the buffer, and those taken next the other half. A single tile
  // is overwritten each time, so that it stays in L1.
  Word* slot(int64_t tile) { return tiles_ + (at_once_ == 1 ? 0 : tile % (2 * at_once_)) * kTileWords; }

  void expand() {
    Word* to = slot(expanded_);
    const uint8_t* tile = tile_ + expanded_ * kCompressedTileBytes;
    const int64_t first = expanded_++ * kTileWeights, end = first + kTileWeights;
    expand_tile(tile, table_, to);
    for (uint32_t escape; escape_ < last_escape_; escape_ += sizeof escape) {
      std::memcpy(&escape, escape_, sizeof escape);
      if (escape >> 8 >= end) break;
      reinterpret_cast<uint8_t*>(to)[((escape >> 8) - first) * 2 + 1] = uint8_t(escape);
    }
    asm volatile("" : : "r"(to) : "memory");  // GCC does not know that the tile instructions read memory
    if (at_once_ > 1) prefetch(tile + kAhead * kCompressedTileBytes, 0, kCompressedTileBytes / 64);
  }

  static constexpr int64_t kAhead = 4;  // expanding a tile prefetches the one that the next chunk expands
  alignas(64) Word tiles_[2 * kMostTiles * kTileWords];
  uint8_t table_[16];
  const uint8_t* tile_;                                       // the first one
  const uint8_t *escape_ = nullptr, *last_escape_ = nullptr;  // the next escape, and the end of the escapes
  int64_t num_tiles_, at_once_, taken_ = 0, expanded_ = 0;
  bool is_compressed_;
};

}  // namespace ygg

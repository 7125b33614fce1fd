// The panels of a packed weight tile after tile: where they lie in memory, or expanded from three quarters of their bytes. compression.py has the layout and the
// specification.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace ygg {

constexpr int64_t kHeaderBytes = 64, kLowerBytes = 512, kCompressedTileBytes = 768, kTileWeights = 512;
constexpr int64_t kMostTiles = 4;  // that are taken at once

// Sixty-four lower bytes of two lines and the codes of their upper ones become the two lines.
inline void expand_lines(const uint8_t* lower, const uint8_t* codes, bool is_second, const uint8_t* table, Word* to) {
  auto* lines = reinterpret_cast<uint8_t*>(to);
  for (int i = 0; i < 64; ++i) {
    uint8_t* weight = lines + i / 8 % 2 * 64 + i / 16 * 16 + i % 8 * 2;
    weight[0] = lower[i];
    weight[1] = table[is_second ? codes[i] >> 4 : codes[i] & 15];
  }
}

inline void expand_tile(const uint8_t* tile, const uint8_t* table, Word* to) {
#if defined(__AVX512BW__)
  const __m512i upper = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), low_half = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (int four = 0; four < 4; ++four, to += 4 * kColumns) {
    const __m512i codes = _mm512_loadu_si512(tile + kLowerBytes + 64 * four);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const __m512i lower = _mm512_loadu_si512(tile + 128 * four + 64 * pair);
      const __m512i found = _mm512_shuffle_epi8(upper, _mm512_and_si512(pair ? _mm512_srli_epi16(codes, 4) : codes, low_half));
      _mm512_storeu_si512(to + 2 * pair * kColumns, _mm512_unpacklo_epi8(lower, found));
      _mm512_storeu_si512(to + (2 * pair + 1) * kColumns, _mm512_unpackhi_epi8(lower, found));
    }
  }
#else
  for (int two = 0; two < 8; ++two) expand_lines(tile + 64 * two, tile + kLowerBytes + 64 * (two / 2), two % 2, table, to + 2 * two * kColumns);
#endif
}

class PanelTiles {
 public:
  // Of a panel that begins at `panel`; `num_tiles` are all that it has.
  PanelTiles(const void* panel, bool is_compressed, int64_t num_tiles) : next_(static_cast<const uint8_t*>(panel)), is_compressed_(is_compressed) {
    if (!is_compressed) return;
    uint32_t num_escapes;
    std::memcpy(table_, panel, sizeof table_);
    std::memcpy(&num_escapes, next_ + sizeof table_, sizeof num_escapes);
    next_ += kHeaderBytes;
    escape_ = next_ + num_tiles * kCompressedTileBytes;
    last_escape_ = escape_ + 4 * int64_t(num_escapes);
  }

  // Bytes of a tile in memory.
  int64_t tile_bytes() const { return is_compressed_ ? kCompressedTileBytes : 4 * kTileWords; }

  // Where the tiles behind those taken so far lie.
  const char* ahead() const { return reinterpret_cast<const char*>(next_); }

  // The next ones, `count` of them and at most kMostTiles, one behind the other; expanded ones until the next call.
  const Word* take(int64_t count) {
    const uint8_t* tile = next_;
    next_ += count * tile_bytes();
    if (!is_compressed_) return reinterpret_cast<const Word*>(tile);
    for (int64_t i = 0; i < count; ++i) expand_tile(tile + i * kCompressedTileBytes, table_, tiles_ + i * kTileWords);
    for (const int64_t end = taken_ + count * kTileWeights; escape_ < last_escape_; escape_ += 4) {
      uint32_t escape;
      std::memcpy(&escape, escape_, sizeof escape);
      if (escape >> 8 >= end) break;
      reinterpret_cast<uint8_t*>(tiles_)[((escape >> 8) - taken_) * 2 + 1] = uint8_t(escape);
    }
    taken_ += count * kTileWeights;
    asm volatile("" : : "r"(tiles_) : "memory");  // GCC does not know that the tile instructions read memory
    return tiles_;
  }

 private:
  alignas(64) Word tiles_[kMostTiles * kTileWords];
  uint8_t table_[16];
  const uint8_t *next_, *escape_ = nullptr, *last_escape_ = nullptr;
  int64_t taken_ = 0;  // weights
  bool is_compressed_;
};

}  // namespace ygg

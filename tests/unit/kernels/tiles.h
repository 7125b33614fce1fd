// The tile instructions of AMX in software: so the kernels' form for AMX runs on processors without it that
// have bf16 in AVX-512.
//
// GCC includes this file first (`-include`), with `-D__AMX_BF16__`; CONTRIBUTING.md has the command. The
// sizes of the operands are checked, since a wrong one is an exception on a real processor, too. Sums add
// in ascending order and round after each product, so their bits may differ from a real processor's.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps

namespace tiles {

struct Tile {
  int64_t rows = 0, bytes = 0;  // in use
  unsigned char data[16][64] = {};
};

inline thread_local Tile all[8];

inline void check(bool holds) {
  if (!holds) __builtin_trap();
}

inline void load_config(const void* config) {
  const auto* from = static_cast<const unsigned char*>(config);
  for (int t = 0; t < 8; ++t) {
    uint16_t bytes;
    std::memcpy(&bytes, from + 16 + 2 * t, sizeof bytes);
    all[t] = {.rows = from[48 + t], .bytes = bytes};
  }
}

inline void zero(int t) { std::memset(all[t].data, 0, sizeof all[t].data); }

inline void load(int t, const void* from, int64_t stride) {
  check(all[t].rows > 0);
  zero(t);
  for (int64_t r = 0; r < all[t].rows; ++r)
    std::memcpy(all[t].data[r], static_cast<const char*>(from) + r * stride, all[t].bytes);
}

inline void store(int t, void* to, int64_t stride) {
  check(all[t].rows > 0);
  for (int64_t r = 0; r < all[t].rows; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, all[t].data[r], all[t].bytes);
}

inline float bf16(const unsigned char* address) {
  uint32_t bits = 0;
  std::memcpy(reinterpret_cast<char*>(&bits) + 2, address, 2);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// sums (rows, columns) += a (rows, words) b (words, columns), where a word is two bf16 numbers.
inline void add_products(int to, int first, int second) {
  Tile& sums = all[to];
  const Tile &a = all[first], &b = all[second];
  check(a.rows == sums.rows && b.bytes == sums.bytes && a.bytes == 4 * b.rows && sums.rows > 0);
  for (int64_t r = 0; r < sums.rows; ++r)
    for (int64_t c = 0; c < sums.bytes; c += 4) {
      float sum;
      std::memcpy(&sum, &sums.data[r][c], sizeof sum);
      for (int64_t w = 0; w < b.rows; ++w)
        for (int half = 0; half < 4; half += 2)
          sum += bf16(&a.data[r][4 * w + half]) * bf16(&b.data[w][c + half]);
      std::memcpy(&sums.data[r][c], &sum, sizeof sum);
    }
}

}  // namespace tiles

#define _tile_loadconfig(config) tiles::load_config(config)
#define _tile_release() ((void)0)
#define _tile_zero(t) tiles::zero(t)
#define _tile_loadd(t, from, stride) tiles::load(t, from, stride)
#define _tile_stored(t, to, stride) tiles::store(t, to, stride)
#define _tile_dpbf16ps(to, a, b) tiles::add_products(to, a, b)
// the permission to use tiles is granted
#define syscall(number, ...) ((number) == SYS_arch_prctl ? 0L : (syscall)(number, __VA_ARGS__))

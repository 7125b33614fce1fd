// Products with weights of 8 or 4 bits. quantisation.py has the layout and the specification.
//
// A vector instruction multiplies unsigned weights by signed numbers of x and adds four products a column.
// The weights' zero (128 or 8) times the sum of x is subtracted first, so no sum over weights is stored.
// All this is exact in int32. Where arithmetic is the limit, two panels are multiplied at a time: with one,
// loading numbers of x takes longer than the products. The sums of six rows fit the registers, and with one
// panel those of eight. More rows read the panels again, from L1 or L2. Few rows wait for memory
// (linear.cpp chooses the panels that it delivers fastest).
//
// x is rounded once per operator, in blocks of rows:
//
//   block, group   [ word 0 of every row | word 1 .. | ... | correction of every row | scale of every row ]
//
// A processor without VNNI has `pmaddubsw`, which adds two products in 16 bits. With weights of 4 bits the
// sums of a whole group fit: 16 products of at most 15 * 127. With 8 bits two products do not, so pairs of
// 16 bits are multiplied, and a word of x is stored as two: the first and third number of four, and the
// second and fourth one.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace ygg {

constexpr int64_t kScaleBytes = 2 * kColumns;
constexpr float kLargestRounded = 127, kNoSize = 1e-30f;

// Weights along k that share a scale.
constexpr int64_t group_len(int bits) { return bits == 8 ? 64 : 32; }
constexpr int64_t num_groups(int bits, int64_t len) {
  return (len + group_len(bits) - 1) / group_len(bits);
}
constexpr int group_lines(int bits) { return int(group_len(bits) / 4); }
constexpr int64_t group_bytes(int bits) { return kScaleBytes + kColumns * group_len(bits) * bits / 8; }

#if defined(__AVX512VNNI__) || !(defined(__AVX2__) || defined(__AVX512BW__))
constexpr bool kSumsInWords = true;  // of 32 bits
#else
constexpr bool kSumsInWords = false;
#endif
// Whether the products of a group are added in halves of words, of 16 bits.
constexpr bool sums_in_halves(int bits) { return !kSumsInWords && bits == 4; }
// Words of a row that hold four of its numbers.
constexpr int word_parts(int bits) { return kSumsInWords || bits == 4 ? 1 : 2; }
// Words of a row's group: its numbers, correction and scale.
constexpr int group_words(int bits) { return group_lines(bits) * word_parts(bits) + 2; }

// Adds the products of four unsigned weights a column and four numbers of x.
template <int kBits>
IntVec multiply_add_words(IntVec sum, WordVec weights, const Word* x, int64_t stride) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(int32_t(*x)));
#elif defined(__AVX512BW__)
  if constexpr (sums_in_halves(kBits)) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(int32_t(*x)));
    return (IntVec)_mm512_add_epi16((__m512i)sum, pairs);
  }
  const __m512i even = _mm512_and_si512((__m512i)weights, _mm512_set1_epi16(255));
  const __m512i odd = _mm512_srli_epi16((__m512i)weights, 8);
  const __m512i first = _mm512_madd_epi16(even, _mm512_set1_epi32(int32_t(x[0])));
  const __m512i second = _mm512_madd_epi16(odd, _mm512_set1_epi32(int32_t(x[stride])));
  return sum + (IntVec)first + (IntVec)second;
#elif defined(__AVX2__)
  if constexpr (sums_in_halves(kBits)) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(int32_t(*x)));
    return (IntVec)_mm256_add_epi16((__m256i)sum, pairs);
  }
  const __m256i even = _mm256_and_si256((__m256i)weights, _mm256_set1_epi16(255));
  const __m256i odd = _mm256_srli_epi16((__m256i)weights, 8);
  const __m256i first = _mm256_madd_epi16(even, _mm256_set1_epi32(int32_t(x[0])));
  const __m256i second = _mm256_madd_epi16(odd, _mm256_set1_epi32(int32_t(x[stride])));
  return sum + (IntVec)first + (IntVec)second;
#else
  for (int j = 0; j < 4; ++j)
    sum += (IntVec)(weights >> (8 * j) & 255) * int32_t(int8_t(*x >> (8 * j)));
  return sum;
#endif
}

// The sums of a column, from those of its even and odd pairs of products in 16 bits.
inline IntVec add_halves(IntVec sums) {
#if defined(__AVX512BW__)
  return (IntVec)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  return (IntVec)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
  return sums;
#endif
}

inline Vec to_float(IntVec value) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps((__m512i)value);
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps((__m256i)value);
#else
  return __builtin_convertvector(value, Vec);
#endif
}

// Rounds a group of a row, `count` numbers, for weights of kBits, and writes its words, `stride` words from
// one to the next.
template <class Dtype, int kBits>
void quantise_group(const typename Dtype::Element* from, int64_t count, Word* to, int64_t stride) {
  constexpr int64_t kLen = group_len(kBits);
  float numbers[kLen] = {};
  for (int64_t i = 0; i < count; ++i) numbers[i] = Dtype::widen(from[i]);
  uint32_t size = 0;  // as integers, sizes have the same order, and NaN is the largest
  for (float number : numbers) size = std::max(size, std::bit_cast<uint32_t>(number) & 0x7fffffff);
  const float largest = std::bit_cast<float>(size);
  const float inverse = largest > kNoSize ? kLargestRounded / largest : 0.0f;
  int32_t sum = 0;
  int8_t rounded[kLen];
  constexpr float kShift = 3 << 22;  // the lowest bits of a sum with it are the nearest whole number
  for (int i = 0; i < kLen; ++i) {
    const int32_t value =
        std::bit_cast<int32_t>(numbers[i] * inverse + kShift) - std::bit_cast<int32_t>(kShift);
    rounded[i] = int8_t(value);
    sum += rounded[i];
  }
  constexpr int kParts = word_parts(kBits);
  for (int word = 0; word < group_lines(kBits); ++word, to += kParts * stride) {
    const int8_t* four = rounded + 4 * word;
    if constexpr (kParts == 1) {
      std::memcpy(to, four, sizeof *to);
    } else {
      for (int part = 0; part < kParts; ++part)
        to[part * stride] = uint16_t(four[part]) | uint32_t(uint16_t(four[2 + part])) << 16;
    }
  }
  to[0] = uint32_t(-(1 << (kBits - 1)) * sum);
  to[stride] = std::bit_cast<uint32_t>(largest / kLargestRounded);
}

// The weights of line `line` of a group, without sign.
template <int kBits>
inline WordVec line_of(const uint8_t* lines, int line, int vec) {
  if constexpr (kBits == 8) return (WordVec)load(lines + 64 * line + vec * 4 * kLanes);
  const WordVec two = (WordVec)load(lines + 64 * (line / 2) + vec * 4 * kLanes);
  return (line % 2 ? two >> 4 : two) & 0x0f0f0f0f;
}

// What a block of rows prefetches for each panel while it computes `num_groups` groups: `bytes` for every
// group, from `from` on.
template <int kPanels>
struct Ahead {
  int64_t num_groups, bytes;
  const uint8_t* from[kPanels];
};

// kRows rows, a block, of kPanels panels: writes kRows x 16 sums for each, `stride` floats apart.
template <int kBits, int kRows, int kPanels, bool kIsReadOnce>
void multiply_groups(float* out, int64_t stride, const uint8_t* const* panels, const Word* x,
                     const std::array<Ahead<kPanels>, 2>& ahead) {
  constexpr int64_t kBytes = group_bytes(kBits);
  const uint8_t* group[kPanels];
  for (int p = 0; p < kPanels; ++p) group[p] = panels[p];
  Vec sums[kPanels][kRows][kVecs] = {};
  for (Ahead<kPanels> part : ahead) {
    for (int64_t g = 0; g < part.num_groups; ++g, x += group_words(kBits) * kRows) {
      const Word *corrections = x + (group_words(kBits) - 2) * kRows, *scales = corrections + kRows;
      IntVec exact[kPanels][kRows][kVecs];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const IntVec first = sums_in_halves(kBits) ? IntVec{} : (IntVec)(WordVec{} + corrections[r]);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p)
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v) exact[p][r][v] = first;
      }
#pragma GCC unroll 8
      for (int line = 0; line < group_lines(kBits); ++line) {
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; ++p) {
          if (line * 64 < part.bytes) prefetch_line<kIsReadOnce>(part.from[p] + line * 64);
#pragma GCC unroll 4
          for (int v = 0; v < kVecs; ++v) {
            const WordVec weights = line_of<kBits>(group[p] + kScaleBytes, line, v);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
              exact[p][r][v] =
                  multiply_add_words<kBits>(exact[p][r][v], weights,
                                            x + line * word_parts(kBits) * kRows + r, kRows);
          }
        }
      }
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const Vec scale = BFloat16::widen_all(reinterpret_cast<const uint16_t*>(group[p]) + v * kLanes);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            IntVec sum = exact[p][r][v];
            if (sums_in_halves(kBits)) sum = add_halves(sum) + (IntVec)(WordVec{} + corrections[r]);
            sums[p][r][v] = sums[p][r][v] + to_float(sum) * (scale * broadcast(scales[r]));
          }
        }
        group[p] += kBytes;
        part.from[p] += part.bytes;
      }
    }
  }
  // unrolled, because GCC keeps an array in memory that is read at variable places
#pragma GCC unroll 4
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec sum = sums[p][r][v];
        std::memcpy(out + p * stride + r * kColumns + v * kLanes, &sum, sizeof sum);
      }
    }
  }
}

}  // namespace ygg

// Vectors of words, as wide as the processor's, and the two dtypes of the kernels.
//
// A word is 32 bits: one fp32 number, or two bf16 numbers that are multiplied by two others and added in
// one step. A kernel reads one operand as single words and the other as lines of 16 words, so one loop
// serves both dtypes.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#endif

namespace ygg {

constexpr int kColumns = 16;  // words of a line

typedef uint32_t Word __attribute__((may_alias));

#if defined(__AVX512F__)
constexpr int kLanes = 16, kMaxRows = 8;  // most rows of accumulators in registers
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8, kMaxRows = 6;
#else
constexpr int kLanes = at::vec::Vectorized<float>::size(), kMaxRows = 2;
#endif
static_assert(kLanes == at::vec::Vectorized<float>::size());
constexpr int kVecs = kColumns / kLanes;  // vectors of a line
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint64_t WideVec __attribute__((vector_size(4 * kLanes)));
constexpr int kWideLanes = kLanes / 2;

inline Vec load(const void* address) {
  Vec value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

// Zen 5, which alone has both, reads memory fastest if lines are prefetched into L1; processors before it,
// if they are prefetched into L2 (by measurement).
#if defined(__AVX512VP2INTERSECT__) && defined(__AVX512BF16__)
constexpr bool kReadsIntoL1 = true;
#else
constexpr bool kReadsIntoL1 = false;
#endif

// Prefetches a line of weights or of KV. On Zen 5 a line that is read once leaves no copy in L2 and L3.
// Inlined always: GCC removes a call that only prefetches.
template <bool kIsReadOnce = false>
[[gnu::always_inline]] inline void prefetch_line(const void* address) {
  __builtin_prefetch(address, 0, !kReadsIntoL1 ? 2 : kIsReadOnce ? 0 : 3);
}

inline Vec broadcast(uint32_t bits) { return (Vec)(WordVec{} + bits); }

inline Vec multiply_add(Vec a, Vec b, Vec sum) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, sum);
#else
  return a * b + sum;
#endif
}

// The products of the lower halves of 64-bit words.
inline WideVec multiply_halves(WideVec a, WideVec b) {
#if defined(__AVX512F__)
  return (WideVec)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (WideVec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Calls a function of ATen's vectors, which have the same width.
template <class Function>
inline Vec apply(Function function, Vec value) {
  at::vec::Vectorized<float> result = function(at::vec::Vectorized<float>::loadu(&value));
  result.store(&value);
  return value;
}
inline Vec exp_u20(Vec value) {
  return apply([](const auto& v) { return v.exp_u20(); }, value);
}
inline Vec exp(Vec value) {
  return apply([](const auto& v) { return v.exp(); }, value);
}
inline Vec maximum(Vec a, Vec b) {  // keeps NaN
  return apply([&](const auto& v) { return at::vec::maximum(v, at::vec::Vectorized<float>::loadu(&b)); },
               a);
}

// Reduces the numbers of a vector, half with half.
template <class Operation>
inline float of_all(Vec value, Operation operation) {
  float numbers[kLanes];
  std::memcpy(numbers, &value, sizeof numbers);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) numbers[i] = operation(numbers[i], numbers[i + half]);
  return numbers[0];
}

struct Float32 {
  using Element = float;
  static constexpr int kPair = 1;   // numbers of a word
  static constexpr int kParts = 1;  // products of a word: one for all its numbers, or one in fp32 for each
  static Vec widen_all(const Element* numbers) { return load(numbers); }
  static Vec round(Vec value) { return value; }
  static Vec nearest(Vec value) { return value; }
  static float widen(Element value) { return value; }
  static Vec part(Vec words, int) { return words; }
  static Vec multiply(Vec sum, Vec a, Vec b) { return multiply_add(a, b, sum); }
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int kPair = 2;
  typedef Element Narrow __attribute__((vector_size(2 * kLanes)));
  static Narrow round(Vec value) {  // to nearest even
#if defined(__AVX512BF16__)
    return (Narrow)_mm512_cvtneps_pbh((__m512)value);
#endif
    return __builtin_convertvector(nearest_bits(value) >> 16, Narrow);
  }
  static Vec nearest(Vec value) {  // rounded likewise, as fp32
#if defined(__AVX512BF16__)
    return widen_all(round(value));
#endif
    return (Vec)(nearest_bits(value) & 0xffff0000u);
  }
  static WordVec nearest_bits(Vec value) {  // in the upper half
    const WordVec bits = (WordVec)value;
    return (bits & 0x7fffffff) > 0x7f800000 ? WordVec{} + 0x7fc00000 : bits + 0x7fff + ((bits >> 16) & 1);
  }
  static float widen(Element value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }
  static Vec widen_all(Narrow numbers) { return (Vec)(words(numbers) << 16); }
  static Vec widen_all(const Element* numbers) { return widen_all(narrow(numbers)); }
  static Narrow narrow(const Element* numbers) {
    Narrow value;
    std::memcpy(&value, numbers, sizeof value);
    return value;
  }
  static WordVec words(Narrow numbers) {
#if defined(__AVX512F__)
    return (WordVec)_mm512_cvtepu16_epi32((__m256i)numbers);
#elif defined(__AVX2__)
    // GCC 12 compiles __builtin_convertvector to five instructions
    return (WordVec)_mm256_cvtepu16_epi32((__m128i)numbers);
#else
    return __builtin_convertvector(numbers, WordVec);
#endif
  }
#if defined(__AVX512BF16__)
  static constexpr int kParts = 1;
  static Vec part(Vec words, int) { return words; }
  static Vec multiply(Vec sum, Vec a, Vec b) {
    return (Vec)_mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
#else
  static constexpr int kParts = 2;
  static Vec part(Vec words, int odd) {
    return (Vec)(odd ? (WordVec)words & 0xffff0000u : (WordVec)words << 16);
  }
  static Vec multiply(Vec sum, Vec a, Vec b) { return multiply_add(a, b, sum); }
#endif
};

constexpr int kTileRows = 16, kTileWords = kTileRows * kColumns;

#if defined(__AMX_BF16__)
inline bool amx_granted() {  // Linux grants the tile registers to a process on request
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// The sizes of the eight tile registers, as the processor reads them.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int first, int count, int64_t num_rows, int64_t bytes) {
    std::fill_n(rows + first, count, static_cast<uint8_t>(num_rows));
    std::fill_n(row_bytes + first, count, static_cast<uint16_t>(bytes));
  }
  void load() const {
    asm volatile("" : : "r"(this) : "memory");  // GCC does not know that the tile instructions read memory
    _tile_loadconfig(this);
  }
};
#else
inline bool amx_granted() { return false; }
#endif

}  // namespace ygg

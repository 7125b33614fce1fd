// The draws of Philox4x64-10, as numpy's generator uses it, and their Gumbel noise.
//
// A counter gives four draws. Token t has draw t % 4 of counter t / 4 + 1; the keys are seed and position.
// Source: Salmon et al. 2011.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "vectors.h"

namespace ygg {

struct PhiloxKeys {
  uint64_t first, second;

  PhiloxKeys next() const { return {first + 0x9E3779B97F4A7C15, second + 0xBB67AE8584CAA73B}; }
};

constexpr int kPhiloxRounds = 10;
constexpr uint64_t kPhiloxFirst = 0xD2E7470EE14C6C93, kPhiloxSecond = 0xCA5A826395121157;

inline std::array<uint64_t, 4> philox(uint64_t counter, PhiloxKeys keys) {
  std::array<uint64_t, 4> state{counter, 0, 0, 0};
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const auto first = static_cast<unsigned __int128>(kPhiloxFirst) * state[0];
    const auto second = static_cast<unsigned __int128>(kPhiloxSecond) * state[2];
    state = {uint64_t(second >> 64) ^ state[1] ^ keys.first, uint64_t(second),
             uint64_t(first >> 64) ^ state[3] ^ keys.second, uint64_t(first)};
    keys = keys.next();
  }
  return state;
}

// ---- many counters at once ----

constexpr int kBatchCounters = 16, kBatchTokens = 4 * kBatchCounters;
constexpr int kBatchVecs = kBatchCounters / kWideLanes;

using Counters = std::array<WideVec, kBatchVecs>;

// The draws of a batch of counters.
struct Draws {
  WideVec words[4][kBatchVecs];

  uint64_t of(int counter, int word) const {
    return words[word][counter / kWideLanes][counter % kWideLanes];
  }
  // of a token of `draws_of`
  uint64_t of(int place) const { return of(place / 4, place % 4); }
};

struct WideProduct {
  WideVec upper, lower;
};

// The 128 bits of products by a constant.
inline WideProduct multiply_wide(WideVec a, uint64_t by) {
  const WideVec by_lower = WideVec{} + (by & 0xffffffff), by_upper = WideVec{} + (by >> 32);
  const WideVec a_upper = a >> 32;
  const WideVec lowest = multiply_halves(a, by_lower);
  const WideVec inner = multiply_halves(a_upper, by_lower) + (lowest >> 32);
  const WideVec outer = multiply_halves(a, by_upper) + (inner & 0xffffffff);
  return {multiply_halves(a_upper, by_upper) + (inner >> 32) + (outer >> 32),
          outer << 32 | (lowest & 0xffffffff)};
}

// `philox` of every counter. The first two rounds have a factor that is 0 and one that is the same for all
// counters.
inline Draws philox_batch(const Counters& counters, PhiloxKeys keys) {
  const auto constant = static_cast<unsigned __int128>(kPhiloxFirst) * keys.first;
  const PhiloxKeys second_keys = keys.next();
  Draws draws;
  auto& [a, b, c, d] = draws.words;
  for (int v = 0; v < kBatchVecs; ++v) {
    const WideProduct first = multiply_wide(counters[v], kPhiloxFirst);
    const WideProduct second = multiply_wide(first.upper ^ keys.second, kPhiloxSecond);
    a[v] = second.upper ^ second_keys.first;
    b[v] = second.lower;
    c[v] = first.lower ^ (uint64_t(constant >> 64) ^ second_keys.second);
    d[v] = WideVec{} + uint64_t(constant);
  }
  keys = second_keys.next();
  for (int round = 2; round < kPhiloxRounds; ++round, keys = keys.next())
    for (int v = 0; v < kBatchVecs; ++v) {
      const WideProduct first = multiply_wide(a[v], kPhiloxFirst);
      const WideProduct second = multiply_wide(c[v], kPhiloxSecond);
      a[v] = second.upper ^ b[v] ^ keys.first;
      b[v] = second.lower;
      c[v] = first.upper ^ d[v] ^ keys.second;
      d[v] = first.lower;
    }
  return draws;
}

// The draws of tokens [first, first + kBatchTokens); `first` is a multiple of 4.
inline Draws draws_of(int64_t first, PhiloxKeys keys) {
  Counters counters;
  for (int i = 0; i < kBatchCounters; ++i)
    counters[i / kWideLanes][i % kWideLanes] = uint64_t(first) / 4 + 1 + uint64_t(i);
  return philox_batch(counters, keys);
}

// ---- noise ----

// u of a draw, never 0.
inline double uniform_of(uint64_t draw) {
  return std::max(double(draw >> 11) * 0x1p-53, std::numeric_limits<double>::min());
}

// 1 - u of a draw.
inline double rest_of(uint64_t draw) { return 1.0 - double(draw >> 11) * 0x1p-53; }

// The noise of a draw.
inline float gumbel(uint64_t draw) { return float(-std::log(-std::log(uniform_of(draw)))); }

}  // namespace ygg

// The constants of layout.py, which explains them. A test holds the two files equal.
#pragma once

#include <cstdint>

namespace ygg {

enum Column {
  kToken = 0,
  kPosition = 1,
  kRow = 2,
  kIndex = 3,
  kPrefix = 4,
  kRead = 5,
  kPath = 6,
};

// values of kRead
constexpr int32_t kReadBest = 1, kReadWide = 2;

constexpr int64_t kPageLen = 16;

}  // namespace ygg

// Where the page of one head holds its words on a CPU: in the order in which products read them.
// page_order.py shows it, and has the specification.
#pragma once

#include <cstdint>
#include <cstring>

#include "layout.h"
#include "vectors.h"

namespace ygg {

// A page of the keys or values of one head, F features each, as words.
template <class Element>
struct PageOrder {
  static constexpr int64_t kPair = sizeof(Word) / sizeof(Element);  // numbers of a word

  // Word s of the key in a slot: all slots' first words, then all second ones.
  static int64_t key(int64_t slot, int64_t s) { return s * kPageLen + slot; }

  // The line of F words that has the value in a slot, in bf16 together with another slot's.
  static int64_t value_line(int64_t slot, int64_t dim) { return slot / kPair * dim; }

  // The bits of a slot's numbers within the words of its line.
  static int64_t first_bit(int64_t slot) { return slot % kPair * 16; }
  static uint32_t mask(int64_t slot) { return (kPair == 1 ? 0xffffffffu : 0xffffu) << first_bit(slot); }

  static void store_key(Word* page, int64_t slot, const Element* key, int64_t dim) {
    for (int64_t s = 0; s < dim / kPair; ++s)
      std::memcpy(page + PageOrder::key(slot, s), key + s * kPair, sizeof(Word));
  }

  static void store_value(Word* page, int64_t slot, const Element* value, int64_t dim) {
    Word* line = page + value_line(slot, dim);
    if constexpr (kPair == 1)
      std::memcpy(line, value, dim * sizeof(Word));
    else
      for (int64_t f = 0; f < dim; ++f)
        line[f] = (line[f] & ~mask(slot)) | uint32_t(value[f]) << first_bit(slot);
  }

  static void copy_key(Word* to, int64_t to_slot, const Word* from, int64_t from_slot, int64_t dim) {
    for (int64_t s = 0; s < dim / kPair; ++s) to[key(to_slot, s)] = from[key(from_slot, s)];
  }

  // Copies a value from one line to another.
  static void copy_value(Word* to, int64_t to_slot, const Word* from, int64_t from_slot, int64_t dim) {
    for (int64_t f = 0; f < dim; ++f) {
      const uint32_t number = from[f] >> first_bit(from_slot) << first_bit(to_slot);
      to[f] = (to[f] & ~mask(to_slot)) | (number & mask(to_slot));
    }
  }
};

}  // namespace ygg

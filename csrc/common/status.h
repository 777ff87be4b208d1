// Flags of a row or a sequence; specdec_kernels.Status has the same numbers.
#pragma once
#include <cstdint>

namespace specdec {
enum Status : int32_t {
  kNaN = 1,
  kInf = 2,
  kEmptyRow = 4,
  kBadToken = 8,
  kBadParam = 16,
  kBadTree = 32,
  kBadDraft = 64
};
}

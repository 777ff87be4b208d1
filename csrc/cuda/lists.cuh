// Ascending lists of ids, as processors have them.
#pragma once
#include "common/processors.h"
#include "cuda/warp.cuh"

namespace specdec::cuda {

// Whether the n ids id(0), id(1), … ascend, in every thread of the block.
template <class Id>
__device__ __forceinline__ bool block_ascends(int32_t n, Id id) {
  int32_t bad = 0;
  for (int32_t i = 1 + int32_t(threadIdx.x); i < n; i += int32_t(blockDim.x)) bad |= !may_follow(id(i), id(i - 1));
  return block_reduce(bad, 0, Or{}) == 0;
}

}  // namespace specdec::cuda

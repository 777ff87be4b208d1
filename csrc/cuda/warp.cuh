// Warps and blocks: lane numbers and reductions. Results do not depend on the block's size.
#pragma once
#include <cstdint>

#include "common/host_device.h"
#include "cuda/portable.h"

namespace specdec::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return int(threadIdx.x % 32); }
__device__ __forceinline__ int warp_id() { return int(threadIdx.x / 32); }
__device__ __forceinline__ int num_warps() { return int(blockDim.x / 32); }

struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};
struct Min {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};
struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Or {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a | b;
  }
};

// `op` over the warp, with the same bits in every lane: op is commutative and lanes meet in pairs.
template <class T, class Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = op(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// `op` over the block, in every thread. For operations whose order does not matter: Max, Min, Or, integer sums.
template <class T, class Op>
__device__ __forceinline__ T block_reduce(T value, T identity, Op op) {
  SPECDEC_SHARED(T, part, 32);
  value = warp_reduce(value, op);
  if (lane_id() == 0) part[warp_id()] = value;
  __syncthreads();
  value = warp_reduce(lane_id() < num_warps() ? part[lane_id()] : identity, op);
  __syncthreads();
  return value;
}

// True in the one block that arrives last, which can read what the others have written.
__device__ __forceinline__ bool arrives_last(unsigned* arrived, int64_t blocks) {
  SPECDEC_SHARED(bool, last, 1);
  __syncthreads();
  if (threadIdx.x == 0) {  // for the whole block: its barriers extend the fences to all threads
    __threadfence();
    last[0] = atomicAdd(arrived, 1u) + 1 == unsigned(blocks);
    __threadfence();
  }
  __syncthreads();
  return last[0];
}

// Floats as unsigned integers of the same order. NaN has no place: it is removed before.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

}  // namespace specdec::cuda

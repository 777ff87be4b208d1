// What the kernels need beyond plain C++, as spelt for nvcc; csrc/emulator spells the same for a C++ compiler.
#pragma once
#ifdef SPECDEC_EMULATOR
#include "emulator/cuda.h"
#else
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

// A static array in shared memory, uninitialised and of a trivially copyable type; the launch's dynamic shared memory.
#define SPECDEC_SHARED(type, name, count)                                      \
  __shared__ __align__(16) unsigned char name##_bytes[sizeof(type) * (count)]; \
  type* const name = reinterpret_cast<type*>(name##_bytes)
#define SPECDEC_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace specdec::cuda {

bool hopper_code();  // see strategy.h

struct Shape {
  dim3 grid, block;
  size_t shared = 0;         // bytes of dynamic shared memory
  unsigned cluster = 1;      // blocks of a cluster, along x
  bool overlapping = false;  // may start before the stream's previous kernel has ended: see wait_for_previous
  bool overlapped = false;   // the next kernel may start before this one has ended
};

// Prepares the current device for a kernel's launches, once: the settings that several threads ask for must not differ
// from call to call. See strategy.cu.
cudaError_t prepare_kernel(const void* kernel, bool overlaps);

// Kernel launch; returns the launch's error. More than 48 KB of shared memory per block, static and dynamic together,
// must be requested, and a kernel's static memory is not known here.
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const Shape& shape, cudaStream_t stream,
                          Arguments&&... arguments) {
  const bool overlaps = shape.overlapping || shape.overlapped;
  if (shape.shared > 0 || overlaps) {
    const cudaError_t error = prepare_kernel(reinterpret_cast<const void*>(kernel), overlaps);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  if (shape.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {shape.cluster, 1, 1};
  }
  if (shape.overlapping && hopper_code()) {  // older code would not wait
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  config.attrs = attributes;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

#ifdef __CUDACC__
// Blocks until what the stream's previous kernel wrote can be read.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Lets the stream's next kernel start and run up to its wait_for_previous.
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// 2^x within 2 units in the last place; denormal results are 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Prefetches the line of device memory at an address, without waiting.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

// The larger one, or NaN if either is NaN; +0 is larger than -0. For two floats, and for both halves of two words.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ unsigned max_or_nan_bf16x2(unsigned a, unsigned b) {
  unsigned y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ unsigned max_or_nan_f16x2(unsigned a, unsigned b) {
  unsigned y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// A float16 from its bits.
__device__ __forceinline__ float half_bits_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// The cluster that the block belongs to; a cluster of one block if the launch asked for none.
__device__ __forceinline__ unsigned cluster_rank() {
#if __CUDA_ARCH__ >= 900
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

__device__ __forceinline__ unsigned cluster_size() {
#if __CUDA_ARCH__ >= 900
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The same address of shared memory in another block of the cluster.
template <class T>
__device__ __forceinline__ T* in_cluster_block(T* address, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  T* mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(address), "r"(rank));
  return mapped;
#else
  (void)rank;
  return address;
#endif
}

// ---- Bulk copies, and the barriers in shared memory that signal their end: compute capability 9.0 and later.

// A barrier whose phase ends when `arrivals` threads have arrived and all bytes that they announced have landed.
__device__ __forceinline__ void init_mbarrier(uint64_t* barrier, unsigned arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(unsigned(__cvta_generic_to_shared(barrier))),
               "r"(arrivals)
               : "memory");
#endif
}

// After init_mbarrier, by the same thread: makes the barriers usable by copies.
__device__ __forceinline__ void publish_mbarriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives and announces bytes.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(unsigned(__cvta_generic_to_shared(barrier))),
      "r"(bytes)
      : "memory");
#endif
}

// Starts a copy from device memory into the block's shared memory; addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   unsigned(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(unsigned(__cvta_generic_to_shared(barrier)))
               : "memory");
#endif
}

// Blocks until the barrier's phase of this parity (0 for the first) has ended; then what has landed can be read.
__device__ __forceinline__ void wait_for_phase(uint64_t* barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
          unsigned(__cvta_generic_to_shared(barrier))),
      "r"(parity)
      : "memory");
#endif
}

// A word in device memory that other blocks may be changing by atomics. It tells nothing about their other writes.
__device__ __forceinline__ unsigned load_now(const unsigned* address) {
  unsigned found;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(__cvta_generic_to_global(address)) : "memory");
  return found;
}

// Blocks until all these bits of a word in device memory are set. What their setters wrote before a fence can be read
// after one. Setters must be certain to run: they have already started, or wait for nothing.
__device__ __forceinline__ void wait_for_bits(unsigned* flags, unsigned bits) {
  while ((load_now(flags) & bits) != bits) {
  }
}

// Loads from memory of any kind, whereas __ldg is for device memory that no kernel writes.
template <class T>
__device__ __forceinline__ T load_anywhere(const T* address) {
  return *address;
}
#endif

}  // namespace specdec::cuda
#endif

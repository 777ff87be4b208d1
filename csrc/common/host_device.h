// Functions that host and device share. Internal linkage on the host: files compiled for different instruction sets include
// them, and an external copy built for one set could be the one that the linker keeps for all.
#pragma once
#ifdef __CUDACC__
#define SPECDEC_HD __host__ __device__ __forceinline__
#else
#define SPECDEC_HD [[maybe_unused]] static inline
#endif

// What is long and called from several places: once in a kernel's code.
#ifdef __CUDACC__
#define SPECDEC_HD_OUT_OF_LINE inline __host__ __device__ __noinline__
#else
#define SPECDEC_HD_OUT_OF_LINE [[maybe_unused]] static inline
#endif

// A template over what its caller can do: where there is a device, over what only that can do.
#ifdef __CUDACC__
#define SPECDEC_RULE __device__ __forceinline__
#else
#define SPECDEC_RULE [[maybe_unused]] static inline
#endif

// The same for a member function, which is inline by itself.
#ifdef __CUDACC__
#define SPECDEC_MEMBER __device__
#else
#define SPECDEC_MEMBER
#endif

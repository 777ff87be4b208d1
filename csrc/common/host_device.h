// Functions that host and device share. Internal linkage on the host: files compiled for different instruction sets include
// them, and an external copy built for one set could be the one that the linker keeps for all.
#pragma once
#ifdef __CUDACC__
#define SPECDEC_HD __host__ __device__ __forceinline__
#else
#define SPECDEC_HD [[maybe_unused]] static inline
#endif

// For long functions with several call sites: their code exists once per kernel.
#ifdef __CUDACC__
#define SPECDEC_HD_OUT_OF_LINE inline __host__ __device__ __noinline__
#else
#define SPECDEC_HD_OUT_OF_LINE [[maybe_unused]] static inline
#endif

// For templates over a class of the caller's; in CUDA code its members may be callable on the device only.
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

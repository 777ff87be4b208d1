// Runs CUDA C++ kernels on the CPU: what cuda/portable.h gives nvcc, for a C++ compiler. Needs nothing of the CUDA toolkit.
// csrc/emulator/*.cpp belong into every library of emulated kernels.
//
// Kernels run in one thread of the CPU, a fiber for each CUDA thread; fibers give way to each other at collectives and
// barriers, in random schedules at atomics too. What this cannot show: weak memory other than what TSan finds, inline PTX,
// and threads that overtake each other between two such points.
#pragma once
#include <cstdint>
#include <tuple>
#include <utility>

#include "emulator/collectives.h"
#include "emulator/device_functions.h"
#include "emulator/host.h"
#include "emulator/runtime.h"

// `count` may hold commas of template arguments, hence the variadic last parameter.
#define SPECDEC_SHARED(type, name, ...)                    \
  static ::specdec::emulator::SharedArray name##_in_block; \
  auto& name = ::specdec::emulator::shared_array<type[__VA_ARGS__]>(name##_in_block, ::specdec::emulator::Site::here())
#define SPECDEC_DYNAMIC_SHARED(name) unsigned char* const name = ::specdec::emulator::current->block->memory

namespace specdec::cuda {

struct Shape {
  dim3 grid, block;
  size_t shared = 0;
  unsigned cluster = 1;
  bool overlapping = false;
};

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const Shape& shape, cudaStream_t, Arguments&&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "a kernel's parameters are at most 4096 bytes");
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  };
  const Call call{kernel, {std::forward<Arguments>(arguments)...}};
  auto body = [](const void* p) {
    // Parameters come with the launch; the device does not fetch them from the host's memory.
    const Call mine = [p] {
      emulator::IgnoreReads ignore;
      return *static_cast<const Call*>(p);
    }();
    std::apply(mine.kernel, mine.arguments);
  };
  const emulator::Grid grid{shape.grid, shape.block, shape.shared, shape.cluster, shape.overlapping};
  return emulator::run_grid(grid, body, &call) ? cudaSuccess : cudaErrorInvalidConfiguration;
}

inline void wait_for_previous() { emulator::wait_for_previous_kernel(); }
inline void allow_next() {}

inline float fast_exp2(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline float half_bits_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7FFF;
  if (magnitude > 0x7C00) return __uint_as_float(0x7FFFFFFFu);                                        // NaN
  if (magnitude == 0x7C00) return __uint_as_float(sign | 0x7F800000u);                                // infinity
  if (magnitude < 0x400) return __uint_as_float(sign | 0x3F800000u) * (float(magnitude) * 0x1p-24f);  // subnormal
  return __uint_as_float(sign | ((magnitude << 13) + 0x38000000u));
}

inline unsigned cluster_rank() { return emulator::current->block->rank; }
inline unsigned cluster_size() { return emulator::blocks_of_cluster(); }
inline void cluster_sync(emulator::Site site = emulator::Site::here()) { emulator::cluster_barrier(site); }

template <class T>
T* in_cluster_block(T* address, unsigned rank) {
  return static_cast<T*>(emulator::address_in_cluster_block(address, rank));
}

}  // namespace specdec::cuda

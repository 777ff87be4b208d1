// Runs CUDA C++ kernels on the CPU: what cuda/portable.h gives nvcc, for a C++ compiler. Needs nothing of the CUDA toolkit.
// csrc/emulator/*.cpp belong in every library of emulated kernels.
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
#include "emulator/transfers.h"

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
  bool overlapping = false, overlapped = false;
};

template <class... Parameters, class... Arguments>
cudaError_t launch_named(const char* name, void (*kernel)(Parameters...), const Shape& shape, cudaStream_t,
                         Arguments&&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "a kernel's parameters are at most 4096 bytes");
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  };
  const Call call{kernel, {std::forward<Arguments>(arguments)...}};
  auto body = [](const void* p) {
    // Parameters are copied with the launch; the device does not fetch them from the host's memory.
    const Call mine = [p] {
      emulator::IgnoreReads ignore;
      return *static_cast<const Call*>(p);
    }();
    std::apply(mine.kernel, mine.arguments);
  };
  const emulator::Grid grid{shape.grid, shape.block, shape.shared, shape.cluster, shape.overlapping, name};
  return emulator::run_grid(grid, body, &call) ? cudaSuccess : cudaErrorInvalidConfiguration;
}

#define launch_kernel(...) launch_named(#__VA_ARGS__, __VA_ARGS__)

inline void wait_for_previous() { emulator::wait_for_previous_kernel(); }
inline void allow_next() {}
inline void prefetch(const void* address) { (void)*static_cast<const volatile char*>(address); }  // for the sanitizers

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

inline float max_or_nan(float a, float b) { return a != a || b != b ? __uint_as_float(0x7FFFFFFFu) : fmaxf(a, b); }

// Both halves of two words; to_float turns 16 bits into a float.
template <class ToFloat>
unsigned max_or_nan_x2(unsigned a, unsigned b, ToFloat to_float) {
  const auto larger = [&](uint16_t a, uint16_t b) -> unsigned {
    const float x = to_float(a), y = to_float(b), max = max_or_nan(x, y);
    return max != max ? 0x7FFF : x == max && signbit(x) == signbit(max) ? a : b;
  };
  return larger(uint16_t(a), uint16_t(b)) | larger(uint16_t(a >> 16), uint16_t(b >> 16)) << 16;
}
inline unsigned max_or_nan_bf16x2(unsigned a, unsigned b) {
  return max_or_nan_x2(a, b, [](uint16_t bits) { return __uint_as_float(unsigned(bits) << 16); });
}
inline unsigned max_or_nan_f16x2(unsigned a, unsigned b) { return max_or_nan_x2(a, b, half_bits_to_float); }

inline unsigned cluster_rank() { return emulator::current->block->rank; }
inline unsigned cluster_size() { return emulator::blocks_of_cluster(); }
inline void cluster_sync(emulator::Site site = emulator::Site::here()) { emulator::cluster_barrier(site); }

template <class T>
T* in_cluster_block(T* address, unsigned rank) {
  return static_cast<T*>(emulator::address_in_cluster_block(address, rank));
}

inline void init_mbarrier(uint64_t* barrier, unsigned arrivals, emulator::Site site = emulator::Site::here()) {
  emulator::init_barrier(barrier, arrivals, site);
}
inline void publish_mbarriers() { emulator::publish_barriers(); }
inline void expect_bytes(uint64_t* barrier, unsigned bytes, emulator::Site site = emulator::Site::here()) {
  emulator::expect_bytes(barrier, bytes, site);
}
inline void bulk_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier,
                      emulator::Site site = emulator::Site::here()) {
  emulator::start_copy(to, from, bytes, barrier, site);
}
inline void wait_for_phase(uint64_t* barrier, unsigned parity, emulator::Site site = emulator::Site::here()) {
  emulator::wait_for_barrier(barrier, parity, site);
}
inline void wait_for_bits(unsigned* flags, unsigned bits, emulator::Site site = emulator::Site::here()) {
  emulator::wait_for_bits(flags, bits, site);
}

inline unsigned load_now(const unsigned* address) {
  emulator::count_load(sizeof *address);
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

// Loads from memory of any kind; what is not the cluster's own is counted.
template <class T>
T load_anywhere(const T* address, emulator::Site site = emulator::Site::here()) {
  if (!emulator::is_shared(address)) return __ldg(address, site);
  emulator::check_aligned(address, alignof(T), "load_anywhere", site);
  return *address;
}

}  // namespace specdec::cuda

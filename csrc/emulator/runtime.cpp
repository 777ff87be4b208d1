// What tests set in the emulator. A library of emulated kernels is csrc/cuda/*.cu and csrc/emulator/*.cpp.
#include "emulator/cuda.h"

#define SPECDEC_EXPORT extern "C" __attribute__((visibility("default")))

// Order of threads, warps and blocks in every later launch: 0 forward, 1 reverse, 2 random from `seed`.
SPECDEC_EXPORT void specdec_emulator_schedule(int order, uint64_t seed) {
  auto& options = specdec_emu::options();
  options.order = specdec_emu::Order(order);
  options.seed = seed;
  options.shuffle_blocks = order == 2;
}

// Multiprocessors that the emulated device claims; 8 unless set.
SPECDEC_EXPORT void specdec_emulator_multiprocessors(int count) { g_specdec_multiprocessors = count; }

// Picks the table of tile kernels, once.
#include "kernels.h"

namespace specdec::cpu {
namespace {

int limit = 2;

const Kernels& pick() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && limit >= 2) return kernels_avx512;
  if (avx2 && limit >= 1) return kernels_avx2;
#endif
  return kernels_default;
}

const Kernels* chosen = nullptr;

}  // namespace

const Kernels& kernels() {
  // Two threads that both come first pick the same table, and a pointer is written in one piece.
  const Kernels* table = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
  if (table == nullptr) {
    table = &pick();
    __atomic_store_n(&chosen, table, __ATOMIC_RELEASE);
  }
  return *table;
}

}  // namespace specdec::cpu

// Called by specdec_kernels/backends/native.py through ctypes. A limit only ever lowers the choice.
extern "C" {
__attribute__((visibility("default"))) void specdec_limit_cpu_capability(int level) {
  specdec::cpu::limit = level;
  __atomic_store_n(&specdec::cpu::chosen, nullptr, __ATOMIC_RELEASE);
}
__attribute__((visibility("default"))) int specdec_cpu_capability() { return specdec::cpu::kernels().level; }
}

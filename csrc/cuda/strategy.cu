#include "cuda/strategy.h"

#include <atomic>
#ifndef SPECDEC_EMULATOR
#include "cuda/device_info.h"
#endif

namespace specdec::cuda {
namespace {

constexpr int kDevices = 64;
std::atomic<int> forced{int(Strategy::kAuto)};

// ask(device, &value) once for each device; `otherwise` where it fails.
template <class Ask>
int asked_once(std::atomic<int> (&known)[kDevices], int otherwise, Ask ask) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return otherwise;
  if ((value = known[device].load(std::memory_order_relaxed)) > 0) return value;
  if (ask(device, &value) != cudaSuccess || value < 1) return otherwise;
  known[device].store(value, std::memory_order_relaxed);
  return value;
}

}  // namespace

Strategy forced_strategy() { return Strategy(forced.load(std::memory_order_relaxed)); }

int multiprocessors() {
#ifdef SPECDEC_EMULATOR
  return emulator::multiprocessors();  // which tests change
#else
  static std::atomic<int> known[kDevices];
  return asked_once(known, 1, [](int device, int* count) {
    return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  });
#endif
}

bool hopper_code() {
#ifdef SPECDEC_EMULATOR
  return true;
#else
  static std::atomic<int> known[kDevices];  // what decides is __CUDA_ARCH__, not the device
  return asked_once(known, 0, [](int, int* version) {
           *version = virtual_architecture();
           return cudaSuccess;
         }) >= 90;
#endif
}

}  // namespace specdec::cuda

void specdec_cuda_force_strategy(int strategy) { specdec::cuda::forced.store(strategy, std::memory_order_relaxed); }

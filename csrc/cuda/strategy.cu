#include "cuda/strategy.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#ifndef SPECDEC_EMULATOR
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "cuda/device_info.h"
#endif

namespace specdec::cuda {
namespace {

// The layout of verify_chain, by sequences per multiprocessor: the first one whose `below` is greater. On an H100 the
// split layout, which reads every row but keeps the whole device busy, was the fastest of the first four, uncut and
// cut, at all batches from 1 to 256 (the resident one serves at most 15 sequences). The early layout is not measured
// yet: its border is where it should save more bytes than it costs (a memset, a look at each row's end).
// `python -m bench.gpu.crossovers --write` sets this from measurements.
constexpr struct {
  double below;
  Strategy strategy;
} kLayouts[] = {
    {0.4, Strategy::kSplit},
    {INFINITY, Strategy::kEarly},
};

constexpr int kDevices = 64;
std::atomic<int> forced{int(Strategy::kAuto)}, overlap{1};

// Calls ask(device, &value) once for each device; returns `otherwise` if it fails.
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
bool may_overlap() { return overlap.load(std::memory_order_relaxed) != 0; }

Strategy strategy_for_chains(int64_t batch) {
  const double each = double(batch) / multiprocessors();
  for (const auto& layout : kLayouts) {
    if (each < layout.below) return layout.strategy;
  }
  return Strategy::kWalk;
}

int multiprocessors() {
#ifdef SPECDEC_EMULATOR
  return emulator::multiprocessors();  // tests change it
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
  static std::atomic<int> known[kDevices];  // it depends on __CUDA_ARCH__, not on the device
  return asked_once(known, 0, [](int, int* version) {
           *version = virtual_architecture();
           return cudaSuccess;
         }) >= 90;
#endif
}

#ifdef SPECDEC_EMULATOR
int clusters_at_once(const void*, const Shape& shape) {
  constexpr int64_t kBlocks = 1, kAll = 228 << 10, kArrays = 12 << 10,
                    kSystem = 1 << 10;  // of an H100's multiprocessor
  const int64_t bytes = int64_t(shape.shared) + kArrays;
  if (bytes > emulator::kMostShared) return 0;
  return int(multiprocessors() * std::min(kBlocks, kAll / (bytes + kSystem)) / shape.cluster);
}
#else
int clusters_at_once(const void* kernel, const Shape& shape) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, unsigned, size_t>, int> known;
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [found, is_new] = known.try_emplace({kernel, device, shape.cluster, shape.shared}, 0);
  if (!is_new) return found->second;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.cluster);
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (prepare_kernel(kernel, false) == cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess)
    found->second = count;
  else
    cudaGetLastError();  // it asks for more than the device has
  return found->second;
}

cudaError_t prepare_kernel(const void* kernel, bool overlaps) {
  // Kernels run beside each other on a multiprocessor only if its memory is divided in the same way for them: room for
  // three blocks with a list of kMaxListed floats.
  constexpr int kRoom = 64 << 10;
  static std::mutex mutex;
  static std::set<std::tuple<const void*, int, bool>> prepared;
  int device = 0, most = 0, all = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  if (prepared.count({kernel, device, overlaps})) return cudaSuccess;
  cudaFuncAttributes attributes{};
  if ((error = cudaFuncGetAttributes(&attributes, kernel)) != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  // The limit alone reserves nothing: what a launch asks for counts.
  error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - int(attributes.sharedSizeBytes));
  if (error != cudaSuccess) return error;
  if (overlaps && hopper_code()) {
    error = cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (error != cudaSuccess) return error;
    const int percent = std::min(100, 100 * kRoom / all);  // 28 of an H100's 228 KB
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent);
  }
  if (error == cudaSuccess) prepared.insert({kernel, device, overlaps});
  return error;
}
#endif

}  // namespace specdec::cuda

void specdec_cuda_force_strategy(int strategy) { specdec::cuda::forced.store(strategy, std::memory_order_relaxed); }
void specdec_cuda_allow_overlap(int allow) { specdec::cuda::overlap.store(allow, std::memory_order_relaxed); }

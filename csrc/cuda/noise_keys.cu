#include "common/ids.h"
#include "common/philox.h"
#include "cuda/ops.h"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) noise_keys_kernel(NoiseKeysArgs args) {
  const int64_t i = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (i >= args.batch * args.n) return;
  const int64_t b = i / args.n;
  const int64_t step = args.steps ? args.steps[b] : args.step;
  args.out[i] = noise_key(args.seeds[b], id_at(args.positions, i), step, args.purpose);
}

}  // namespace

cudaError_t noise_keys(const NoiseKeysArgs& args, const Launch& launch) {
  const int64_t count = args.batch * args.n;
  if (count == 0) return cudaSuccess;
  const dim3 grid(unsigned((count + kThreads - 1) / kThreads));
  return launch_kernel(noise_keys_kernel, {grid, dim3(kThreads)}, launch.stream, args);
}

}  // namespace specdec::cuda

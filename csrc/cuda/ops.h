// The CUDA kernels: one function an op, each in the file of its name. They enqueue work on the stream and return.
#pragma once
#include <cstdint>
#include <functional>

#include "common/params.h"
#include "cuda/portable.h"

namespace specdec::cuda {

struct Launch {
  cudaStream_t stream;
  // Device memory of at least so many bytes, 256-byte aligned, not initialised, valid until the work enqueued is done.
  std::function<void*(int64_t bytes)> scratch;
};

cudaError_t row_stats(const RowStatsArgs& args, const Launch& launch);
cudaError_t warp_probs(const WarpProbsArgs& args, const Launch& launch);
cudaError_t uniform_samples(const UniformSamplesArgs& args, const Launch& launch);
cudaError_t noise_keys(const NoiseKeysArgs& args, const Launch& launch);
cudaError_t sample(const SampleArgs& args, const Launch& launch);
cudaError_t verify(const VerifyChainArgs& args, const Launch& launch);  // verify_chain and verify_packed
cudaError_t verify_tree(const VerifyTreeArgs& args, const Launch& launch);
cudaError_t gather_kv(const GatherKVArgs& args, const Launch& launch);

// Under the names that csrc/bind_ops.h knows them by.
struct Kernels {
  static constexpr auto kRowStats = row_stats;
  static constexpr auto kWarpProbs = warp_probs;
  static constexpr auto kUniformSamples = uniform_samples;
  static constexpr auto kNoiseKeys = noise_keys;
  static constexpr auto kSample = sample;
  static constexpr auto kVerify = verify;
  static constexpr auto kVerifyTree = verify_tree;
  static constexpr auto kGatherKV = gather_kv;
};

}  // namespace specdec::cuda

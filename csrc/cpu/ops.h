// The CPU kernels: one function an op, each in the file of its name.
#pragma once
#include "common/params.h"

namespace specdec::cpu {

void row_stats(const RowStatsArgs& args);
void warp_probs(const WarpProbsArgs& args);
void uniform_samples(const UniformSamplesArgs& args);
void noise_keys(const NoiseKeysArgs& args);
void sample(const SampleArgs& args);
void verify(const VerifyChainArgs& args);  // verify_chain and verify_packed
void verify_tree(const VerifyTreeArgs& args);
void gather_kv(const GatherKVArgs& args);

}  // namespace specdec::cpu

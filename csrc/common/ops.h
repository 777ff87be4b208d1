// The list of ops. It generates the kernels' declarations on each device (cpu/ops.h, cuda/ops.h), their names in
// csrc/bind_ops.h and their registrations: OP(Name, op) is op `op`, whose kernels take Name##Args (common/params.h).
#pragma once

#define SPECDEC_OPS(OP)               \
  OP(RowStats, row_stats)             \
  OP(WarpProbs, warp_probs)           \
  OP(MaskLogits, mask_logits_)        \
  OP(UniformSamples, uniform_samples) \
  OP(NoiseKeys, noise_keys)           \
  OP(Sample, sample)                  \
  OP(ShardStats, shard_stats)         \
  OP(MergeShards, merge_shards)       \
  OP(ShardDraw, shard_draw)           \
  OP(TokenLogprobs, token_logprobs)   \
  OP(VerifyChain, verify_chain)       \
  OP(VerifyTree, verify_tree)         \
  OP(GatherKV, gather_kv_)            \
  OP(CountTokens, count_tokens_)

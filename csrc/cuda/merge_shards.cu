#include "common/row_stats.h"
#include "cuda/ops.h"
#include "cuda/row.cuh"
#include "cuda/tile_sums.cuh"

namespace specdec::cuda {
namespace {

// One warp per row.
__global__ void __launch_bounds__(32) merge_shards_kernel(const __grid_constant__ MergeShardsArgs args) {
  const int64_t index = blockIdx.x;
  const float* const maxima = args.tile_max + index * args.tiles;
  const float* const mass = args.tile_mass + index * args.tiles;
  const Sampling sampling = sampling_of(args.params, index / args.n);
  float max = -INFINITY;
  for (int tile = lane_id(); tile < args.tiles; tile += 32) max = fmaxf(max, maxima[tile]);
  max = warp_reduce(max, Max{});
  const float sum = sum_of_tiles(args.tiles, [&](int tile) {
    return args.probs ? mass[tile] : mass[tile] * exp_of(maxima[tile], max, sampling.inverse_temperature);
  });
  if (lane_id() != 0) return;
  RowLaw law = merged_law(max, sum, sampling);
  if (args.probs) law.normalizer = sum;
  write_values(law, args.values, index, kNotAsked, kNotAsked);
  const float x = args.logits_at[index];
  args.prob[index] = args.probs || law.one_hot ? 0.0f : weight_of(x, law) * law.inverse_normalizer;
}

}  // namespace

cudaError_t merge_shards(const MergeShardsArgs& args, const Launch& launch) {
  const int64_t count = args.batch * args.n;
  if (count == 0) return cudaSuccess;
  return launch_kernel(merge_shards_kernel, {dim3(unsigned(count)), dim3(32)}, launch.stream, args);
}

}  // namespace specdec::cuda

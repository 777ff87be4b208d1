#include "cuda/rows.cuh"

namespace specdec::cuda {
namespace {

// log sum exp and entropy of the raw row (temperature 1, nothing cut) from its tiles, by one warp.
__device__ void raw_moments(const Reading& read, float* log_normalizer, float* entropy) {
  *log_normalizer = read.law.max;
  *entropy = 0.0f;
  if (isinf(read.law.max)) return;
  float sum = 0.0f, weighted = 0.0f;
  const int tiles = read.row.tiles();
  for (int begin = 0; begin < tiles; begin += 32) {
    const int tile = begin + lane_id(), count = tiles - begin < 32 ? tiles - begin : 32;
    float mine = 0.0f, mine_weighted = 0.0f;
    if (tile < tiles && read.table.max[tile] > -INFINITY) {
      const float shift = read.table.max[tile] - read.law.max;
      const float scale = shift >= kSmallestExponent ? fast_exp2(shift * kLog2E) : 0.0f;
      mine = read.table.raw_sum[tile] * scale;
      mine_weighted = scale > 0 ? read.table.raw_weighted[tile] * scale + mine * shift : 0.0f;
    }
    for (int i = 0; i < count; ++i) {
      sum += __shfl_sync(kAllLanes, mine, i);
      weighted += __shfl_sync(kAllLanes, mine_weighted, i);
    }
  }
  *log_normalizer = read.law.max + logf(sum);
  *entropy = logf(sum) - weighted / sum;
}

__global__ void __launch_bounds__(kRowThreads, 2)
    row_stats_kernel(const __grid_constant__ RowSet set, const __grid_constant__ StatsOut out) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(Reading, read, 1);
  read_row(set, shared, read[0]);
  if (warp_id() != 0) return;
  float log_normalizer = -INFINITY, entropy = -INFINITY;
  if (set.raw) raw_moments(read[0], &log_normalizer, &entropy);
  if (lane_id() == 0) write_stats(read[0].law, out, blockIdx.x, log_normalizer, entropy);
}

}  // namespace

cudaError_t row_stats(const RowStatsArgs& args, const Launch& launch) {
  if (args.batch * args.n == 0) return cudaSuccess;
  const RowSet set{args.logits, args.n, args.params, args.raw, may_cut(args.params)};
  RowPlan plan;
  const cudaError_t error = plan_rows(set, args.batch, launch, &plan);
  return error ? error : launch_kernel(row_stats_kernel, plan.shape, launch.stream, plan.set, args.out);
}

}  // namespace specdec::cuda

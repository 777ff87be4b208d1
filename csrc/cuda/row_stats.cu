#include "common/row_stats.h"
#include "cuda/rows.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {
namespace {

__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    row_stats_kernel(const __grid_constant__ RowSet set, const __grid_constant__ StatsOut out) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(Reading, read, 1);
  read_row(set, shared, read[0]);
  if (warp_id() != 0) return;
  const RawMoments raw = raw_moments(read[0]);
  if (lane_id() == 0) write_stats(read[0].law, out, blockIdx.x, read[0].law.max + logf(raw.normalizer), raw.entropy);
}

}  // namespace

cudaError_t row_stats(const RowStatsArgs& args, const Launch& launch) {
  if (args.batch * args.n == 0) return cudaSuccess;
  if (!kProcessed && args.processors.on) return with_processors::row_stats(args, launch);
  const RowSet set = rows_of(args, true, may_cut(args.params));
  RowPlan plan;
  const cudaError_t error = plan_rows(set, args.batch, launch, &plan, [](Arena&, bool) {});
  return error ? error : launch_kernel(row_stats_kernel, plan.shape, launch.stream, plan.set, args.out);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS

#include "cuda/rows.cuh"

namespace specdec::cuda {
namespace {

// One block per row; `scanned`: a kernel before this one has read the row.
__global__ void __launch_bounds__(kRowThreads, 2)
    shard_stats_kernel(const __grid_constant__ RowSet set, const __grid_constant__ ShardStatsArgs args, bool scanned) {
  SPECDEC_DYNAMIC_SHARED(shared);
  const int64_t index = blockIdx.x;
  const RowView row = set.row(index);
  const Sampling sampling = set.sampling(index);
  const TileTable table = set.table(index, reinterpret_cast<float*>(shared));
  if (scanned)
    wait_for_previous();
  else
    scan_row<false>(row, args.probs ? plan_of_probs() : scan_plan(sampling, row.vocab, false), table);
  const bool summed = args.probs || !sampling.greedy;
  const int tiles = row.tiles();
  float max = -INFINITY;
  int32_t flags = 0;
  for (int tile = int(threadIdx.x); tile < tiles; tile += int(blockDim.x)) {
    args.tile_max[index * tiles + tile] = table.max[tile];
    args.tile_mass[index * tiles + tile] = summed ? table.mass[tile] : 0.0f;
    max = fmaxf(max, table.max[tile]);
    if (table.nan[tile] > 0) flags = kNaN;
  }
  max = block_reduce(max, -INFINITY, Max{});
  flags = block_reduce(flags, 0, Or{});
  const int32_t argmax = max > -INFINITY ? find_argmax(row, table, max) : 0;
  if (threadIdx.x != 0) return;
  args.argmax[index] = argmax;
  args.status[index] = flags;
}

}  // namespace

cudaError_t shard_stats(const ShardStatsArgs& args, const Launch& launch) {
  const int64_t count = args.batch * args.n;
  if (count == 0) return cudaSuccess;
  SamplingArgs uncut{};
  uncut.temperature = args.params.temperature;
  uncut.temperatures = args.params.temperatures;
  uncut.top_p = 1.0f;
  RowPlan plan;
  plan.set = {args.logits, args.n, uncut, false, false};
  if (args.probs) {  // rows of probabilities are not split
    const int tiles = tiles_of(args.logits.vocab);
    allocate(launch, [&](Arena& arena) { plan.set.tables = arena.take<float>(count * tiles * TileTable::kNumbers); });
    plan.shape = {dim3(unsigned(count)), dim3(threads_for(tiles, kRowThreads))};
  } else {
    const cudaError_t error = plan_rows(plan.set, args.batch, launch, &plan, [](Arena&, bool) {});
    if (error) return error;
  }
  return launch_kernel(shard_stats_kernel, plan.shape, launch.stream, plan.set, args,
                       !args.probs && plan.set.tables != nullptr);
}

}  // namespace specdec::cuda

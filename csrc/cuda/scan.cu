#include "cuda/rows.cuh"

namespace specdec::cuda {
namespace {

__global__ void __launch_bounds__(kRowThreads, 2) scan_rows_kernel(RowSet set, int64_t chunks) {
  allow_next();
  const int64_t index = blockIdx.x / chunks;
  const RowView row = set.row(index);
  const ScanPlan plan = scan_plan(set.sampling(index), row.vocab, set.raw);
  const TileTable table = set.table(index, nullptr);
  for (int tile = int(blockIdx.x % chunks) * num_warps() + warp_id(); tile < row.tiles();
       tile += int(chunks) * num_warps())
    scan_tile(row, tile, plan, table, [](auto* address, auto value) { *address = value; });
}

}  // namespace

cudaError_t launch_scan(const RowSet& set, int64_t count, cudaStream_t stream) {
  const int64_t chunks = chunks_of(tiles_of(set.rows.vocab), count, kRowThreads / 32);
  return launch_kernel(scan_rows_kernel, {dim3(unsigned(count * chunks)), dim3(kRowThreads)}, stream, set, chunks);
}

}  // namespace specdec::cuda

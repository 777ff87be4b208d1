// Each thread moves the same piece of every row of a path, in the order of the path. No thread touches another's
// pieces, so rows that overlap need neither scratch memory nor a barrier.
#include <algorithm>

#include "common/cache_path.h"
#include "cuda/ops.h"
#include "cuda/strategy.h"
#include "cuda/warp.cuh"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 256, kBlocksAMultiprocessor = 8;
constexpr int kWindow = 32;  // moves that a block looks up at once: one per lane
constexpr int kHeld = 4;     // loads that a thread has in flight at once

// Bypasses the multiprocessor's own cache: attention will read the rows elsewhere.
template <class Unit>
__device__ __forceinline__ void move_pieces(unsigned char* piece, const CacheShape& shape, const RowMove* moves,
                                            int count) {
  for (int first = 0; first < count; first += kHeld) {
    Unit held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i < count)
        held[i] = __ldcg(reinterpret_cast<const Unit*>(piece + offset_of(shape, moves[first + i].from)));
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i < count) __stcg(reinterpret_cast<Unit*>(piece + offset_of(shape, moves[first + i].to)), held[i]);
    }
  }
}

// A sequence's `blocks` blocks share the pieces of all planes; `pieces`: a row's, all heads, in the widest plane.
__global__ void __launch_bounds__(kThreads, 3)
    gather_kv_kernel(const __grid_constant__ GatherKVArgs args, unsigned blocks, unsigned pieces) {
  SPECDEC_SHARED(RowMove, moves, kWindow);
  SPECDEC_SHARED(int, num_moves, 1);
  SPECDEC_SHARED(bool, path_ends, 1);
  const int64_t b = blockIdx.x / blocks, context = id_at(args.context_lengths, b);
  const bool staying = stays(args, context);
  for (int64_t window = 0;; window += kWindow) {
    if (threadIdx.x < kWindow) {
      RowMove move{};
      const int lane = lane_id();
      const PathStep step = staying ? PathStep::kEnd : path_step(args, b, context, window + lane, &move);
      const unsigned stops = __ballot_sync(kAllLanes, step != PathStep::kMove);
      const int followed = stops ? __ffs(int(stops)) - 1 : kWindow;
      const bool moving = lane < followed && !in_place(move);
      const unsigned all_moving = __ballot_sync(kAllLanes, moving);
      if (moving) moves[__popc(all_moving & ((1u << lane) - 1))] = move;
      if (lane == 0) {
        num_moves[0] = __popc(all_moving);
        path_ends[0] = stops != 0;
      }
      if (lane == followed && blockIdx.x % blocks == 0) write_outcome(args, b, context, window + followed, step);
    }
    __syncthreads();
    const int count = num_moves[0];
    const bool last = path_ends[0];
    const unsigned items = count > 0 ? unsigned(args.num_planes) * pieces : 0;
    for (unsigned item = blockIdx.x % blocks * kThreads + threadIdx.x; item < items; item += blocks * kThreads) {
      const unsigned plane = item / pieces, column = item % pieces;
      const CacheShape& shape = args.shapes[args.shape_of[plane]];
      const unsigned head = column / unsigned(shape.units), unit = column % unsigned(shape.units);
      if (head >= unsigned(shape.heads)) continue;
      unsigned char* piece = args.data[plane] + head * shape.stride_head + unit * shape.stride_unit;
      switch (shape.unit_bytes) {
        case 16:
          move_pieces<int4>(piece, shape, moves, count);
          break;
        case 8:
          move_pieces<int2>(piece, shape, moves, count);
          break;
        case 4:
          move_pieces<int32_t>(piece, shape, moves, count);
          break;
        case 2:
          move_pieces<int16_t>(piece, shape, moves, count);
          break;
        default:
          move_pieces<int8_t>(piece, shape, moves, count);
      }
    }
    if (last) return;
    __syncthreads();
  }
}

}  // namespace

cudaError_t gather_kv_(const GatherKVArgs& args, const Launch& launch) {
  if (args.batch == 0) return cudaSuccess;
  int64_t pieces = 1;
  for (int i = 0; i < args.num_planes; ++i) {
    const CacheShape& shape = args.shapes[args.shape_of[i]];
    pieces = std::max(pieces, int64_t(shape.heads) * shape.units);
  }
  const int64_t useful = std::max<int64_t>(1, (args.num_planes * pieces + kThreads - 1) / kThreads);
  const int64_t fill = std::max<int64_t>(1, int64_t(multiprocessors()) * kBlocksAMultiprocessor / args.batch);
  const Strategy strategy = forced_strategy();
  const int64_t blocks = strategy == Strategy::kAuto    ? std::min(useful, fill)
                         : strategy == Strategy::kSplit ? useful
                                                        : 1;
  const Shape shape{dim3(unsigned(args.batch * blocks)), dim3(kThreads)};
  return launch_kernel(gather_kv_kernel, shape, launch.stream, args, unsigned(blocks), unsigned(pieces));
}

}  // namespace specdec::cuda

#include "common/row_stats.h"
#include "cuda/rows.cuh"

namespace specdec::cuda {
namespace {

// A shard's row viewed as part of the whole row, so that ids and tiles are those of the whole vocabulary. No tile
// before the shard's first is read.
__device__ __forceinline__ RowView whole_row(const Rows& rows, const ShardDrawArgs& args, int64_t index) {
  RowView row = row_view(rows, index / args.n, index % args.n);
  row.data = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(row.data) -
                                           uintptr_t(args.first) * unsigned(size_of(row.dtype)));
  row.vocab += args.first;
  return row;
}

__device__ __forceinline__ int first_tile_of(const ShardDrawArgs& args) { return args.first / kTile; }

// P of a row, and what is subtracted from it.
__device__ Position position_of(const ShardDrawArgs& args, int64_t index) {
  Position at{};
  at.row = whole_row(args.logits, args, index);
  at.law = shard_law(args.values + index * kNumValues, args.argmax[index], sampling_of(args.params, index / args.n), 0);
  const float weight = args.weights[index];
  if (weight < 0) return at;
  at.left = {weight, 1.0f, 1.0f, false};
  if (args.point_tokens) {
    const int64_t token = args.point_tokens[index];
    if (token < args.first || token >= at.row.vocab) return at;  // it takes nothing away here
    at.draft.kind = DraftLaw::Kind::kPoint;
    at.draft.token = int32_t(token);
  } else if (args.draft_status) {
    at.draft.law = shard_draft_law(args, index, 0);
    const bool is_probs = !args.draft.data && !(at.draft.law.status & kBadDraft);
    at.draft.kind = is_probs ? DraftLaw::Kind::kProbs : DraftLaw::Kind::kLogits;
    at.draft.row = whole_row(args.draft.data ? args.draft : args.draft_probs, args, index);
  }
  return at;
}

// Whether nothing but P's one id can be left, or nothing at all.
__device__ __forceinline__ bool is_certain(const Position& at) { return at.law.one_hot || at.left.scale == 0.0f; }

// One block per row: the masses of its tiles. `tables`: [rows, tiles, TileTable::kNumbers].
__global__ void __launch_bounds__(kRowThreads, 2)
    masses_kernel(const __grid_constant__ ShardDrawArgs args, float* tables) {
  SPECDEC_SHARED(Position, at, 1);
  const int64_t index = blockIdx.x;
  by_one([&] { at[0] = position_of(args, index); });
  const Position& from = at[0];
  const int first = first_tile_of(args), tiles = from.row.tiles() - first;
  float* const out = args.out + index * tiles;
  if (is_certain(from)) {  // all there is lies at one id
    const int32_t id = from.law.argmax;
    const bool here = id >= args.first && id < from.row.vocab;
    for (int tile = int(threadIdx.x); tile < tiles; tile += int(blockDim.x)) {
      float mass = 0.0f;
      if (here && id / kTile == first + tile)
        mass = from.draft.kind == DraftLaw::Kind::kNone ? from.left.scale
                                                        : residual_weight(from.left.scale, from.draft.prob(id));
      out[tile] = mass;
    }
    return;
  }
  const RowView own = row_view(args.logits, index / args.n, index % args.n);
  TileTable table = table_of(tables, index, tiles);
  scan_row<false>(own, {true, false, false, from.law.inverse_temperature}, table);
  for (int tile = int(threadIdx.x); tile < tiles; tile += int(blockDim.x))
    table.mass[tile] *= exp_of(table.max[tile], from.law.max, from.law.inverse_temperature);
  __syncthreads();
  table.max -= first;
  table.mass -= first;
  for (int tile = first + warp_id(); tile < from.row.tiles(); tile += num_warps()) {
    const float mass = from.mass<false, 2>(tile, table);
    if (lane_id() == 0) out[tile - first] = mass;
  }
}

// One block per row: the token, if the draw ends in this shard.
__global__ void __launch_bounds__(kRuns * 32, 1) draw_kernel(const __grid_constant__ ShardDrawArgs args) {
  SPECDEC_SHARED(Position, at, 1);
  const int64_t index = blockIdx.x;
  by_one([&] { at[0] = position_of(args, index); });
  int32_t unused = 0;
  const double uniform = uniform_of(args.uniform_samples, index, &unused);
  const FoundTile found = find_tile(args.masses + index * args.all_tiles, args.all_tiles, uniform);
  const bool here = found.tile >= first_tile_of(args) && found.tile < at[0].row.tiles() && !is_certain(at[0]);
  const int32_t id = here ? find_id(at[0], found) : -1;
  if (threadIdx.x == 0) args.token[index] = id;
}

// One block per row: its best noisy id.
__global__ void __launch_bounds__(kRowThreads, 2) best_kernel(const __grid_constant__ ShardDrawArgs args) {
  const int64_t index = blockIdx.x;
  const RowView row = whole_row(args.logits, args, index);
  const RowLaw law =
      shard_law(args.values + index * kNumValues, args.argmax[index], sampling_of(args.params, index / args.n), 0);
  BestNoisy best;
  if (!law.one_hot)
    for (int tile = first_tile_of(args) + warp_id(); tile < row.tiles(); tile += num_warps())
      best.see(row, law, tile, args.noise_keys[index], nullptr);
  const Fixed key = block_reduce(best.key, Fixed(0), Max{});
  if (threadIdx.x != 0) return;
  args.token[index] = key == 0 ? -1 : noisy_id(key);
  args.score[index] = key == 0 ? -INFINITY : from_ordered(uint32_t(key >> 32));
}

}  // namespace

cudaError_t shard_draw(const ShardDrawArgs& args, const Launch& launch) {
  const int64_t count = args.batch * args.n;
  if (count == 0) return cudaSuccess;
  const int tiles = tiles_of(args.logits.vocab);
  const Shape rows{dim3(unsigned(count)), dim3(threads_for(tiles, kRowThreads))};
  if (args.noise_keys) return launch_kernel(best_kernel, rows, launch.stream, args);
  if (args.masses) return launch_kernel(draw_kernel, {dim3(unsigned(count)), dim3(kRuns * 32)}, launch.stream, args);
  float* tables = nullptr;
  allocate(launch, [&](Arena& arena) { tables = arena.take<float>(count * tiles * TileTable::kNumbers); });
  return launch_kernel(masses_kernel, rows, launch.stream, args, tables);
}

}  // namespace specdec::cuda

// One block per token reads the token's row, finds its law, and then looks again only at tiles whose maximum can
// matter. If processors change the row, its law is found first, in a reading of its own.
#include "common/token_logprobs.h"

#include "cuda/rows.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {
namespace {

// Calls f(x, id) for this thread's ids in the tiles with wanted(maximum); NaN is read as -inf.
template <class Wanted, class F>
__device__ __forceinline__ void for_each_id(const Reading& r, Wanted wanted, F f) {
  for_each_in_row(r, wanted, [&](float x, int tile, int i) {
    const int32_t id = held_id(tile, i);
    if (id < r.row.vocab) f(x == x ? x : -INFINITY, id);
  });
}

__device__ __forceinline__ float logit_of(const RowView& row, int32_t id) {
  const float x = logit_at(row, id);
  return x == x ? x : -INFINITY;
}

// How many ids come before a token, ordered by descending logit and, among equal ones, by ascending id.
__device__ __forceinline__ int ids_before(const Reading& r, float logit, int32_t token) {
  int before = 0;
  for_each_id(
      r, [&](float max) { return max >= logit; },
      [&](float x, int32_t id) { before += x > logit || (x == logit && id < token); });
  return block_reduce(before, 0, Sum{});
}

// An id's place in that order, from which the id can be recovered; 0 is below all.
__device__ __forceinline__ Fixed place_of(float x, int32_t id) { return Fixed(key_of(x)) << 32 | uint32_t(~id); }
__device__ __forceinline__ int32_t id_of(Fixed place) { return int32_t(~uint32_t(place)); }

// The highest place below `limit` among the ids of tiles whose maximum is >= bound; 0 if there is none.
__device__ __forceinline__ Fixed next_below(const Reading& r, Fixed limit, float bound) {
  Fixed best = 0;
  for_each_id(
      r, [&](float max) { return max >= bound; },
      [&](float x, int32_t id) {
        const Fixed place = place_of(x, id);
        if (place < limit && place > best) best = place;
      });
  return block_reduce(best, Fixed(0), Max{});
}

// tables: [slots, tiles, TileTable::kNumbers] in device memory; null: each block has its own, shared.
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    token_logprobs_kernel(const __grid_constant__ TokenLogprobsArgs args, bool listed, float* tables) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(Reading, read, 1);
  SPECDEC_SHARED(LogLaws, laws, 1);
  Reading& r = read[0];
  const int64_t index = blockIdx.x;
  const TokenSlot slot = token_slot(args, index);
  if (slot.token < 0) {
    if (threadIdx.x == 0) write_no_token(args, index, slot.status);
    return;
  }
  const RowView given = row_view(args.logits, slot.b, slot.row);
  RowView processed = given;
  if constexpr (kProcessed) {
    find_overlay(args.processors, slot.b, slot.b * args.n + slot.row - slot.place, tokens_of(args, slot.b));
    processed.lay_over(slot.place);
  }
  by_one([&] {
    r.row = processed;
    r.sampling = sampling_of(args.params, slot.b);
    r.list = reinterpret_cast<float*>(shared);
    const int tiles = r.row.tiles();
    r.table = tables ? table_of(tables, index, tiles) : TileTable(r.list + (listed ? kMaxListed : 0), tiles);
  });
  if constexpr (kProcessed) {
    scan_row<false>(r.row, scan_plan(r.sampling, r.row.vocab, false), r.table);
    find_law(r, false);
    by_one([&] {
      laws[0].law = r.law;
      r.row = given;
      r.sampling.greedy = true;  // of the row as given only the maximum is needed
    });
  }
  ScanPlan plan = scan_plan(r.sampling, r.row.vocab, true);
  plan.groups |= args.num_top > 0;
  scan_row<false>(r.row, plan, r.table);
  find_law(r, false);
  if (warp_id() == 0) {
    const RawMoments raw = raw_moments(r);
    if (lane_id() == 0) {
      const RowLaw law = kProcessed ? laws[0].law : r.law;
      laws[0] = {law, logf(law.normalizer), r.law.max, r.law.max + logf(raw.normalizer), r.law.argmax};
      laws[0].law.status |= r.law.status;
    }
  }
  __syncthreads();
  const auto both = [&](float x, int32_t id) { return Logit{x, kProcessed ? logit_of(processed, id) : x}; };
  const float logit = logit_of(given, slot.token);
  const int before = ids_before(r, logit, slot.token);
  if (threadIdx.x == 0) write_token(args, index, laws[0], both(logit, slot.token), slot.token, before + 1);
  if (args.num_top == 0) return;
  const float bound = isinf(r.law.max) ? -INFINITY : nth_group_maximum(r, args.num_top);
  Fixed place = ~Fixed(0);
  int count = 0;
  for (; count < args.num_top; ++count) {
    place = next_below(r, place, bound);
    if (place == 0) break;
    const float x = logit_of(given, id_of(place));
    if (threadIdx.x == 0) write_top(args, index, count, laws[0], both(x, id_of(place)), id_of(place));
  }
  if (threadIdx.x == 0) write_no_top(args, index, count);
}

}  // namespace

cudaError_t token_logprobs(const TokenLogprobsArgs& args, const Launch& launch) {
  if (!kProcessed && args.processors.on) return with_processors::token_logprobs(args, launch);
  const int64_t count = args.batch * args.width;
  if (count == 0) return cudaSuccess;
  const int tiles = tiles_of(args.logits.vocab);
  const bool listed = may_cut(args.params), is_long = tiles > kMostSharedTiles;
  const size_t table = size_t(tiles) * TileTable::kNumbers * sizeof(float);
  float* tables = nullptr;
  allocate(launch, [&](Arena& arena) {
    if (is_long) tables = arena.take<float>(count * tiles * TileTable::kNumbers);
  });
  Shape shape{dim3(unsigned(count)), dim3(threads_for(tiles, kRowThreads))};
  shape.shared = (is_long ? 0 : table) + (listed ? kMaxListed * sizeof(float) : 0);
  return launch_kernel(token_logprobs_kernel, shape, launch.stream, args, listed, tables);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS

// From a row's tile table to its law. Cut-offs are found without sorting: a group of 128 ids is read again only if its
// maximum can matter, and what may be kept is listed in shared memory; rows with too much to list are read again, four
// times a cut-off. Masses are counted in fixed point, so that no order of adding matters.
#pragma once
#include "cuda/scan.cuh"
#include "cuda/tile_sums.cuh"

namespace specdec::cuda {

constexpr int kMaxListed = 4096;  // values listed at most
constexpr int kCounted = 128;     // up to so many, a cut-off is found by comparing all with all
constexpr int kTopGroups = 512;   // top-p alone first lists what reaches the so-many-th largest group maximum
constexpr int kDigits = 256;      // a digit of a radix selection has 8 bits

using Fixed = unsigned long long;

// Weights (at most 1 each) as fixed-point numbers whose sum over a row fits 62 bits.
struct FixedScale {
  float up;
  double down;
  __device__ explicit FixedScale(int32_t vocab) {
    const int bits = 62 - (32 - __clz(vocab));
    up = float(1ull << bits);
    down = 1.0 / double(1ull << bits);
  }
  __device__ Fixed operator()(float weight) const { return __float2ull_rn(weight * up); }
  __device__ float back(Fixed sum) const { return float(double(sum) * down); }
};

// How much of each digit a radix selection has seen: 64-bit sums in two halves, as shared memory adds 32 bits at once and
// 64 bits only by trying again.
struct Bins {
  uint32_t low[kDigits], high[kDigits];
  uint32_t digit;  // the digit chosen, and
  Fixed above;     // the sum of all higher values

  __device__ Fixed sum(int digit) const { return Fixed(high[digit]) << 32 | low[digit]; }

  __device__ void add(uint32_t digit, Fixed measure) {
    const uint32_t mine = uint32_t(measure);
    const uint32_t carry = atomicAdd(&low[digit], mine) > 0xFFFFFFFFu - mine ? 1 : 0;
    const uint32_t rest = uint32_t(measure >> 32) + carry;
    if (rest) atomicAdd(&high[digit], rest);
  }
};

// The block's one set of bins, whatever is selected by them.
__device__ __forceinline__ Bins& selection_bins() {
  SPECDEC_SHARED(Bins, bins, 1);
  return bins[0];
}

// One warp, from the highest digit down: lane l holds digits 255 - 8 l … 248 - 8 l.
__device__ __forceinline__ void choose_digit(Bins& bins, Fixed above, Fixed goal) {
  constexpr int kEach = kDigits / 32;
  const int top = kDigits - 1 - lane_id() * kEach;
  Fixed mine = 0;
  for (int i = 0; i < kEach; ++i) mine += bins.sum(top - i);
  Fixed until = mine;  // this lane's digits and all higher ones
  for (int step = 1; step < 32; step *= 2) {
    const Fixed other = __shfl_up_sync(kAllLanes, until, step);
    if (lane_id() >= step) until += other;
  }
  const unsigned reached = __ballot_sync(kAllLanes, mine > 0 && above + until >= goal);
  const unsigned filled = __ballot_sync(kAllLanes, mine > 0);
  const int chosen = reached ? __ffs(int(reached)) - 1 : filled ? 31 - __clz(int(filled)) : 0;
  if (lane_id() != chosen) return;
  Fixed sum = above + until - mine, before_last = sum;
  int last = top;
  for (int digit = top; digit > top - kEach; --digit) {
    const Fixed here = bins.sum(digit);
    if (here == 0) continue;
    last = digit;
    before_last = sum;
    sum += here;
    if (sum >= goal) break;
  }
  bins.digit = uint32_t(last);
  bins.above = before_last;
}

// The largest value c such that `goal` is reached by the sum of measure(x) over {x >= c}; the lowest value if it never
// is. each(f) calls f(x) for this thread's values; called by the whole block. By so many leading bits of the value: the
// lowest value with those.
template <class Each, class Measure>
__device__ float radix_select(Each each, Measure measure, Fixed goal, int bits) {
  Bins& bins = selection_bins();
  uint32_t prefix = 0;
  Fixed above = 0;
#pragma unroll 1
  for (int shift = 24; shift >= 32 - bits; shift -= 8) {
    for (int i = int(threadIdx.x); i < kDigits; i += int(blockDim.x)) bins.low[i] = bins.high[i] = 0;
    __syncthreads();
    each([&](float x) {
      const uint32_t key = ordered(x);
      if (shift == 24 || key >> (shift + 8) == prefix) bins.add(key >> shift & 255, measure(x));
    });
    __syncthreads();
    if (warp_id() == 0) choose_digit(bins, above, goal);
    __syncthreads();
    prefix = prefix << 8 | bins.digit;
    above = bins.above;
    __syncthreads();
  }
  const uint32_t key = prefix << (32 - bits);  // cut short, it may lie below -inf, among the NaNs
  return key <= ordered(-INFINITY) ? -INFINITY : from_ordered(key);
}

// A row that a block reads, in shared memory: what all its threads know alike.
struct Reading {
  RowView row;
  Sampling sampling;
  TileTable table;
  float* list;  // kMaxListed floats of shared memory, or null where nothing is cut
  RowLaw law;
};

// ---- A row's cut-off, found by one block: what follows is called by all its threads and returns the same to all. The law has
// the row's max and temperature and, where cut.whole, its normaliser. Out of line, as each is called from several places.

// What is looked through: group maxima, the list, or the row itself.
enum class Values : int32_t { kGroups, kListed, kRow };

// The values that may be kept, of which so many were found: they are listed if there is room for them.
__device__ __forceinline__ Values found_in(int count) { return count <= kMaxListed ? Values::kListed : Values::kRow; }

// f(x) for each value >= bound that falls to this thread; `count`: of group maxima, or on the list.
template <class F>
__device__ __forceinline__ void for_each(const Reading& r, Values values, int count, float bound, F f) {
  if (values != Values::kRow) {
    const float* const x = values == Values::kListed ? r.list : r.table.group_max;
#pragma unroll 1
    for (int i = int(threadIdx.x); i < count; i += int(blockDim.x))
      if (x[i] >= bound) f(x[i]);
    return;
  }
#pragma unroll 1
  for (int tile = warp_id(); tile < r.row.tiles(); tile += num_warps()) {
    if (!(r.table.max[tile] >= bound)) continue;
#pragma unroll 1
    for (int j = 0; j < kRuns; ++j) {
      const Run run = load_run(r.row, tile, j);
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (run.x[k] >= bound && run.x[k] > -INFINITY) f(run.x[k]);
    }
  }
}

// By a warp: appends one group to the list. Lane l takes ids 4 (l % 8) … of its run l / 8.
__device__ __forceinline__ void list_group(const Reading& r, int group, float bound, int* count) {
  const int32_t first = group / kGroups * kTile + (lane_id() / 8 * 32 + group % kGroups * 4) * kRun + lane_id() % 8 * 4;
  float x[4];
  unsigned kept[4];
  int total = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    x[k] = first + k < r.row.vocab ? logit_at(r.row, first + k) : -INFINITY;
    kept[k] = __ballot_sync(kAllLanes, x[k] >= bound && x[k] > -INFINITY);
    total += __popc(kept[k]);
  }
  int place = 0;
  if (lane_id() == 0) place = atomicAdd(count, total);
  place = __shfl_sync(kAllLanes, place, 0);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int mine = place + __popc(kept[k] & ((1u << lane_id()) - 1));
    if ((kept[k] >> lane_id() & 1) && mine < kMaxListed) r.list[mine] = x[k];
    place += __popc(kept[k]);
  }
}

// Lists the possible values >= bound, in no order; how many there are, listed or not.
inline __device__ __noinline__ int make_list(const Reading& r, float bound) {
  SPECDEC_SHARED(int, count, 1);
  __syncthreads();
  if (threadIdx.x == 0) count[0] = 0;
  __syncthreads();
  const int groups = r.row.tiles() * kGroups;
#pragma unroll 1
  for (int first = warp_id() * 32; first < groups; first += num_warps() * 32) {
    const int mine = first + lane_id();
    const float max = mine < groups ? r.table.group_max[mine] : -INFINITY;
    for (unsigned hot = __ballot_sync(kAllLanes, max >= bound && max > -INFINITY); hot != 0; hot &= hot - 1)
      list_group(r, first + __ffs(int(hot)) - 1, bound, count);
  }
  __syncthreads();
  return count[0];
}

// How a selection counts a value: as one, or by its weight in fixed point.
class Measured {
 public:
  __device__ Measured(const Reading& r, bool by_weight)
      : law_(r.law), up_(FixedScale(r.row.vocab).up), by_weight_(by_weight) {}
  __device__ Fixed operator()(float x) const { return by_weight_ ? __float2ull_rn(weight_of(x, law_) * up_) : 1; }

 private:
  const RowLaw& law_;
  const float up_;
  const bool by_weight_;
};

inline __device__ __noinline__ float select_by_digits(const Reading& r, Values values, int count, float bound,
                                                      bool by_weight, Fixed goal, int bits) {
  return radix_select([&](auto f) { for_each(r, values, count, bound, f); }, Measured(r, by_weight), goal, bits);
}

// The same over the `count` listed values >= bound where they are few: by comparing all with all.
inline __device__ __noinline__ float select_among_few(const Reading& r, int count, float bound, bool by_weight,
                                                      Fixed goal) {
  const Measured measure(r, by_weight);
  float lowest = INFINITY, chosen = -INFINITY;
  for_each(r, Values::kListed, count, bound, [&](float x) {
    lowest = fminf(lowest, x);
    Fixed above = 0, until = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float other = r.list[i];
      const Fixed m = other >= bound ? measure(other) : 0;
      above += other > x ? m : 0;
      until += other >= x ? m : 0;
    }
    if (above < goal && goal <= until) chosen = x;
  });
  chosen = block_reduce(chosen, -INFINITY, Max{});
  lowest = block_reduce(lowest, INFINITY, Min{});
  return chosen > -INFINITY ? chosen : lowest;
}

// A lower bound of the n-th largest group maximum, to 16 bits: at least n ids are as large. -inf if groups are fewer.
__device__ __forceinline__ float nth_group_maximum(const Reading& r, int64_t n) {
  const int groups = r.row.tiles() * kGroups;
  return n > groups ? -INFINITY : select_by_digits(r, Values::kGroups, groups, -INFINITY, false, Fixed(n), 16);
}

// The smallest of the possible values >= bound, and their mass.
struct Kept {
  float lowest;
  Fixed mass;
};
inline __device__ __noinline__ Kept kept_from(const Reading& r, int count, float bound) {
  const Measured measure(r, true);
  float lowest = INFINITY;
  Fixed mass = 0;
  for_each(r, found_in(count), count, bound, [&](float x) {
    lowest = fminf(lowest, x);
    mass += measure(x);
  });
  lowest = block_reduce(lowest, INFINITY, Min{});
  return {lowest, block_reduce(mass, Fixed(0), Sum{})};
}

__device__ __forceinline__ float select(const Reading& r, Values values, int count, float bound, bool by_weight,
                                        Fixed goal) {
  return values == Values::kListed && count <= kCounted
             ? select_among_few(r, count, bound, by_weight, goal)
             : select_by_digits(r, values, count, bound, by_weight, goal, 32);
}

// top-k of the values >= floor.
__device__ __forceinline__ float top_k(const Reading& r, int64_t k, int count, float floor) {
  if (count < k) return floor;  // fewer than k possible ids
  return select(r, found_in(count), count, floor, false, Fixed(k));
}

// top-p of the values >= floor, or of the `whole` row, whose mass is then law.normalizer.
__device__ __forceinline__ float top_p(const Reading& r, bool whole, int count, float floor, float listed_from) {
  if (whole) floor = -INFINITY;
  const Fixed seen = kept_from(r, count, floor).mass;
  const double total = whole ? double(r.law.normalizer) / FixedScale(r.row.vocab).down : double(seen);
  const Fixed goal = Fixed(ceil(double(r.sampling.top_p) * total));
  const bool deeper = whole && seen < goal && listed_from > -INFINITY;  // the mass lies deeper than what was listed
  return select(r, deeper ? Values::kRow : found_in(count), count, floor, true, goal);
}

// The smallest logit kept, and the normaliser of what is kept.
struct FoundCut {
  float cutoff, normalizer;
};
__device__ __forceinline__ FoundCut find_cut(const Reading& r) {
  const Sampling& s = r.sampling;
  const Cut cut = cut_of(s, r.row.vocab);
  const float likely = s.min_p > 0 ? r.law.max + logf(s.min_p) * s.temperature : -INFINITY;
  float floor = s.min_p_first ? likely : -INFINITY, listed_from = floor;
  if (cut.top_k > 0)
    listed_from = fmaxf(floor, nth_group_maximum(r, cut.top_k));
  else if (s.top_p < 1 && cut.whole && r.row.vocab > kMaxListed)
    listed_from = nth_group_maximum(r, min(kTopGroups, r.row.tiles() * kGroups / 4));
  else if (!(s.top_p < 1))
    listed_from = likely;
  int count = make_list(r, listed_from);
  if (cut.top_k > 0) {
    floor = fmaxf(floor, top_k(r, cut.top_k, count, floor));
    if (count > kMaxListed) count = make_list(r, listed_from = floor);
  }
  if (s.top_p < 1) floor = fmaxf(floor, top_p(r, cut.whole, count, floor, listed_from));
  floor = fmaxf(floor, likely);
  if (count > kMaxListed || floor < listed_from) count = make_list(r, floor);
  const Kept kept = kept_from(r, count, floor);
  return {kept.lowest, FixedScale(r.row.vocab).back(kept.mass)};
}

// The lowest id of the largest logit, by one block.
__device__ __forceinline__ int32_t find_argmax(const RowView& row, const TileTable& table, float max) {
  SPECDEC_SHARED(int32_t, argmax, 1);
  int first = row.tiles();
  for (int tile = int(threadIdx.x); tile < row.tiles(); tile += int(blockDim.x))
    if (table.max[tile] == max) first = first < tile ? first : tile;
  first = block_reduce(first, row.tiles(), Min{});
  if (warp_id() == 0) {
    int32_t id = row.vocab;
#pragma unroll 1
    for (int j = kRuns - 1; j >= 0; --j) {
      const Run run = load_run(row, first, j);
#pragma unroll
      for (int k = kRun - 1; k >= 0; --k)
        if (run.x[k] == max) id = held_id(first, j * kRun + k);
    }
    id = warp_reduce(id, Min{});
    if (lane_id() == 0) argmax[0] = id;
  }
  __syncthreads();
  const int32_t id = argmax[0];
  __syncthreads();
  return id;
}

// f() by one thread; what it writes to shared memory is there for the whole block.
template <class F>
__device__ __forceinline__ void by_one(F f) {
  __syncthreads();
  if (threadIdx.x == 0) f();
  __syncthreads();
}

// Finds the law of a row that has been scanned, by one block. Makes table.mass relative to the row's maximum where the
// whole row's mass is needed.
__device__ __forceinline__ void find_law(Reading& reading, bool need_argmax) {
  const TileTable& table = reading.table;
  const int tiles = reading.row.tiles();
  float max = -INFINITY;
  int32_t flags = 0;
  for (int tile = int(threadIdx.x); tile < tiles; tile += int(blockDim.x)) {
    max = fmaxf(max, table.max[tile]);
    if (table.nan[tile] > 0) flags = kNaN;
  }
  max = block_reduce(max, -INFINITY, Max{});
  flags = block_reduce(flags, 0, Or{}) | (max == INFINITY ? kInf : 0) | (max == -INFINITY ? kEmptyRow : 0);
  const bool one_hot = reading.sampling.greedy || isinf(max);
  int32_t argmax = 0;
  if ((need_argmax || one_hot) && max > -INFINITY) argmax = find_argmax(reading.row, table, max);
  by_one([&] {
    RowLaw law{};
    law.max = max;
    law.cutoff = -INFINITY;
    law.inverse_temperature = reading.sampling.inverse_temperature;
    law.normalizer = law.inverse_normalizer = 1.0f;
    law.argmax = argmax;
    law.status = flags | reading.sampling.status;
    law.one_hot = one_hot;
    reading.law = law;
  });
  if (one_hot) return;

  const Cut cut = cut_of(reading.sampling, reading.row.vocab);
  if (cut.whole) {
    const float scale = reading.sampling.inverse_temperature * kLog2E;
    for (int tile = int(threadIdx.x); tile < tiles; tile += int(blockDim.x))
      table.mass[tile] *= fast_exp2((table.max[tile] - max) * scale);
    __syncthreads();
    if (warp_id() == 0) {
      const float total = sum_of_tiles(table.mass, tiles);
      if (lane_id() == 0) reading.law.normalizer = total;
    }
    __syncthreads();
  }
  FoundCut found{-INFINITY, 0.0f};
  if (cut.any) found = find_cut(reading);
  by_one([&] {
    if (cut.any) {
      reading.law.cutoff = found.cutoff;
      reading.law.normalizer = found.normalizer;
    }
    reading.law.inverse_normalizer = 1.0f / reading.law.normalizer;
  });
}

// Sum of exp(logit - max) and entropy of the raw row (temperature 1, nothing cut).
struct RawMoments {
  float normalizer, entropy;
};

// From the tiles of a row whose law was found, by one warp.
__device__ __forceinline__ RawMoments raw_moments(const Reading& reading) {
  const float max = reading.law.max;
  if (isinf(max)) return {1.0f, 0.0f};
  const TileTable& table = reading.table;
  const int tiles = reading.row.tiles();
  const auto scale_of = [&](int tile) {  // what a tile's sums are multiplied by; -inf - max is far below the bound
    const float shift = table.max[tile] - max;
    return shift >= kSmallestExponent ? fast_exp2(shift * kLog2E) : 0.0f;
  };
  const float sum = sum_of_tiles(tiles, [&](int tile) { return table.raw_sum[tile] * scale_of(tile); });
  const float weighted = sum_of_tiles(tiles, [&](int tile) {
    const float scale = scale_of(tile);
    if (!(scale > 0)) return 0.0f;
    return table.raw_weighted[tile] * scale + table.raw_sum[tile] * scale * (table.max[tile] - max);
  });
  return {sum, logf(sum) - weighted / sum};
}

}  // namespace specdec::cuda

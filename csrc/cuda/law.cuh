// From a row's tile table to its law. Cut-offs are found without sorting a row: a group of 128 ids is read again only
// if its maximum can matter, and the values that may be kept are listed in shared memory. A short list is sorted, after
// which only sums need comparing; a longer one is narrowed first, and so is a row with too many such values to list.
// Masses are counted in fixed point, so that the order of adding does not matter, and without atomics.
#pragma once
#include "cuda/scan.cuh"
#include "cuda/search.cuh"
#include "cuda/tile_sums.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

constexpr int kMaxListed = 4096;  // values that are listed, at most
constexpr int kFew = 128;         // up to so many are sorted
constexpr int kTopGroups = 512;   // top-p alone first lists what reaches the group maximum of this rank
constexpr int kWindow = 1024;     // groups searched at a time for those to be read again
constexpr int kAtOnce = 4;        // groups that a warp loads together; the others are prefetched meanwhile

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

// A row that a block reads, in shared memory: the state that all its threads share.
struct Reading {
  RowView row;
  Sampling sampling;
  TileTable table;
  float* list;  // kMaxListed floats of shared memory, or null if nothing is cut
  RowLaw law;
};

// ---- A row's cut-off, found by one block: all its threads call what follows, and all get the same result. The law has
// the row's max and temperature and, if cut.whole, its normaliser. Out of line, as each has several call sites.

// The values to search: group maxima, the list, or the row itself.
enum class Values : int32_t { kGroups, kListed, kRow };

// Where the values that may be kept are, given their number: in the list if it has room for them.
__device__ __forceinline__ Values found_in(int count) { return count <= kMaxListed ? Values::kListed : Values::kRow; }

// Calls f(x, tile, i) for this thread's values in those tiles of a row that have wanted(max): held_id(tile, i) is the
// id, which may be past the row's end.
template <class Wanted, class F>
__device__ __forceinline__ void for_each_in_row(const Reading& r, Wanted wanted, F f) {
#pragma unroll 1
  for (int tile = warp_id(); tile < r.row.tiles(); tile += num_warps()) {
    if (!wanted(r.table.max[tile])) continue;
#pragma unroll 1
    for (int j = 0; j < kRuns; ++j) {
      const Run run = load_run(r.row, tile, j);
#pragma unroll
      for (int k = 0; k < kRun; ++k) f(run.x[k], tile, j * kRun + k);
    }
  }
}

// Calls f(x) for this thread's values: of the group maxima, of the list, or of a row's tiles with wanted(max).
template <class Wanted, class F>
__device__ __forceinline__ void for_each(const Reading& r, Values values, Wanted wanted, F f) {
  if (values != Values::kRow) {
    const float* const x = values == Values::kListed ? r.list : r.table.group_max;
    const int count = values == Values::kListed ? search().count : r.row.tiles() * kGroups;
#pragma unroll 1
    for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) f(x[i]);
    return;
  }
  for_each_in_row(r, wanted, [&](float x, int, int) { f(x); });
}

// How a selection counts a value: as one, or by its fixed-point weight.
class Measured {
 public:
  __device__ Measured(const Reading& r, bool by_weight)
      : law_(r.law), up_(by_weight ? FixedScale(r.row.vocab).up : 0.0f) {}
  __device__ Fixed operator()(float x) const { return up_ > 0 ? __float2ull_rn(weight_in(x, law_) * up_) : 1; }

 private:
  const RowLaw& law_;
  const float up_;
};

// Narrows a search: among group maxima until not many more than the goal are left, in a row until what is left can be
// listed, and in the list until it can be sorted.
inline __device__ __noinline__ void narrow_in(Reading& r, Values values, bool by_weight) {
  const auto wanted = [&](float max) { return key_of(max) >= search().range.low; };
  narrow([&](auto f) { for_each(r, values, wanted, f); }, Measured(r, by_weight),
         [&] {
           return values == Values::kGroups ? int(search().goal) / 4 + 8 : values == Values::kRow ? kMaxListed : kFew;
         });
}

// A lower bound of the n-th largest group maximum that not many more groups reach: at least n ids are this large. -inf
// if there are fewer groups.
inline __device__ __noinline__ float nth_group_maximum(Reading& r, int64_t n) {
  const int groups = r.row.tiles() * kGroups, threads = int(blockDim.x);
  float most = -INFINITY, least = INFINITY;
  const auto all = [](float) { return true; };
  for_each(r, Values::kGroups, all, [&](float x) {
    most = fmaxf(most, x);
    least = fminf(least, x);
  });
  float bound = -INFINITY;
  if (n <= threads)
    bound = bound_of_nth(most, min(groups, threads), n);
  else if (n <= groups)
    bound = block_reduce(least, INFINITY, Min{});
  if (bound == -INFINITY) return bound;
  search().start(range_of(bound, r.law.max, DType::kBFloat16), Fixed(n));  // precise enough
  narrow_in(r, Values::kGroups, false);
  return search().range.lowest();
}

// The first of the lane's four ids in a group: 4 (l % 8) … of run l / 8.
__device__ __forceinline__ int32_t id_in_group(int group) {
  return group / kGroups * kTile + (lane_id() / 8 * 32 + group % kGroups * 4) * kRun + lane_id() % 8 * 4;
}

// Four neighbouring logits, processed. Out of line, with the result in registers.
struct Four {
  float x[4];
};
inline __device__ __noinline__ Four processed_four(Overlaid overlay, int32_t vocab, int32_t first, Four four) {
  process<4>(overlay, vocab, first, four.x, nullptr);
  return four;
}

// By one warp: lists the values in the search's range from every step-th of n groups, at most kAtOnce groups.
__device__ __forceinline__ void list_groups(Reading& r, const int* groups, int step, int n) {
  const RowView row = r.row;
  const DType loaded = row.loaded();
  uint32_t words[kAtOnce * 4];
  const auto load = [&](auto of_type) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int32_t first = i * step < n ? id_in_group(groups[i * step]) : row.vocab;
      const auto* const ids =
          reinterpret_cast<const decltype(of_type)*>(start_of(row, min(first, row.vocab - 1) / kTile)) + first;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        words[i * 4 + k] = first + k < row.vocab ? load_anywhere(ids + k) : negative_infinity(row.dtype);
    }
  };
  if (row.dtype == DType::kFloat32)
    load(uint32_t{});
  else
    load(uint16_t{});
  if (row.overlay()) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      Four four;
#pragma unroll
      for (int k = 0; k < 4; ++k) unpack<1>(words + i * 4 + k, row.dtype, four.x + k);
      if (i * step < n) four = processed_four(row.overlay(), row.vocab, id_in_group(groups[i * step]), four);
#pragma unroll
      for (int k = 0; k < 4; ++k) words[i * 4 + k] = __float_as_uint(four.x[k]);
    }
  }
  unsigned held = 0;
  float x;
#pragma unroll
  for (int i = 0; i < kAtOnce * 4; ++i) {
    unpack<1>(words + i, loaded, &x);
    if (search().range.holds(x)) held |= 1u << i;
  }
  int place = take_places(__popc(held), &search().count);
#pragma unroll
  for (int i = 0; i < kAtOnce * 4; ++i) {
    if (!(held >> i & 1)) continue;
    unpack<1>(words + i, loaded, &x);
    if (place < kMaxListed) r.list[place] = x;
    ++place;
  }
}

// Lists the values in the search's range, in no order; returns their number, listed or not.
inline __device__ __noinline__ int make_list(Reading& r) {
  SPECDEC_SHARED(int, hot, kWindow);  // groups that are to be read
  SPECDEC_SHARED(int, num_hot, 1);
  constexpr int kEach = 4;
  const int groups = r.row.tiles() * kGroups;
  by_one([&] { search().count = num_hot[0] = 0; });
#pragma unroll 1
  for (int window = 0; window < groups; window += kWindow) {
    const int end = min(window + kWindow, groups);
#pragma unroll 1
    for (int first = window + warp_id() * 32 * kEach; first < end; first += num_warps() * 32 * kEach) {
      unsigned is_hot = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int group = first + i * 32 + lane_id();
        if (group < end && key_of(r.table.group_max[group]) >= search().range.low) is_hot |= 1u << i;
      }
      int place = take_places(__popc(is_hot), num_hot);
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (is_hot >> i & 1) hot[place++] = first + i * 32 + lane_id();
    }
    __syncthreads();
    const int n = num_hot[0];
    for (int i = warp_id() + num_warps() * kAtOnce; i < n && r.row.held < 0; i += num_warps()) {
      const int32_t id = id_in_group(hot[i]);
      if (id < r.row.vocab) prefetch(r.row.data + int64_t(id) * size_of(r.row.dtype));
    }
#pragma unroll 1
    for (int first = warp_id(); first < n; first += num_warps() * kAtOnce)
      list_groups(r, hot + first, num_warps(), n - first);
    by_one([&] { num_hot[0] = 0; });
  }
  return search().count;
}

__device__ __forceinline__ int list_from(Reading& r, float bound) {
  search().start(range_of(bound, r.law.max, r.row.loaded()), 0);
  return make_list(r);
}

// Values in descending order, each with the measure up to it: lane l of every warp holds those from l * kOfLane on.
class Sorted {
 public:
  // From up to kFew values in shared memory, by one block.
  __device__ __forceinline__ Sorted(const float* values, int count, Measured measure) : count_(count), x_(sorted()) {
    for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) {
      const uint32_t mine = ordered(values[i]);
      int before = 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j) {
        const uint32_t other = ordered(values[j]);
        before += other > mine || (other == mine && j < i);
      }
      sorted()[before] = values[i];
    }
    __syncthreads();
    Fixed sum = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (index(i) < count) sum += measure(x_[index(i)]);
      until_[i] = sum;
    }
    const Fixed before = sum_until(sum) - sum;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) until_[i] += before;
  }

  __device__ float operator[](int i) const { return x_[i]; }

  // How many values are >= bound; and the first value (or else the last) with which a goal is reached.
  __device__ int reaching(float bound) const {
    return number([&](int i) { return index(i) < count_ && x_[index(i)] >= bound; });
  }
  __device__ int first_with(Fixed goal) const {
    return min(number([&](int i) { return until_[i] < goal; }), count_ - 1);
  }

  // The measure of the first n.
  __device__ Fixed measure_of(int n) const {
    Fixed mine = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (index(i) == n - 1) mine = until_[i];
    return n > 0 ? __shfl_sync(kAllLanes, mine, (n - 1) / kOfLane) : 0;
  }

 private:
  static constexpr int kOfLane = kFew / 32;
  __device__ static float* sorted() {
    SPECDEC_SHARED(float, values, kFew);
    return values;
  }
  __device__ static int index(int i) { return lane_id() * kOfLane + i; }
  template <class Is>
  __device__ static int number(Is is) {
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) mine += is(i);
    return __reduce_add_sync(kAllLanes, mine);
  }

  const int count_;
  const float* const x_;
  Fixed until_[kOfLane];
};

// Finishes a search in the list.
inline __device__ __noinline__ float select_listed(Reading& r, bool by_weight) {
  SPECDEC_SHARED(float, few, kFew);
  SPECDEC_SHARED(int, num_few, 1);
  const Range& range = search().range;
  narrow_in(r, Values::kListed, by_weight);
  if (range.is_one() || range.inside == 0) return range.lowest();
  by_one([&] { num_few[0] = 0; });
  const int count = search().count;
#pragma unroll 1
  for (int first = warp_id() * 32; first < count; first += num_warps() * 32) {
    const float x = first + lane_id() < count ? r.list[first + lane_id()] : -INFINITY;
    const bool held = range.holds(x);
    const int place = take_places(held, num_few);
    if (held) few[place] = x;
  }
  __syncthreads();
  const Sorted sorted(few, num_few[0], Measured(r, by_weight));
  return sorted[sorted.first_with(search().goal - range.above)];
}

// In the list, or in the row from `bound` on: the largest value c such that the measure of {x >= c} reaches `goal`; if
// it never does, the lowest value of any measure. A search in the row replaces the list by the row's values.
__device__ __forceinline__ float select(Reading& r, Values values, float bound, bool by_weight, Fixed goal) {
  search().start(range_of(bound, r.law.max, r.row.loaded()), goal);
  if (values == Values::kRow) {
    narrow_in(r, values, by_weight);
    if (search().range.is_one() || search().range.inside == 0) return search().range.lowest();
    make_list(r);
  }
  return select_listed(r, by_weight);
}

// The smallest of the values >= bound that may be kept, and their mass.
struct Kept {
  float lowest;
  Fixed mass;
};
inline __device__ __noinline__ Kept kept_from(const Reading& r, Values values, float bound) {
  const Measured measure(r, true);
  uint32_t lowest = ~0u;
  Fixed mass = 0;
  const auto wanted = [bound](float x) { return x >= bound && x > -INFINITY; };
  for_each(r, values, wanted, [&](float x) {
    if (!wanted(x)) return;
    lowest = min(lowest, ordered(x));
    mass += measure(x);
  });
  lowest = block_reduce(lowest, ~0u, Min{});
  return {from_ordered(lowest), block_reduce(mass, Fixed(0), Sum{})};
}

// The mass that top-p has to reach: of the mass `seen`, or of the `whole` row's, which is law.normalizer.
__device__ __forceinline__ Fixed goal_of(const Reading& r, bool whole, Fixed seen) {
  const double total = whole ? double(r.law.normalizer) / FixedScale(r.row.vocab).down : double(seen);
  return Fixed(ceil(double(r.sampling.top_p) * total));
}

// The smallest logit kept, and the normaliser of what is kept, which is positive.
struct FoundCut {
  float cutoff, normalizer;
};

__device__ __forceinline__ float likely_of(const Reading& r) { return likely_from(r.sampling, r.law.max); }
__device__ __forceinline__ float floor_of(const Reading& r) { return cut_from(r.sampling, r.law.max); }

// The cut if at most kFew values, those from listed_from on, are listed: once sorted, they tell everything. The
// normaliser is 0 if top-p's mass lies deeper.
inline __device__ __noinline__ FoundCut cut_few(const Reading& r, float listed_from) {
  const Cut cut = cut_of(r.sampling, r.row.vocab);
  const Sorted sorted(r.list, search().count, Measured(r, true));
  float floor = floor_of(r);
  if (cut.top_k > 0 && search().count >= cut.top_k) floor = fmaxf(floor, sorted[int(cut.top_k) - 1]);
  if (r.sampling.top_p < 1) {
    const Fixed seen = sorted.measure_of(cut.whole ? search().count : sorted.reaching(floor));
    const Fixed goal = goal_of(r, cut.whole, seen);
    if (cut.whole && seen < goal && listed_from > -INFINITY) return {-INFINITY, 0.0f};
    floor = fmaxf(floor, sorted[sorted.first_with(goal)]);
  }
  const int kept = sorted.reaching(fmaxf(floor, likely_of(r)));
  return {sorted[kept - 1], FixedScale(r.row.vocab).back(sorted.measure_of(kept))};
}

// The same for any number of values, listed if there is room for them.
inline __device__ __noinline__ FoundCut cut_many(Reading& r, float listed_from) {
  const Cut cut = cut_of(r.sampling, r.row.vocab);
  Values found = found_in(search().count);
  float floor = floor_of(r);
  if (cut.top_k > 0) {
    if (search().count >= cut.top_k)  // else fewer ids are possible
      floor = fmaxf(floor, select(r, found, listed_from, false, Fixed(cut.top_k)));
    if (found == Values::kRow) found = found_in(list_from(r, floor));
  }
  if (r.sampling.top_p < 1) {
    const Kept seen = kept_from(r, found, cut.whole ? -INFINITY : floor);
    const Fixed goal = goal_of(r, cut.whole, seen.mass);
    float bound = seen.lowest;
    if (cut.whole && seen.mass < goal && listed_from > -INFINITY) {  // the mass lies deeper than what was listed
      found = Values::kRow;
      // All that lies below weighs at most an eighth of what may be cut.
      const float rest = (1 - r.sampling.top_p) * r.law.normalizer / (8.0f * float(r.row.vocab));
      bound = r.law.weights ? r.law.max * rest : r.law.max + logf(rest) * r.sampling.temperature;
    }
    floor = fmaxf(floor, select(r, found, bound, true, goal));
  }
  const Kept kept = kept_from(r, found, fmaxf(floor, likely_of(r)));
  return {kept.lowest, FixedScale(r.row.vocab).back(kept.mass)};
}

__device__ __forceinline__ FoundCut find_cut(Reading& r) {
  const Sampling& s = r.sampling;
  const Cut cut = cut_of(s, r.row.vocab);
  float listed_from = floor_of(r);
  if (cut.top_k > 0)
    listed_from = fmaxf(listed_from, nth_group_maximum(r, cut.top_k));
  else if (s.top_p < 1 && cut.whole && r.row.vocab > kMaxListed)
    listed_from = nth_group_maximum(r, min(kTopGroups, r.row.tiles() * kGroups / 4));
  else if (!(s.top_p < 1))
    listed_from = likely_of(r);
  if (list_from(r, listed_from) <= kFew) {
    const FoundCut found = cut_few(r, listed_from);
    if (found.normalizer > 0) return found;
  }
  return cut_many(r, listed_from);
}

// The lowest id of the largest logit, by one block.
__device__ __forceinline__ int32_t find_argmax(const RowView& row, const TileTable& table, float max) {
  int first = row.tiles();
  for (int tile = int(threadIdx.x); tile < row.tiles(); tile += int(blockDim.x))
    if (table.max[tile] == max) first = first < tile ? first : tile;
  first = block_reduce(first, row.tiles(), Min{});
  int32_t id = row.vocab;
#pragma unroll 1
  for (int j = warp_id(); j < kRuns; j += num_warps()) {
    const Run run = load_run(row, first, j);
#pragma unroll
    for (int k = kRun - 1; k >= 0; --k)
      if (run.x[k] == max && held_id(first, j * kRun + k) < id) id = held_id(first, j * kRun + k);
  }
  return block_reduce(id, row.vocab, Min{});
}

// The sum of a row of weights whose law has its max; makes table.mass relative to it. Out of line, as it is rare.
inline __device__ __noinline__ void sum_weights(Reading& r) {
  const int tiles = r.row.tiles();
  const auto sum = [&](auto f) {
    if (warp_id() == 0) {
      const float total = sum_of_tiles(r.table.mass, tiles);
      if (lane_id() == 0) f(total);
    }
    __syncthreads();
  };
  sum([&](float total) { set_total(r.law, total, r.sampling); });
  if (r.law.one_hot) return;
  // As each id is multiplied: if the tile's largest comes to 0 there is nothing to draw.
  for (int tile = int(threadIdx.x); tile < tiles; tile += int(blockDim.x)) {
    const float times = r.law.inverse_temperature;
    r.table.mass[tile] = r.table.max[tile] * times > 0.0f ? r.table.mass[tile] * times : 0.0f;
  }
  __syncthreads();
  sum([&](float total) { r.law.normalizer = total; });
}

// Finds the law of a scanned row, by one block. If the whole row's mass is needed, makes table.mass relative to the
// row's maximum.
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
  const bool weights = has_weights(reading.sampling);
  const bool one_hot = reading.sampling.greedy || isinf(max) || (weights && !(max >= kSmallestWeight));
  int32_t argmax = 0;
  if ((need_argmax || one_hot || weights) && max > -INFINITY) argmax = find_argmax(reading.row, table, max);
  by_one([&] {
    RowLaw law{};
    law.max = max;
    law.cutoff = -INFINITY;
    law.inverse_temperature = reading.sampling.inverse_temperature;
    law.normalizer = law.inverse_normalizer = 1.0f;
    law.argmax = argmax;
    law.status = flags | reading.sampling.status | reading.row.overlay().status();
    law.one_hot = one_hot;
    reading.law = weights ? law_of_weights(max, argmax, flags, reading.sampling) : law;
  });
  if (one_hot) return;
  if (weights) {
    sum_weights(reading);
    if (reading.law.one_hot) return;
  }

  const Cut cut = cut_of(reading.sampling, reading.row.vocab);
  if (cut.whole && !weights) {
    for (int tile = int(threadIdx.x); tile < tiles; tile += int(blockDim.x))
      table.mass[tile] *= exp_of(table.max[tile], max, reading.sampling.inverse_temperature);
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

// The same law with the same numbers, by one warp and without a barrier, for an uncut row of few tiles whose argmax is
// not needed; each lane has neighbouring tiles. The law is in lane 0; the lanes' masses become relative to the row's
// maximum. False for any other row, or if not all of the row's mass is finite.
__device__ __forceinline__ bool plain_law(const RowView& row, const Sampling& sampling, const TileTable& table,
                                          float (&mass)[kLeaves], RowLaw* law) {
  const int tiles = row.tiles();
  if (tiles > kTree || sampling.greedy || has_weights(sampling) || cut_of(sampling, row.vocab).any) return false;
  const int first = lane_id() * kLeaves;
  float max[kLeaves], most = -INFINITY;
  bool nan = false;
#pragma unroll
  for (int i = 0; i < kLeaves; ++i) {
    const bool inside = first + i < tiles;
    max[i] = inside ? table.max[first + i] : -INFINITY;
    mass[i] = inside ? table.mass[first + i] : 0.0f;
    nan |= inside && table.nan[first + i] > 0;
    most = fmaxf(most, max[i]);
  }
  most = warp_max(most);
  if (isinf(most)) return false;
#pragma unroll
  for (int i = 0; i < kLeaves; ++i) mass[i] *= exp_of(max[i], most, sampling.inverse_temperature);
  const float total = WarpTree<float>(0, tiles, [&](int tile) { return mass[tile - first]; }).sum();
  nan = __any_sync(kAllLanes, nan);
  if (lane_id() == 0)
    *law = {most,  -INFINITY, sampling.inverse_temperature, total, 1.0f / total, 0, (nan ? kNaN : 0) | sampling.status,
            false, false};
  return true;
}

// The plain law of a reading; makes its table's masses relative.
__device__ __forceinline__ bool find_plain_law(Reading& reading) {
  float mass[kLeaves];
  if (!plain_law(reading.row, reading.sampling, reading.table, mass, &reading.law)) return false;
#pragma unroll
  for (int i = 0; i < kLeaves; ++i) {
    const int tile = lane_id() * kLeaves + i;
    if (tile < reading.row.tiles()) reading.table.mass[tile] = mass[i];
  }
  return true;
}

// Sum of exp(logit - max) and entropy of the raw row (temperature 1, nothing cut).
struct RawMoments {
  float normalizer, entropy;
};

// From the tiles of a row whose law has been found, by one warp.
__device__ __forceinline__ RawMoments raw_moments(const Reading& reading) {
  const float max = reading.law.max;
  if (isinf(max)) return {1.0f, 0.0f};
  const TileTable& table = reading.table;
  const int tiles = reading.row.tiles();
  const auto scale_of = [&](int tile) { return exp_of(table.max[tile], max, 1.0f); };
  const float sum = sum_of_tiles(tiles, [&](int tile) { return table.raw_sum[tile] * scale_of(tile); });
  const float weighted = sum_of_tiles(tiles, [&](int tile) {
    const float scale = scale_of(tile);
    if (!(scale > 0)) return 0.0f;
    return table.raw_weighted[tile] * scale + table.raw_sum[tile] * scale * (table.max[tile] - max);
  });
  return {sum, logf(sum) - weighted / sum};
}

}  // namespace specdec::SPECDEC_CUDA_ROWS

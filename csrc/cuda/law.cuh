// From a row's tile table to its law. Cut-offs are found without sorting: a group of 128 ids is read again only if its
// maximum can matter, and what may be kept is listed in shared memory; rows with too much to list are read again, four
// times a cut-off. Masses are counted in fixed point, so that no order of adding matters.
#pragma once
#include "cuda/scan.cuh"

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

// Finds a row's cut-off by one block; every member is called by all its threads and returns the same to all. The law has
// the row's max and temperature and, where cut.whole, its normaliser.
class Truncation {
 public:
  __device__ explicit Truncation(const Reading& r)
      : row_(r.row),
        sampling_(r.sampling),
        law_(r.law),
        table_(r.table),
        list_(r.list),
        cut_(cut_of(r.sampling, r.row.vocab)),
        fixed_(r.row.vocab) {}

  // The smallest logit kept, and the normaliser of what is kept.
  struct Found {
    float cutoff, normalizer;
  };
  __device__ Found find() {
    const float likely = sampling_.min_p > 0 ? law_.max + logf(sampling_.min_p) * sampling_.temperature : -INFINITY;
    float floor = sampling_.min_p_first ? likely : -INFINITY;
    float listed_from = floor;
    if (cut_.top_k > 0)
      listed_from = fmaxf(floor, nth_group_maximum(cut_.top_k));
    else if (sampling_.top_p < 1 && cut_.whole && row_.vocab > kMaxListed)
      listed_from = nth_group_maximum(min(kTopGroups, row_.tiles() * kGroups / 4));
    else if (!(sampling_.top_p < 1))
      listed_from = likely;
    make_list(listed_from);
    if (cut_.top_k > 0) {
      floor = fmaxf(floor, top_k(floor));
      if (count_ > kMaxListed) make_list(listed_from = floor);
    }
    if (sampling_.top_p < 1) floor = fmaxf(floor, top_p(floor, listed_from));
    floor = fmaxf(floor, likely);
    if (count_ > kMaxListed || floor < listed_from) make_list(floor);

    float lowest = INFINITY;
    Fixed mass = 0;
    for_each(floor, [&](float x) {
      lowest = fminf(lowest, x);
      mass += fixed_(weight_of(x, law_));
    });
    lowest = block_reduce(lowest, INFINITY, Min{});
    return {lowest, fixed_.back(block_reduce(mass, Fixed(0), Sum{}))};
  }

 private:
  // f(x) for each possible value >= bound that falls to this thread: of the list if it is complete, else of the row.
  template <class F>
  __device__ void for_each(float bound, F f) const {
    if (count_ <= kMaxListed) {
      for (int i = int(threadIdx.x); i < count_; i += int(blockDim.x))
        if (list_[i] >= bound) f(list_[i]);
    } else {
      for_each_in_row(bound, f);
    }
  }

  template <class F>
  __device__ void for_each_in_row(float bound, F f) const {
    for (int tile = warp_id(); tile < row_.tiles(); tile += num_warps()) {
      if (!(table_.max[tile] >= bound)) continue;
#pragma unroll 1
      for (int j = 0; j < kRuns; ++j) {
        float x[kRun];
        load_run(row_, tile, j, x);
#pragma unroll
        for (int k = 0; k < kRun; ++k)
          if (x[k] >= bound && x[k] > -INFINITY) f(x[k]);
      }
    }
  }

  // Lists the possible values >= bound, in no order; count_ tells how many there are, listed or not.
  __device__ void make_list(float bound) {
    SPECDEC_SHARED(int, count, 1);
    __syncthreads();
    if (threadIdx.x == 0) count[0] = 0;
    __syncthreads();
    const int groups = row_.tiles() * kGroups;
    for (int first = warp_id() * 32; first < groups; first += num_warps() * 32) {
      const int mine = first + lane_id();
      const float max = mine < groups ? table_.group_max[mine] : -INFINITY;
      for (unsigned hot = __ballot_sync(kAllLanes, max >= bound && max > -INFINITY); hot != 0; hot &= hot - 1)
        list_group(first + __ffs(int(hot)) - 1, bound, count);
    }
    __syncthreads();
    count_ = count[0];
  }

  // The warp appends one group: lane l takes ids 4 (l % 8) … of its run l / 8.
  __device__ void list_group(int group, float bound, int* count) {
    const int32_t first =
        group / kGroups * kTile + (lane_id() / 8 * 32 + group % kGroups * 4) * kRun + lane_id() % 8 * 4;
    float x[4];
    unsigned kept[4];
    int total = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[k] = first + k < row_.vocab ? logit_at(row_, first + k) : -INFINITY;
      kept[k] = __ballot_sync(kAllLanes, x[k] >= bound && x[k] > -INFINITY);
      total += __popc(kept[k]);
    }
    int place = 0;
    if (lane_id() == 0) place = atomicAdd(count, total);
    place = __shfl_sync(kAllLanes, place, 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int mine = place + __popc(kept[k] & ((1u << lane_id()) - 1));
      if ((kept[k] >> lane_id() & 1) && mine < kMaxListed) list_[mine] = x[k];
      place += __popc(kept[k]);
    }
  }

  // The same over the listed values >= bound: comparing all with all where they are few.
  template <class Measure>
  __device__ float select_listed(float bound, Measure measure, Fixed goal) {
    if (count_ > kCounted) return radix_select([&](auto f) { for_each(bound, f); }, measure, goal, 32);
    float lowest = INFINITY, chosen = -INFINITY;
    for_each(bound, [&](float x) {
      lowest = fminf(lowest, x);
      Fixed above = 0, until = 0;
      for (int i = 0; i < count_; ++i) {
        const float other = list_[i];
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
  __device__ float nth_group_maximum(int64_t n) {
    const int groups = row_.tiles() * kGroups;
    if (n > groups) return -INFINITY;
    return radix_select(
        [&](auto f) {
          for (int i = int(threadIdx.x); i < groups; i += int(blockDim.x)) f(table_.group_max[i]);
        },
        [](float) { return Fixed(1); }, Fixed(n), 16);
  }

  __device__ float top_k(float floor) {
    const auto one = [](float) { return Fixed(1); };
    if (count_ > kMaxListed) return radix_select([&](auto f) { for_each(floor, f); }, one, Fixed(cut_.top_k), 32);
    if (count_ < cut_.top_k) return floor;  // fewer than k possible ids
    return select_listed(floor, one, Fixed(cut_.top_k));
  }

  __device__ Fixed mass_above(float floor) {
    Fixed mass = 0;
    for_each(floor, [&](float x) { mass += fixed_(weight_of(x, law_)); });
    return block_reduce(mass, Fixed(0), Sum{});
  }

  // top-p of the ids >= floor, or of the whole row, whose mass is then law_.normalizer.
  __device__ float top_p(float floor, float listed_from) {
    const auto measure = [&](float x) { return fixed_(weight_of(x, law_)); };
    const Fixed seen = mass_above(cut_.whole ? -INFINITY : floor);
    const double total = cut_.whole ? double(law_.normalizer) / fixed_.down : double(seen);
    const Fixed goal = Fixed(ceil(double(sampling_.top_p) * total));
    if (cut_.whole) floor = -INFINITY;
    if (count_ > kMaxListed) return radix_select([&](auto f) { for_each(floor, f); }, measure, goal, 32);
    if (seen >= goal || listed_from == -INFINITY || !cut_.whole) return select_listed(floor, measure, goal);
    // The mass lies deeper than what was listed.
    return radix_select([&](auto f) { for_each_in_row(floor, f); }, measure, goal, 32);
  }

  const RowView& row_;
  const Sampling& sampling_;
  const RowLaw& law_;
  const TileTable& table_;
  float* const list_;
  const Cut cut_;
  const FixedScale fixed_;
  int count_ = 0;
};

// Out of line: it is long, and most rows are not cut.
inline __device__ __noinline__ Truncation::Found find_cut(const Reading& reading) { return Truncation(reading).find(); }

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
      float x[kRun];
      load_run(row, first, j, x);
#pragma unroll
      for (int k = kRun - 1; k >= 0; --k)
        if (x[k] == max) id = held_id(first, j * kRun + k);
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
    flags |= table.flags[tile];
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
      const float total = ordered_sum(table.mass, tiles);
      if (lane_id() == 0) reading.law.normalizer = total;
    }
    __syncthreads();
  }
  Truncation::Found found{-INFINITY, 0.0f};
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
  float sum = 0.0f, weighted = 0.0f;
  const int tiles = reading.row.tiles();
  for (int begin = 0; begin < tiles; begin += 32) {
    const int tile = begin + lane_id(), count = tiles - begin < 32 ? tiles - begin : 32;
    float mine = 0.0f, mine_weighted = 0.0f;
    if (tile < tiles && reading.table.max[tile] > -INFINITY) {
      const float shift = reading.table.max[tile] - max;
      const float scale = shift >= kSmallestExponent ? fast_exp2(shift * kLog2E) : 0.0f;
      mine = reading.table.raw_sum[tile] * scale;
      mine_weighted = scale > 0 ? reading.table.raw_weighted[tile] * scale + mine * shift : 0.0f;
    }
    for (int i = 0; i < count; ++i) {
      sum += __shfl_sync(kAllLanes, mine, i);
      weighted += __shfl_sync(kAllLanes, mine_weighted, i);
    }
  }
  return {sum, logf(sum) - weighted / sum};
}

}  // namespace specdec::cuda

// Shared by the kernels with one block or cluster per sequence, which read rows only as far as a rule gets.
#pragma once
#include "cuda/rows.cuh"
#include "cuda/strategy.h"
#include "cuda/verify_rows.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

constexpr int kWalkThreads = 256;
constexpr unsigned kMaxCluster = 8;

// Long, with several call sites: out of line, so that each exists once. `raw`: null if the raw row is not needed;
// `probs`: the row holds probabilities.
template <bool kClustered>
__device__ __noinline__ void read_row(Reading& reading, RawRow* raw, bool probs = false) {
  const ScanPlan plan = probs ? plan_of_probs() : scan_plan(reading.sampling, reading.row.vocab, raw != nullptr);
  scan_row<kClustered>(reading.row, plan, reading.table);
  find_law(reading, raw != nullptr);
  if (probs && warp_id() == 0) {
    const float total = sum_of_tiles(reading.table.mass, reading.row.tiles());
    if (lane_id() == 0) reading.law = law_of_probs(reading.law, total);
  }
  if (raw == nullptr || warp_id() != 0) return;
  const RawRow found = raw_row(reading);
  if (lane_id() == 0) *raw = found;
}

template <bool kClustered>
__device__ __noinline__ Fixed best_noisy(const Position& from, const TileTable& table, int64_t key) {
  BestNoisy best;
  Team<kClustered>::for_each_tile(from.row.tiles(), [&](int tile) {
    if (table.max[tile] >= from.law.cutoff) best.see(from.row, from.law, tile, key, nullptr);
  });
  return block_reduce(best.key, Fixed(0), Max{});
}

// The id with the best noisy score in a row that was read, by a team.
template <bool kClustered>
__device__ __forceinline__ int32_t noisy_token(const Position& from, const TileTable& table, int64_t key) {
  SPECDEC_SHARED(Fixed, box, kMaxCluster);
  using Group = Team<kClustered>;
  Fixed found = best_noisy<kClustered>(from, table, key);
  if constexpr (kClustered) {
    Group::sync();
    if (threadIdx.x == 0) Group::store(box + Group::rank(), found);
    Group::sync();
    for (unsigned r = 0; r < Group::size(); ++r) found = Max{}(found, box[r]);
  }
  return noisy_id(found);
}

// How many numbers a sequence's rows leave behind: two tables and two rows of masses.
inline int64_t numbers_of(const VerifyArgs& args) {
  const int64_t tiles = tiles_of(args.target.vocab);
  return (tiles + draft_tiles(args)) * TileTable::kNumbers + 2 * tiles;
}

// Where these numbers are: in shared memory, after the list, or in device memory.
struct Place {
  bool listed;
  float* numbers;  // null: shared
  int64_t size;
  __device__ float* of(int64_t b, float* list) const {
    return numbers ? numbers + b * size : list + (listed ? kMaxListed : 0);
  }
  size_t shared() const { return sizeof(float) * size_t((listed ? kMaxListed : 0) + (numbers ? 0 : size)); }
};

// Most GPUs give a block 99 KB, including the list and the kernels' own arrays (verify_tree's: 31 KB).
constexpr int64_t kMostSharedNumbers = 13 << 10;

inline Place place_of(const VerifyArgs& args, const Launch& launch) {
  Place place{may_cut(args), nullptr, numbers_of(args)};
  if (place.size > kMostSharedNumbers)
    place.numbers = static_cast<float*>(launch.scratch(args.batch * place.size * int64_t(sizeof(float))));
  return place;
}

// Blocks per sequence, which has its rows to itself: the fewer sequences, the more blocks share each row.
inline unsigned cluster_of(const VerifyArgs& args) {
  const Strategy forced = forced_strategy();
  unsigned cluster = forced == Strategy::kCluster ? 2 : 1;
  const int tiles = tiles_of(args.target.vocab);
  while (forced == Strategy::kAuto && cluster < kMaxCluster && int64_t(cluster) * 2 * kWalkThreads / 32 <= tiles &&
         args.batch * cluster * 2 <= multiprocessors())
    cluster *= 2;
  return hopper_code() ? cluster : 1;
}

// How a walking kernel is launched: with one block per sequence, or with clusters, whose kernel is given.
template <class Kernel>
Shape walk_shape(const VerifyArgs& args, const Place& place, unsigned cluster, Kernel by_cluster) {
  const dim3 threads(threads_for(tiles_of(args.target.vocab), kWalkThreads));
  const auto shape = [&] { return Shape{dim3(unsigned(args.batch) * cluster), threads, place.shared(), cluster}; };
  if (place.numbers) cluster = 1;
  // The multiprocessors of a small GPU, or of a part of one, may come in groups smaller than a cluster.
  while (cluster > 1 && clusters_at_once(reinterpret_cast<const void*>(by_cluster), shape()) == 0) cluster /= 2;
  return shape();
}

// The state that all threads of a block share; in shared memory, so that it does not fill everybody's registers.
struct WalkState {
  Span span;
  Reading target, draft;
  Position now;  // the present position
  Mixing mixing;
  float *mass, *other_mass;  // its tiles' masses, and room for as many
};

// Reads a row of the present position; returns the row's flags.
template <bool kClustered>
__device__ __forceinline__ int32_t read_target(const VerifyArgs& args, WalkState& state, int64_t i) {
  by_one([&] {
    state.target.row.data = target_row(args, state.span, i).data;
    state.target.row.lay_over(i);
  });
  read_row<kClustered>(state.target, is_cascade(args.law.kind) ? &state.mixing.target : nullptr);
  by_one([&] {
    state.mixing.measure = Measure::kNothing;
    state.now = {state.target.row, state.target.law, state.now.cut};
  });
  return state.now.law.status;
}

template <bool kClustered>
__device__ __forceinline__ int32_t read_draft(const VerifyArgs& args, WalkState& state, int64_t b, int64_t i,
                                              int32_t point) {
  if (reads_draft(args)) {
    by_one([&] { state.draft.row.data = draft_row(args, state.span, i).data; });
    read_row<kClustered>(state.draft, is_cascade(args.law.kind) ? &state.mixing.draft : nullptr,
                         args.draft_probs.data != nullptr);
  }
  by_one([&] {
    state.now.draft = draft_law(args, state.span, b, i, state.draft.law, point);
    if (reads_draft(args)) state.now.draft.row = state.draft.row;
    if (args.law.kind != LawKind::kLossless) begin(args.law, state.mixing, state.now);
  });
  return state.now.draft.law.status;
}

// The rows of one sequence, one position after the other. All threads of all blocks of the team take the same branches,
// with the same numbers.
template <bool kClustered>
class WalkRows {
 public:
  using Group = Team<kClustered>;

  // `list`: kMaxListed floats, if rows may be cut; `numbers`: see numbers_of.
  __device__ WalkRows(const VerifyArgs& args, int64_t b, const Span& span, const Sampling& target_sampling,
                      WalkState& state, float* list, float* numbers)
      : args_(args), b_(b), state_(state), status_(span.status) {
    by_one([&] {
      state.span = span;
      state.mass = numbers + tiles() * TileTable::kNumbers;
      state.other_mass = state.mass + tiles();
      state.target.list = state.draft.list = list;
      state.target.row = target_row(args, span, 0);
      state.target.sampling = target_sampling;
      state.target.table = TileTable(numbers, tiles());
      state.draft.sampling = draft_sampling(args, b);
      state.draft.row = reads_draft(args) ? draft_row(args, span, 0) : RowView{};
      if (reads_draft(args)) {
        state.draft.table = TileTable(state.other_mass + tiles(), state.draft.row.tiles());
      }
      state.now.cut = cut_of(target_sampling, args.target.vocab).any;
    });
  }

  // Reads target row i, without a draft; its flags count from here on.
  __device__ void read_target(int64_t i) { status_ |= cuda::read_target<kClustered>(args_, state_, i); }

  // Reads the draft's row i too, whose flags count as well; begins the position's mixture. `point`: as for draft_law.
  __device__ void read_draft(int64_t i, int32_t point) {
    status_ |= cuda::read_draft<kClustered>(args_, state_, b_, i, point);
  }

 protected:
  __device__ bool cascade() const { return is_cascade(args_.law.kind); }
  __device__ int tiles() const { return tiles_of(args_.target.vocab); }
  __device__ double uniform(int64_t i) { return uniform_at(args_, state_.span, b_, i, &status_); }

  __device__ void end_mixture() {
    if (state_.mixing.measure != Measure::kNothing)
      end_mixing<kClustered>(args_.law, state_.mixing, state_.now, state_.mass);
  }

  // Makes the remainder at the present position the cascade's law itself.
  __device__ void set_cascade() {
    end_mixture();
    by_one([&] { state_.now.left = cascade_of(state_.now.mixture); });
  }

  template <class From>
  __device__ void find_masses(const From& from) {
    Group::sync();  // the masses may still be in use
    masses_of<kClustered, 1>(from, state_.target.table, state_.mass, int(Group::rank()), int(Group::size()));
    Group::sync();
  }

  // A token from what is left at a position, given its tiles' masses; if nothing is left, from what replaces it.
  // reread() reads the position's row again if the table holds another row.
  template <class Reread>
  __device__ int32_t draw_left(Position& from, const float* mass, double uniform, Reread reread) {
    for (int tried = 1;; ++tried) {
      const int32_t id = draw_id(from, mass, uniform);
      if (id >= 0 || tried == kMostRemainders) return max(id, 0);
      by_one([&] { from.take_all(); });
      if (from.certain()) return from.law.argmax;  // of such a row no masses are known
      if (!from.left.mixed) reread();
      find_masses(from);
      mass = state_.mass;
    }
  }

  // The id that position i's noise picks from the current row.
  __device__ int32_t noisy(int64_t i) {
    return noisy_token<kClustered>(state_.now, state_.target.table, key_at(args_, state_.span, b_, i));
  }

  const VerifyArgs& args_;
  const int64_t b_;
  WalkState& state_;
  int32_t status_;
};

}  // namespace specdec::SPECDEC_CUDA_ROWS

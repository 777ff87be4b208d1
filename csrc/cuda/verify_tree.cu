// verify_tree with a block (or a cluster of them) a sequence: of all the rows of a tree only those are read that the rule
// gets to.
#include "common/tree_rules.h"
#include "cuda/siblings.cuh"
#include "cuda/strategy.h"
#include "cuda/walk.cuh"

namespace specdec::cuda {
namespace {

// Numbers that a sequence's rows leave behind: two tables and two rows of sums.
int64_t numbers_of(const VerifyArgs& args) {
  const int64_t tiles = (args.target.vocab + kTile - 1) / kTile;
  const int32_t draft_vocab = args.draft.data ? args.draft.vocab : args.draft_probs.data ? args.draft_probs.vocab : 0;
  const int64_t draft_tiles = (draft_vocab + kTile - 1) / kTile;
  return (tiles + draft_tiles) * TileTable::kNumbers + 2 * tiles;
}

// What all threads of a block know alike.
struct State {
  Span span;
  Sampling sampling;
  Reading target, draft;
  Mixing mixing;
  Position now;
  float *sums, *more_sums;  // of tiles
};

// What common/tree_rules.h asks of a sequence's rows.
template <bool kClustered>
class TreeRows {
 public:
  using Group = Team<kClustered>;
  using Laws = NodeLaws;

  // `list`: of kMaxListed floats, if rows may be cut; `numbers`: see numbers_of.
  __device__ TreeRows(const VerifyTreeArgs& args, int64_t b, State& state, float* list, float* numbers)
      : args_(args), b_(b), state_(state) {
    by_one([&] {
      state.span = tree_span(args, b);
      state.sums = numbers + tiles() * TileTable::kNumbers;
      state.more_sums = state.sums + tiles();
      state.target.list = state.draft.list = list;
      state.sampling = target_sampling(args, b);
      state.target.table = TileTable(numbers, tiles());
      state.draft.sampling = draft_sampling(args, b);
      if (has_draft(args))
        state.draft.table = TileTable(state.more_sums + tiles(), draft_row(args, state.span, 0).tiles());
      state.now.cut = cut_of(state.sampling, args.target.vocab).any;
    });
    status_ = state.span.status;
  }

  template <class F>
  __device__ static void by_one(F f) {
    cuda::by_one(f);
  }
  template <class F>
  __device__ static void for_each(int64_t n, F f) {
    for (int32_t i = int32_t(threadIdx.x); i < n; i += int32_t(blockDim.x)) f(i);
    __syncthreads();
  }
  template <class F>
  __device__ static int32_t flags_of(int64_t n, F f) {
    int32_t flags = 0;
    for (int32_t i = int32_t(threadIdx.x); i < n; i += int32_t(blockDim.x)) flags |= f(i);
    return block_reduce(flags, 0, Or{});
  }

  __device__ void flag(int32_t flags) { status_ |= flags; }
  __device__ int32_t status() const { return status_; }
  __device__ float coin(int32_t node) { return uniform_at(args_, state_.span, node, &status_); }

  __device__ void read(int32_t node, bool whole) {
    by_one([&] { state_.target.sampling = whole ? untruncated(state_.sampling) : state_.sampling; });
    read_target(node, is_cascade(args_.law.kind) ? &state_.mixing.target : nullptr);
  }
  __device__ const RowLaw& law() const { return state_.now.law; }
  __device__ float p(int32_t id) const { return state_.now.p(id); }

  // In nats.
  __device__ float entropy() {
    const Position& now = state_.now;
    if (now.law.one_hot) return 0.0f;
    Group::sync();
    Group::for_each_tile(tiles(), [&](int tile) {
      float sum = 0.0f;
#pragma unroll 1
      for (int j = 0; j < kRuns; ++j) {
        float x[kRun];
        load_run(now.row, tile, j, x);
#pragma unroll
        for (int k = 0; k < kRun; ++k) {
          const float p = prob_of(x[k], now.law, held_id(tile, j * kRun + k));
          sum += p > 0 ? p * ((now.law.max - x[k]) * now.law.inverse_temperature) : 0.0f;
        }
      }
      sum = warp_reduce(sum, Sum{});
      if (lane_id() == 0) Group::store(state_.sums + tile, sum);
    });
    Group::sync();
    return logf(now.law.normalizer) + ordered_sum(state_.sums, tiles());
  }

  __device__ void mix(int32_t node) {
    read_draft(node, &state_.mixing.draft);
    by_one([&] { begin(args_.law, state_.mixing, state_.now); });
    if (state_.mixing.measure != Measure::kNothing)
      end_mixing<kClustered>(args_.law, state_.mixing, state_.now, state_.sums);
    by_one([&] { state_.now.left = cascade_of(state_.now.mixture); });
  }
  __device__ int64_t draw(float uniform) { return draw_from(state_.now, uniform); }
  __device__ int64_t noisy(int32_t node) {
    return noisy_token<kClustered>(state_.now, state_.target.table, args_.noise_keys[state_.span.target_index + node]);
  }

  __device__ void read(NodeLaws& laws, int32_t node, bool drafted) {
    by_one([&] { state_.target.sampling = state_.sampling; });
    read_target(node, nullptr);
    if (drafted) read_draft(node, nullptr);
    by_one([&] {
      laws.row = state_.now.row;
      laws.law = state_.now.law;
      laws.draft = state_.now.draft;
    });
  }
  __device__ RejectionSums sums(const NodeLaws& laws, float scale, float taken) {
    Group::sync();  // the sums may still be in use
    rejection_sums<kClustered>(laws, scale, taken, state_.sums, state_.more_sums);
    Group::sync();
    return {ordered_sum(state_.sums, tiles()), ordered_sum(state_.more_sums, tiles())};
  }
  __device__ int64_t draw(const NodeLaws& laws, float uniform) { return draw_from(laws, uniform); }

 private:
  __device__ int tiles() const { return (args_.target.vocab + kTile - 1) / kTile; }

  // Reads a node's target row into `now`, without a draft; its flags count from here on.
  __device__ void read_target(int32_t node, RawRow* raw) {
    by_one([&] { state_.target.row = target_row(args_, state_.span, node); });
    read_row<kClustered>(state_.target, raw);
    by_one([&] {
      state_.mixing.measure = Measure::kNothing;
      state_.now = {state_.target.row, state_.target.law, state_.now.cut};
    });
    status_ |= state_.now.law.status;
  }

  // And the draft's, whose flags count too.
  __device__ void read_draft(int32_t node, RawRow* raw) {
    if (reads_draft(args_)) {
      by_one([&] { state_.draft.row = draft_row(args_, state_.span, node); });
      read_row<kClustered>(state_.draft, raw);
    }
    by_one([&] {
      if (args_.draft_probs.data) state_.draft.law = flags_alone(state_.draft.law);
      state_.now.draft = draft_law(args_, state_.span, b_, node, state_.draft.law, kNone);
    });
    status_ |= state_.now.draft.law.status;
  }

  template <class From>
  __device__ int64_t draw_from(const From& from, float u) {
    Group::sync();  // the sums may still be in use
    masses_of<kClustered>(from, state_.target.table, state_.sums, int(Group::rank()), int(Group::size()));
    Group::sync();
    return max(cuda::draw(from, state_.sums, u), 0);
  }

  const VerifyTreeArgs& args_;
  const int64_t b_;
  State& state_;
  int32_t status_;
};

template <bool kClustered>
using Rules = TreeRules<TreeRows<kClustered>>;

// What a sequence's rows leave behind is in shared memory, after the list, or in device memory.
struct Place {
  bool listed;
  float* numbers;  // null: shared
  int64_t size;
};

template <bool kClustered>
__global__ void __launch_bounds__(kWalkThreads, 2)
    verify_tree_kernel(const __grid_constant__ VerifyTreeArgs args, const __grid_constant__ Place place) {
  using Group = Team<kClustered>;
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(State, state, 1);
  SPECDEC_SHARED(typename Rules<kClustered>::Memory, memory, 1);
  float* const list = reinterpret_cast<float*>(shared);
  const int64_t b = blockIdx.x / Group::size();
  float* const numbers = place.numbers ? place.numbers + b * place.size : list + (place.listed ? kMaxListed : 0);
  TreeRows<kClustered> rows(args, b, state[0], list, numbers);
  Rules<kClustered> rules(args, b, rows, memory[0]);
  const TreeOutcome outcome = rules.decide();
  if (Group::rank() == 0) rules.write(outcome);
  Group::sync();  // no block may end while another could still write into its shared memory
}

}  // namespace

cudaError_t verify_tree(const VerifyTreeArgs& args, const Launch& launch) {
  if (args.batch == 0) return cudaSuccess;
  const int tiles = (args.target.vocab + kTile - 1) / kTile;
  Place place{may_cut(args.params) || may_cut(args.draft_params), nullptr, numbers_of(args)};
  size_t shared = place.listed ? kMaxListed * sizeof(float) : 0;
  const bool fits = place.size <= int64_t(kMostSharedTiles) * 2 * (TileTable::kNumbers + 1);
  if (fits)
    shared += size_t(place.size) * sizeof(float);
  else
    place.numbers = static_cast<float*>(launch.scratch(args.batch * place.size * int64_t(sizeof(float))));
  // A sequence has its rows to itself: the fewer sequences, the more blocks share each row.
  unsigned cluster = 1;
  const Strategy forced = forced_strategy();
  while (forced == Strategy::kAuto && cluster < kMaxCluster && int64_t(cluster) * 2 * kWalkThreads / 32 <= tiles &&
         args.batch * cluster * 2 <= multiprocessors())
    cluster *= 2;
  if (forced == Strategy::kCluster) cluster = 2;
  if (!hopper_code() || !fits) cluster = 1;
  const Shape shape{dim3(unsigned(args.batch) * cluster), dim3(threads_for(tiles, kWalkThreads)), shared, cluster};
  return launch_kernel(cluster > 1 ? verify_tree_kernel<true> : verify_tree_kernel<false>, shape, launch.stream, args,
                       place);
}

}  // namespace specdec::cuda

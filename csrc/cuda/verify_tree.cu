// verify_tree with one block (or one cluster) per sequence: of all the rows of a tree only those that the rule gets to
// are read.
#include "common/tree_rules.h"
#include "cuda/siblings.cuh"
#include "cuda/strategy.h"
#include "cuda/walk.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {
namespace {

// The answers of a sequence's rows to common/tree_rules.h.
template <bool kClustered>
class TreeRows : public WalkRows<kClustered> {
  using Base = WalkRows<kClustered>;
  using Base::state_, Base::status_, Base::tiles;
  using typename Base::Group;

 public:
  using Laws = NodeLaws;

  __device__ TreeRows(const VerifyTreeArgs& args, int64_t b, WalkState& state, float* list, float* numbers)
      : Base(args, b, tree_span(args, b), target_sampling(args, b), state, list, numbers), tree_(args) {
    find_overlay(args.processors, b, state.span.target_index, drafted_of(args, b));
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
  __device__ double coin(int32_t node) { return this->uniform(node); }

  __device__ void read(int32_t node, bool whole) {
    if (tree_.acceptance == TreeAcceptance::kTypical) {
      by_one([&] {
        const Sampling sampling = target_sampling(tree_, this->b_);
        state_.target.sampling = whole ? untruncated(sampling) : sampling;
      });
    }
    this->read_target(node);
  }
  __device__ const RowLaw& law() const { return state_.now.law; }
  __device__ float p(int32_t id) const { return state_.now.p(id); }
  __device__ float entropy();
  __device__ void mix(int32_t node) {
    this->read_draft(node, kNone);
    this->set_cascade();
  }
  __device__ int64_t draw(double uniform) {
    this->find_masses(state_.now);
    return this->draw_left(state_.now, state_.mass, uniform, [] {});
  }
  using Base::noisy;

  __device__ void read(NodeLaws& laws, int32_t node, bool drafted) {
    this->read_target(node);
    if (drafted) this->read_draft(node, kNone);
    by_one([&] {
      laws.row = state_.now.row;
      laws.law = state_.now.law;
      laws.draft = state_.now.draft;
    });
  }
  __device__ RejectionSums sums(const NodeLaws& laws, float scale, float taken) {
    Group::sync();  // the sums may still be in use
    rejection_sums<kClustered>(laws, scale, taken, state_.mass, state_.other_mass);
    Group::sync();
    return {sum_of_tiles(state_.mass, tiles()), sum_of_tiles(state_.other_mass, tiles())};
  }
  __device__ int64_t draw(const NodeLaws& laws, double uniform) {
    this->find_masses(laws);
    return max(cuda::draw_id(laws, state_.mass, uniform), 0);
  }

 private:
  const VerifyTreeArgs& tree_;
};

// In nats.
template <bool kClustered>
__device__ float TreeRows<kClustered>::entropy() {
  const Position& now = state_.now;
  if (now.law.one_hot) return 0.0f;
  Group::sync();
  Group::for_each_tile(tiles(), [&](int tile) {
    float sum = 0.0f;
#pragma unroll 1
    for (int j = 0; j < kRuns; ++j) {
      const Run x = load_run(now.row, tile, j);
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        const float p = prob_of(x.x[k], now.law, held_id(tile, j * kRun + k));
        sum += p > 0 ? p * ((now.law.max - x.x[k]) * now.law.inverse_temperature) : 0.0f;
      }
    }
    sum = warp_reduce(sum, Sum{});
    if (lane_id() == 0) Group::store(state_.mass + tile, sum);
  });
  Group::sync();
  return logf(now.law.normalizer) + sum_of_tiles(state_.mass, tiles());
}

template <bool kClustered>
using Rules = TreeRules<TreeRows<kClustered>>;

template <bool kClustered>
__global__ void __launch_bounds__(kWalkThreads, 1)
    verify_tree_kernel(const __grid_constant__ VerifyTreeArgs args, const __grid_constant__ Place place) {
  using Group = Team<kClustered>;
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(WalkState, state, 1);
  SPECDEC_SHARED(typename Rules<kClustered>::Memory, memory, 1);
  float* const list = reinterpret_cast<float*>(shared);
  const int64_t b = blockIdx.x / Group::size();
  float* const numbers = place.of(b, list);
  TreeRows<kClustered> rows(args, b, state[0], list, numbers);
  Rules<kClustered> rules(args, b, rows, memory[0]);
  const TreeOutcome outcome = rules.decide();
  if (Group::rank() == 0) rules.write(outcome);
  Group::sync();  // no block may end while another could still write into its shared memory
}

}  // namespace

cudaError_t verify_tree(const VerifyTreeArgs& args, const Launch& launch) {
  if (args.batch == 0) return cudaSuccess;
  if (!kProcessed && args.processors.on) return with_processors::verify_tree(args, launch);
  const Place place = place_of(args, launch);
  const Shape shape = walk_shape(args, place, cluster_of(args), verify_tree_kernel<true>);
  return launch_kernel(shape.cluster > 1 ? verify_tree_kernel<true> : verify_tree_kernel<false>, shape, launch.stream,
                       args, place);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS

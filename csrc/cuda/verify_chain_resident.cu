// verify_chain in one launch for few sequences: one cluster per position. It brings the position's rows into its shared
// memory once, and computes from them all that could be wanted: P's and Q's laws, the verdict on the draft token, and
// the token that would replace it. The last cluster of a sequence to finish picks what counts.
//
// Under the block rule a position must know w, which depends on the positions before it. It waits for these alone, and
// clusters then take positions in the order in which they start: a cluster that is waited for has already started and
// waits for no later one, so the first unfinished one can always go on, however few clusters run at a time.
#include <algorithm>
#ifndef SPECDEC_EMULATOR
#include <map>
#include <mutex>
#endif

#include "cuda/chain_walk.cuh"
#include "cuda/strategy.h"

namespace specdec::cuda {
namespace {

constexpr int kWarps = kWalkThreads / 32;
constexpr int kMostSequences = 15, kMostPositions = 32;
constexpr int kSlots = 8192;  // 1 MB of counters: a captured launch keeps its own for good

// Zero between launches: the last user of one resets it.
struct Counters {
  unsigned tickets;                  // positions taken
  unsigned arrived[kMostSequences];  // positions done
  unsigned told[kMostSequences];     // positions whose step is known, one bit each
};
__device__ Counters all_counters[kSlots];

// What a position leaves behind.
struct Result {
  Step step;        // of the block rule, told first
  bool reached;     // the block rule gets here
  bool accepted;    // the draft token is; under the block rule, all of them before this position
  int32_t status;   // flags from looking at the position, and
  int32_t drawing;  // from drawing `token`
  int64_t token;    // what follows the accepted ones if they end here
};

struct Workspace {
  int slot;         // of counters
  Result* results;  // [batch, positions]
  int64_t positions;
  int target_place, draft_place, list_place;  // offsets in dynamic shared memory
  bool listed, waits;
};

class Positioned : public Chain<true> {
 public:
  __device__ Positioned(const VerifyChainArgs& args, const Workspace& work, int64_t b, int64_t i, ChainState& state,
                        unsigned char* shared)
      : Chain<true>(args, b, state, reinterpret_cast<float*>(shared + work.list_place),
                    reinterpret_cast<float*>(shared + work.list_place) + (work.listed ? kMaxListed : 0)),
        work_(work),
        counters_(all_counters[work.slot]),
        i_(i),
        length_(state.span.length),
        closed_(state.span.closed),
        weighs_(!by_match(args) && by_block(args, b)) {}

  __device__ void run() {
    const Span& span = state_.span;
    Result found{};
    const bool has_rows = !span.idle && i_ < target_rows(span);
    if (has_rows) hold_rows();
    if (has_rows || (weighs_ && !span.idle && i_ == length_))
      found = by_match(args_) ? by_noise() : weighs_ ? by_weight() : by_coin();
    if (has_rows) {
      wait_until_held(state_.target.row);
      wait_until_held(state_.draft.row);
    }
    if (Group::rank() == 0) hand_in(found);
    Group::sync();  // no block may end while another could still read its shared memory
  }

 private:
  __device__ Result& result(int64_t i) const { return work_.results[b_ * work_.positions + i]; }

  __device__ void hold_rows() {
    const bool drafted = reads_draft(args_) && i_ < draft_rows(args_, state_.span);
    by_one([&] {
      state_.target.row.data = target_row(args_, state_.span, i_).data;
      hold(state_.target.row, work_.target_place);
      if (!drafted) return;
      state_.draft.row.data = draft_row(args_, state_.span, i_).data;
      hold(state_.draft.row, work_.draft_place);
    });
  }

  __device__ Result by_noise() {
    read_target(i_);
    const int64_t id = wanted(i_);
    return {{}, true, i_ < length_ && accepts_by_match(*this, i_, id), status_, status_, id};
  }

  __device__ Result by_coin() {
    if (i_ < length_) {
      const Verdict verdict = judge_by_token(args_, *this, i_);
      if (verdict == Verdict::kAccepted) return {{}, true, true, status_, 0, Outcome::kNothing};
      if (verdict == Verdict::kImpossible) end_before(i_);
    }
    const int64_t id = final_token(next_after(state_.span, i_), i_);
    return {{}, true, false, status_, status_, id};
  }

  __device__ Result by_weight() {
    const int32_t before = status_;
    Result found{};
    Step step{0.0f, kImpossible};
    if (i_ < length_) {
      read_target(i_);
      Chain<true>::read_draft(i_);
      end_mixture();
      step = step_here(args_.law, state_.now, int32_t(token(i_)));
      if (step.q == kImpossible) end_before(i_);
      tell(step);
    }
    const int32_t looked = status_;
    const bool ends = step.q == kImpossible;  // the span ends here
    found.token = Outcome::kNothing;
    if (ends && next_after(state_.span, i_) == Next::kBonus) found.token = final_token(Next::kBonus, i_);
    const int32_t drawn = status_;
    const float w = weight();
    if (w < 0) return found;
    found.reached = true;
    status_ = before;
    const double u = i_ > 0 ? coin(i_ - 1) : 0.0;
    if (ends || !(w > 0)) {
      found.accepted = i_ == 0 || u < w;
      if (w > 0 && i_ < length_) status_ |= looked;
      found.status = status_;
      found.drawing = drawn;
      return found;
    }
    set_residual(w);
    const bool certain = state_.now.certain();
    if (!certain) find_masses(state_.now);
    found.accepted = i_ == 0 || u < block_threshold(w, Chain<true>::residual(i_));
    status_ |= looked;
    found.status = status_;
    if (!found.accepted) return found;
    found.token = certain ? state_.now.law.argmax : draw_left(state_.now, state_.mass, uniform(0), [] {});
    found.drawing = status_;
    return found;
  }

  __device__ __noinline__ static Step step_here(const TargetLaw& law, const Position& at, int32_t x) {
    return step_at(law, at, x);
  }

  __device__ void tell(Step step) {
    if (Group::rank() != 0 || threadIdx.x != 0) return;
    result(i_).step = step;
    __threadfence();
    atomicOr(&counters_.told[b_], 1u << i_);
  }

  // w at this position; negative if the rule does not get here. Only one block waits: once its cluster is done nobody
  // reads what was told.
  __device__ float weight() {
    SPECDEC_SHARED(float, box, 1);
    if (Group::rank() == 0 && threadIdx.x == 0) {
      float w = 1.0f;
      if (i_ > 0) {
        wait_for_bits(&counters_.told[b_], ~0u >> (32 - i_));
        __threadfence();
      }
      for (int64_t i = 0; i < i_ && w >= 0; ++i) w = w > 0 ? weight_after(result(i).step, w) : kImpossible;
      Group::store(box, w);
    }
    __syncwarp();
    Group::sync();
    return box[0];
  }

  // By the first block of the cluster: a sequence's last cluster to arrive writes the outcome.
  __device__ void hand_in(const Result& found) {
    SPECDEC_SHARED(bool, last, 1);
    by_one([&] {
      Result& mine = result(i_);
      mine.reached = found.reached;
      mine.accepted = found.accepted;
      mine.status = found.status;
      mine.drawing = found.drawing;
      mine.token = found.token;
      __threadfence();
      const unsigned count = unsigned(work_.positions);
      last[0] = atomicInc(&counters_.arrived[b_], count - 1) == count - 1;
      if (last[0] && weighs_) atomicExch(&counters_.told[b_], 0u);
      __threadfence();
    });
    if (last[0]) write();
  }

  __device__ void write() {
    Outcome outcome;
    int32_t status = state_.span.status;
    if (!state_.span.idle) {
      const int64_t rows = length_ + (closed_ ? 0 : 1), i = lane_id();
      const bool looked = i < (weighs_ ? length_ + 1 : rows);
      Result at{};
      if (looked) at = result(i);
      const unsigned accepted = __ballot_sync(kAllLanes, looked && at.reached && at.accepted);
      // Under the block rule the last position that accepts what is before it; else the first that does not accept.
      const int end = weighs_ ? 31 - __clz(int(accepted)) : __ffs(int(~accepted)) - 1;
      const bool counts = looked && (weighs_ ? at.reached : i <= end);
      status |= warp_reduce((counts ? at.status : 0) | (looked && i == end ? at.drawing : 0), Or{});
      const int64_t none = Outcome::kNothing, id = looked ? at.token : none;
      outcome.accepted = end;
      outcome.final = __shfl_sync(kAllLanes, id, end);
    }
    write_outcome(args_, state_.span, b_, outcome, status, threadIdx.x, blockDim.x);
  }

  const Workspace& work_;
  Counters& counters_;
  const int64_t i_;
  const int64_t length_;  // of the span as first found
  const bool closed_, weighs_;
};

// The position for a cluster that waits for others: the next one that no cluster has taken.
__device__ __forceinline__ unsigned take_ticket(unsigned* tickets, unsigned count) {
  SPECDEC_SHARED(unsigned, ticket, 1);
  using Group = Team<true>;
  Group::sync();
  if (Group::rank() == 0 && threadIdx.x == 0) Group::store(ticket, atomicInc(tickets, count - 1));
  __syncwarp();
  Group::sync();
  return ticket[0];
}

__global__ void __launch_bounds__(kWalkThreads, 1)
    verify_resident_kernel(const __grid_constant__ VerifyChainArgs args, const __grid_constant__ Workspace work) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(ChainState, state, 1);
  const unsigned count = gridDim.x / cluster_size();
  const int64_t place = work.waits ? take_ticket(&all_counters[work.slot].tickets, count) : blockIdx.x / cluster_size();
  Positioned(args, work, place / work.positions, place % work.positions, state[0], shared).run();
}

// Lays out a block's shared memory.
Shape shape_of(const VerifyChainArgs& args, unsigned cluster, Workspace& work) {
  const auto place = [&](const Rows& rows) {
    return bytes_of_place(part_of(tiles_of(rows.vocab), int(cluster), kWarps), rows.dtype);
  };
  work.positions = args.num_draft + 1;
  work.listed = finds_cuts(args);
  work.waits = args.acceptance == Acceptance::kBlock;
  work.draft_place = place(args.target);
  work.list_place = work.draft_place + (reads_draft(args) ? place(rows_of_draft(args)) : 0);
  const int64_t numbers = (work.listed ? kMaxListed : 0) + numbers_of(args);
  return {dim3(unsigned(args.batch * work.positions) * cluster), dim3(kWalkThreads),
          size_t(work.list_place) + sizeof(float) * size_t(numbers), cluster};
}

#ifdef SPECDEC_EMULATOR
int slot_of(cudaStream_t) { return 0; }
#else
// Counters that no other launch uses at the same time: a stream's own, as its launches come one after the other; or a
// captured launch's own, as the launches of a graph do so too. -1 if none are left.
int slot_of(cudaStream_t stream) {
  static std::mutex mutex;
  static std::map<int, int> used;  // by device
  static std::map<std::pair<int, unsigned long long>, int> of_stream;
  int device = 0;
  unsigned long long id = 0;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaStreamIsCapturing(stream, &capturing);
  // Not for a capturing stream: the driver does not permit the query there (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED).
  if (error == cudaSuccess && capturing == cudaStreamCaptureStatusNone) error = cudaStreamGetId(stream, &id);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return -1;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (capturing == cudaStreamCaptureStatusNone) {
    if (const auto known = of_stream.find({device, id}); known != of_stream.end()) return known->second;
  }
  if (used[device] == kSlots) return -1;
  const int slot = used[device]++;
  if (capturing == cudaStreamCaptureStatusNone) of_stream[{device, id}] = slot;
  return slot;
}
#endif

}  // namespace

unsigned resident_cluster(const VerifyChainArgs& args, bool at_once) {
  const int tiles = std::max(tiles_of(args.target.vocab), draft_tiles(args));
  if (!hopper_code() || args.batch > kMostSequences || args.num_draft >= kMostPositions) return 0;
  for (unsigned cluster = kMaxCluster; cluster >= 2; cluster /= 2) {
    if (cluster > 2 && tiles < int(cluster) * 4) continue;
    if (part_of(tiles, int(cluster), kWarps) > kMostRounds * kWarps) continue;
    Workspace work{};
    const Shape shape = shape_of(args, cluster, work);
    const int64_t room = clusters_at_once(reinterpret_cast<const void*>(verify_resident_kernel), shape);
    if (room >= (at_once ? args.batch * work.positions : 1)) return cluster;
  }
  return 0;
}

cudaError_t verify_resident(const VerifyChainArgs& args, unsigned cluster, const Launch& launch, bool* done) {
  Workspace work{};
  work.slot = slot_of(launch.stream);
  *done = work.slot >= 0;
  if (!*done) return cudaSuccess;
  const Shape shape = shape_of(args, cluster, work);
  work.results = static_cast<Result*>(launch.scratch(args.batch * work.positions * int64_t(sizeof(Result))));
  return launch_kernel(verify_resident_kernel, shape, launch.stream, args, work);
}

}  // namespace specdec::cuda

// One block per sequence, 32 tokens at a time: each list entry moves up by the number of new ids below its own.
#include "common/count_tokens_.h"
#include "cuda/lists.cuh"
#include "cuda/ops.h"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 256, kWindow = 32;

__device__ __forceinline__ int32_t num_below(const int32_t* ids, int32_t id) {
  int32_t n = 0;
#pragma unroll
  for (int k = 0; k < kWindow; ++k) n += ids[k] < id;
  return n;
}

// No __ldg: whatever is loaded here was, or will be, written.
__global__ void __launch_bounds__(kThreads) count_tokens_kernel(const CountTokensArgs args) {
  SPECDEC_SHARED(int32_t, fresh, kWindow);  // ids that are not in the list yet, each once; INT32_MAX elsewhere
  const int64_t b = blockIdx.x;
  const int32_t capacity = args.capacity;
  int32_t* const ids = args.ids + b * capacity;
  int32_t* const counts = args.counts + b * capacity;
  const bool good = block_ascends(capacity, [ids](int32_t i) { return ids[i]; });
  if (threadIdx.x == 0) args.status[b] = good ? 0 : kBadParam;
  if (!good) return;
  int32_t counted = 0;
  bool fits = true;
  for (int64_t window = 0; window < args.n; window += kWindow) {
    int32_t mine = INT32_MAX, entry = 0, count = 0;  // in warp 0: a lane's fresh id
    if (warp_id() == 0) {
      const int32_t id = id_to_count(args, b, window + lane_id());
      const unsigned alike = __match_any_sync(kAllLanes, id);
      const bool first = id != INT32_MAX && lane_id() == __ffs(int(alike)) - 1;
      entry = first ? first_at_least(ids, capacity, id) : 0;
      count = 2 * __popc(alike);
      const bool known = first && entry < capacity && ids[entry] == id;
      if (known) counts[entry] = plus(counts[entry], count);
      if (first && !known) mine = id;
      fresh[lane_id()] = mine;
      counted += __popc(__ballot_sync(kAllLanes, id != INT32_MAX));
    }
    __syncthreads();
    int32_t lowest = INT32_MAX;
    for (int k = 0; k < kWindow; ++k) lowest = min(lowest, fresh[k]);
    const int32_t begin = first_at_least(ids, capacity, lowest), held = first_at_least(ids, capacity, INT32_MAX);
    fits &= held + num_below(fresh, INT32_MAX) <= capacity;
    for (int32_t end = held; end > begin; end -= kThreads) {
      const int32_t i = end - 1 - int32_t(threadIdx.x);
      const bool moves = i >= begin;
      const int32_t id = moves ? ids[i] : 0, known = moves ? counts[i] : 0;
      __syncthreads();  // all are loaded; they go where none of those still to come stand
      const int32_t to = i + num_below(fresh, id);
      if (moves && to < capacity) {
        ids[to] = id;
        counts[to] = known;
      }
    }
    __syncthreads();
    const int32_t to = entry + num_below(fresh, mine);
    if (mine != INT32_MAX && to < capacity) {
      ids[to] = mine;
      counts[to] = count;
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  args.num_output[b] = plus(args.num_output[b], counted);
  if (!fits) args.status[b] = kBadParam;
}

}  // namespace

cudaError_t count_tokens_(const CountTokensArgs& args, const Launch& launch) {
  if (args.batch == 0) return cudaSuccess;
  return launch_kernel(count_tokens_kernel, {dim3(unsigned(args.batch)), dim3(kThreads)}, launch.stream, args);
}

}  // namespace specdec::cuda

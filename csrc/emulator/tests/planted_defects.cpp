// Kernels with one defect each, and the same kernels without it: what the emulator and the sanitizers must report, and
// what they must let pass. `template <bool kGood>` chooses between the two.
//
//   planted_defects list                         name, who sees it, and the words it is reported with
//   planted_defects all                          each in ten schedules (bad ones only where the emulator alone sees them)
//   planted_defects NAME good|bad ORDER SEED     one of them
//
// Nothing detects a thread that waits for another in a loop of its own (rather than wait_for_bits): no schedule returns
// to the other thread, and the program hangs.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "cuda/portable.h"

extern "C" void specdec_emulator_schedule(int order, uint64_t seed);
extern "C" void specdec_emulator_resident(int count);

namespace {

using namespace specdec::cuda;

constexpr unsigned kAll = 0xffffffffu;
constexpr int kWarps = 8, kThreads = 32 * kWarps;

std::vector<float> numbers(int n) {
  std::vector<float> x(n);
  for (int i = 0; i < n; ++i) x[i] = float(i + 1);
  return x;
}

bool all_equal(const std::vector<float>& x, float value) {
  for (float v : x) {
    if (v != value) return false;
  }
  return true;
}

// ---- shared memory between the threads of a block

template <bool kFirst, bool kSecond>
__device__ float sum_of_block(float value) {
  SPECDEC_SHARED(float, part, kWarps);
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  if (kFirst) __syncthreads();
  value = 0.0f;
  for (int i = 0; i < kWarps; ++i) value += part[i];
  if (kSecond) __syncthreads();
  return value;
}

template <bool kFirst, bool kSecond>
__global__ void two_sums(const float* x, float* out) {
  const float one = sum_of_block<kFirst, kSecond>(x[threadIdx.x]);
  const float two = sum_of_block<kFirst, kSecond>(2.0f * x[threadIdx.x]);
  out[threadIdx.x] = one + two;
}

template <bool kFirst, bool kSecond>
bool run_two_sums() {
  const auto x = numbers(kThreads);
  std::vector<float> out(kThreads);
  launch_kernel(two_sums<kFirst, kSecond>, {1, kThreads}, nullptr, x.data(), out.data());
  return all_equal(out, 3.0f * float(kThreads * (kThreads + 1) / 2));
}

template <bool kGood>
bool missing_barrier() {
  return run_two_sums<kGood, true>();
}

template <bool kGood>
bool reused_buffer() {
  return run_two_sums<true, kGood>();
}

template <bool kGood>
__global__ void shift_in_place(const float* x, float* out) {
  SPECDEC_SHARED(float, row, kThreads);
  const int i = threadIdx.x;
  row[i] = x[i];
  __syncthreads();
  const float next = row[(i + 1) % kThreads];
  if (kGood) __syncthreads();
  row[i] = next;
  __syncthreads();
  out[i] = row[i];
}

template <bool kGood>
bool write_before_read() {
  const auto x = numbers(kThreads);
  std::vector<float> out(kThreads);
  launch_kernel(shift_in_place<kGood>, {1, kThreads}, nullptr, x.data(), out.data());
  for (int i = 0; i < kThreads; ++i) {
    if (out[i] != x[(i + 1) % kThreads]) return false;
  }
  return true;
}

template <bool kGood>
__global__ void tree_in_warp(const float* x, float* out) {
  SPECDEC_SHARED(float, row, 32);
  const int lane = threadIdx.x;
  row[lane] = x[lane];
  if (kGood) __syncwarp();
  for (int step = 16; step > 0; step /= 2) {
    if (lane < step) row[lane] += row[lane + step];
    if (kGood) __syncwarp();
  }
  if (lane == 0) *out = row[0];
}

template <bool kGood>
bool missing_syncwarp() {
  const auto x = numbers(32);
  std::vector<float> out(1);
  launch_kernel(tree_in_warp<kGood>, {1, 32}, nullptr, x.data(), out.data());
  return out[0] == 528.0f;
}

// A shuffle brings lanes together but orders no memory: right here in every schedule, wrong on a device.
template <bool kGood>
__global__ void read_after_shuffle(const float* x, float* out) {
  SPECDEC_SHARED(float, row, 32);
  const int lane = threadIdx.x;
  row[lane] = x[lane];
  if (kGood) __syncwarp();
  out[lane] = row[__shfl_xor_sync(kAll, lane, 1)];
}

template <bool kGood>
bool shuffle_as_fence() {
  const auto x = numbers(32);
  std::vector<float> out(32);
  launch_kernel(read_after_shuffle<kGood>, {1, 32}, nullptr, x.data(), out.data());
  for (int i = 0; i < 32; ++i) {
    if (out[i] != x[i ^ 1]) return false;
  }
  return true;
}

// ---- collectives that not all lanes or threads come to

template <bool kGood>
__global__ void barrier_of_half(float* out) {
  if (kGood || threadIdx.x < kThreads / 2) __syncthreads();
  out[threadIdx.x] = 1.0f;
}

template <bool kGood>
__global__ void barrier_at_two_places(float* out) {
  if (kGood || threadIdx.x < kThreads / 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1.0f;
}
template <>
__global__ void barrier_at_two_places<true>(float* out) {
  __syncthreads();
  out[threadIdx.x] = 1.0f;
}

template <bool kGood>
__global__ void barrier_in_uneven_loop(float* out) {
  const int turns = kGood || threadIdx.x < 32 ? 4 : 3;
  for (int i = 0; i < turns; ++i) __syncthreads();
  out[threadIdx.x] = 1.0f;
}

template <bool kGood>
__global__ void barrier_after_return(float* out) {
  out[threadIdx.x] = 1.0f;
  if (!kGood && threadIdx.x >= kThreads / 2) return;
  __syncthreads();
}

template <bool kGood>
__global__ void shuffle_of_half(float* out) {
  float value = 1.0f;
  if (kGood || threadIdx.x % 32 < 16) value = __shfl_xor_sync(kAll, value, 1);
  out[threadIdx.x] = value;
}

template <bool kGood>
__global__ void shuffle_from_outside(float* out) {
  float value = 1.0f;
  if (threadIdx.x % 32 < 16) value = __shfl_sync(0xffffu, value, kGood ? 15 : 16);
  out[threadIdx.x] = value;
}

template <bool kGood>
__global__ void mask_without_self(float* out) {
  out[threadIdx.x] = __any_sync(kGood ? kAll : 0xffffu, 1) ? 1.0f : 0.0f;
}

template <bool kGood>
__global__ void shuffle_after_return(float* out) {
  out[threadIdx.x] = 1.0f;
  if (!kGood && threadIdx.x % 32 == 31) return;
  out[threadIdx.x] = __shfl_xor_sync(kAll, 1.0f, 1);
}

template <bool kGood>
__global__ void two_collectives(float* out) {
  const bool ballot = kGood || threadIdx.x % 32 < 16;
  out[threadIdx.x] = (ballot ? __ballot_sync(kAll, 1) == kAll : __shfl_sync(kAll, 1, 0) == 1) ? 1.0f : 0.0f;
}

template <class Kernel>
bool run_ones(Kernel kernel) {
  std::vector<float> out(kThreads);
  launch_kernel(kernel, {1, kThreads}, nullptr, out.data());
  return all_equal(out, 1.0f);
}

// ---- addresses

template <bool kGood>
__global__ void past_the_array(float* out) {
  SPECDEC_SHARED(float, part, kWarps);
  const int every = kGood ? 32 : 16;
  float* p = part;  // as a pointer: the compiler does not know the bound
  if (threadIdx.x % every == 0) p[threadIdx.x / every] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = part[threadIdx.x / 32];
}

template <bool kGood>
__global__ void past_the_dynamic(float* out, int n) {
  SPECDEC_DYNAMIC_SHARED(bytes);
  float* row = reinterpret_cast<float*>(bytes);
  for (int i = threadIdx.x; i < n + (kGood ? 0 : 1); i += kThreads) row[i] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = row[threadIdx.x];
}

template <bool kGood>
bool dynamic_overrun() {
  std::vector<float> out(kThreads);
  launch_kernel(past_the_dynamic<kGood>, {1, kThreads, 4000}, nullptr, out.data(), 1000);
  return all_equal(out, 1.0f);
}

template <bool kGood>
__global__ void one_unwritten(float* out, int n) {
  SPECDEC_DYNAMIC_SHARED(bytes);
  float* row = reinterpret_cast<float*>(bytes);
  for (int i = threadIdx.x; i < (kGood ? n : n - 1); i += kThreads) row[i] = 1.0f;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += row[i];
  out[threadIdx.x] = sum;
}

template <bool kGood>
bool uninitialised_shared() {
  std::vector<float> out(kThreads);
  launch_kernel(one_unwritten<kGood>, {1, kThreads, 4000}, nullptr, out.data(), 1000);
  return all_equal(out, 1000.0f);
}

template <bool kGood>
__global__ void past_the_row(const float* x, float* out, int n) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < (kGood ? n : (n + 3) / 4 * 4); i += kThreads) sum += x[i] > 0.0f ? 1.0f : 0.0f;
  atomicAdd(out, sum);
}

template <bool kGood>
bool global_overrun() {
  const auto x = numbers(1001);
  std::vector<float> out(1);
  launch_kernel(past_the_row<kGood>, {1, kThreads}, nullptr, x.data(), out.data(), 1001);
  return out[0] == 1001.0f;
}

template <bool kGood, bool kLdg>
__global__ void load_four(const float* x, float* out) {
  const float4* p = reinterpret_cast<const float4*>(x + (kGood ? 4 : 1));
  *out = kLdg ? __ldg(p).x : p->x;
}

template <bool kGood, bool kLdg>
bool run_load_four() {
  std::vector<float4> x(2, make_float4(1.0f, 1.0f, 1.0f, 1.0f));  // vectors of it are aligned
  std::vector<float> out(1);
  launch_kernel(load_four<kGood, kLdg>, {1, 1}, nullptr, &x[0].x, out.data());
  return out[0] == 1.0f;
}

template <bool kGood>
bool misaligned_ldg() {
  return run_load_four<kGood, true>();
}

template <bool kGood>
bool misaligned_pointer() {
  return run_load_four<kGood, false>();
}

template <bool kGood>
__global__ void wide_index(const float* x, float* out, int row, int width) {
  const int64_t index = kGood ? int64_t(row) * width : row * width;
  *out = x[index & 3];
}

template <bool kGood>
bool index_overflow() {
  const auto x = numbers(4);
  std::vector<float> out(1);
  launch_kernel(wide_index<kGood>, {1, 1}, nullptr, x.data(), out.data(), 65536, 65536);
  return out[0] == 1.0f;
}

// ---- global memory between threads, blocks and kernels

template <bool kGood>
__global__ void count_threads(float* count) {
  if (kGood) {
    atomicAdd(count, 1.0f);
  } else {
    const float before = *count;
    __syncwarp();
    *count = before + 1.0f;
  }
}

template <bool kGood>
__global__ void count_threads_at_once(float* count) {
  if (kGood) {
    atomicAdd(count, 1.0f);
  } else {
    *count += 1.0f;
  }
}

template <class Kernel>
bool run_count(Kernel kernel) {
  std::vector<float> count(1);
  launch_kernel(kernel, {1, kThreads}, nullptr, count.data());
  return count[0] == float(kThreads);
}

template <bool kGood>
__global__ void chain_of_blocks(float* out) {
  out[blockIdx.x] = kGood || blockIdx.x == 0 ? 7.0f : out[blockIdx.x - 1];
}

template <bool kGood>
bool block_order() {
  std::vector<float> out(4);
  launch_kernel(chain_of_blocks<kGood>, {4, 1}, nullptr, out.data());
  return all_equal(out, 7.0f);
}

// The last block to finish reads what all blocks have written.
template <bool kFence, bool kBarrier>
__global__ void hand_over(float* part, unsigned* finished, float* out) {
  SPECDEC_SHARED(bool, is_last, 1);
  part[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f;
  if (kFence) __threadfence();
  if (kBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    is_last[0] = atomicAdd(finished, 1u) == gridDim.x - 1;
    if (kFence) __threadfence();
  }
  __syncthreads();
  if (!is_last[0]) return;
  float sum = 0.0f;
  for (unsigned block = 0; block < gridDim.x; ++block) sum += part[block * blockDim.x + threadIdx.x];
  out[threadIdx.x] = sum;
}

template <bool kFence, bool kBarrier>
bool run_hand_over() {
  constexpr int kBlocks = 6, kWidth = 64;
  std::vector<float> part(kBlocks * kWidth), out(kWidth);
  std::vector<unsigned> finished(1);
  launch_kernel(hand_over<kFence, kBarrier>, {kBlocks, kWidth}, nullptr, part.data(), finished.data(), out.data());
  return all_equal(out, float(kBlocks));
}

template <bool kGood>
bool hand_over_without_fence() {
  return run_hand_over<kGood, true>();
}

template <bool kGood>
bool hand_over_without_barrier() {
  return run_hand_over<true, kGood>();
}

__global__ void write_ones(float* x) {
  allow_next();
  x[threadIdx.x] = 1.0f;
}

template <bool kGood>
__global__ void read_ones(const float* x, float* out) {
  if (kGood) wait_for_previous();
  out[threadIdx.x] = x[threadIdx.x];
}

template <bool kGood>
bool overlap_without_wait() {
  std::vector<float> x(32), out(32);
  cudaStreamSynchronize(nullptr);
  launch_kernel(write_ones, {1, 32}, nullptr, x.data());
  launch_kernel(read_ones<kGood>, {1, 32, 0, 1, true}, nullptr, x.data(), out.data());
  cudaStreamSynchronize(nullptr);
  return all_equal(out, 1.0f);
}

// ---- clusters: blocks that read each other's shared memory

template <bool kFirst, bool kLast>
__global__ void read_neighbour(float* out) {
  SPECDEC_SHARED(float, row, 64);
  row[threadIdx.x] = float(cluster_rank() + 1);
  if (kFirst) cluster_sync();
  if (cluster_rank() == 0) {
    for (int i = 0; i < 20; ++i) __syncthreads();  // the others may be gone by now
  }
  out[blockIdx.x * 64 + threadIdx.x] = in_cluster_block(row, cluster_rank() ^ 1)[threadIdx.x];
  if (kLast) cluster_sync();
}

template <bool kFirst, bool kLast>
bool run_read_neighbour() {
  std::vector<float> out(4 * 64);
  launch_kernel(read_neighbour<kFirst, kLast>, {4, 64, 0, 2}, nullptr, out.data());
  for (int i = 0; i < 4 * 64; ++i) {
    if (out[i] != float((i / 64 % 2 ^ 1) + 1)) return false;
  }
  return true;
}

template <bool kGood>
bool cluster_without_first_sync() {
  return run_read_neighbour<kGood, true>();
}

template <bool kGood>
bool cluster_without_last_sync() {
  return run_read_neighbour<true, kGood>();
}

template <bool kGood>
__global__ void sync_of_one_block(float* out) {
  if (kGood || cluster_rank() == 0) cluster_sync();
  out[blockIdx.x * 32 + threadIdx.x] = 1.0f;
  if (!kGood) __syncthreads();
}

template <bool kGood>
bool cluster_sync_of_one() {
  std::vector<float> out(2 * 32);
  launch_kernel(sync_of_one_block<kGood>, {2, 32, 0, 2}, nullptr, out.data());
  return all_equal(out, 1.0f);
}

#include "planted_transfers.h"

// ---- the table

struct Defect {
  const char* name;
  const char* seen_by;  // of plain, asan (with UBSan), tsan; "plain" is the emulator alone, in one of ten schedules
  const char* words;    // in the emulator's report; "wrong result" where only the result shows it
  bool (*good)();       // each returns whether the result is right
  bool (*bad)();
};

#define RUN(name) name<true>, name<false>
#define ONES(name) [] { return run_ones(name<true>); }, [] { return run_ones(name<false>); }
#define COUNT(name) [] { return run_count(name<true>); }, [] { return run_count(name<false>); }
const Defect kDefects[] = {
    {"missing_barrier", "plain,tsan", "wrong result", RUN(missing_barrier)},
    {"reused_buffer", "plain,tsan", "wrong result", RUN(reused_buffer)},
    {"write_before_read", "plain,tsan", "wrong result", RUN(write_before_read)},
    {"missing_syncwarp", "plain,tsan", "wrong result", RUN(missing_syncwarp)},
    {"shuffle_as_fence", "tsan", "", RUN(shuffle_as_fence)},
    {"barrier_of_half", "plain", "returned without it", ONES(barrier_of_half)},
    {"barrier_at_two_places", "plain", "other threads of the block are at the barrier", ONES(barrier_at_two_places)},
    {"barrier_in_uneven_loop", "plain", "returned without it", ONES(barrier_in_uneven_loop)},
    {"barrier_after_return", "plain", "returned without it", ONES(barrier_after_return)},
    {"shuffle_of_half", "plain", "returned", ONES(shuffle_of_half)},
    {"shuffle_from_outside", "plain", "takes no part", ONES(shuffle_from_outside)},
    {"mask_without_self", "plain", "not in its own mask", ONES(mask_without_self)},
    {"shuffle_after_return", "plain", "returned", ONES(shuffle_after_return)},
    {"two_collectives", "plain", "other lanes of the mask are in the collective", ONES(two_collectives)},
    {"array_overrun", "asan", "", ONES(past_the_array)},
    {"dynamic_overrun", "asan", "", RUN(dynamic_overrun)},
    {"uninitialised_shared", "plain", "wrong result", RUN(uninitialised_shared)},
    {"global_overrun", "asan", "", RUN(global_overrun)},
    {"misaligned_ldg", "plain", "no multiple of 16", RUN(misaligned_ldg)},
    {"misaligned_pointer", "asan", "", RUN(misaligned_pointer)},
    {"index_overflow", "asan", "", RUN(index_overflow)},
    {"non_atomic_update", "plain,tsan", "wrong result", COUNT(count_threads)},
    {"non_atomic_increment", "tsan", "", COUNT(count_threads_at_once)},
    {"block_order", "plain,tsan", "wrong result", RUN(block_order)},
    {"hand_over_without_fence", "tsan", "", RUN(hand_over_without_fence)},
    {"hand_over_without_barrier", "plain,tsan", "wrong result", RUN(hand_over_without_barrier)},
    {"overlap_without_wait", "tsan", "", RUN(overlap_without_wait)},
    {"cluster_without_first_sync", "plain,tsan", "wrong result", RUN(cluster_without_first_sync)},
    {"cluster_without_last_sync", "plain,asan", "wrong result", RUN(cluster_without_last_sync)},
    {"cluster_sync_of_one", "plain", "returned without it", RUN(cluster_sync_of_one)},
    {"copy_without_wait", "plain,tsan", "wrong result", RUN(copy_without_wait)},
    {"copy_into_buffer_in_use", "plain,tsan", "wrong result", RUN(copy_into_buffer_in_use)},
    {"expected_bytes_too_few", "plain,tsan", "wrong result", RUN(expected_bytes_too_few)},
    {"expected_bytes_too_many", "plain", "in a wait for memory", RUN(expected_bytes_too_many)},
    {"wait_for_wrong_phase", "plain,tsan", "wrong result", RUN(wait_for_wrong_phase)},
    {"copy_not_waited_for", "plain", "without having waited", RUN(copy_not_waited_for)},
    {"barrier_not_initialised", "plain", "not initialised", RUN(barrier_not_initialised)},
    {"barrier_not_published", "plain", "was not published", RUN(barrier_not_published)},
    {"copy_misaligned", "plain", "multiples of 16", RUN(copy_misaligned)},
    {"wait_for_later_block", "plain", "in a wait for memory", RUN(wait_for_later_block)},
    {"told_without_fence", "tsan", "", RUN(told_without_fence)},
    {"seen_without_fence", "tsan", "", RUN(seen_without_fence)},
    {"flags_cleared_in_use", "plain", "wrong result", RUN(flags_cleared_in_use)},
};

std::string outcome(bool (*run)(), int order, uint64_t seed) {
  specdec_emulator_schedule(order, seed);
  try {
    return run() ? "ok" : "wrong result";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && !std::strcmp(argv[1], "list")) {
    for (const Defect& d : kDefects) std::printf("%s|%s|%s\n", d.name, d.seen_by, d.words);
    return 0;
  }
  if (argc == 2 && !std::strcmp(argv[1], "all")) {
    for (const Defect& d : kDefects) {
      for (int good = 0; good < 2; ++good) {
        if (!good && !std::strstr(d.seen_by, "plain")) continue;
        for (int i = 0; i < 10; ++i) {
          const int order = i < 2 ? i : 2;
          std::printf("%s|%s|%d|%s\n", d.name, good ? "good" : "bad", i,
                      outcome(good ? d.good : d.bad, order, uint64_t(i)).c_str());
        }
      }
    }
    return 0;
  }
  for (const Defect& d : kDefects) {
    if (argc != 5 || std::strcmp(argv[1], d.name)) continue;
    const bool good = !std::strcmp(argv[2], "good");
    const std::string result = outcome(good ? d.good : d.bad, std::atoi(argv[3]), std::strtoull(argv[4], nullptr, 10));
    std::printf("%s\n", result.c_str());
    return result == "ok" ? 0 : 1;
  }
  std::fprintf(stderr, "usage: planted_defects list | all | NAME good|bad ORDER SEED\n");
  return 2;
}

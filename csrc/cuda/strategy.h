// How the work is laid out over the device. Results do not depend on it, to the last bit.
#pragma once
#include "cuda/portable.h"

namespace specdec::cuda {

enum class Strategy : int {
  kAuto = 0,      // by shape
  kSplit = 1,     // every row is split over many blocks, all rows at once: few sequences
  kWalk = 2,      // one block per row or sequence, rows read only as far as the rule gets: many sequences
  kCluster = 3,   // the same by a cluster of blocks
  kResident = 4,  // for chains: one cluster per position, with its rows in shared memory, if all of them fit
  kEarly = 5,     // for chains: split, but by positions and only as far as a rejected token: many sequences
};

Strategy forced_strategy();  // kAuto unless specdec_cuda_force_strategy asked for another
bool may_overlap();          // whether kernels of an op may overlap: yes, unless specdec_cuda_allow_overlap(0) said no
int multiprocessors();       // of the current device
int clusters_at_once(const void* kernel, const Shape& shape);  // of such a launch that the current device can run
bool hopper_code();  // the current device runs code compiled for compute capability 9.0 or later

Strategy strategy_for_chains(int64_t batch);  // how verify_chain lays out long rows of so many sequences

}  // namespace specdec::cuda

// For tests and benchmarks: every later launch of this process uses this strategy (if the op has it); no launch
// overlaps the one before it.
extern "C" __attribute__((visibility("default"))) void specdec_cuda_force_strategy(int strategy);
extern "C" __attribute__((visibility("default"))) void specdec_cuda_allow_overlap(int allow);

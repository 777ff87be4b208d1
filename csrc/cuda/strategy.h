// How the work is laid out over the device. Results do not depend on it, to the last bit.
#pragma once
#include "cuda/portable.h"

namespace specdec::cuda {

enum class Strategy : int {
  kAuto = 0,     // by shape
  kSplit = 1,    // every row is split over many blocks, all rows at once: few sequences
  kWalk = 2,     // a block a row or sequence, rows read only as far as the rule gets: many sequences
  kCluster = 3,  // the same by a cluster of blocks
};

Strategy forced_strategy();  // kAuto unless specdec_cuda_force_strategy asked for another
int multiprocessors();       // of the current device
bool hopper_code();          // the current device runs code compiled for compute capability 9.0 or later

}  // namespace specdec::cuda

// For tests and benchmarks: every later launch of this process takes this strategy (where the op has it).
extern "C" __attribute__((visibility("default"))) void specdec_cuda_force_strategy(int strategy);

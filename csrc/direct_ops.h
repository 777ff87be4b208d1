// Calls an op past torch's dispatcher, which costs more than a small op does: a library of kernels exports this, and
// the Python module (csrc/host/direct.cpp) calls it. Both are built from this file and share nothing else.
#pragma once
#include <cstdint>

namespace specdec {

// A tensor, for as long as a call takes.
struct DirectTensor {
  enum DType : int32_t { kFloat32, kBFloat16, kFloat16, kInt64, kInt32, kFloat64, kOther };
  void* data;
  const int64_t *sizes, *strides;  // strides in elements
  int32_t dim;
  DType dtype;
  int32_t element_size;  // in bytes
  int32_t cuda_device;   // -1: the CPU
};

// One argument of an op.
struct DirectArgument {
  enum Kind : int32_t { kNone, kTensor, kInteger, kNumbers, kIntegers, kTensors };
  Kind kind = kNone;
  int64_t number = 0;  // kInteger: itself; of a list, how many
  const void* items =
      nullptr;  // a DirectTensor, or a list's doubles, int64_t or arguments (of which each is kTensor or kNone)
};

// How a call ended: with results; with nothing done, as only the dispatcher can tell what is wrong or missing; or with
// a failed kernel, which had begun and may have written, so that it must not run again.
enum class DirectEnd : int32_t { kDone, kRefused, kFailed };

// The error message of a kernel that failed.
using DirectWords = char[512];

struct DirectOp {
  int32_t num_arguments, num_results;
  const DirectArgument::Kind* kinds;  // of the arguments; one that is missing is kNone
  // If done, results are owned AtenTensorHandles, null for what was not asked for; if failed, there are words.
  DirectEnd (*run)(const DirectArgument* arguments, void** results, DirectWords& words) noexcept;
};

}  // namespace specdec

// Exported by each library; null: it has no such op.
extern "C" __attribute__((visibility("default"))) const specdec::DirectOp* specdec_direct_op(const char* name);
// The checksums of the sources that specdec_kernels/backends/contract.py names, whose order of arguments the library
// was built for, and of this file, whose structs it was built for; both from setup.py.
extern "C" __attribute__((visibility("default"))) int64_t specdec_contract();
extern "C" __attribute__((visibility("default"))) int64_t specdec_direct_layout();

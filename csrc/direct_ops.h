// The way to an op past torch's dispatcher, which costs more than a small op does: what a library of kernels exports and the
// Python module (csrc/host/direct.cpp) calls. Both are built from this file; neither knows more of the other.
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

// How a call ended: with results; with nothing done, as only the dispatcher can say what is wrong or missing; or with a kernel
// that had begun, and may have written: it must not run again.
enum class DirectEnd : int32_t { kDone, kRefused, kFailed };

// What a kernel that failed says of it.
using DirectWords = char[512];

struct DirectOp {
  int32_t num_arguments, num_results;
  const DirectArgument::Kind* kinds;  // of the arguments; one that is missing is kNone
  // Done, it gives owned AtenTensorHandles, null for what was not asked for; failed, words.
  DirectEnd (*run)(const DirectArgument* arguments, void** results, DirectWords& words) noexcept;
};

}  // namespace specdec

// Exported by each library; null: it has no such op.
extern "C" __attribute__((visibility("default"))) const specdec::DirectOp* specdec_direct_op(const char* name);
// What setup.py read of the sources that specdec_kernels/backends/contract.py names, for whose order of arguments the library
// was built; and of this file, for whose structs.
extern "C" __attribute__((visibility("default"))) int64_t specdec_contract();
extern "C" __attribute__((visibility("default"))) int64_t specdec_direct_layout();

// One piece of device memory per call, handed out in parts: an allocation costs the host about as much as a launch.
#pragma once
#include "cuda/ops.h"

namespace specdec::cuda {

// Hands out parts of a piece of memory one after the other; without memory it only counts.
class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(static_cast<unsigned char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    T* const part = base_ ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += (count * int64_t(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }

  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 256;
  unsigned char* base_;
  int64_t bytes_ = 0;
};

// Calls lay_out(arena), which takes the parts, twice: first to count, then with the memory.
template <class LayOut>
void allocate(const Launch& launch, LayOut lay_out) {
  Arena counting;
  lay_out(counting);
  if (counting.bytes() == 0) return;
  Arena arena(launch.scratch(counting.bytes()));
  lay_out(arena);
}

}  // namespace specdec::cuda

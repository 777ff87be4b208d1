#include <type_traits>

#include "cuda/rows.cuh"

namespace specdec::cuda {
namespace {

// Each thread has whole pieces of 16 bytes to itself, and no two threads look at the same byte. No __ldg, since what is
// loaded here is also written here. Whatever follows in the stream reads the rows, so it waits for the end.
template <DType kType>
__global__ void __launch_bounds__(kRowThreads)
    mask_kernel(const __grid_constant__ RowSet set, int64_t chunks, const RowLaw* laws, int32_t* status) {
  using Value = std::conditional_t<kType == DType::kFloat32, uint32_t, uint16_t>;
  constexpr int kEach = 16 / sizeof(Value);
  const Value infinity = Value(negative_infinity(kType));
  wait_for_previous();
  const int64_t index = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const float cutoff = laws[index].cutoff;
  if (chunk == 0 && threadIdx.x == 0) status[index] = laws[index].status;
  if (isinf(cutoff)) return;
  const RowView row = set.row(index);
  const int skipped = int(reinterpret_cast<uintptr_t>(row.data) % 16 / sizeof(Value)), end = skipped + row.vocab;
  Value* const values = reinterpret_cast<Value*>(const_cast<char*>(row.data)) - skipped;
  for (int64_t first = (chunk * kRowThreads + threadIdx.x) * kEach; first < end;
       first += chunks * kRowThreads * kEach) {
    if (first < skipped || first + kEach > end) {
      for (int64_t i = max(first, int64_t(skipped)); i < min(first + kEach, int64_t(end)); ++i) {
        const uint32_t word = __ldcg(values + i);
        float x;
        unpack<1>(&word, kType, &x);
        if (x < cutoff) values[i] = infinity;
      }
      continue;
    }
    uint4* const piece = reinterpret_cast<uint4*>(values + first);
    const uint4 held = __ldcg(piece);
    const uint32_t words[4] = {held.x, held.y, held.z, held.w};
    float x[kEach];
    unpack<kEach>(words, kType, x);
    uint32_t kept[4], cut = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t gone = 0;
#pragma unroll
      for (int k = w * kEach / 4; k < (w + 1) * kEach / 4; ++k)
        if (x[k] < cutoff) gone |= kEach == 4 ? 0xFFFFFFFFu : 0xFFFFu << (k % 2 * 16);
      kept[w] = (words[w] & ~gone) | (negative_infinity(kType) & gone);
      cut |= gone;
    }
    if (cut) *piece = make_uint4(kept[0], kept[1], kept[2], kept[3]);
  }
}

}  // namespace

cudaError_t mask_logits_(const MaskLogitsArgs& args, const Launch& launch) {
  if (args.batch * args.n == 0) return cudaSuccess;
  KnownLaws known;
  const cudaError_t error =
      find_laws({args.logits, args.n, args.params, false, may_cut(args.params)}, args.batch, launch, &known);
  if (error) return error;
  const auto masked = [&](auto kernel) {
    return launch_kernel(kernel, known.shape, launch.stream, known.set, known.chunks, known.laws, args.status);
  };
  switch (args.logits.dtype) {
    case DType::kFloat32:
      return masked(mask_kernel<DType::kFloat32>);
    case DType::kBFloat16:
      return masked(mask_kernel<DType::kBFloat16>);
    default:
      return masked(mask_kernel<DType::kFloat16>);
  }
}

}  // namespace specdec::cuda

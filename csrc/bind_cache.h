// From the tensors of a key-value cache to the planes that kernels take.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <vector>

#include "bind_arguments.h"
#include "common/params.h"

namespace specdec::bind {

// What the dimensions of a cache tensor are, as CACHE_DIMS of specdec_kernels/ops/arguments.py numbers them.
enum CacheDim : int64_t { kBlock, kHead, kRow, kElement, kBatchAndHead, kFurther };
constexpr int64_t kNumCacheDims = 6;

// One tensor of a cache. What is missing has size 1; strides are in bytes.
struct CacheTensor {
  struct Dim {
    int64_t size = 1, stride = 0;
  };

  Dim block, head, row, element;
  std::vector<Dim> further;  // a plane for each of their indices
  unsigned char* data;
  int64_t element_size;
  bool empty;

  template <class Tensor>
  CacheTensor(const Tensor& x, const std::vector<int64_t>& layout, int64_t batch)
      : data(static_cast<unsigned char*>(x.mutable_data_ptr())), element_size(int64_t(x.element_size())) {
    elements_of(x);
    SPECDEC_CHECK(int64_t(layout.size()) == x.dim(), "specdec: a cache's tensors and layout disagree");
    empty = x.numel() == 0;
    std::bitset<kNumCacheDims> given;
    for (size_t i = 0; i < layout.size(); ++i) {
      SPECDEC_CHECK(0 <= layout[i] && layout[i] < kNumCacheDims, "specdec: a cache's layout has numbers below ",
                    kNumCacheDims);
      SPECDEC_CHECK(layout[i] == kFurther || !given[size_t(layout[i])], "specdec: a cache's layout repeats a number");
      given.set(size_t(layout[i]));
      const Dim dim{x.size(int64_t(i)), empty ? 0 : x.stride(int64_t(i)) * element_size};
      SPECDEC_CHECK(empty || dim.size <= 1 || dim.stride > 0, "specdec: elements of a cache share memory");
      switch (layout[i]) {
        case kBlock:
          block = dim;
          break;
        case kHead:
          head = dim;
          break;
        case kRow:
          row = dim;
          break;
        case kElement:
          element = dim;
          break;
        case kBatchAndHead:
          SPECDEC_CHECK(batch > 0 ? dim.size % batch == 0 : dim.size == 0,
                        "specdec: batch times heads is no multiple of the batch");
          head = {batch > 0 ? dim.size / batch : 1, dim.stride};
          block = {batch, head.size * dim.stride};
          break;
        default:
          further.push_back(dim);
      }
    }
    SPECDEC_CHECK(!given[kBatchAndHead] || !(given[kBlock] || given[kHead]),
                  "specdec: a cache's layout repeats a number");
  }

  int64_t planes() const {
    if (empty) return 0;
    int64_t count = 1;
    for (const Dim& dim : further) count *= dim.size;
    return count;
  }

  unsigned char* plane(int64_t index) const {
    unsigned char* at = data;
    for (const Dim& dim : further) {
      at += index % dim.size * dim.stride;
      index /= dim.size;
    }
    return at;
  }

  CacheShape shape() const {
    const bool whole = element.stride == element_size || element.size == 1;  // a head's row is one piece of memory
    int64_t heads = head.size, bytes = element.size * element_size;
    if (whole && head.stride == bytes) {  // and so are all heads of a row
      bytes *= heads;
      heads = 1;
    }
    int64_t unit = element_size, stride = element.stride;
    if (whole) {
      int64_t bits = 16 | bytes | block.stride | row.stride | int64_t(reinterpret_cast<uintptr_t>(data));
      if (heads > 1) bits |= head.stride;
      for (const Dim& dim : further) bits |= dim.stride;
      unit = stride = bits & -bits;
    }
    const int64_t units = whole ? bytes / unit : element.size;
    SPECDEC_CHECK((unit & (unit - 1)) == 0 && unit <= 16 && heads * units < (1 << 22),
                  "specdec: a cache's rows are too wide");
    return {block.stride, row.stride, head.stride, stride, int32_t(heads), int32_t(units), int32_t(unit)};
  }
};

// Gives `args` the planes of the tensors, as many to a call of `run` as fit.
template <class Run>
void run_on_planes(const std::vector<CacheTensor>& tensors, GatherKVArgs& args, Run run) {
  int num_shapes = 0;
  const auto flush = [&] {
    run(args);
    args.num_planes = num_shapes = 0;
  };
  std::vector<CacheShape> shapes;  // all of them before anything is moved, as one may be refused
  shapes.reserve(tensors.size());
  for (const CacheTensor& tensor : tensors) shapes.push_back(tensor.planes() ? tensor.shape() : CacheShape{});
  for (size_t t = 0; t < tensors.size(); ++t) {
    const CacheTensor& tensor = tensors[t];
    const int64_t planes = tensor.planes();
    const CacheShape& shape = shapes[t];
    const auto same = [&](const CacheShape& x) {
      return x.stride_block == shape.stride_block && x.stride_row == shape.stride_row &&
             x.stride_head == shape.stride_head && x.stride_unit == shape.stride_unit && x.heads == shape.heads &&
             x.units == shape.units && x.unit_bytes == shape.unit_bytes;
    };
    for (int64_t i = 0; i < planes; ++i) {
      if (args.num_planes == kMostPlanes) flush();
      int found = int(std::find_if(args.shapes, args.shapes + num_shapes, same) - args.shapes);
      if (found == kMostCacheShapes) {
        flush();
        found = 0;
      }
      if (found == num_shapes) args.shapes[num_shapes++] = shape;
      args.data[args.num_planes] = tensor.plane(i);
      args.shape_of[args.num_planes++] = uint8_t(found);
    }
  }
  flush();
}

}  // namespace specdec::bind

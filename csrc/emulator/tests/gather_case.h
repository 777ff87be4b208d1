#pragma once
#include <numeric>

#include "cases.h"

namespace specdec::tests {

// A cache whose rows, heads and blocks may lie apart, and paths with bad values among them.
inline Case gather_case(Random& random) {
  struct Cache {
    GatherKVArgs args{};
    std::vector<std::vector<unsigned char>> planes;
    std::vector<int64_t> nodes, contexts;
    std::vector<int32_t> table;
  };
  auto cache = std::make_shared<Cache>();
  GatherKVArgs& args = cache->args;
  const bool paged = random.chance(0.5);
  args.batch = 1 + random.below(3);
  args.max_depth = random.pick({0, 1, 4, 9, 40, 70});
  args.max_blocks = paged ? 1 + random.below(3) : 1;
  args.block_size = random.pick({1, 5, 16, 80});
  args.num_blocks = args.batch * args.max_blocks;
  args.num_planes = int32_t(1 + random.below(4));
  for (int i = 0; i < args.num_planes; ++i) {
    CacheShape& shape = args.shapes[i];
    args.shape_of[i] = uint8_t(i);
    shape.unit_bytes = random.pick({1, 2, 4, 8, 16});
    shape.units = random.pick({1, 3, 8});
    shape.heads = int32_t(1 + random.below(3));
    // The dimensions in some order, with gaps of whole units.
    int64_t stride = shape.unit_bytes;
    std::vector<std::pair<int64_t*, int64_t>> dims = {{&shape.stride_unit, shape.units},
                                                      {&shape.stride_head, shape.heads},
                                                      {&shape.stride_row, args.block_size},
                                                      {&shape.stride_block, args.num_blocks}};
    if (random.chance(0.3)) std::swap(dims[0], dims[2]);
    if (random.chance(0.5)) std::swap(dims[1], dims[2]);
    int64_t bytes = shape.unit_bytes;
    for (const auto& [to, size] : dims) {
      *to = stride;
      bytes += (size - 1) * stride;
      stride *= size + random.pick({0, 0, 1});
    }
    cache->planes.emplace_back(size_t(bytes));
    for (unsigned char& byte : cache->planes.back()) byte = static_cast<unsigned char>(random.bits());
  }
  if (paged) {
    cache->table.resize(size_t(args.num_blocks));
    std::iota(cache->table.begin(), cache->table.end(), 0);
    for (size_t i = cache->table.size(); i > 1; --i)
      std::swap(cache->table[i - 1], cache->table[random.below(int64_t(i))]);
    if (random.chance(0.3)) cache->table[0] = random.pick({-1, int32_t(args.num_blocks)});
    args.block_table = {cache->table.data(), false};
  }
  const int64_t capacity = args.max_blocks * args.block_size;
  for (int64_t b = 0; b < args.batch; ++b) {
    cache->contexts.push_back(random.chance(0.2) ? random.pick({int64_t(-1), capacity, capacity + 7})
                                                 : random.below(capacity));
    int64_t node = 0;
    for (int64_t j = 0; j < args.max_depth; ++j) {
      node += 1 + random.below(2);
      cache->nodes.push_back(random.chance(0.03) ? random.pick({int64_t(-1), int64_t(0), node - 1, int64_t(1) << 62})
                                                 : node);
    }
  }
  args.accepted_nodes = {cache->nodes.data(), true};
  args.context_lengths = {cache->contexts.data(), true};
  return {label("gather_kv", args.batch, args.max_depth, int32_t(capacity), paged ? " paged" : ""),
          [cache](const Backend& backend) -> Outputs {
            GatherKVArgs args = cache->args;
            std::vector<std::vector<unsigned char>> planes = cache->planes;
            for (size_t i = 0; i < planes.size(); ++i) args.data[i] = planes[i].data();
            Result<int64_t> lengths(args.batch);
            Result<int32_t> status(args.batch);
            args.lengths = lengths.data();
            args.status = status.data();
            backend.gather_kv_(args);
            std::string moved = lengths.bytes() + status.bytes();
            for (const auto& plane : planes) moved.append(plane.begin(), plane.end());
            moved.resize((moved.size() + 3) / 4 * 4);  // outputs are compared by words
            return {moved};
          }};
}

}  // namespace specdec::tests

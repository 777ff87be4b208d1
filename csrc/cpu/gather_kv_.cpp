#include <cstring>
#include <vector>

#include "common/cache_path.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kWorthThreads = 256 * 1024;  // bytes moved

struct Path {
  int64_t first, end;  // its moves
};

template <int kBytes>
void move_pieces(unsigned char* plane, const CacheShape& shape, const RowMove* moves, const Path& path) {
  for (int64_t head = 0; head < shape.heads; ++head) {
    for (int64_t unit = 0; unit < shape.units; ++unit) {
      unsigned char* piece = plane + head * shape.stride_head + unit * shape.stride_unit;
      for (int64_t i = path.first; i < path.end; ++i)
        std::memmove(piece + offset_of(shape, moves[i].to), piece + offset_of(shape, moves[i].from), kBytes);
    }
  }
}

void move_rows(unsigned char* plane, const CacheShape& shape, const RowMove* moves, const Path& path) {
  if (shape.stride_unit == shape.unit_bytes) {
    const size_t bytes = size_t(shape.units) * size_t(shape.unit_bytes);
    for (int64_t i = path.first; i < path.end; ++i) {
      unsigned char* to = plane + offset_of(shape, moves[i].to);
      const unsigned char* from = plane + offset_of(shape, moves[i].from);
      for (int64_t head = 0; head < shape.heads; ++head)
        std::memmove(to + head * shape.stride_head, from + head * shape.stride_head, bytes);
    }
    return;
  }
  switch (shape.unit_bytes) {
    case 16:
      return move_pieces<16>(plane, shape, moves, path);
    case 8:
      return move_pieces<8>(plane, shape, moves, path);
    case 4:
      return move_pieces<4>(plane, shape, moves, path);
    case 2:
      return move_pieces<2>(plane, shape, moves, path);
    default:
      return move_pieces<1>(plane, shape, moves, path);
  }
}

}  // namespace

void gather_kv_(const GatherKVArgs& args) {
  std::vector<RowMove> moves;
  std::vector<Path> paths;
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t context = id_at(args.context_lengths, b), first = int64_t(moves.size());
    int64_t followed = 0;
    PathStep step = PathStep::kEnd;
    RowMove move;
    if (!stays(args, context)) {
      for (; (step = path_step(args, b, context, followed, &move)) == PathStep::kMove; ++followed) {
        if (!in_place(move)) moves.push_back(move);
      }
    }
    write_outcome(args, b, context, followed, step);
    if (int64_t(moves.size()) > first) paths.push_back({first, int64_t(moves.size())});
  }
  int64_t bytes = 0;
  for (int i = 0; i < args.num_planes; ++i) {
    const CacheShape& shape = args.shapes[args.shape_of[i]];
    bytes += int64_t(moves.size()) * shape.heads * shape.units * shape.unit_bytes;
  }
  const int64_t planes = args.num_planes;
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      move_rows(args.data[i % planes], args.shapes[args.shape_of[i % planes]], moves.data(), paths[size_t(i / planes)]);
  };
  const int64_t tasks = planes * int64_t(paths.size());
  if (bytes < kWorthThreads) {
    work(0, tasks);
  } else {
    parallel_for(tasks, work);
  }
}

}  // namespace specdec::cpu

// Where in a key-value cache the rows of a sequence's accepted nodes stand, and where they go.
#pragma once
#include "common/ids.h"
#include "common/status.h"

namespace specdec {

struct CacheRow {
  int64_t block, row;
};

struct RowMove {
  CacheRow from, to;
};

enum class PathStep : int32_t { kMove, kEnd, kBad };

// The number of rows that a sequence can have.
SPECDEC_HD int64_t cache_capacity(const GatherKVArgs& args) { return args.max_blocks * args.block_size; }

// Whether none of a sequence's rows move: it is idle, or its root is not in the cache.
SPECDEC_HD bool stays(const GatherKVArgs& args, int64_t context) {
  return context < 0 || context >= cache_capacity(args);
}

SPECDEC_HD bool find_row(const GatherKVArgs& args, int64_t b, int64_t position, CacheRow* found) {
  if (!args.block_table.data) {
    *found = {b, position};
    return true;
  }
  const int64_t block = id_at(args.block_table, b * args.max_blocks + position / args.block_size);
  *found = {block, position % args.block_size};
  return block >= 0 && block < args.num_blocks;
}

// The step that sequence b, unless stays(), takes for its accepted node j after following all nodes before it. Nodes
// ascend, so a row moves down or stays, and never overwrites a row that a later node still has to take.
SPECDEC_HD PathStep path_step(const GatherKVArgs& args, int64_t b, int64_t context, int64_t j, RowMove* move) {
  if (j >= args.max_depth) return PathStep::kEnd;
  const int64_t node = id_at(args.accepted_nodes, b * args.max_depth + j);
  if (node == -1) return PathStep::kEnd;
  const int64_t previous = j > 0 ? id_at(args.accepted_nodes, b * args.max_depth + j - 1) : 0;
  // Nodes ascend from 1, so node j > j; but a caller that asks for many steps at once has not seen the earlier nodes.
  if (node <= previous || node <= j || node >= cache_capacity(args) - context) return PathStep::kBad;
  const bool found = find_row(args, b, context + node, &move->from) && find_row(args, b, context + 1 + j, &move->to);
  return found ? PathStep::kMove : PathStep::kBad;
}

SPECDEC_HD bool in_place(const RowMove& move) {
  return move.from.block == move.to.block && move.from.row == move.to.row;
}

SPECDEC_HD int64_t offset_of(const CacheShape& shape, const CacheRow& at) {
  return at.block * shape.stride_block + at.row * shape.stride_row;
}

// Writes the outcome of a sequence that follows `moved` nodes up to the step `last`.
SPECDEC_HD void write_outcome(const GatherKVArgs& args, int64_t b, int64_t context, int64_t moved, PathStep last) {
  const bool stayed = stays(args, context);
  const int64_t length = stayed ? context : context + 1 + moved;
  if (args.context_lengths.is_int64) {
    static_cast<int64_t*>(args.lengths)[b] = length;
  } else {
    static_cast<int32_t*>(args.lengths)[b] = int32_t(length);
  }
  const bool beyond = stayed && context >= 0;
  args.status[b] = beyond ? kBadParam : last == PathStep::kBad ? kBadTree : 0;
}

}  // namespace specdec

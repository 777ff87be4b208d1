#include <cmath>

#include "common/status.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/row.h"

namespace specdec::cpu {

void mask_logits_(const MaskLogitsArgs& args) {
  for_each_row(args.batch * args.n, args.logits.vocab, [&](int64_t index, Team* team) {
    thread_local Reading read;
    const int64_t b = index / args.n;
    const RowView row = row_view(args.logits, b, index % args.n);
    read_row(row, sampling_of(args.params, b), team, read);
    args.status[index] = read.law.status;
    const float cutoff = read.law.cutoff;
    if (std::isinf(cutoff)) return;
    // A group of lower ids is overwritten without being read, unless it may contain a NaN, which stays.
    const float* const group_max = read.law.status & kNaN ? nullptr : read.scratch.group_max.data();
    for_each_tile(row, team, [&](int tile) {
      row.kernels().mask(const_cast<void*>(row.in_memory(tile * kTile)), row.tile_size(tile),
                         group_max ? group_max + tile * (kTile / kGroup) : nullptr, cutoff);
    });
  });
}

}  // namespace specdec::cpu

#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/row.h"

namespace specdec::cpu {

void warp_probs(const WarpProbsArgs& args) {
  for_each_row(args.batch * args.n, args.logits.vocab, [&](int64_t index, Team* team) {
    thread_local Reading read;
    const int64_t b = index / args.n;
    const RowView row = row_view(args.logits, b, index % args.n, args.processors, b, index);
    Reading& known = read;  // so that other threads, which have a `read` of their own, see this one
    read_row(row, sampling_of(args.params, b), team, known);
    float* out = args.out + index * row.vocab;
    for_each_tile(row, team, [&](int tile) { tile_probs(row, known.law, tile, 1.0f, out + tile * kTile); });
  });
}

}  // namespace specdec::cpu

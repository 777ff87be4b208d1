#include <algorithm>

#include "cpu/draw.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace specdec::cpu {

void shard_stats(const ShardStatsArgs& args) {
  for_each_row(args.batch * args.n, args.logits.vocab, [&](int64_t index, Team* team) {
    thread_local RowScratch scratch;
    const int64_t b = index / args.n;
    const RowView row = row_view(args.logits, b, index % args.n);
    const Sampling sampling = sampling_of(args.params, b);
    const bool sum = !args.probs && !sampling.greedy;
    args.status[index] = scan_tiles(row, sampling.inverse_temperature, sum, team, scratch);
    args.argmax[index] = find_argmax(row, scratch);
    const int tiles = row.tiles();
    std::vector<float>& mass = scratch.tile_mass;  // helpers, with a scratch of their own, use this one
    if (args.probs)
      for_each_tile(row, team, [&](int tile) { mass[tile] = sum_of_probs(row, tile); });
    else if (!sum)
      std::fill(mass.begin(), mass.end(), 0.0f);
    std::copy_n(scratch.tile_max.begin(), tiles, args.tile_max + index * tiles);
    std::copy_n(mass.begin(), tiles, args.tile_mass + index * tiles);
  });
}

}  // namespace specdec::cpu

#include "common/row_stats.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/row.h"

namespace specdec::cpu {

void row_stats(const RowStatsArgs& args) {
  for_each_row(args.batch * args.n, args.logits.vocab, [&](int64_t index, Team* team) {
    thread_local Reading read;
    const int64_t b = index / args.n;
    const RowView row = row_view(args.logits, b, index % args.n, args.processors, b, index);
    read_row(row, sampling_of(args.params, b), team, read);
    float log_normalizer, entropy;
    raw_moments(row, read.law.max, team, &log_normalizer, &entropy);
    write_stats(read.law, args.out, index, log_normalizer, entropy);
  });
}

}  // namespace specdec::cpu

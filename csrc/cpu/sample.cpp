#include <cmath>
#include <limits>

#include "common/ids.h"
#include "common/row_stats.h"
#include "common/status.h"
#include "cpu/draw.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace specdec::cpu {
namespace {

std::vector<NoisyToken> draw_row(const SampleArgs& args, Reading& read, int64_t index) {
  if (args.noise_keys) return noisy_top(read, args.noise_keys[index], args.draft_to_target, args.num_samples);
  if (read.law.one_hot || !args.uniform_samples.data) return {{0.0f, read.law.argmax}};
  return {{0.0f, draw_token(read, uniform_of(args.uniform_samples, index, &read.law.status))}};
}

}  // namespace

void sample(const SampleArgs& args) {
  for_each_row(args.batch * args.n, args.logits.vocab, [&](int64_t index, Team* team) {
    thread_local Reading read;
    const int64_t b = index / args.n, batch = batch_of(args.row_of, b);
    RowView row{};
    std::vector<NoisyToken> drawn;
    if (batch >= 0) {
      row = row_view(args.logits, batch, index % args.n, args.processors, b, index);
      read_row(row, sampling_of(args.params, b), team, read);
      drawn = draw_row(args, read, index);
    } else {
      read.law = law_of_no_row();
    }
    const RowLaw& law = read.law;
    for (int32_t i = 0; i < args.num_samples; ++i) {
      int64_t token = -1;
      float log_prob = -std::numeric_limits<float>::infinity();
      if (i < int32_t(drawn.size())) {
        const int32_t id = drawn[i].id;
        float logit;
        row.kernels().load(row.at(id, 1), 1, &logit);
        token = args.draft_to_target ? args.draft_to_target[id] : id;
        log_prob = log_prob_of(law, logit);
      }
      args.token[index * args.num_samples + i] = token;
      args.log_prob[index * args.num_samples + i] = log_prob;
    }
    write_stats(law, args.out, index, kNotAsked, kNotAsked);
  });
}

}  // namespace specdec::cpu

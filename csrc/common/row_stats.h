// How a row's law is kept in RowStats, and read back.
#pragma once
#include "common/law.h"

namespace specdec {

constexpr float kNotAsked = -INFINITY;  // a raw value that nobody asked for

SPECDEC_HD void write_values(const RowLaw& law, float* values, int64_t index, float raw_log_normalizer,
                             float raw_entropy) {
  values += index * kNumValues;
  values[0] = law.max;
  values[1] = law.cutoff;
  values[2] = law.weights ? logf(fmaxf(law.max, 0.0f) * law.normalizer)
                          : law.max * law.inverse_temperature + logf(law.normalizer);
  values[3] = law.normalizer;
  values[4] = raw_log_normalizer;
  values[5] = raw_entropy;
}

// Writes row `index` of RowStats.
SPECDEC_HD void write_stats(const RowLaw& law, const StatsOut& out, int64_t index, float raw_log_normalizer,
                            float raw_entropy) {
  write_values(law, out.values, index, raw_log_normalizer, raw_entropy);
  out.argmax[index] = law.argmax;
  out.status[index] = law.status;
}

// The law that a row's stats describe, except for its argmax and status.
SPECDEC_HD RowLaw told_law(const float* values, const Sampling& sampling) {
  RowLaw law{};
  law.max = values[0];
  law.cutoff = values[1];
  law.normalizer = values[3];
  law.inverse_normalizer = 1.0f / values[3];
  law.inverse_temperature = sampling.inverse_temperature;
  law.one_hot = sampling.greedy || isinf(law.max);
  return law;
}

// The law of a shard's row whose ids start at `first`, from the stats of the whole row.
SPECDEC_HD RowLaw shard_law(const float* values, int64_t argmax, const Sampling& sampling, int32_t first) {
  RowLaw law = told_law(values, sampling);
  law.argmax = argmax >= 0 && argmax <= 0x7FFFFFFF ? int32_t(argmax) - first : -1;
  return law;
}

// The law of a shard's row of the draft; no_law where its status says so.
SPECDEC_HD RowLaw shard_draft_law(const ShardDrawArgs& args, int64_t index, int32_t first) {
  if (args.draft_status[index] & kBadDraft) return no_law(0);
  if (!args.draft.data) return RowLaw{};
  return shard_law(args.draft_values + index * kNumValues, args.draft_argmax[index],
                   sampling_of(args.draft_params, index / args.n), first);
}

// The law of a row from its tiles' maximum and their masses' sum.
SPECDEC_HD RowLaw merged_law(float max, float normalizer, const Sampling& sampling) {
  RowLaw law{};
  law.max = max;
  law.cutoff = -INFINITY;
  law.inverse_temperature = sampling.inverse_temperature;
  law.one_hot = sampling.greedy || isinf(max);
  law.normalizer = law.one_hot ? 1.0f : normalizer;
  law.inverse_normalizer = 1.0f / law.normalizer;
  return law;
}

// The law of a row of `vocab` ids whose stats the caller has kept; no_law if no row has such stats.
SPECDEC_HD RowLaw kept_law(const float* values, int64_t argmax, int32_t status, const Sampling& sampling,
                           int32_t vocab) {
  RowLaw law = told_law(values, sampling);
  law.argmax = argmax >= 0 && argmax < vocab ? int32_t(argmax) : -1;  // the caller's: it may be no id of the row
  law.status = status;
  const bool certain = law.max == law.max && law.argmax >= 0;
  const bool spread =
      law.cutoff <= law.max && law.normalizer >= 1.0f - kSlack && law.normalizer <= (1.0f + kSlack) * float(vocab);
  return (law.one_hot ? certain : spread) ? law : no_law(status);
}

}  // namespace specdec

// How a row's law is kept in RowStats, and read back.
#pragma once
#include "common/law.h"

namespace specdec {

// Row `index` of RowStats.
SPECDEC_HD void write_stats(const RowLaw& law, const StatsOut& out, int64_t index, float raw_log_normalizer,
                            float raw_entropy) {
  float* values = out.values + index * kNumValues;
  values[0] = law.max;
  values[1] = law.cutoff;
  values[2] = law.max * law.inverse_temperature + logf(law.normalizer);
  values[3] = law.normalizer;
  values[4] = raw_log_normalizer;
  values[5] = raw_entropy;
  out.argmax[index] = law.argmax;
  out.status[index] = law.status;
}

// The law of a row of `vocab` ids whose stats the caller has kept; no_law if no row has such stats.
SPECDEC_HD RowLaw kept_law(const float* values, int64_t argmax, int32_t status, const Sampling& sampling,
                           int32_t vocab) {
  RowLaw law{};
  law.max = values[0];
  law.cutoff = values[1];
  law.normalizer = values[3];
  law.inverse_normalizer = 1.0f / values[3];
  law.inverse_temperature = sampling.inverse_temperature;
  law.argmax = argmax >= 0 && argmax < vocab ? int32_t(argmax) : -1;  // the caller's: it may be no id of the row
  law.status = status;
  law.one_hot = sampling.greedy || isinf(law.max);
  const bool certain = law.max == law.max && law.argmax >= 0;
  const bool spread =
      law.cutoff <= law.max && law.normalizer >= 1.0f - kSlack && law.normalizer <= (1.0f + kSlack) * float(vocab);
  return (law.one_hot ? certain : spread) ? law : no_law(status);
}

}  // namespace specdec

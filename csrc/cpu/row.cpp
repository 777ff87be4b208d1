#include "cpu/row.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "common/status.h"
#include "cpu/parallel.h"
#include "cpu/tile_sums.h"
#include "cpu/truncation.h"

namespace specdec::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kTilesToShare = 8;  // the fewest tiles that are worth sharing with a team

RowLaw analyse_row(const RowView& row, const Sampling& sampling, Team* team, RowScratch& scratch) {
  const bool weights = has_weights(sampling);
  const int64_t top_k = sampling.top_k < row.vocab ? sampling.top_k : 0;
  const bool cut = top_k > 0 || sampling.top_p < 1 || sampling.min_p > 0;
  // If truncation leaves few ids, their own weights are all that is needed; top-p alone needs the whole row's mass.
  const bool sum =
      !sampling.greedy && (!cut || (sampling.top_p < 1 && top_k == 0 && !(sampling.min_p_first && sampling.min_p > 0)));
  const int32_t flags = scan_tiles(row, sampling.inverse_temperature, sum || (weights && !sampling.greedy), team,
                                   scratch, weights, sampling.greedy);
  const float max = *std::max_element(scratch.tile_max.begin(), scratch.tile_max.end());

  RowLaw law{};
  if (weights) {
    law = law_of_weights(max, find_argmax(row, scratch), flags, sampling);
    if (law.one_hot) return law;
    set_total(law, sum_of(scratch.tile_mass), sampling);
    if (law.one_hot) return law;
    scratch.summed = sum;
  } else {
    law.max = max;
    law.inverse_temperature = sampling.inverse_temperature;
    law.cutoff = -kInfinity;
    law.normalizer = law.inverse_normalizer = 1.0f;
    law.status = flags | sampling.status | row.overlay.status | (law.max == kInfinity ? kInf : 0) |
                 (law.max == -kInfinity ? kEmptyRow : 0);
    law.one_hot = sampling.greedy || std::isinf(law.max);
    law.argmax = find_argmax(row, scratch);
    if (law.one_hot) return law;
  }
  if (sum) {
    if (weights)
      for (size_t tile = 0; tile < scratch.tile_mass.size(); ++tile) {
        // As in scale_masses.
        const bool weighs = scratch.tile_max[tile] * law.inverse_temperature > 0;
        scratch.tile_mass[tile] = weighs ? scratch.tile_mass[tile] * law.inverse_temperature : 0.0f;
      }
    else
      scale_masses(scratch.tile_max.data(), law.max, sampling.inverse_temperature, scratch.tile_mass);
    law.normalizer = sum_of(scratch.tile_mass);
  }
  if (cut) {
    Sampling effective = sampling;
    effective.top_k = top_k;
    law.cutoff = find_cutoff(row, effective, law.max, scratch);
    if (scratch.listed) {
      list_weights(scratch.kept_logit, weights, law.max, law.inverse_temperature, 1.0f, scratch.kept_mass);
      double z = 0, part = 0;
      int tile = -1;
      for (size_t i = 0; i < scratch.kept_id.size(); ++i) {
        if (scratch.kept_id[i] / kTile != tile) z += part, part = 0, tile = scratch.kept_id[i] / kTile;
        part += scratch.kept_mass[i];
      }
      law.normalizer = float(z + part);
    } else {
      if (!scratch.summed) {
        for_each_tile(row, team, [&](int tile) {
          scratch.tile_mass[tile] =
              weighing(row, weights)
                  .kept_sum(row.tile(tile), row.tile_size(tile), law.max, law.inverse_temperature, law.cutoff);
        });
      }
      scratch.summed = true;
      law.normalizer = sum_of(scratch.tile_mass);
    }
  }
  law.inverse_normalizer = 1.0f / law.normalizer;
  return law;
}

// The most that processors add to a logit: the largest positive bias if penalties only lower logits; infinite if they
// can raise them, or if a bias is NaN.
float most_added(const Overlay& overlay) {
  bool known = overlay.repetition >= 1 && overlay.frequency >= 0 && overlay.presence >= 0;
  float most = 0.0f;
  for (int32_t i = 0; i < overlay.num_bias; ++i) {
    known &= !std::isnan(overlay.bias_values[i]);
    most = std::max(most, overlay.bias_values[i]);
  }
  return known ? most : kInfinity;
}

}  // namespace

int32_t scan_tiles(const RowView& row, float inverse_temperature, bool sum, Team* team, RowScratch& scratch,
                   bool weights, bool only_max) {
  const LogitKernels &kernels = weighing(row, weights), &given = cpu::kernels().logits[int(row.dtype)];
  const int tiles = row.tiles(), groups = (row.vocab + kGroup - 1) / kGroup;
  scratch.group_max.resize(groups);
  scratch.tile_max.resize(tiles);
  scratch.tile_mass.resize(tiles);
  scratch.summed = sum;
  scratch.listed = false;
  const bool bounded = only_max && row.processed;
  const float added = bounded ? most_added(row.overlay) : 0.0f;
  std::atomic<float> largest{-kInfinity};
  int32_t flags = 0;
  for_each_tile(row, team, [&](int tile) {
    const int n = row.tile_size(tile);
    float *const first = &scratch.group_max[tile * (kTile / kGroup)], *const last = first + (n + kGroup - 1) / kGroup;
    float& max = scratch.tile_max[tile];
    // A tile whose unprocessed logits cannot contain the largest need not be processed. Rounding keeps sums in order,
    // and tiles with a NaN are always looked at.
    if (bounded && given.group_maxima(row.in_memory(tile * kTile), n, first) == 0 &&
        *std::max_element(first, last) + added < largest.load(std::memory_order_relaxed)) {
      std::fill(first, last, -kInfinity);
      max = -kInfinity;
      return;
    }
    const Logits x = row.tile(tile);
    const int32_t seen = kernels.group_maxima(x, n, first);
    if (seen) __atomic_fetch_or(&flags, seen, __ATOMIC_RELAXED);
    max = *std::max_element(first, last);
    if (sum) scratch.tile_mass[tile] = std::isfinite(max) ? kernels.exp_sum(x, n, max, inverse_temperature) : 0.0f;
    for (float before = largest; bounded && max > before && !largest.compare_exchange_weak(before, max);) {
    }
  });
  return flags;
}

int32_t find_argmax(const RowView& row, const RowScratch& scratch) {
  const auto group = std::max_element(scratch.group_max.begin(), scratch.group_max.end());
  if (*group == -kInfinity) return 0;
  float values[kGroup];
  const int begin = int(group - scratch.group_max.begin()) * kGroup, n = std::min(kGroup, row.vocab - begin);
  row.kernels().load(row.at(begin, n), n, values);
  return begin + int(std::find(values, values + n, *group) - values);
}

void scale_masses(const float* tile_max, float max, float inverse_temperature, std::vector<float>& mass) {
  for (size_t tile = 0; tile < mass.size(); ++tile) {
    // As for an id: if the tile's largest weighs nothing there is nothing to draw, though many may add up to a number.
    const float exponent = (tile_max[tile] - max) * inverse_temperature;
    mass[tile] = exponent >= kSmallestExponent ? mass[tile] * std::exp(exponent) : 0.0f;
  }
}

bool ascends(const int32_t* ids, int32_t n) {
  bool good = true;
  for (int32_t i = 1; i < n; ++i) good &= may_follow(ids[i], ids[i - 1]);
  return good;
}

RowView row_view(const Rows& rows, int64_t b, int64_t i) {
  return {static_cast<const char*>(rows.data) + (b * rows.stride_batch + i * rows.stride_row) * size_of(rows.dtype),
          rows.dtype, rows.vocab};
}

RowView row_view(const Rows& rows, int64_t b, int64_t i, const ProcessorArgs& processors, int64_t sequence,
                 int64_t first, int64_t place, const Drafted& drafted) {
  RowView row = row_view(rows, b, i);
  row.processed = processors.on;
  row.place = int32_t(place);
  if (processors.on) row.overlay = overlay_of(processors, sequence, first, drafted, ascends);
  return row;
}

namespace {

// The first entry of a list from id `begin` on. Tiles mostly come one after the other; it is then where the entries of
// the previous tile ended, and need not be searched for.
int32_t first_from(const int32_t* ids, int32_t num_ids, int32_t begin, int32_t guess) {
  const bool right =
      guess <= num_ids && (guess == 0 || ids[guess - 1] < begin) && (guess == num_ids || ids[guess] >= begin);
  return right ? guess : first_at_least(ids, num_ids, begin);
}

// Calls f(entry, id) for a list's entries from entry i on, below id `end`; returns the next entry.
template <class Fn>
int32_t for_each_before(int32_t end, const int32_t* ids, int32_t num_ids, int32_t i, Fn f) {
  for (; i < num_ids && ids[i] < end; ++i) f(i, ids[i]);
  return i;
}

// Whether the first n bits are 1, or there are none.
bool allows_all(const int32_t* words, int n) {
  for (int i = 0; words && i < n; i += 32) {
    const int unused = n - i < 32 ? 32 - (n - i) : 0;
    if (uint32_t(~words[i / 32]) << unused) return false;
  }
  return true;
}

}  // namespace

void Logits::process(const RowView& row, int32_t begin, int n) {
  const Overlay& overlay = row.overlay;
  const OverlaidRow overlaid{&overlay, row.place};
  const LogitKernels& kernels = cpu::kernels().logits[int(row.dtype)];
  const auto made = [&](int32_t id) {
    float x;
    kernels.widen(row.in_memory(id), nullptr, 1, &x);
    return processed(overlaid, id, x);
  };
  if (n == 1) {
    data_ = made_;
    made_[0] = made(begin);
    return;
  }
  thread_local int32_t next_bias = 0, next_count = 0;
  int32_t bias = first_from(overlay.bias_ids, overlay.num_bias, begin, next_bias);
  int32_t count = first_from(overlay.count_ids, overlay.num_counts, begin, next_count);
  const auto from = [begin](const int32_t* words) { return words ? words + begin / 32 : nullptr; };
  const int32_t end = begin + n;
  bool changed = row.dtype != DType::kFloat32 || (bias < overlay.num_bias && overlay.bias_ids[bias] < end) ||
                 (count < overlay.num_counts && overlay.count_ids[count] < end);
  if (overlay.penalises) overlaid.drafted().for_each([&](int64_t id) { changed |= id >= begin && id < end; });
  if (!changed && allows_all(from(overlaid.bitmask()), n) && allows_all(from(overlay.allowed), n)) return;

  data_ = made_;
  kernels.widen(row.in_memory(begin), from(overlaid.bitmask()), n, made_);
  if (overlay.allowed) row.kernels().widen(made_, from(overlay.allowed), n, made_);
  next_bias = for_each_before(end, overlay.bias_ids, overlay.num_bias, bias, [&](int32_t i, int32_t id) {
    made_[id - begin] = overlaid.biased(made_[id - begin], i, overlay.bias_values[i]);
  });
  if (!overlay.penalises) return;
  next_count = for_each_before(end, overlay.count_ids, overlay.num_counts, count, [&](int32_t i, int32_t id) {
    made_[id - begin] = overlay.penalised(made_[id - begin], overlay.counts[i], 0);
  });
  overlaid.drafted().for_each([&](int64_t id) {  // counts once more: again from the model's logit
    if (id >= begin && id < end) made_[id - begin] = made(int32_t(id));
  });
}

void share_tiles(const RowView& row, Team* team, const std::function<void(int64_t, int64_t)>& f) {
  if (row.tiles() >= kTilesToShare)
    team->share(row.tiles(), f);
  else
    f(0, row.tiles());
}

void for_each_tile(const RowView& row, Team* team, const std::function<void(int)>& f) {
  share_tiles(row, team, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) f(int(tile));
  });
}

void read_row(const RowView& row, const Sampling& sampling, Team* team, Reading& out) {
  out.row = row;
  out.team = team;
  out.law = analyse_row(row, sampling, team, out.scratch);
}

void raw_moments(const RowView& row, float max, Team* team, float* log_normalizer, float* entropy) {
  *log_normalizer = max;
  *entropy = 0.0f;
  if (std::isinf(max)) return;
  std::vector<float> sum(row.tiles()), weighted(row.tiles());
  for_each_tile(row, team, [&](int tile) {
    row.kernels().moments(row.tile(tile), row.tile_size(tile), max, &sum[tile], &weighted[tile]);
  });
  const float z = sum_of(sum), w = sum_of(weighted);
  *log_normalizer = max + std::log(z);
  *entropy = std::log(z) - w / z;
}

void tile_probs(const RowView& row, const RowLaw& law, int tile, float scale, float* out) {
  const int n = row.tile_size(tile);
  if (law.one_hot) {
    std::fill(out, out + n, 0.0f);
    const int32_t offset = law.argmax - tile * kTile;
    if (offset >= 0 && offset < n) out[offset] = scale;
    return;
  }
  weighing(row, law.weights)
      .weights(row.tile(tile), n, law.max, law.inverse_temperature, law.cutoff, law.inverse_normalizer * scale, out);
}

float prob_at(const RowView& row, const RowLaw& law, int32_t id) {
  if (law.one_hot) return id == law.argmax ? 1.0f : 0.0f;
  float out;
  weighing(row, law.weights)
      .weights(row.at(id, 1), 1, law.max, law.inverse_temperature, law.cutoff, law.inverse_normalizer, &out);
  return out;
}

void list_weights(const std::vector<float>& x, bool weights, float max, float inverse_temperature, float scale,
                  std::vector<float>& out) {
  out.resize(x.size());
  for (size_t i = 0; i < x.size(); i += kTile)
    kernels().logits[weights ? kOfWeights : int(DType::kFloat32)].weights(
        &x[i], int(std::min<size_t>(kTile, x.size() - i)), max, inverse_temperature, -kInfinity, scale, &out[i]);
}

}  // namespace specdec::cpu

#include "cpu/row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "common/status.h"
#include "cpu/parallel.h"
#include "cpu/tile_sums.h"

namespace specdec::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kTopGroups = 512;  // top-p alone first lists what reaches the so-many-th largest group maximum
// A row is split over the threads only if it is long, and the longer the fewer they are: waking one takes tens of
// microseconds, as much as reading a row of 100,000 ids.
constexpr int kTilesToSplit = 64, kTilesPerHelper = 256;

// Floats as integers of the same order.
uint32_t ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

float from_ordered(uint32_t key) {
  const uint32_t bits = key >> 31 ? key & 0x7FFFFFFFu : ~key;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Finds cut-offs in a row whose group maxima are known.
class Truncation {
 public:
  Truncation(const RowView& row, const Sampling& sampling, float max, RowScratch& scratch)
      : row_(row), sampling_(sampling), max_(max), scratch_(scratch) {}

  // The law's cutoff: the smallest logit kept. Leaves the kept ids in scratch if they are few enough.
  float find() {
    const float likely = sampling_.min_p > 0 ? max_ + std::log(sampling_.min_p) * sampling_.temperature : -kInfinity;
    float floor = sampling_.min_p_first ? likely : -kInfinity;
    if (sampling_.top_k > 0) floor = std::max(floor, top_k(floor));
    if (sampling_.top_p < 1) floor = std::max(floor, top_p(floor));
    floor = std::max(floor, likely);
    return keep(floor);
  }

 private:
  // Lists every id with logit >= bound (and > -inf) in index order; false if there are too many.
  bool list(float bound) {
    scratch_.kept_id.clear();
    scratch_.kept_logit.clear();
    float values[kGroup];
    const int groups = int(scratch_.group_max.size());
    for (int group = 0; group < groups; ++group) {
      if (!(scratch_.group_max[group] >= bound) || scratch_.group_max[group] == -kInfinity) continue;
      const int begin = group * kGroup, n = std::min(kGroup, row_.vocab - begin);
      row_.kernels().load(row_.at(begin), n, values);
      for (int i = 0; i < n; ++i) {
        if (!(values[i] >= bound) || values[i] == -kInfinity) continue;
        if (int(scratch_.kept_id.size()) == RowScratch::kMaxKept) return false;
        scratch_.kept_id.push_back(begin + i);
        scratch_.kept_logit.push_back(values[i]);
      }
    }
    return true;
  }

  // The n-th largest group maximum: at least n ids are as large. -inf if there are fewer groups.
  float nth_group_maximum(int64_t n) {
    if (n > int64_t(scratch_.group_max.size())) return -kInfinity;
    scratch_.sorted = scratch_.group_max;
    std::nth_element(scratch_.sorted.begin(), scratch_.sorted.begin() + (n - 1), scratch_.sorted.end(),
                     std::greater<>());
    return scratch_.sorted[n - 1];
  }

  float top_k(float floor) {
    const int64_t k = sampling_.top_k;
    if (list(std::max(floor, nth_group_maximum(k)))) {
      if (int64_t(scratch_.kept_logit.size()) < k) return floor;  // fewer than k possible ids
      scratch_.sorted = scratch_.kept_logit;
      std::nth_element(scratch_.sorted.begin(), scratch_.sorted.begin() + (k - 1), scratch_.sorted.end(),
                       std::greater<>());
      return scratch_.sorted[k - 1];
    }
    return select(floor, double(k), false);
  }

  float top_p(float floor) {
    const bool whole = scratch_.summed;  // then nothing has been cut yet, and the whole row's mass is known
    const int64_t groups = int64_t(scratch_.group_max.size());
    const bool few = row_.vocab <= RowScratch::kMaxKept;
    if (!list(whole && !few ? nth_group_maximum(std::min<int64_t>(kTopGroups, groups / 4)) : floor)) {
      return select(floor, double(sampling_.top_p) * total_above(floor), true);
    }
    scratch_.sorted = scratch_.kept_logit;
    std::sort(scratch_.sorted.begin(), scratch_.sorted.end(), std::greater<>());
    list_weights(scratch_.sorted, max_, sampling_.inverse_temperature, 1.0f, scratch_.sorted_mass);
    double total = 0;
    if (whole) {
      for (float mass : scratch_.tile_mass) total += mass;
    } else {
      for (float mass : scratch_.sorted_mass) total += mass;
    }
    const double goal = double(sampling_.top_p) * total;
    double above = 0;
    for (size_t i = 0; i < scratch_.sorted.size();) {  // ties go together
      size_t next = i;
      double mass = 0;
      for (; next < scratch_.sorted.size() && scratch_.sorted[next] == scratch_.sorted[i]; ++next)
        mass += scratch_.sorted_mass[next];
      if (above + mass >= goal) return scratch_.sorted[i];
      above += mass;
      i = next;
    }
    // The mass lies deeper than what was listed (or rounding kept the sum short of it).
    return whole && !few ? select(floor, goal, true) : scratch_.sorted.back();
  }

  double total_above(float floor) const {
    double total = 0;
    float mass[kTile];
    for (int tile = 0; tile < row_.tiles(); ++tile) {
      const int n = row_.tile_size(tile);
      row_.kernels().weights(row_.at(tile * kTile), n, max_, sampling_.inverse_temperature, floor, 1.0f, mass);
      total += cpu::kernels().sum(mass, n);
    }
    return total;
  }

  // The largest value c at or above `floor` such that the number (or mass) of {x >= c} reaches `goal`, by three passes of
  // a histogram over the bits of the value: for rows where too many ids compete to list them.
  float select(float floor, double goal, bool by_mass) {
    std::vector<double> bins(2048);
    float values[kTile], measure[kTile];
    std::fill(measure, measure + kTile, 1.0f);
    uint32_t prefix = 0;
    double above = 0;
    int fixed = 0;  // leading bits of the value already known
    for (int width : {11, 11, 10}) {
      std::fill(bins.begin(), bins.end(), 0.0);
      const int shift = 32 - fixed - width;
      int lowest = 1 << width;
      for (int tile = 0; tile < row_.tiles(); ++tile) {
        const int n = row_.tile_size(tile);
        row_.kernels().load(row_.at(tile * kTile), n, values);
        if (by_mass)
          row_.kernels().weights(row_.at(tile * kTile), n, max_, sampling_.inverse_temperature, floor, 1.0f, measure);
        for (int i = 0; i < n; ++i) {
          if (!(values[i] >= floor) || values[i] == -kInfinity) continue;
          const uint32_t key = ordered(values[i]);
          if (fixed && key >> (32 - fixed) != prefix) continue;
          const int bin = int(key >> shift & ((1u << width) - 1));
          bins[bin] += measure[i];
          lowest = std::min(lowest, bin);
        }
      }
      int bin = (1 << width) - 1;
      while (bin > lowest && above + bins[bin] < goal) above += bins[bin--];
      prefix = prefix << width | uint32_t(bin);
      fixed += width;
    }
    return from_ordered(prefix);
  }

  // Keeps what is >= bound; returns the smallest logit kept.
  float keep(float bound) {
    scratch_.listed = list(bound);
    if (scratch_.listed) return *std::min_element(scratch_.kept_logit.begin(), scratch_.kept_logit.end());
    float values[kTile], lowest = kInfinity;
    for (int tile = 0; tile < row_.tiles(); ++tile) {
      const int n = row_.tile_size(tile);
      row_.kernels().load(row_.at(tile * kTile), n, values);
      for (int i = 0; i < n; ++i)
        lowest = values[i] >= bound && values[i] > -kInfinity ? std::min(lowest, values[i]) : lowest;
    }
    return lowest;
  }

  const RowView& row_;
  const Sampling& sampling_;
  const float max_;
  RowScratch& scratch_;
};

RowLaw analyse_row(const RowView& row, const Sampling& sampling, bool split, RowScratch& scratch) {
  const LogitKernels& kernels = row.kernels();
  const int tiles = row.tiles(), groups = (row.vocab + kGroup - 1) / kGroup;
  const int64_t top_k = sampling.top_k < row.vocab ? sampling.top_k : 0;
  const bool cut = top_k > 0 || sampling.top_p < 1 || sampling.min_p > 0;
  // Where truncation leaves few ids their own weights are all that is needed; top-p alone needs the whole row's mass.
  const bool sum =
      !sampling.greedy && (!cut || (sampling.top_p < 1 && top_k == 0 && !(sampling.min_p_first && sampling.min_p > 0)));
  scratch.group_max.resize(groups);
  scratch.tile_max.resize(tiles);
  scratch.tile_mass.resize(tiles);
  scratch.summed = sum;
  scratch.listed = false;

  int32_t flags = 0;
  for_each_tile(row, split, [&](int tile) {
    const int n = row.tile_size(tile), first = tile * (kTile / kGroup);
    const void* x = row.at(tile * kTile);
    const int32_t seen = kernels.group_maxima(x, n, &scratch.group_max[first]);
    if (seen) __atomic_fetch_or(&flags, seen, __ATOMIC_RELAXED);
    const float* maxima = &scratch.group_max[first];
    const float max = *std::max_element(maxima, maxima + (n + kGroup - 1) / kGroup);
    scratch.tile_max[tile] = max;
    if (sum)
      scratch.tile_mass[tile] = std::isfinite(max) ? kernels.exp_sum(x, n, max, sampling.inverse_temperature) : 0.0f;
  });

  RowLaw law{};
  law.max = *std::max_element(scratch.tile_max.begin(), scratch.tile_max.end());
  law.inverse_temperature = sampling.inverse_temperature;
  law.cutoff = -kInfinity;
  law.normalizer = law.inverse_normalizer = 1.0f;
  law.status = flags | sampling.status | (law.max == kInfinity ? kInf : 0) | (law.max == -kInfinity ? kEmptyRow : 0);
  law.one_hot = sampling.greedy || std::isinf(law.max);
  if (law.max > -kInfinity) {
    const int group =
        int(std::find(scratch.group_max.begin(), scratch.group_max.end(), law.max) - scratch.group_max.begin());
    float values[kGroup];
    const int begin = group * kGroup, n = std::min(kGroup, row.vocab - begin);
    kernels.load(row.at(begin), n, values);
    law.argmax = begin + int(std::find(values, values + n, law.max) - values);
  }
  if (law.one_hot) return law;

  if (sum) {
    for (int tile = 0; tile < tiles; ++tile)
      scratch.tile_mass[tile] *= std::exp((scratch.tile_max[tile] - law.max) * sampling.inverse_temperature);
    law.normalizer = sum_of(scratch.tile_mass);
  }
  if (cut) {
    Sampling effective = sampling;
    effective.top_k = top_k;
    law.cutoff = Truncation(row, effective, law.max, scratch).find();
    scratch.summed = !scratch.listed;
    if (scratch.listed) {
      list_weights(scratch.kept_logit, law.max, law.inverse_temperature, 1.0f, scratch.sorted_mass);
      double z = 0, part = 0;
      int tile = -1;
      for (size_t i = 0; i < scratch.kept_id.size(); ++i) {
        if (scratch.kept_id[i] / kTile != tile) z += part, part = 0, tile = scratch.kept_id[i] / kTile;
        part += scratch.sorted_mass[i];
      }
      law.normalizer = float(z + part);
    } else {
      for_each_tile(row, split, [&](int tile) {
        float mass[kTile];
        const int n = row.tile_size(tile);
        kernels.weights(row.at(tile * kTile), n, law.max, law.inverse_temperature, law.cutoff, 1.0f, mass);
        scratch.tile_mass[tile] = cpu::kernels().sum(mass, n);
      });
      law.normalizer = sum_of(scratch.tile_mass);
    }
  }
  law.inverse_normalizer = 1.0f / law.normalizer;
  return law;
}

}  // namespace

RowView row_view(const Rows& rows, int64_t b, int64_t i) {
  const int64_t size = rows.dtype == DType::kFloat32 ? 4 : 2;
  return {static_cast<const char*>(rows.data) + (b * rows.stride_batch + i * rows.stride_row) * size, rows.dtype,
          rows.vocab};
}

void for_each_tile(const RowView& row, bool split, const std::function<void(int)>& f) {
  const int tiles = row.tiles();
  if (split && tiles >= kTilesToSplit && tiles * (num_threads() - 1) >= kTilesPerHelper) {
    parallel_for(tiles, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) f(int(tile));
    });
  } else {
    for (int tile = 0; tile < tiles; ++tile) f(tile);
  }
}

void read_row(const RowView& row, const Sampling& sampling, bool split, Reading& out) {
  out.row = row;
  out.split = split;
  out.law = analyse_row(row, sampling, split, out.scratch);
}

void raw_moments(const RowView& row, float max, bool split, float* log_normalizer, float* entropy) {
  *log_normalizer = max;
  *entropy = 0.0f;
  if (std::isinf(max)) return;
  std::vector<float> sum(row.tiles()), weighted(row.tiles());
  for_each_tile(row, split, [&](int tile) {
    row.kernels().moments(row.at(tile * kTile), row.tile_size(tile), max, &sum[tile], &weighted[tile]);
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
  row.kernels().weights(row.at(tile * kTile), n, law.max, law.inverse_temperature, law.cutoff,
                        law.inverse_normalizer * scale, out);
}

float prob_at(const RowView& row, const RowLaw& law, int32_t id) {
  if (law.one_hot) return id == law.argmax ? 1.0f : 0.0f;
  float out;
  row.kernels().weights(row.at(id), 1, law.max, law.inverse_temperature, law.cutoff, law.inverse_normalizer, &out);
  return out;
}

void list_weights(const std::vector<float>& x, float max, float inverse_temperature, float scale,
                  std::vector<float>& out) {
  out.resize(x.size());
  for (size_t i = 0; i < x.size(); i += kTile)
    kernels().logits[int(DType::kFloat32)].weights(&x[i], int(std::min<size_t>(kTile, x.size() - i)), max,
                                                   inverse_temperature, -kInfinity, scale, &out[i]);
}

}  // namespace specdec::cpu

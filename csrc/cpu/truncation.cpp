#include "cpu/truncation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>

namespace specdec::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr int kTopGroups = 512;      // top-p alone first lists what reaches the group maximum of this rank
constexpr int kLong = 32768;         // rows this long are sampled first:
constexpr int kSampled = 8;          // one chunk in so many,
constexpr int kChunk = 256;          // of so many ids; the sample's masses
constexpr double kDeviations = 2.5;  // are taken to be off by so many standard deviations
constexpr int kMaxBand = 16384;      // values copied for a closer look, at most
constexpr int kFew = 128;            // values that are sorted, at most

// Floats as integers of the same order; both zeros become one number.
uint32_t ordered(float x) {
  uint32_t bits;
  x += 0.0f;
  std::memcpy(&bits, &x, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

float from_ordered(uint32_t key) {
  const uint32_t bits = key >> 31 ? key & 0x7FFFFFFFu : ~key;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// How a value counts: as exp((x - max) * inverse_temperature), which is 1 for all if inverse_temperature is 0; or as
// the weight it is.
struct Measure {
  float max, inverse_temperature;
  bool weights = false;
  float of(float x) const {
    return weights ? std::max(x, 0.0f) * inverse_temperature : std::exp((x - max) * inverse_temperature);
  }
};

RowView view_of(const float* values, size_t count) {
  return {reinterpret_cast<const char*>(values), DType::kFloat32, int32_t(count)};
}
RowView view_of(const std::vector<float>& values) { return view_of(values.data(), values.size()); }

// The values of a row with low <= x < high, tile after tile.
struct Band {
  std::vector<float> value = std::vector<float>(kMaxBand + kTile + kMostLanes);
  std::vector<int> first;  // of each tile, and how many there are

  RowView view() const { return view_of(value.data(), size_t(first.back())); }

  // False, with unusable contents, if there are too many. `row` may be a view of the band itself. each(tile) is called
  // while the tile is in the cache.
  template <class Each>
  bool fill(const RowView& row, float low, float high, Each each) {
    first.assign(1, 0);
    for (int tile = 0; tile < row.tiles() && first.back() <= kMaxBand; ++tile) {
      each(tile);
      first.push_back(first.back() + row.kernels().between(row.tile(tile), row.tile_size(tile), low, high, 0, nullptr,
                                                           &value[first.back()]));
    }
    return first.back() <= kMaxBand;
  }

  // The mass of a tile's values that are >= bound.
  float mass(int tile, const Measure& measure, float bound) const {
    return kernels().logits[measure.weights ? kOfWeights : int(DType::kFloat32)].kept_sum(
        &value[first[tile]], first[tile + 1] - first[tile], measure.max, measure.inverse_temperature, bound);
  }
};

// The largest value such that all values as large or larger, together with `above`, reach `goal`; ties go together. The
// smallest if none does.
float among(std::vector<float>& value, const Measure& measure, double above, double goal) {
  std::sort(value.begin(), value.end(), std::greater<>());
  std::vector<float> mass;
  list_weights(value, measure.weights, measure.max, measure.inverse_temperature, 1.0f, mass);
  for (size_t i = 0; i < value.size(); ++i) {
    above += mass[i];
    if (above >= goal && (i + 1 == value.size() || value[i + 1] < value[i])) return value[i];
  }
  return value.back();
}

// The masses of a row's values with low <= key < high, by leading bits of their keys: of all values, or of a sample.
class Bins {
 public:
  Bins(const RowView& row, const Measure& measure, uint32_t low, uint32_t high, bool sampled)
      : low_(low), high_(high), bins_(1u << (row.vocab >= kLong ? 13 : 10)) {
    while ((high - 1 - low) >> shift_ >= bins_) ++shift_;
    thread_local std::vector<double> kept;
    kept.assign(bins_ + 1, 0.0);  // the last one for what lies elsewhere
    mass_ = kept.data();
    float value[kTile], weight[kTile];
    uint32_t bin[kTile];
    const int each = sampled ? kChunk : kTile;
    for (int begin = 0; begin < row.vocab; begin += sampled ? kSampled * kChunk : kTile) {
      const int n = std::min(each, row.vocab - begin);
      const Logits x = row.at(begin, n);
      row.kernels().load(x, n, value);
      weighing(row, measure.weights).weights(x, n, measure.max, measure.inverse_temperature, kLowest, 1.0f, weight);
      for (int i = 0; i < n; ++i) {
        const uint32_t above = ordered(value[i]) - low;
        bin[i] = above < high - low ? above >> shift_ : bins_;
      }
      for (int i = 0; i < n; ++i) mass_[bin[i]] += weight[i];
      if (!sampled) continue;
      total_ += kernels().sum(weight, n);
      const auto squares_from = [&](float bound) {
        return row.kernels().kept_sum(x, n, measure.max, 2 * measure.inverse_temperature, bound);
      };
      squares_ += squares_from(kLowest) - squares_from(from_ordered(high));
    }
    total_ -= mass_[bins_];
  }

  // For a sample: the sum of the weights, and of their squares.
  double total() const { return total_; }
  double squares() const { return std::max(squares_, 0.0); }

  // Keys low to high, what lies above them, and their own mass.
  struct Found {
    uint32_t low, high;
    double above, mass;
  };
  // The bins in which the mass goes from `least` to `most`; it starts at `above`, and each bin counts times `scale`. If
  // the mass never gets that far, the last bin that has any.
  Found find(double above, double scale, double least, double most) const {
    Found found{low_, high_, above, 0};
    bool inside = false;
    for (int bin = int(bins_) - 1; bin >= 0 && (above < most || !inside); --bin) {
      if (!(mass_[bin] > 0)) continue;
      const double here = mass_[bin] * scale;
      const uint64_t edge = low_ + (uint64_t(bin) << shift_);
      if (!inside) found = {low_, uint32_t(std::min<uint64_t>(edge + (1u << shift_), high_)), above, 0};
      found.low = uint32_t(edge);
      found.mass += here;
      above += here;
      inside = inside || above >= least;
    }
    return found;
  }

 private:
  const uint32_t low_, high_, bins_;
  int shift_ = 0;
  double* mass_;
  double total_ = 0, squares_ = 0;
};

// Finds cut-offs in a row whose group maxima are known.
class Truncation {
 public:
  Truncation(const RowView& row, const Sampling& sampling, float max, RowScratch& scratch)
      : row_(row),
        sampling_(sampling),
        weight_{max, has_weights(sampling) ? 1.0f / max : sampling.inverse_temperature, has_weights(sampling)},
        count_{0.0f, 0.0f},
        likely_(likely_from(sampling, max)),
        from_(cut_from(sampling, max)),
        scratch_(scratch) {}

  // The law's cutoff: the smallest logit kept. Leaves the kept ids in scratch if they are few enough.
  float find() {
    float floor = from_;
    if (sampling_.top_k > 0) floor = std::max(floor, top_k(floor));
    if (sampling_.top_p < 1) floor = std::max(floor, top_p(floor));
    return keep(std::max(floor, likely_));
  }

 private:
  // Lists every id with logit >= bound (and > -inf) in index order; false if there are too many.
  bool list(float bound) {
    constexpr int kMost = RowScratch::kMaxKept, kRoom = kMost + kGroup + kMostLanes;
    int32_t id[kRoom];
    float logit[kRoom];
    bound = std::max(bound, kLowest);
    int count = 0;
    const int groups = int(scratch_.group_max.size());
    for (int group = 0; group < groups && count <= kMost; ++group) {
      if (!(scratch_.group_max[group] >= bound)) continue;
      const int begin = group * kGroup, n = std::min(kGroup, row_.vocab - begin);
      count += row_.kernels().between(row_.at(begin, n), n, bound, kInfinity, begin, id + count, logit + count);
    }
    scratch_.kept_id.assign(id, id + count);
    scratch_.kept_logit.assign(logit, logit + count);
    return count <= kMost;
  }

  // The n-th largest of at least n values.
  float nth_largest(const std::vector<float>& values, int64_t n) {
    scratch_.sorted = values;
    std::nth_element(scratch_.sorted.begin(), scratch_.sorted.begin() + (n - 1), scratch_.sorted.end(),
                     std::greater<>());
    return scratch_.sorted[n - 1];
  }

  float top_k(float floor) {
    const int64_t k = sampling_.top_k;
    const bool few = k <= int64_t(scratch_.group_max.size());  // if so, k ids reach the k-th group maximum
    if (list(few ? std::max(floor, nth_largest(scratch_.group_max, k)) : floor)) {
      if (int64_t(scratch_.kept_logit.size()) < k) return floor;  // fewer than k possible ids
      return nth_largest(scratch_.kept_logit, k);
    }
    return select(row_, count_, floor, kInfinity, {0.0, double(k), total_above(count_, floor)});
  }

  float top_p(float floor) {
    const bool whole = scratch_.summed;  // if so, nothing has been cut yet, and the whole row's mass is known
    const bool few = row_.vocab <= RowScratch::kMaxKept;
    const double groups = double(scratch_.group_max.size());
    const Masses top{0.0, std::min<double>(kTopGroups, groups / 4), groups};
    const float from = whole && !few ? select(view_of(scratch_.group_max), count_, floor, kInfinity, top) : floor;
    const bool listed = list(from);
    double seen = 0;
    if (listed) {
      list_weights(scratch_.kept_logit, weight_.weights, weight_.max, weight_.inverse_temperature, 1.0f,
                   scratch_.kept_mass);
      seen = std::accumulate(scratch_.kept_mass.begin(), scratch_.kept_mass.end(), 0.0);
    }
    const double total = whole    ? std::accumulate(scratch_.tile_mass.begin(), scratch_.tile_mass.end(), 0.0)
                         : listed ? seen
                                  : total_above(weight_, floor);
    const double goal = double(sampling_.top_p) * total;
    if (!listed) return select(row_, weight_, floor, kInfinity, {0.0, goal, total});
    if (seen < goal && from > floor) return select(row_, weight_, floor, from, {seen, goal, total});
    return select(view_of(scratch_.kept_logit), weight_, floor, kInfinity, {0.0, goal, total});
  }

  double total_above(const Measure& measure, float floor) const {
    double total = 0;
    for (int tile = 0; tile < row_.tiles(); ++tile)
      total += weighing(row_, measure.weights)
                   .kept_sum(row_.tile(tile), row_.tile_size(tile), measure.max, measure.inverse_temperature,
                             std::max(floor, kLowest));
    return total;
  }

  // What guides a search: the mass above where it begins, the mass to be reached, and all there is.
  struct Masses {
    double above, goal, total;
  };

  // The largest value c of a row with low <= c < high such that what is >= c reaches the goal; if none does, the lowest
  // of any weight. The range is narrowed by bins, first of a sample if the row is long, until few enough values are
  // left to be copied.
  float select(const RowView& row, const Measure& measure, float low, float high, Masses masses) {
    if (row.vocab <= kFew) {
      std::vector<float> value(row.vocab);
      row.kernels().load(row.at(0, row.vocab), row.vocab, value.data());
      std::erase_if(value, [&](float x) { return !(x >= low && x < high); });
      return among(value, measure, masses.above, masses.goal);
    }
    uint32_t from = ordered(std::max(low, kLowest)), to = ordered(high);
    for (bool sampled = row.vocab >= kLong && !measure.weights; to - from > 1; sampled = false) {
      const Bins bins(row, measure, from, to, sampled);
      const double left = masses.total - masses.above, total = bins.total();
      double error = 0, scale = 1;
      if (sampled) {
        if (!(total > 0) || !(masses.goal < masses.total)) continue;
        const double share = (masses.goal - masses.above) / left;
        error = kDeviations * left * std::sqrt(share * (1 - share) * bins.squares()) / total;
        scale = left / total;
      }
      const auto found = bins.find(masses.above, scale, masses.goal - error,
                                   masses.goal + std::min(error, 0.9 * (masses.total - masses.goal)));
      if (!(found.mass > 0)) {
        if (sampled) continue;  // the sample missed it
        return high;            // nothing below weighs anything
      }
      const float lowest = from_ordered(found.low), highest = found.high == to ? high : from_ordered(found.high);
      if (found.high - found.low > 1 && found.mass <= kMaxBand * double(measure.of(lowest))) {
        const std::optional<float> cut =
            look_into(row, measure, lowest, highest, sampled, {found.above, masses.goal, masses.total});
        if (cut) return *cut;
      }
      if (sampled) continue;
      from = found.low;
      to = found.high;
      masses.above = found.above;
    }
    return from_ordered(from);
  }

  bool is_copy(const RowView& row) const { return row.data != row_.data; }

  // `select` among a copy of the values with low <= x < high; nothing if there are too many, or if the range was
  // guessed from a sample and turns out wrong. For a row the tiles' masses of what is kept are left in scratch.
  std::optional<float> look_into(const RowView& row, const Measure& measure, float low, float high, bool sampled,
                                 Masses masses) {
    thread_local Band bands[2];
    const bool copy = is_copy(row);
    Band& band = bands[copy];
    if (!copy) masses.above = 0;
    const bool few = band.fill(row, low, high, [&](int tile) {
      if (!copy)
        masses.above += scratch_.tile_mass[tile] =
            weighing(row, measure.weights)
                .kept_sum(row.tile(tile), row.tile_size(tile), measure.max, measure.inverse_temperature, high);
    });
    if (!few) return {};
    if (sampled) {
      double until = masses.above;
      for (int tile = 0; tile < row.tiles(); ++tile) until += band.mass(tile, measure, low);
      if (!(masses.above < masses.goal && masses.goal <= until)) return {};
    }
    const float cut = select(band.view(), measure, low, high, masses);
    if (!copy) {
      for (int tile = 0; tile < row.tiles(); ++tile) scratch_.tile_mass[tile] += band.mass(tile, measure, cut);
      summed_from_ = measure.inverse_temperature > 0 ? cut : NAN;
    }
    return cut;
  }

  // Keeps what is >= bound; returns the smallest logit kept.
  float keep(float bound) {
    scratch_.listed = list(bound);
    scratch_.summed = !scratch_.listed && bound == summed_from_;
    if (scratch_.listed) return *std::min_element(scratch_.kept_logit.begin(), scratch_.kept_logit.end());
    if (scratch_.summed) return bound;
    float values[kTile], lowest = kInfinity;
    for (int tile = 0; tile < row_.tiles(); ++tile) {
      const int n = row_.tile_size(tile);
      row_.kernels().load(row_.tile(tile), n, values);
      for (int i = 0; i < n; ++i)
        lowest = values[i] >= bound && values[i] > -kInfinity ? std::min(lowest, values[i]) : lowest;
    }
    return lowest;
  }

  const RowView& row_;
  const Sampling& sampling_;
  const Measure weight_, count_;
  const float likely_, from_;
  RowScratch& scratch_;
  float summed_from_ = NAN;  // scratch holds the tiles' masses of what is >= this
};

}  // namespace

float find_cutoff(const RowView& row, const Sampling& sampling, float max, RowScratch& scratch) {
  return Truncation(row, sampling, max, scratch).find();
}

}  // namespace specdec::cpu

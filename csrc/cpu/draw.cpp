#include "cpu/draw.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <utility>

#include "common/philox.h"
#include "common/tile_sums.h"
#include "cpu/tile_sums.h"

namespace specdec::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float clean(float probability) { return probability >= 0 ? probability : 0.0f; }  // NaN and negative ones count as 0

// Where a draw with `rest` left ends in a tile; an overrun lands on the last id of positive weight.
int walk(const float* weight, int n, double rest, float tile_mass) {
  double total = 0, sum = 0;
  for (int i = 0; i < n; ++i)
    if (weight[i] > 0) total += weight[i];
  const double goal = goal_inside(rest, tile_mass, total);
  int last = 0;
  for (int i = 0; i < n; ++i) {
    if (!(weight[i] > 0)) continue;
    sum += weight[i];
    last = i;
    if (sum > goal) return i;
  }
  return last;
}

// The `count` best of the tokens that were offered.
class BestTokens {
 public:
  explicit BestTokens(int count, float limit = std::numeric_limits<float>::max()) : count_(count), limit_(limit) {}

  // Tokens that cannot reach the worst of them are skipped from their bits alone: see noise_candidates.
  float limit() const { return limit_; }

  void offer(const NoisyToken& token) {
    if (int(heap_.size()) == count_) {
      if (!better(token, heap_.front())) return;
      std::pop_heap(heap_.begin(), heap_.end(), better);
      heap_.pop_back();
    }
    heap_.push_back(token);
    std::push_heap(heap_.begin(), heap_.end(), better);
    if (int(heap_.size()) == count_)  // the slack covers the rounding
      limit_ = std::min(limit_, 1.001f * std::exp(-heap_.front().score));
  }

  // The best first; nothing can be offered any more.
  const std::vector<NoisyToken>& sorted() {
    std::sort_heap(heap_.begin(), heap_.end(), better);
    return heap_;
  }

 private:
  static bool better(const NoisyToken& a, const NoisyToken& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
  }

  const int count_;
  float limit_;
  std::vector<NoisyToken> heap_;  // its front is the worst
};

// (scale P - Q)+, or P if there is no `q`, over the listed ids alone.
Weights listed_weights(const Reading& p, const DraftLaw* q, float scale) {
  const RowScratch& kept = p.scratch;
  std::vector<float> weight;
  list_weights(kept.kept_logit, p.law.weights, p.law.max, p.law.inverse_temperature, p.law.inverse_normalizer * scale,
               weight);
  std::vector<double> mass(p.row.tiles());
  for (size_t i = 0; i < weight.size(); ++i) {
    if (q) weight[i] = residual_weight(weight[i], q->prob(kept.kept_id[i]));
    mass[kept.kept_id[i] / kTile] += weight[i];
  }
  return {{mass.begin(), mass.end()}, [&p, weight = std::move(weight)](int tile, float* out) {
            const std::vector<int32_t>& ids = p.scratch.kept_id;
            std::fill(out, out + p.row.tile_size(tile), 0.0f);
            for (auto id = std::lower_bound(ids.begin(), ids.end(), tile * kTile); id != ids.end(); ++id) {
              if (*id / kTile != tile) break;
              out[*id % kTile] = weight[size_t(id - ids.begin())];
            }
          }};
}

// P without `point` (-1: P itself): the tiles' masses are those found when the row was read, except the point's tile.
Weights weights_without(const Reading& p, int32_t point) {
  Weights out{p.scratch.tile_mass, [&p, point](int tile, float* weight) {
                tile_probs(p.row, p.law, tile, p.law.normalizer, weight);
                if (point >= 0 && point / kTile == tile) weight[point % kTile] = 0.0f;
              }};
  if (point < 0) return out;
  float weight[kTile];
  const int tile = point / kTile;
  out.tile(tile, weight);
  out.mass[tile] = kernels().sum(weight, p.row.tile_size(tile));
  return out;
}

}  // namespace

float MappedRow::logit(int32_t id) const {
  const int32_t own = own_id(id);
  float out = -kInfinity;
  if (own >= 0) row.kernels().load(row.at(own, 1), 1, &out);
  return out;
}

void MappedRow::load(int tile, int n, float* out) const {
  const int32_t begin = tile * kTile;
  if (map == nullptr) return row.kernels().load(row.at(begin, n), n, out);
  for (int i = 0; i < n; ++i) out[i] = logit(begin + i);
}

float DraftLaw::own_prob(int32_t id) const {
  return kind_ == Kind::kLogits ? prob_at(mapped_.row, law_, id)
                                : clean(*static_cast<const float*>(mapped_.row.in_memory(id)));
}

float DraftLaw::prob(int32_t id) const {
  if (is_point()) return id == token_ ? 1.0f : 0.0f;
  const int32_t own = mapped_.own_id(id);
  return own < 0 ? 0.0f : own_prob(own);
}

void DraftLaw::tile(int tile, int n, float* out) const {
  const int32_t begin = tile * kTile;
  if (is_point()) {
    std::fill(out, out + n, 0.0f);
    if (token_ >= begin && token_ < begin + n) out[token_ - begin] = 1.0f;
  } else if (mapped_.map != nullptr) {
    for (int i = 0; i < n; ++i) out[i] = prob(begin + i);
  } else if (kind_ == Kind::kLogits) {
    tile_probs(mapped_.row, law_, tile, 1.0f, out);
  } else {
    const float* probs = static_cast<const float*>(mapped_.row.in_memory(begin));
    for (int i = 0; i < n; ++i) out[i] = clean(probs[i]);
  }
}

float sum_of_probs(const RowView& probs, int tile) {
  return weighing(probs, true).exp_sum(probs.in_memory(tile * kTile), probs.tile_size(tile), 0.0f, 1.0f);
}

int32_t status_of_probs(const RowView& probs, Team* team) {
  std::vector<float> sums(probs.tiles());
  std::atomic<int32_t> seen{0};
  for_each_tile(probs, team, [&](int tile) {
    float unused[kTile / kGroup];
    if (const int32_t flags =
            probs.kernels().group_maxima(probs.in_memory(tile * kTile), probs.tile_size(tile), unused))
      seen |= flags;
    sums[tile] = sum_of_probs(probs, tile);
  });
  const float total = std::accumulate(sums.begin(), sums.end(), 0.0f);
  return seen | (seen & kNaN || !is_distribution(total) ? kBadDraft : 0);
}

std::vector<float> by_tile(const Reading& p, const std::function<float(int)>& f) {
  std::vector<float> out(p.row.tiles());
  for_each_tile(p.row, p.team, [&](int tile) { out[tile] = f(tile); });
  return out;
}

float sum_by_tile(const Reading& p, const std::function<float(int)>& f) { return sum_of(by_tile(p, f)); }

bool Weights::any() const {
  return std::any_of(mass.begin(), mass.end(), [](float m) { return m > 0; });
}

float Weights::total() const { return sum_of(mass); }

int32_t Weights::draw(double uniform) const {
  const FoundTile chosen = find_tile(mass, uniform);
  return chosen.tile * kTile + draw_in(chosen.tile, chosen.rest, chosen.mass);
}

int32_t Weights::draw_in(int chosen, double rest, float tile_mass) const {
  float weight[kTile] = {};
  tile(chosen, weight);
  return walk(weight, kTile, rest, tile_mass);
}

Weights weights_of(const Reading& p) {
  return p.scratch.listed ? listed_weights(p, nullptr, 1.0f) : weights_without(p, -1);
}

Weights weights_left(const Reading& p, std::function<void(int tile, float* scaled_p, float* taken_q)> fill) {
  std::vector<float> mass = by_tile(p, [&](int tile) {
    float scaled_p[kTile], taken_q[kTile];
    fill(tile, scaled_p, taken_q);
    return kernels().residual_sum(scaled_p, taken_q, p.row.tile_size(tile));
  });
  return {std::move(mass), [&p, fill = std::move(fill)](int tile, float* out) {
            float taken_q[kTile];
            fill(tile, out, taken_q);
            for (int i = 0; i < p.row.tile_size(tile); ++i) out[i] = residual_weight(out[i], taken_q[i]);
          }};
}

Weights residual_weights(const Reading& p, const DraftLaw& q, float scale) {
  if (p.scratch.listed) return listed_weights(p, &q, scale);
  if (q.is_point()) return weights_without(p, q.token());
  return weights_left(p, [&p, &q, scale](int tile, float* scaled_p, float* taken_q) {
    tile_probs(p.row, p.law, tile, scale, scaled_p);
    q.tile(tile, p.row.tile_size(tile), taken_q);
  });
}

int32_t draw_token(const Reading& p, double uniform) {
  return p.law.one_hot ? p.law.argmax : weights_of(p).draw(uniform);
}

float overlap(const Reading& p, const DraftLaw& q) {
  if (q.is_point()) return prob_at(p.row, p.law, q.token());
  return sum_by_tile(p, [&](int tile) {
    float ps[kTile], qs[kTile];
    tile_probs(p.row, p.law, tile, 1.0f, ps);
    q.tile(tile, p.row.tile_size(tile), qs);
    return kernels().overlap_sum(ps, qs, p.row.tile_size(tile));
  });
}

std::vector<NoisyToken> noisy_top(const Reading& p, int64_t key, const int64_t* ids, int count, int32_t first_id) {
  const RowView& row = p.row;
  const RowLaw& law = p.law;
  const RowScratch& scratch = p.scratch;
  if (law.one_hot) return {{0.0f, law.argmax}};
  const auto target_id = [&](int32_t id) { return uint32_t(ids ? ids[id] : first_id + id); };
  const auto bits_of = [&](int32_t id) { return noise_bits(key, target_id(id)); };
  const auto noisy = [&](int32_t id, float logit, uint32_t bits) {
    return NoisyToken{(logit - law.max) * law.inverse_temperature + gumbel(key, target_id(id), bits), id};
  };
  BestTokens best(count);
  if (scratch.listed) {
    for (size_t i = 0; i < scratch.kept_id.size(); ++i)
      if ((scratch.kept_logit[i] - law.max) * law.inverse_temperature >= kSmallestExponent)
        best.offer(noisy(scratch.kept_id[i], scratch.kept_logit[i], bits_of(scratch.kept_id[i])));
    return best.sorted();
  }
  std::mutex changing;
  share_tiles(row, p.team, [&](int64_t begin, int64_t end) {
    std::unique_lock lock(changing);
    BestTokens here(count, best.limit());
    lock.unlock();
    float weight[kTile], logit[kTile];
    int32_t offset[kTile];
    uint32_t bits[kTile];
    for (int tile = int(begin); tile < int(end); ++tile) {
      const int n = row.tile_size(tile), first = tile * kTile;
      if (!(scratch.tile_max[tile] >= law.cutoff)) continue;
      tile_probs(row, law, tile, law.normalizer, weight);
      row.kernels().load(row.at(first, n), n, logit);
      int found = 0;
      if (ids == nullptr) {
        found = kernels().noise_candidates(key, first_id + first, n, weight, here.limit(), offset, bits);
      } else {
        for (int i = 0; i < n; ++i)
          if (weight[i] > 0) offset[found] = i, bits[found++] = bits_of(first + i);
      }
      for (int i = 0; i < found; ++i) here.offer(noisy(first + offset[i], logit[offset[i]], bits[i]));
    }
    lock.lock();
    for (const NoisyToken& token : here.sorted()) best.offer(token);
  });
  return best.sorted();
}

}  // namespace specdec::cpu

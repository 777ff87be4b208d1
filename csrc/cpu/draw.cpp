#include "cpu/draw.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/philox.h"

namespace specdec::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float clean(float probability) { return probability >= 0 ? probability : 0.0f; }  // NaN and negative ones count as 0

// Walks weights whose running sum first exceeds `rest`; an overrun lands on the last id of positive weight.
int walk(const float* weight, int n, float rest) {
  double sum = 0;  // in float32 a thousand equal weights drift by several borders' width
  int last = 0;
  for (int i = 0; i < n; ++i) {
    if (!(weight[i] > 0)) continue;
    sum += weight[i];
    last = i;
    if (sum > rest) return i;
  }
  return last;
}

// Walks tile masses alike; `rest` becomes what is left for the walk inside the tile (infinite on an overrun).
int walk_tiles(const std::vector<float>& mass, float uniform, float* rest) {
  float total = 0, before = 0;
  for (float m : mass) total += m;
  const float goal = uniform * total;
  int last = 0;
  for (int tile = 0; tile < int(mass.size()); ++tile) {
    if (!(mass[tile] > 0)) continue;
    last = tile;
    if (before + mass[tile] > goal) {
      *rest = goal - before;
      return tile;
    }
    before += mass[tile];
  }
  *rest = kInfinity;
  return last;
}

// The listed ids' weights, and their masses by tile (as many entries as the row has tiles).
struct Listed {
  std::vector<float> weight, mass;
};

Listed listed_weights(const RowView& row, const RowLaw& law, const RowScratch& scratch, const DraftRow* draft,
                      float scale) {
  Listed out{{}, std::vector<float>(row.tiles())};
  list_weights(scratch.kept_logit, law.max, law.inverse_temperature, law.inverse_normalizer * scale, out.weight);
  std::vector<double> mass(out.mass.size());
  for (size_t i = 0; i < out.weight.size(); ++i) {
    if (draft) out.weight[i] = residual_weight(out.weight[i], draft->prob(scratch.kept_id[i]));
    mass[scratch.kept_id[i] / kTile] += out.weight[i];
  }
  out.mass.assign(mass.begin(), mass.end());
  return out;
}

// (scale * P - Q)+ over one tile.
void residual_tile(const RowView& row, const RowLaw& law, const DraftRow& draft, float scale, int tile, float* p,
                   float* q) {
  tile_probs(row, law, tile, scale, p);
  draft.tile(tile, row.tile_size(tile), q);
}

std::vector<float> residual_masses(const RowView& row, const RowLaw& law, const DraftRow& draft, float scale,
                                   bool split) {
  std::vector<float> mass(row.tiles());
  for_each_tile(row, split, [&](int tile) {
    float p[kTile], q[kTile];
    residual_tile(row, law, draft, scale, tile, p, q);
    mass[tile] = kernels().residual_sum(p, q, row.tile_size(tile));
  });
  return mass;
}

int32_t draw_from_list(const RowView& row, const RowScratch& scratch, const Listed& list, float uniform) {
  float rest;
  const int tile = walk_tiles(list.mass, uniform, &rest);
  const auto first = std::lower_bound(scratch.kept_id.begin(), scratch.kept_id.end(), tile * kTile);
  const auto end = std::lower_bound(first, scratch.kept_id.end(), tile * kTile + row.tile_size(tile));
  const size_t offset = size_t(first - scratch.kept_id.begin());
  return first[walk(&list.weight[offset], int(end - first), rest)];
}

}  // namespace

float MappedRow::logit(int32_t id) const {
  const int32_t own = own_id(id);
  float out = -kInfinity;
  if (own >= 0) row.kernels().load(row.at(own), 1, &out);
  return out;
}

void MappedRow::load(int tile, int n, float* out) const {
  const int32_t begin = tile * kTile;
  if (map == nullptr) return row.kernels().load(row.at(begin), n, out);
  for (int i = 0; i < n; ++i) out[i] = logit(begin + i);
}

float DraftRow::own_prob(int32_t id) const {
  return kind_ == Kind::kLogits ? prob_at(mapped_.row, law_, id)
                                : clean(*static_cast<const float*>(mapped_.row.at(id)));
}

float DraftRow::prob(int32_t id) const {
  if (is_point()) return id == token_ ? 1.0f : 0.0f;
  const int32_t own = mapped_.own_id(id);
  return own < 0 ? 0.0f : own_prob(own);
}

void DraftRow::tile(int tile, int n, float* out) const {
  const int32_t begin = tile * kTile;
  if (is_point()) {
    std::fill(out, out + n, 0.0f);
    if (token_ >= begin && token_ < begin + n) out[token_ - begin] = 1.0f;
  } else if (mapped_.map != nullptr) {
    for (int i = 0; i < n; ++i) out[i] = prob(begin + i);
  } else if (kind_ == Kind::kLogits) {
    tile_probs(mapped_.row, law_, tile, 1.0f, out);
  } else {
    const float* probs = static_cast<const float*>(mapped_.row.at(begin));
    for (int i = 0; i < n; ++i) out[i] = clean(probs[i]);
  }
}

bool DraftRow::has_nan() const {
  if (kind_ != Kind::kProbs) return false;
  const float* probs = static_cast<const float*>(mapped_.row.at(0));
  return std::any_of(probs, probs + mapped_.row.vocab, [](float p) { return p != p; });
}

int32_t draw_from_tiles(const std::vector<float>& mass, float uniform, const std::function<int(int, float*)>& weights) {
  float weight[kTile], rest;
  const int tile = walk_tiles(mass, uniform, &rest);
  const int n = weights(tile, weight);
  return tile * kTile + walk(weight, n, rest);
}

bool any(const std::vector<float>& mass) {
  return std::any_of(mass.begin(), mass.end(), [](float m) { return m > 0; });
}

int32_t draw_token(const RowView& row, const RowLaw& law, const RowScratch& scratch, const DraftRow* draft, float scale,
                   float uniform, bool split) {
  if (law.one_hot) return law.argmax;
  if (scratch.listed) {
    Listed list = listed_weights(row, law, scratch, draft, scale);
    if (draft && !any(list.mass)) list = listed_weights(row, law, scratch, nullptr, 1.0f);
    return draw_from_list(row, scratch, list, uniform);
  }
  if (draft && !draft->is_point()) {
    const std::vector<float> mass = residual_masses(row, law, *draft, scale, split);
    if (any(mass))
      return draw_from_tiles(mass, uniform, [&](int tile, float* p) {
        float q[kTile];
        const int n = row.tile_size(tile);
        residual_tile(row, law, *draft, scale, tile, p, q);
        for (int i = 0; i < n; ++i) p[i] = residual_weight(p[i], q[i]);
        return n;
      });
    draft = nullptr;
  }
  // P itself, or P without the point: its tiles' masses are those found when the row was read, but for the point's tile.
  std::vector<float> mass = scratch.tile_mass;
  const auto tile_weights = [&](int tile, float* p) {
    const int n = row.tile_size(tile);
    tile_probs(row, law, tile, law.normalizer, p);
    if (draft && draft->token() / kTile == tile) p[draft->token() % kTile] = 0.0f;
    return n;
  };
  if (draft) {
    float p[kTile];
    const int tile = draft->token() / kTile;
    const int n = tile_weights(tile, p);
    mass[tile] = kernels().sum(p, n);
    if (!any(mass)) mass = scratch.tile_mass, draft = nullptr;
  }
  return draw_from_tiles(mass, uniform, tile_weights);
}

float residual_mass(const RowView& row, const RowLaw& law, const RowScratch& scratch, const DraftRow& draft,
                    float scale, bool split) {
  float total = 0;
  if (law.one_hot) return residual_weight(scale, draft.prob(law.argmax));
  for (float m : scratch.listed ? listed_weights(row, law, scratch, &draft, scale).mass
                                : residual_masses(row, law, draft, scale, split))
    total += m;
  return total;
}

float overlap(const RowView& row, const RowLaw& law, const DraftRow& draft, bool split) {
  if (draft.is_point()) return prob_at(row, law, draft.token());
  std::vector<float> mass(row.tiles());
  for_each_tile(row, split, [&](int tile) {
    float p[kTile], q[kTile];
    residual_tile(row, law, draft, 1.0f, tile, p, q);
    mass[tile] = kernels().overlap_sum(p, q, row.tile_size(tile));
  });
  float total = 0;
  for (float m : mass) total += m;
  return total;
}

std::vector<NoisyToken> noisy_top(const RowView& row, const RowLaw& law, const RowScratch& scratch, int64_t key,
                                  const int64_t* ids, int count) {
  if (law.one_hot) return {{0.0f, law.argmax}};
  std::vector<NoisyToken> best;  // a heap whose front is the worst of the best
  const auto better = [](const NoisyToken& a, const NoisyToken& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
  };
  float limit = std::numeric_limits<float>::max();
  const auto offer = [&](int32_t id, float logit, uint32_t bits) {
    const NoisyToken token{(logit - law.max) * law.inverse_temperature + gumbel(bits), id};
    if (int(best.size()) == count) {
      if (!better(token, best.front())) return;
      std::pop_heap(best.begin(), best.end(), better);
      best.pop_back();
    }
    best.push_back(token);
    std::push_heap(best.begin(), best.end(), better);
    // What cannot reach the worst of the best is passed over by its bits alone; the slack covers the rounding.
    if (int(best.size()) == count)
      limit = std::min(std::numeric_limits<float>::max(), 1.001f * std::exp(-best.front().score));
  };
  const auto bits_of = [&](int32_t id) { return noise_bits(key, ids ? uint32_t(ids[id]) : uint32_t(id)); };
  if (scratch.listed) {
    for (size_t i = 0; i < scratch.kept_id.size(); ++i)
      if ((scratch.kept_logit[i] - law.max) * law.inverse_temperature >= kSmallestExponent)
        offer(scratch.kept_id[i], scratch.kept_logit[i], bits_of(scratch.kept_id[i]));
  } else {
    float weight[kTile], logit[kTile];
    int32_t offset[kTile];
    uint32_t bits[kTile];
    for (int tile = 0; tile < row.tiles(); ++tile) {
      const int n = row.tile_size(tile), first = tile * kTile;
      if (!(scratch.tile_max[tile] >= law.cutoff)) continue;
      tile_probs(row, law, tile, law.normalizer, weight);
      row.kernels().load(row.at(first), n, logit);
      int found = 0;
      if (ids == nullptr) {
        found = kernels().noise_candidates(key, first, n, weight, limit, offset, bits);
      } else {
        for (int i = 0; i < n; ++i)
          if (weight[i] > 0) offset[found] = i, bits[found++] = bits_of(first + i);
      }
      for (int i = 0; i < found; ++i) offer(first + offset[i], logit[offset[i]], bits[i]);
    }
  }
  std::sort_heap(best.begin(), best.end(), better);
  return best;
}

}  // namespace specdec::cpu

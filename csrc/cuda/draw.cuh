// Draws from a row's law, or from what is left of it after a draft law is taken away.
#pragma once
#include "common/philox.h"
#include "cuda/law.cuh"

namespace specdec::cuda {

// The draft's law at one position, over target ids.
struct DraftLaw {
  enum class Kind : int32_t { kNone, kPoint, kLogits, kProbs };
  Kind kind = Kind::kNone;
  int32_t token = -1;  // kPoint: where all mass is
  RowView row{};       // kLogits, kProbs
  RowLaw law{};        // kLogits
  // The draft id of each target id below map_size, -1 where there is none; null: the same id.
  const int64_t* map = nullptr;
  int64_t map_size = 0;

  // The draft id of a target id; -1 if there is none.
  __device__ int32_t draft_id(int32_t id) const {
    const int64_t mapped = map == nullptr ? id : id < map_size ? map[id] : -1;
    return mapped >= 0 && mapped < row.vocab ? int32_t(mapped) : -1;
  }

  __device__ float prob(int32_t id) const {
    if (kind == Kind::kPoint) return id == token ? 1.0f : 0.0f;
    const int32_t mapped = draft_id(id);
    if (mapped < 0) return 0.0f;
    if (kind == Kind::kLogits) return prob_at(row, law, mapped);
    return clean(logit_at(row, mapped));
  }

  // The draft's logit of a draft id; -inf where that is none.
  __device__ float logit(int32_t mapped) const { return mapped >= 0 ? logit_at(row, mapped) : -INFINITY; }

  // Whether Q's row can be read in order, tile by tile (kLogits and kProbs).
  __device__ bool in_order() const { return map == nullptr && !law.one_hot; }

  // Q of a value of such a row.
  __device__ float of_value(float x) const {
    return kind == Kind::kLogits ? weight_of(x, law) * law.inverse_normalizer : clean(x);
  }

  // Q of run j of the lane's ids of a tile.
  __device__ void of_run(int tile, int j, float* q) const {
    if (!in_order()) {
#pragma unroll
      for (int k = 0; k < kRun; ++k) q[k] = prob(held_id(tile, j * kRun + k));
      return;
    }
    load_run(row, tile, j, q);
#pragma unroll
    for (int k = 0; k < kRun; ++k) q[k] = of_value(q[k]);
  }

 private:
  __device__ static float clean(float p) { return p >= 0 ? p : 0.0f; }  // NaN and negative ones count as 0
};

// Whether a target id is kept by the mixture of a position with these rows.
__device__ __forceinline__ bool keeps(bool draft_decides, const Mixture& mixture, const RowView& row,
                                      const DraftLaw& draft, int32_t id) {
  if (!draft_decides) return is_kept(mixture, logit_at(row, id), id);
  const int32_t draft_id = draft.draft_id(id);
  return is_kept(mixture, draft.logit(draft_id), draft_id);
}

// The sum of a tile's weights, by a warp, run by run.
template <class From>
__device__ float weighed_mass(const From& from, int tile) {
  float sum = 0.0f;
#pragma unroll 1
  for (int j = 0; j < kRuns; ++j) {
    float x[kRun];
    load_run(from.row, tile, j, x);
    from.weigh(tile, j, x);
#pragma unroll
    for (int k = 0; k < kRun; ++k) sum += x[k];
  }
  return warp_reduce(sum, Sum{});
}

// One position of a span: P, Q (if there is a draft), the law mixed from the two, and what is left there to draw a token
// from. Without a draft that is P; of a draft that is a point, P without the point, times anything.
struct Position {
  RowView row;
  RowLaw law;
  bool cut;                    // the table's masses are not P's
  bool draft_decides = false;  // what is kept
  DraftLaw draft{};
  Mixture mixture{};
  Remainder left{};

  __device__ float p(int32_t id) const { return prob_at(row, law, id); }
  __device__ float q(int32_t id) const { return draft.prob(id); }
  __device__ bool keeps(int32_t id) const { return cuda::keeps(draft_decides, mixture, row, draft, id); }

  // Where nothing was left: all of a cascade's law, or of P.
  __device__ void take_all() {
    if (!left.mixed) draft = DraftLaw{};
    left = all_of(left, mixture);
  }

  // Whether no more than P's one id can be left.
  __device__ bool certain() const { return law.one_hot && !left.mixed; }

  // A cascade's view of run j of the lane's ids of a tile, x their target logits: f(k, P, Q, kept, draft's logit and id).
  template <class F>
  __device__ __forceinline__ void for_each_mixed(int tile, int j, const float* x, F f) const {
    float y[kRun];
    int32_t ids[kRun];
#pragma unroll
    for (int k = 0; k < kRun; ++k) ids[k] = draft.draft_id(held_id(tile, j * kRun + k));
    if (draft.map == nullptr) {
      load_run(draft.row, tile, j, y);
    } else {
#pragma unroll
      for (int k = 0; k < kRun; ++k) y[k] = draft.logit(ids[k]);
    }
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const int32_t id = held_id(tile, j * kRun + k);
      const bool kept = draft_decides ? is_kept(mixture, y[k], ids[k]) : is_kept(mixture, x[k], id);
      f(k, prob_of(x[k], law, id), prob_of(y[k], draft.law, ids[k]), kept, y[k], ids[k]);
    }
  }

  __device__ bool subtracts() const { return draft.kind >= DraftLaw::Kind::kLogits; }

  // What exp((logit - max) / T) is multiplied by.
  __device__ float times() const { return subtracts() ? law.inverse_normalizer * left.scale : 1.0f; }

  // Weights of run j of the lane's ids of a tile, in the place of their logits.
  __device__ void weigh(int tile, int j, float* x) const {
    if (left.mixed) {
      for_each_mixed(tile, j, x, [&](int k, float p, float q, bool kept, float, int32_t) {
        x[k] = residual_weight(left.scale * p, (kept ? left.taken_kept : left.taken) * q);
      });
      return;
    }
#pragma unroll
    for (int k = 0; k < kRun; ++k) x[k] = weight_of(x[k], law) * times();
    if (subtracts()) {
      float q[kRun];
      draft.of_run(tile, j, q);
#pragma unroll
      for (int k = 0; k < kRun; ++k) x[k] = residual_weight(x[k], q[k]);
    } else if (draft.kind == DraftLaw::Kind::kPoint && draft.token / kTile == tile) {
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (held_id(tile, j * kRun + k) == draft.token) x[k] = 0.0f;
    }
  }

  // The sum of a tile's weights, by a warp; the tile is read only if the row's table does not tell.
  __device__ float mass(int tile, const TileTable& table) const {
    if (left.mixed) return weighed_mass(*this, tile);  // also where P is 0: Q counts if what is lost of it is negative
    if (table.max[tile] == -INFINITY || table.max[tile] < law.cutoff) return 0.0f;
    if (!cut && !subtracts() && (draft.kind == DraftLaw::Kind::kNone || draft.token / kTile != tile))
      return table.mass[tile];
    float x[kHeld], even = 0.0f, odd = 0.0f;
    load_tile(row, tile, x);
    if (subtracts() && draft.in_order()) {  // the same numbers as by runs, with all loads of both rows in flight
      float q[kHeld];
      load_tile(draft.row, tile, q);
#pragma unroll
      for (int k = 0; k < kHeld; ++k) x[k] = residual_weight(weight_of(x[k], law) * times(), draft.of_value(q[k]));
    } else {
#pragma unroll
      for (int j = 0; j < kRuns; ++j) weigh(tile, j, x + j * kRun);
    }
#pragma unroll
    for (int k = 0; k < kHeld; k += 2) even += x[k], odd += x[k + 1];
    return warp_reduce(even + odd, Sum{});
  }
};

// The masses of a row's tiles, this block's share of them: it is number `rank` of `size`. Out of line, as draw_id.
template <bool kClustered = false, class From>
__device__ __noinline__ void masses_of(const From& from, TileTable table, float* mass, int rank, int size) {
  for (int tile = rank * num_warps() + warp_id(); tile < from.row.tiles(); tile += size * num_warps()) {
    const float m = from.mass(tile, table);
    if (lane_id() == 0) Team<kClustered>::store(mass + tile, m);
  }
}

// In one tile, the first id at which the running sum of weights exceeds `rest`, else the last of positive weight.
template <class From>
__device__ __forceinline__ int32_t walk_tile(const From& from, int tile, float rest) {
  float x[kHeld], before = 0.0f;
  int last_run = 0, last_held = 0;
  load_tile(from.row, tile, x);
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    float* const run = x + j * kRun;
    float sum = 0.0f;
    from.weigh(tile, j, run);
#pragma unroll
    for (int k = 0; k < kRun; ++k) sum += run[k];
    float until = sum;  // of this lane and all below
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(kAllLanes, until, step);
      if (lane_id() >= step) until += other;
    }
    const float below = __shfl_up_sync(kAllLanes, until, 1);
    const float start = before + (lane_id() == 0 ? 0.0f : below);
    int hit = -1, positive = -1;
    float partial = 0.0f;
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      partial += run[k];
      if (run[k] > 0) positive = k;
      if (hit < 0 && run[k] > 0 && start + partial > rest) hit = k;
    }
    const unsigned hits = __ballot_sync(kAllLanes, hit >= 0), some = __ballot_sync(kAllLanes, positive >= 0);
    if (hits) {
      const int lane = __ffs(int(hits)) - 1;
      return tile * kTile + (j * 32 + lane) * kRun + __shfl_sync(kAllLanes, hit, lane);
    }
    if (some) {
      const int lane = 31 - __clz(int(some));
      last_run = j * 32 + lane;
      last_held = __shfl_sync(kAllLanes, positive, lane);
    }
    before += __shfl_sync(kAllLanes, until, 31);
  }
  return tile * kTile + last_run * kRun + last_held;
}

// An id drawn by one warp given its tiles' masses, in every lane; -1 if nothing is left to draw from. Out of line, as it
// is called from several places.
template <class From>
__device__ __noinline__ int32_t draw_id(const From& from, const float* mass, float uniform) {
  const int tiles = from.row.tiles();
  const float goal = uniform * ordered_sum(mass, tiles);
  float before = 0.0f, rest = INFINITY;  // infinite on an overrun
  int chosen = -1;
  for (int begin = 0; begin < tiles && rest == INFINITY; begin += 32) {
    const float mine = begin + lane_id() < tiles ? mass[begin + lane_id()] : 0.0f;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {
      const float m = __shfl_sync(kAllLanes, mine, i);
      if (rest < INFINITY || !(m > 0)) continue;
      chosen = begin + i;
      if (before + m > goal)
        rest = goal - before;
      else
        before += m;
    }
  }
  return chosen < 0 ? -1 : walk_tile(from, chosen, rest);
}

// (logit - max) / T + G as a number that is larger for a larger score and, of equal ones, for the lower id.
__device__ __forceinline__ Fixed noisy_key(float score, int32_t id) {
  return Fixed(ordered(score)) << 32 | (0xFFFFFFFFu - uint32_t(id));
}
__device__ __forceinline__ int32_t noisy_id(Fixed key) { return int32_t(0xFFFFFFFFu - uint32_t(key)); }

// offer(score, id) for this lane's possible ids of a tile, but for those that `limit` rules out: see limit_of. `ids` (or
// null) gives the target id, whose noise counts, of each id of the row.
template <class Offer>
__device__ __forceinline__ void noisy_tile(const RowView& row, const RowLaw& law, int tile, int64_t key,
                                           const int64_t* ids, const float& limit, Offer offer) {
#pragma unroll 1
  for (int j = 0; j < kRuns; ++j) {
    float x[kRun];
    load_run(row, tile, j, x);
#pragma unroll
    for (int k = 0; k < kRun; k += 4) {
      const int32_t first = held_id(tile, j * kRun + k);
      Words4 noise{};
      if (ids == nullptr) noise = philox(low_word(key), high_word(key), uint32_t(first) / 4, 0, 0, kNoiseStream);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = weight_of(x[k + i], law);
        if (!(weight > 0)) continue;
        const uint32_t bits = ids == nullptr ? noise.word[i] : noise_bits(key, uint32_t(ids[first + i]));
        if (float(bits) * 0x1p-32f > weight * limit) continue;
        offer((x[k + i] - law.max) * law.inverse_temperature + gumbel(bits), first + i);
      }
    }
  }
}

constexpr float kNoLimit = 3.0e38f;

// A score is log(weight) - log(-log1p(-t)) and -log1p(-t) >= t, so an id with t > weight * limit_of(score) has a lower
// score, which its bits alone show; the slack covers the rounding.
__device__ __forceinline__ float limit_of(float score) { return fminf(kNoLimit, 1.001f * fast_exp2(-score * kLog2E)); }

// The best noisy key of the rows' tiles that one thread has seen.
struct BestNoisy {
  Fixed key = 0;
  float limit = kNoLimit;
  __device__ void see(const RowView& row, const RowLaw& law, int tile, int64_t noise_key, const int64_t* ids) {
    noisy_tile(row, law, tile, noise_key, ids, limit, [&](float score, int32_t id) {
      const Fixed offered = noisy_key(score, id);
      if (offered <= key) return;
      key = offered;
      limit = limit_of(score);
    });
  }
};

}  // namespace specdec::cuda

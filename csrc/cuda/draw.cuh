// Draws from a row's law, or from what is left of it after a draft law is subtracted.
#pragma once
#include "common/philox.h"
#include "cuda/law.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

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

  // The draft id of a target id; -1 if it has none.
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

  // The draft's logit of a draft id; -inf for -1.
  __device__ float logit(int32_t mapped) const { return mapped >= 0 ? logit_at(row, mapped) : -INFINITY; }

  // Whether Q's row can be read in order, tile by tile (kLogits and kProbs).
  __device__ bool in_order() const { return map == nullptr && !law.one_hot; }

  // Calls f(q), where q(value) gives Q from a value of such a row.
  template <class F>
  __device__ __forceinline__ auto with_values(F f) const {
    return kind == Kind::kLogits ? f(Weight(law, law.inverse_normalizer)) : f([](float x) { return clean(x); });
  }

  // The draft ids of run j of the lane's target ids in a tile, and their logits. Out of line, as everything that works
  // by runs: it has several call sites.
  struct Drafted {
    Run x;
    int32_t ids[kRun];
  };
  __device__ __noinline__ Drafted run(int tile, int j) const {
    Drafted out;
#pragma unroll
    for (int k = 0; k < kRun; ++k) out.ids[k] = draft_id(held_id(tile, j * kRun + k));
    if (map == nullptr) {
      out.x = load_run(row, tile, j);
    } else {
#pragma unroll
      for (int k = 0; k < kRun; ++k) out.x.x[k] = logit(out.ids[k]);
    }
    return out;
  }

  // Q of the same ids, for kLogits and kProbs.
  __device__ __noinline__ Run of_run(int tile, int j) const {
    const auto of_values = [&](const Run& x) {
      return with_values([&](auto of_value) {
        Run q;
#pragma unroll
        for (int k = 0; k < kRun; ++k) q.x[k] = of_value(x.x[k]);
        return q;
      });
    };
    if (in_order()) return of_values(load_run(row, tile, j));
    const Drafted drafted = run(tile, j);
    Run q = of_values(drafted.x);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      if (kind == Kind::kLogits && law.one_hot) q.x[k] = drafted.ids[k] == law.argmax ? 1.0f : 0.0f;
      if (drafted.ids[k] < 0) q.x[k] = 0.0f;
    }
    return q;
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

// The sum of a tile's weights, run by run; by one warp.
template <class From>
__device__ float weighed_mass(const From& from, int tile) {
  float sum = 0.0f;
#pragma unroll 1
  for (int j = 0; j < kRuns; ++j) {
    const Run weights = from.weigh(tile, j, load_run(from.row, tile, j));
#pragma unroll
    for (int k = 0; k < kRun; ++k) sum += weights.x[k];
  }
  return warp_reduce(sum, Sum{});
}

// One position of a span: P, Q (if there is a draft), the law mixed from the two, and what is left there to draw a
// token from: without a draft, P; with a point mass as draft, any multiple of P without the point.
struct Position {
  RowView row;
  RowLaw law;
  bool cut;                    // P is truncated: the table's masses are not P's
  bool draft_decides = false;  // which ids are kept
  DraftLaw draft{};
  Mixture mixture{};
  Remainder left{};

  __device__ float p(int32_t id) const { return prob_at(row, law, id); }
  __device__ float q(int32_t id) const { return draft.prob(id); }
  __device__ bool keeps(int32_t id) const { return cuda::keeps(draft_decides, mixture, row, draft, id); }

  // For when nothing is left: takes all of a cascade's law, or of P.
  __device__ void take_all() {
    left = all_of(left, mixture);
    if (!left.mixed) draft = DraftLaw{};
  }

  // Whether nothing but P's one id can be left.
  __device__ bool certain() const { return law.one_hot && !left.mixed; }

  // A cascade's view of run j of the lane's ids in a tile with target logits x: f(k, P, Q, kept, draft's logit and id).
  template <class F>
  __device__ __forceinline__ void for_each_mixed(int tile, int j, const Run& x, F f) const {
    const DraftLaw::Drafted drafted = draft.run(tile, j);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const int32_t id = held_id(tile, j * kRun + k), draft_id = drafted.ids[k];
      const float y = drafted.x.x[k];
      const bool kept = draft_decides ? is_kept(mixture, y, draft_id) : is_kept(mixture, x.x[k], id);
      f(k, prob_of(x.x[k], law, id), prob_of(y, draft.law, draft_id), kept, y, draft_id);
    }
  }

  __device__ bool subtracts() const { return draft.kind >= DraftLaw::Kind::kLogits; }

  // The factor of exp((logit - max) / T) in a weight.
  __device__ float times() const { return subtracts() ? law.inverse_normalizer * left.scale : 1.0f; }

  // Weights of run j of the lane's ids in a tile with target logits x.
  __device__ __noinline__ Run weigh(int tile, int j, Run x) const {
    Run weights;
    if (left.mixed) {
      for_each_mixed(tile, j, x, [&](int k, float p, float q, bool kept, float, int32_t) {
        weights.x[k] = residual_weight(left.scale * p, (kept ? left.taken_kept : left.taken) * q);
      });
      return weights;
    }
    if (law.weights) {
#pragma unroll
      for (int k = 0; k < kRun; ++k) weights.x[k] = weight_itself(x.x[k], law) * times();
    } else {
      const Weight weight(law, times());
#pragma unroll
      for (int k = 0; k < kRun; ++k) weights.x[k] = weight(x.x[k]);
    }
    if (subtracts()) {
      const Run q = draft.of_run(tile, j);
#pragma unroll
      for (int k = 0; k < kRun; ++k) weights.x[k] = residual_weight(weights.x[k], q.x[k]);
    } else if (has_point(tile)) {
#pragma unroll
      for (int k = 0; k < kRun; ++k)
        if (held_id(tile, j * kRun + k) == draft.token) weights.x[k] = 0.0f;
    }
    return weights;
  }

  // Whether tables do not tell the tiles' masses; with a point mass as draft, one tile's mass is never told.
  __device__ bool reads_rows() const { return left.mixed || cut || subtracts(); }
  __device__ bool has_point(int tile) const {
    return draft.kind == DraftLaw::Kind::kPoint && draft.token / kTile == tile;
  }

  // Whether P is positive anywhere in a tile.
  __device__ bool possible(int tile, const TileTable& table) const {
    return table.max[tile] > -INFINITY && table.max[tile] >= law.cutoff;
  }

  // The mass of a tile, by one warp; the tile is read only if the row's table does not tell. The loads of kStep runs of
  // both rows are in flight at once, as many as the registers allow.
  template <bool kAnywhere, int kStep>
  __device__ float mass(int tile, const TileTable& table) const {
    if (left.mixed) return weighed_mass(*this, tile);  // also where P is 0: a negative `taken` adds Q
    if (!possible(tile, table)) return 0.0f;
    if (!reads_rows() && !has_point(tile)) return table.mass[tile];
    float sum;
    if (fits(tile)) {
      sum = draft.with_values([&](auto of_draft) { return sum_of_runs<kAnywhere, kStep>(tile, of_draft); });
    } else {
      float even = 0.0f, odd = 0.0f;
#pragma unroll 1
      for (int j = 0; j < kRuns; ++j) {
        const Run weights = weigh(tile, j, load_run(row, tile, j));
#pragma unroll
        for (int k = 0; k < kRun; k += 2) even += weights.x[k], odd += weights.x[k + 1];
      }
      sum = even + odd;
    }
    return warp_reduce(sum, Sum{});
  }

  // The weights of run j of the lane's ids in a tile, loaded for this run alone.
  __device__ Run weights_of(int tile, int j) const {
    if (!fits(tile)) return weigh(tile, j, load_run(row, tile, j));
    return draft.with_values([&](auto of_draft) {
      uint32_t words[2][kRun];
      load_runs<1>(row, row.data, tile, j, words[0]);
      load_runs<1>(draft.row, draft.row.data, tile, j, words[1]);
      Run p, q;
      unpack<kRun>(words[0], row.dtype, p.x);
      unpack<kRun>(words[1], draft.row.dtype, q.x);
      const Weight weight(law, times());
#pragma unroll
      for (int k = 0; k < kRun; ++k) p.x[k] = residual_weight(weight(p.x[k]), of_draft(q.x[k]));
      return p;
    });
  }

 private:
  // Whether a tile of both rows can be loaded run by run, with nothing else to look at.
  __device__ bool fits(int tile) const {
    return subtracts() && draft.in_order() && !kProcessed && !law.weights &&
           ((is_whole(row, tile) && is_whole(draft.row, tile)) || (in_whole_runs(row) && in_whole_runs(draft.row)));
  }

  // The lane's share of the mass of a tile that fits; the same numbers as from weigh.
  template <bool kAnywhere, int kStep, class OfDraft>
  __device__ __forceinline__ float sum_of_runs(int tile, OfDraft of_draft) const {
    const bool whole = is_whole(row, tile) && is_whole(draft.row, tile);
    const char* const start = kAnywhere ? start_of(row, tile) : row.data;
    const char* const start_of_draft = kAnywhere ? start_of(draft.row, tile) : draft.row.data;
    const Weight weight(law, times());
    constexpr int kValues = kStep * kRun;
    float even = 0.0f, odd = 0.0f;
#pragma unroll 1
    for (int j = 0; j < kRuns; j += kStep) {
      uint32_t words[2][kValues];
      float p[kValues], q[kValues];
      if (whole) {
        load_whole<kStep, kAnywhere>(lane_pieces(start, row.dtype, tile, j), row.dtype, words[0]);
        load_whole<kStep, kAnywhere>(lane_pieces(start_of_draft, draft.row.dtype, tile, j), draft.row.dtype, words[1]);
      } else {
        load_runs<kStep, kAnywhere>(row, start, tile, j, words[0]);
        load_runs<kStep, kAnywhere>(draft.row, start_of_draft, tile, j, words[1]);
      }
      unpack<kValues>(words[0], row.dtype, p);
      unpack<kValues>(words[1], draft.row.dtype, q);
#pragma unroll
      for (int k = 0; k < kValues; ++k) (k % 2 ? odd : even) += residual_weight(weight(p[k]), of_draft(q[k]));
    }
    return even + odd;
  }
};

// The masses of a row's tiles: the share of block number `rank` of `size`. Out of line, as draw_id.
template <bool kClustered = false, int kStep = 2, class From>
__device__ __noinline__ void masses_of(const From& from, TileTable table, float* mass, int rank, int size) {
  for_each_tile(rank, size, from.row.tiles(), [&](int tile) {
    const float m = from.template mass<kClustered, kStep>(tile, table);
    if (lane_id() == 0) Team<kClustered>::store(mass + tile, m);
  });
}

// The weights of a tile; each of four warps finds those of one run.
class TileWeights {
 public:
  __device__ explicit TileWeights(float* weights) : weights_(weights) {}
  template <class From>
  __device__ __forceinline__ void find(const From& from, int tile, int j) const {
    const Run run = from.weights_of(tile, j);
#pragma unroll
    for (int k = 0; k < kRun; ++k) at(j, k) = run.x[k];
  }
  // Their sum, by one warp, once the others have written theirs; the same number as from.mass gives.
  __device__ __forceinline__ float sum() const {
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
#pragma unroll
      for (int k = 0; k < kRun; k += 2) even += at(j, k), odd += at(j, k + 1);
    }
    return warp_reduce(even + odd, Sum{});
  }

 private:
  __device__ __forceinline__ float& at(int j, int k) const { return weights_[(j * kRun + k) * 32 + lane_id()]; }
  float* weights_;
};

constexpr int kTilesOfBlock = 2;  // in a block of kTilesOfBlock * kRuns warps

// As masses_of, but with a warp for each run of a tile, for calls with so few rows that there are enough warps. Not for
// what is left of a cascade.
inline __device__ __noinline__ void masses_by_runs(const Position& from, TileTable table, float* mass, int rank,
                                                   int size) {
  SPECDEC_SHARED(float, weights, kTilesOfBlock* kTile);
  const int tiles = from.row.tiles(), j = warp_id() % kRuns, place = warp_id() / kRuns;
  const TileWeights own(weights + place * kTile);
  for (int first = rank * kTilesOfBlock; first < tiles; first += size * kTilesOfBlock) {
    const int tile = first + place;
    const bool read = tile < tiles && from.possible(tile, table);
    if (read) own.find(from, tile, j);
    __syncthreads();
    if (j == 0 && tile < tiles) {
      const float m = read ? own.sum() : 0.0f;
      if (lane_id() == 0) mass[tile] = m;
    }
    __syncthreads();  // the weights are still in use
  }
}

// The masses of all tiles, by one block, if no rows need to be read for them.
inline __device__ __noinline__ void told_masses(const Position& from, TileTable table, float* mass) {
  SPECDEC_SHARED(float, weights, kTile);
  const TileWeights around(weights);
  const int tiles = from.row.tiles();
  const int point = from.draft.kind == DraftLaw::Kind::kPoint ? from.draft.token / kTile : -1;
  const bool read = point >= 0 && from.possible(point, table);
  if (read && warp_id() < kRuns) around.find(from, point, warp_id());
  for (int tile = int(threadIdx.x); tile < tiles; tile += int(blockDim.x))
    if (tile != point) mass[tile] = from.possible(tile, table) ? table.mass[tile] : 0.0f;
  __syncthreads();
  if (point < 0 || warp_id() != 0) return;
  const float m = read ? around.sum() : 0.0f;
  if (lane_id() == 0) mass[point] = m;
}

// Where a draw ends in one run of a tile, if it ends there; else the run's last id of positive weight, if it has one.
struct EndInRun {
  int32_t place;
  bool ends, some;
};

// The id at which a draw ends in the tile it has found, by one block: the first whose running sum of weights exceeds
// the goal; on an overrun the last of positive weight. Each warp has a run, and each lane the ids that it holds; sums
// run from run to run and, within a run, from lane to lane.
template <class From>
__device__ __forceinline__ int32_t find_id(const From& from, const FoundTile& found) {
  SPECDEC_SHARED(double, totals, kRuns);
  SPECDEC_SHARED(EndInRun, ends, kRuns);
  const int j = warp_id();  // blocks have at least four warps: see threads_for
  Run run{};
  double until = 0.0;  // the run's sum of weights over this lane and all below
  if (j < kRuns) {
    run = from.weigh(found.tile, j, load_run(from.row, found.tile, j));
#pragma unroll
    for (int k = 0; k < kRun; ++k) until += run.x[k];
    until = sum_until(until);
    if (lane_id() == 31) totals[j] = until;
  }
  __syncthreads();
  if (j < kRuns) {
    double total = 0.0, before = 0.0;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      if (i == j) before = total;
      total += totals[i];
    }
    const double goal = goal_inside(found.rest, found.mass, total);
    const double below = __shfl_up_sync(kAllLanes, until, 1);
    const double start = before + (lane_id() == 0 ? 0.0 : below);
    int hit = -1, positive = -1;
    double partial = 0.0;
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      partial += run.x[k];
      if (run.x[k] > 0) positive = k;
      if (hit < 0 && run.x[k] > 0 && start + partial > goal) hit = k;
    }
    const unsigned hits = __ballot_sync(kAllLanes, hit >= 0), some = __ballot_sync(kAllLanes, positive >= 0);
    const int lane = hits ? __ffs(int(hits)) - 1 : some ? 31 - __clz(int(some)) : 0;
    const int place = (j * 32 + lane) * kRun + __shfl_sync(kAllLanes, hits ? hit : positive, lane);
    if (lane_id() == 0) ends[j] = {place, hits != 0, some != 0};
  }
  __syncthreads();
  int last = 0;
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    if (ends[i].some) last = ends[i].place;
    if (ends[i].ends) break;
  }
  return found.tile * kTile + last;
}

// An id drawn by one block given its tiles' masses, in every thread; -1 if nothing is left to draw from. Out of line:
// it has several call sites.
template <class From>
__device__ __noinline__ int32_t draw_id(const From& from, const float* mass, double uniform) {
  SPECDEC_SHARED(FoundTile, found, 1);
  __syncthreads();
  if (warp_id() == 0) {
    const FoundTile tile = find_tile(mass, from.row.tiles(), uniform);
    if (lane_id() == 0) found[0] = tile;
  }
  __syncthreads();
  return found[0].tile < 0 ? -1 : find_id(from, found[0]);
}

// (logit - max) / T + G as a number that grows with the score and, among equal scores, is larger for the lower id.
__device__ __forceinline__ Fixed noisy_key(float score, int32_t id) {
  return Fixed(ordered(score)) << 32 | (0xFFFFFFFFu - uint32_t(id));
}
__device__ __forceinline__ int32_t noisy_id(Fixed key) { return int32_t(0xFFFFFFFFu - uint32_t(key)); }

// Out of line: few ids of a tile get this far.
inline __device__ __noinline__ float noisy_score(float exponent, int64_t key, uint32_t id, uint32_t bits) {
  return exponent + gumbel(key, id, bits);
}

// Calls offer(score, id) for this lane's possible ids of a tile, except those that `limit` rules out: see limit_of.
// `ids` (or null) maps an id of the row to the target id, whose noise counts.
template <class Offer>
__device__ __forceinline__ void noisy_tile(const RowView& row, const RowLaw& law, int tile, int64_t key,
                                           const int64_t* ids, const float& limit, Offer offer) {
#pragma unroll 1
  for (int j = 0; j < kRuns; ++j) {
    const Run run = load_run(row, tile, j);
#pragma unroll
    for (int k = 0; k < kRun; k += 4) {
      const int32_t first = held_id(tile, j * kRun + k);
      Words4 noise{};
      if (ids == nullptr) noise = philox(low_word(key), high_word(key), uint32_t(first) / 4, 0, 0, kNoiseStream);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = weight_of(run.x[k + i], law);
        if (!(weight > 0)) continue;
        const uint32_t id = uint32_t(ids == nullptr ? first + i : ids[first + i]);
        const uint32_t bits = ids == nullptr ? noise.word[i] : noise_bits(key, id);
        if (float(bits) * 0x1p-32f > weight * limit) continue;
        offer(noisy_score((run.x[k + i] - law.max) * law.inverse_temperature, key, id, bits), first + i);
      }
    }
  }
}

constexpr float kNoLimit = 3.0e38f;

// A score is log(weight) - log(-log1p(-t)) and -log1p(-t) >= t, so an id with t > weight * limit_of(score) has a lower
// score. Its bits alone show that; the slack covers the rounding.
__device__ __forceinline__ float limit_of(float score) { return fminf(kNoLimit, 1.001f * fast_exp2(-score * kLog2E)); }

// The best noisy key among the tiles that one thread has seen.
struct BestNoisy {
  Fixed key = 0;
  float limit = kNoLimit;
  __device__ __forceinline__ void see(const RowView& row, const RowLaw& law, int tile, int64_t noise_key,
                                      const int64_t* ids) {
    *this = better(*this, row, law, tile, noise_key, ids);
  }

 private:
  __device__ __noinline__ static BestNoisy better(BestNoisy best, RowView row, RowLaw law, int tile, int64_t noise_key,
                                                  const int64_t* ids) {
    noisy_tile(row, law, tile, noise_key, ids, best.limit, [&](float score, int32_t id) {
      const Fixed offered = noisy_key(score, id);
      if (offered <= best.key) return;
      best.key = offered;
      best.limit = limit_of(score);
    });
    return best;
  }
};

}  // namespace specdec::SPECDEC_CUDA_ROWS

// The law that a target law derives from P and Q at a position: begun from the raw rows and, if they do not decide it,
// completed by a measure of both rows.
#pragma once
#include "cuda/draw.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

// What a cascade looks at in a row that was scanned with raw sums and whose law has been found; by one warp.
__device__ __forceinline__ RawRow raw_row(const Reading& reading) {
  const RawMoments raw = raw_moments(reading);
  return {reading.law.max, 1.0f / raw.normalizer, raw.entropy, reading.law.argmax};
}

// A position's mixture so far, in shared memory.
struct Mixing {
  RawRow target, draft;
  Measure measure;  // what is still to be summed
};

// Begins the mixture of a position with known P and Q; by one thread, and out of line to save registers.
inline __device__ __noinline__ void begin(const TargetLaw& law, Mixing& mixing, Position& at) {
  float surprise_q = 0.0f;
  if (asks_surprise_of_argmax(law))
    surprise_q = surprise(mixing.target, logit_at(at.row, mixing.draft.argmax), mixing.draft.argmax);
  at.mixture = begin_mixture(law, mixing.target, mixing.draft, surprise_q, &mixing.measure);
  at.draft_decides = draft_decides(law.kind);
  if (!at.subtracts()) mixing.measure = Measure::kNothing;  // for a point only the remainder's direction counts
}

// P of an id in a raw row, given its logit.
__device__ __forceinline__ float raw_prob(const RawRow& row, float x, int32_t id) {
  if (isinf(row.max)) return id == row.argmax ? 1.0f : 0.0f;
  return exp_of(x, row.max, 1.0f) * row.max_prob;
}

// A measure of the lane's ids of run j of a tile; for a lossy law the sum of (scale P - Q)+.
__device__ __forceinline__ float measure_run(const Position& at, const Mixing& mixing, int tile, int j) {
  const Run x = load_run(at.row, tile, j);
  float sum = 0.0f;
  if (mixing.measure == Measure::kLossyScale) {
    const Run q = at.draft.of_run(tile, j);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      const bool itself = at.law.weights && !at.law.one_hot;
      const float p = itself ? weight_itself(x.x[k], at.law) * at.law.inverse_normalizer
                             : prob_of(x.x[k], at.law, held_id(tile, j * kRun + k));
      sum += residual_weight(at.left.scale * p, q.x[k]);
    }
    return sum;
  }
  at.for_each_mixed(tile, j, x, [&](int k, float p, float q, bool kept, float y, int32_t draft_id) {
    float raw_q = 0.0f, surprise_p = 0.0f;
    if (mixing.measure == Measure::kCrossEntropy) {
      raw_q = raw_prob(mixing.draft, y, draft_id);
      surprise_p = surprise(mixing.target, x.x[k], held_id(tile, j * kRun + k));
    }
    sum += measured(mixing.measure, p, q, kept, raw_q, surprise_p);
  });
  return sum;
}

// The measures of a position's tiles: this block's share, as in masses_of.
template <bool kClustered = false>
__device__ __noinline__ void measures_of(const Position& at, const Mixing& mixing, float* sums, int rank, int size) {
  for_each_tile(rank, size, at.row.tiles(), [&](int tile) {
    float sum = 0.0f;
#pragma unroll 1
    for (int j = 0; j < kRuns; ++j) sum += measure_run(at, mixing, tile, j);
    sum = warp_reduce(sum, Sum{});
    if (lane_id() == 0) Team<kClustered>::store(sums + tile, sum);
  });
}

// Completes the mixture with the measure's sum, by one block.
__device__ __forceinline__ void end(const TargetLaw& law, Mixing& mixing, float sum, Position& at) {
  by_one([&] {
    end_mixture(law, mixing.target, mixing.draft, mixing.measure, sum, at.mixture);
    mixing.measure = Measure::kNothing;
  });
}

// Sums the measure that the mixture still needs and completes it, by a team.
template <bool kClustered>
__device__ __noinline__ void end_mixing(const TargetLaw& law, Mixing& mixing, Position& at, float* sums) {
  const bool solves = mixing.measure == Measure::kLossyScale;
  const auto left = [&](float scale) {
    if (solves) by_one([&] { at.left.scale = scale; });
    Team<kClustered>::sync();
    measures_of<kClustered>(at, mixing, sums, int(Team<kClustered>::rank()), int(Team<kClustered>::size()));
    Team<kClustered>::sync();
    return sum_of_tiles(sums, at.row.tiles());
  };
  end(law, mixing, solves ? exact_scale(at.mixture.accept, left) : left(1.0f), at);
}

}  // namespace specdec::SPECDEC_CUDA_ROWS

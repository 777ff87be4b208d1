#include <algorithm>
#include <numeric>

#include "common/row_stats.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/row.h"
#include "cpu/tile_sums.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kCostOfTile = 16;  // adding one tile costs as much as this many numbers of a row

}  // namespace

void merge_shards(const MergeShardsArgs& args) {
  for_each_row(args.batch * args.n, args.tiles * kCostOfTile, [&](int64_t index, Team*) {
    const float* const maxima = args.tile_max + index * args.tiles;
    const float* const given = args.tile_mass + index * args.tiles;
    Sampling sampling = sampling_of(args.params, index / args.n);
    const float max = *std::max_element(maxima, maxima + args.tiles);
    std::vector<float> mass(given, given + args.tiles);
    if (args.probs) {
      RowLaw law = merged_law(max, 1.0f, sampling);
      law.normalizer = std::accumulate(mass.begin(), mass.end(), 0.0f);  // in the order of status_of_probs
      write_values(law, args.values, index, kNotAsked, kNotAsked);
      args.prob[index] = 0.0f;
      return;
    }
    scale_masses(maxima, max, sampling.inverse_temperature, mass);
    const RowLaw law = merged_law(max, sum_of(mass), sampling);
    write_values(law, args.values, index, kNotAsked, kNotAsked);
    const RowView row{reinterpret_cast<const char*>(args.logits_at + index), DType::kFloat32, 1};
    args.prob[index] = law.one_hot ? 0.0f : prob_at(row, law, 0);
  });
}

}  // namespace specdec::cpu

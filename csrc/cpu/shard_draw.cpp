#include <algorithm>
#include <limits>
#include <vector>

#include "common/row_stats.h"
#include "cpu/draw.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/tile_sums.h"

namespace specdec::cpu {
namespace {

// Some neighbouring tiles of a shard's row: P there, what is subtracted, and what is left to draw from.
class Part {
 public:
  // The ids from `offset` on, `width` of them.
  Part(const ShardDrawArgs& args, int64_t index, int32_t offset, int32_t width, Team* team)
      : args_(args), weight_(args.weights[index]) {
    const int32_t first = args.first + offset;
    p_.row = part_of(args.logits, index, offset, width);
    p_.law = shard_law(args.values + index * kNumValues, args.argmax[index], sampling_of(args.params, index / args.n),
                       first);
    p_.team = team;
    p_.scratch.listed = false;
    if (weight_ < 0) return;
    if (args.point_tokens) {
      const int64_t token = args.point_tokens[index];
      q_ = DraftLaw(token >= first && token < int64_t(first) + width ? int32_t(token) - first : -1);
    } else if (args.draft_status) {
      const Rows& rows = args.draft.data ? args.draft : args.draft_probs;
      const MappedRow draft{part_of(rows, index, offset, width)};
      const RowLaw law = shard_draft_law(args, index, first);
      const bool is_probs = !args.draft.data && !(law.status & kBadDraft);
      q_ = is_probs ? DraftLaw(draft) : DraftLaw(draft, law);
    }
  }

  const RowLaw& law() const { return p_.law; }
  int tiles() const { return p_.row.tiles(); }
  // Whether nothing but P's one id can be left, or nothing at all.
  bool is_certain() const { return p_.law.one_hot || weight_ == 0; }

  // What is left. `summed`: the tiles' masses are needed.
  Weights weights(bool summed) {
    if (summed && q_.is_point()) {
      scan_tiles(p_.row, p_.law.inverse_temperature, true, p_.team, p_.scratch);
      scale_masses(p_.scratch.tile_max.data(), p_.law.max, p_.law.inverse_temperature, p_.scratch.tile_mass);
    } else {
      p_.scratch.tile_mass.assign(tiles(), 0.0f);
    }
    return residual_weights(p_, q_, weight_);  // a point elsewhere subtracts nothing
  }

  // The mass of a row with at most one id left, by tiles.
  void write_certain(float* out) const {
    std::fill(out, out + tiles(), 0.0f);
    const int32_t id = p_.law.argmax;
    if (id >= 0 && id < p_.row.vocab) out[id / kTile] = weight_ < 0 ? 1.0f : residual_weight(weight_, q_.prob(id));
  }

  std::vector<NoisyToken> best(int64_t key) {
    p_.scratch.tile_max.assign(tiles(), p_.law.max);  // no tile is skipped
    return noisy_top(p_, key, nullptr, 1, args_.first);
  }

 private:
  RowView part_of(const Rows& rows, int64_t index, int32_t offset, int32_t width) const {
    const RowView whole = row_view(rows, index / args_.n, index % args_.n);
    return {static_cast<const char*>(whole.in_memory(offset)), whole.dtype, width};
  }

  const ShardDrawArgs& args_;
  const float weight_;
  Reading p_;
  DraftLaw q_;
};

void draw_noisy(const ShardDrawArgs& args, int64_t index, Team* team) {
  Part part(args, index, 0, args.logits.vocab, team);
  args.token[index] = -1;
  args.score[index] = -std::numeric_limits<float>::infinity();
  if (part.law().one_hot) return;
  for (const NoisyToken& token : part.best(args.noise_keys[index])) {
    args.token[index] = args.first + token.id;
    args.score[index] = token.score;
  }
}

void draw(const ShardDrawArgs& args, int64_t index, Team* team) {
  const float* const given = args.masses + index * args.all_tiles;
  const std::vector<float> mass(given, given + args.all_tiles);
  args.token[index] = -1;
  if (std::none_of(mass.begin(), mass.end(), [](float m) { return m > 0; })) return;
  int32_t unused = 0;
  const FoundTile found = find_tile(mass, uniform_of(args.uniform_samples, index, &unused));
  const int64_t offset = int64_t(found.tile) * kTile - args.first;
  if (offset < 0 || offset >= args.logits.vocab) return;
  Part part(args, index, int32_t(offset), std::min<int32_t>(kTile, args.logits.vocab - int32_t(offset)), team);
  if (part.is_certain()) return;
  args.token[index] = args.first + offset + part.weights(false).draw_in(0, found.rest, found.mass);
}

void write_masses(const ShardDrawArgs& args, int64_t index, Team* team) {
  Part part(args, index, 0, args.logits.vocab, team);
  float* const out = args.out + index * part.tiles();
  if (part.is_certain()) return part.write_certain(out);
  const Weights weights = part.weights(true);
  std::copy(weights.mass.begin(), weights.mass.end(), out);
}

}  // namespace

void shard_draw(const ShardDrawArgs& args) {
  for_each_row(args.batch * args.n, args.logits.vocab, [&](int64_t index, Team* team) {
    if (args.noise_keys)
      draw_noisy(args, index, team);
    else if (args.masses)
      draw(args, index, team);
    else
      write_masses(args, index, team);
  });
}

}  // namespace specdec::cpu

#pragma once
#include "cases.h"

namespace specdec::tests {

// A row as one shard: its tiles' stats, the whole row's, and what is drawn from it.
inline Case shard_case(Random& random, bool large) {
  const int64_t batch = 1 + random.below(3), n = 1 + random.below(2), count = batch * n;
  const int32_t vocab = make_vocab(random, large), tiles = (vocab + kTile - 1) / kTile;
  const auto rows = make_rows(random, make_values(random, count, vocab), batch, n, vocab, make_dtype(random));
  const auto params = make_params(random, batch, vocab);
  const auto keys = make_keys(random, count);
  const auto draft = make_rows(random, make_values(random, count, vocab), batch, n, vocab, make_dtype(random));
  const auto uniforms = make_uniforms(random, count);
  const bool drafted = random.chance(0.5);
  auto one = [=](const Backend& backend) -> Outputs {
    Result<float> tile_max(count * tiles), tile_mass(count * tiles), at(count), values(count * kNumValues);
    Result<float> prob(count), weights(count), masses(count * tiles), score(count);
    Result<int64_t> argmax(count), token(count);
    Result<int32_t> status(count);
    backend.shard_stats(
        {rows->rows, batch, n, params->args, false, tile_max.data(), tile_mass.data(), argmax.data(), status.data()});
    for (int64_t i = 0; i < count; ++i) at.data()[i] = tile_max.data()[i * tiles], weights.data()[i] = 0.7f;
    backend.merge_shards({tile_max.data(), tile_mass.data(), at.data(), batch, n, tiles, params->args, false,
                          values.data(), prob.data()});
    ShardDrawArgs args{};
    args.logits = rows->rows;
    args.batch = batch;
    args.n = n;
    args.values = values.data();
    args.argmax = argmax.data();
    args.weights = weights.data();
    args.params = args.draft_params = params->args;
    StatsResult stats(count);
    if (drafted) {
      backend.row_stats({draft->rows, batch, n, params->args, stats.out()});
      args.draft = draft->rows;
      args.draft_values = stats.values.data();
      args.draft_argmax = stats.argmax.data();
      args.draft_status = stats.status.data();
    } else {
      args.point_tokens = argmax.data();
    }
    args.out = masses.data();
    backend.shard_draw(args);
    Result<int64_t> drawn(count);
    ShardDrawArgs rest = args;
    rest.masses = masses.data();
    rest.all_tiles = tiles;
    rest.uniform_samples = uniforms.given();
    rest.out = nullptr;
    rest.token = drawn.data();
    if (tiles > 1) backend.shard_draw(rest);
    args.noise_keys = keys.data();
    args.out = nullptr;
    args.token = token.data();
    args.score = score.data();
    backend.shard_draw(args);
    return {argmax.bytes() + status.bytes(), tile_max.bytes() + tile_mass.bytes(), values.bytes() + prob.bytes(),
            masses.bytes(), drawn.bytes() + token.bytes() + score.bytes()};
  };
  return {label("shards", batch, n, vocab, drafted ? " drafted" : ""), one};
}

}  // namespace specdec::tests

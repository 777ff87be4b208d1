// What the bindings of every device share: from the ops' arguments (bind_arguments.h) to the structs that kernels take.
// Arguments are validated in specdec_kernels/ops, with better messages. Here is only what memory safety needs if the
// dispatcher is called directly: checks of every size, dtype and device that a kernel relies on. Kernels check
// themselves whatever depends on values.
//
// A `Device` is made for each call and says where outputs go and how kernels run:
//   Device(op, like)          for op `op`, on the device of tensor `like`
//   type(), index()           of that device
//   check(tensor)             throws if the tensor is elsewhere
//   run(kernel, args)         runs one of its kernels, which are its members by the ops' names
#pragma once
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "bind_arguments.h"
#include "bind_cache.h"
#include "bind_outputs.h"
#include "common/law.h"
#include "common/ops.h"

namespace specdec::bind {

template <class Device, class Tensor>
struct Ops {
  using Made = typename MadeOf<Tensor>::Type;
  template <class T>
  using Output = bind::Output<Made, T>;
  using TwoTensors = std::tuple<Made, Made>;
  using ThreeTensors = std::tuple<Made, Made, Made>;
  using FourTensors = std::tuple<Made, Made, Made, Made>;
  using FiveTensors = std::tuple<Made, Made, Made, Made, Made>;
  using SevenTensors = std::tuple<Made, Made, Made, Made, Made, Made, Made>;
  using MaybeTensor = std::optional<Tensor>;
  using PerSequence = PerSequenceOf<Tensor>;

  static ThreeTensors row_stats(const Tensor& logits, const PerSequence& processors, const PerSequence& per_sequence,
                                const Numbers& settings) {
    Device device("row_stats", logits);
    Given given(device);
    const auto asked = settings_of<RowStatsSettings>(settings);
    check_per_sequence(per_sequence, 1);
    const Leading leading(logits, false);
    Stats stats(device, leading);
    const Rows rows = given.rows(logits);
    device.run(Device::row_stats,
               {rows, leading.batch, leading.n, given.params(asked.params, per_sequence, 0, leading.batch), stats.out(),
                given.processors(processors, rows, leading.batch, leading.batch * leading.n)});
    return {std::move(stats.values.tensor), std::move(stats.argmax.tensor), std::move(stats.status.tensor)};
  }

  static Made warp_probs(const Tensor& logits, const PerSequence& processors, const PerSequence& per_sequence,
                         const Numbers& settings) {
    Device device("warp_probs", logits);
    Given given(device);
    const auto asked = settings_of<WarpProbsSettings>(settings);
    check_per_sequence(per_sequence, 1);
    const Leading leading(logits, false);
    const Rows rows = given.rows(logits);
    Output<float> out = leading.output<Output<float>>(device, rows.vocab);
    device.run(Device::warp_probs,
               {rows, leading.batch, leading.n, given.params(asked.params, per_sequence, 0, leading.batch), out.data,
                given.processors(processors, rows, leading.batch, leading.batch * leading.n)});
    return std::move(out.tensor);
  }

  static Made mask_logits_(const Tensor& logits, const PerSequence& per_sequence, const Numbers& settings) {
    Device device("mask_logits_", logits);
    Given given(device);
    const auto asked = settings_of<MaskLogitsSettings>(settings);
    check_per_sequence(per_sequence, 1);
    const Leading leading(logits, false);
    auto status = leading.output<Output<int32_t>>(device);
    device.run(Device::mask_logits_, {given.written_rows(logits), leading.batch, leading.n,
                                      given.params(asked.params, per_sequence, 0, leading.batch), status.data});
    return std::move(status.tensor);
  }

  static Made uniform_samples(const Tensor& seeds, const MaybeTensor& steps, int64_t step, int64_t num,
                              int64_t purpose) {
    Device device("uniform_samples", seeds);
    Given given(device);
    SPECDEC_CHECK(0 <= num && num <= kMostNumbers, "specdec: num must be in [0, 2**31)");
    const int64_t batch = seeds.numel();
    Output<double> out(device, {batch, num});
    device.run(Device::uniform_samples,
               {given.template flat<int64_t>(seeds, batch, "seeds"),
                given.template flat<int64_t>(steps, batch, "steps"), step, batch, num, uint32_t(purpose), out.data});
    return std::move(out.tensor);
  }

  static Made noise_keys(const Tensor& seeds, const Tensor& positions, const MaybeTensor& steps, int64_t step,
                         int64_t purpose) {
    Device device("noise_keys", seeds);
    Given given(device);
    const int64_t batch = seeds.numel();
    SPECDEC_CHECK(positions.dim() == 2 && positions.size(0) == batch, "specdec: seeds and positions disagree in shape");
    const int64_t n = positions.size(1);
    Output<int64_t> out(device, {batch, n});
    device.run(Device::noise_keys,
               {given.template flat<int64_t>(seeds, batch, "seeds"), given.ids(positions, batch * n, "positions"),
                given.template flat<int64_t>(steps, batch, "steps"), step, batch, n, uint32_t(purpose), out.data});
    return std::move(out.tensor);
  }

  static FiveTensors sample(const Tensor& logits, const MaybeTensor& uniform_samples, const MaybeTensor& noise_keys,
                            const MaybeTensor& draft_to_target, int64_t num_samples, const PerSequence& processors,
                            const MaybeTensor& row_index, const PerSequence& per_sequence, const Numbers& settings) {
    Device device("sample", logits);
    Given given(device);
    const auto asked = settings_of<SampleSettings>(settings);
    check_per_sequence(per_sequence, 1);
    SPECDEC_CHECK(1 <= num_samples && num_samples <= kMostSamples, "specdec: num_samples must be in [1, ", kMostSamples,
                  "]");
    SPECDEC_CHECK(num_samples == 1 || noise_keys, "specdec: several samples need noise_keys");
    Leading leading(logits, true);
    BatchIndex row_of{};
    if (row_index) {
      row_of = {given.ids(*row_index, row_index->numel(), "row_index"), leading.batch};
      leading.batch = row_index->numel();
    }
    Rows rows = given.rows(logits);
    if (leading.flat) rows.stride_batch = rows.stride_row;
    const int64_t count = leading.batch * leading.n;
    auto token = num_samples == 1 ? leading.output<Output<int64_t>>(device)
                                  : leading.output<Output<int64_t>>(device, num_samples);
    auto log_prob =
        num_samples == 1 ? leading.output<Output<float>>(device) : leading.output<Output<float>>(device, num_samples);
    Stats stats(device, leading);
    SamplingArgs params = given.params(asked.params, per_sequence, 0, leading.batch);
    if (asked.probs != 0) params.rows = RowKind::kWeights;
    SPECDEC_CHECK(asked.probs == 0 || (rows.dtype == DType::kFloat32 && !noise_keys && !processors),
                  "specdec: probabilities must be float32, without noise_keys or processors");
    device.run(
        Device::sample,
        {rows, leading.batch, leading.n, params, given.uniforms(uniform_samples, count, "uniform_samples"),
         given.template flat<int64_t>(noise_keys, count, "noise_keys"),
         given.template flat<int64_t>(draft_to_target, rows.vocab, "draft_to_target"), int32_t(num_samples), token.data,
         log_prob.data, stats.out(), given.processors(processors, rows, leading.batch, count), row_of});
    return {std::move(token.tensor), std::move(log_prob.tensor), std::move(stats.values.tensor),
            std::move(stats.argmax.tensor), std::move(stats.status.tensor)};
  }

  static FourTensors shard_stats(const Tensor& logits, const PerSequence& per_sequence, const Numbers& settings) {
    Device device("shard_stats", logits);
    Given given(device);
    const auto asked = settings_of<ShardStatsSettings>(settings);
    check_per_sequence(per_sequence, 1);
    const Leading leading(logits, false);
    const Rows rows = given.rows(logits);
    SPECDEC_CHECK(asked.probs == 0 || rows.dtype == DType::kFloat32, "specdec: probabilities must be float32");
    const int64_t tiles = tiles_of(rows.vocab);
    Output<float> tile_max(device, {leading.batch, leading.n, tiles}),
        tile_mass(device, {leading.batch, leading.n, tiles});
    Output<int64_t> argmax(device, {leading.batch, leading.n});
    Output<int32_t> status(device, {leading.batch, leading.n});
    device.run(Device::shard_stats,
               {rows, leading.batch, leading.n, given.params(asked.params, per_sequence, 0, leading.batch),
                asked.probs != 0, tile_max.data, tile_mass.data, argmax.data, status.data});
    return {std::move(tile_max.tensor), std::move(tile_mass.tensor), std::move(argmax.tensor),
            std::move(status.tensor)};
  }

  static TwoTensors merge_shards(const Tensor& tile_max, const Tensor& tile_mass, const Tensor& logits_at,
                                 const PerSequence& per_sequence, const Numbers& settings) {
    Device device("merge_shards", tile_max);
    Given given(device);
    const auto asked = settings_of<MergeShardsSettings>(settings);
    check_per_sequence(per_sequence, 1);
    SPECDEC_CHECK(tile_max.dim() == 3 && 1 <= tile_max.size(2) && tile_max.size(2) <= kMostNumbers,
                  "specdec: tile_max must be [batch, n, tiles]");
    const int64_t batch = tile_max.size(0), n = tile_max.size(1), tiles = tile_max.size(2);
    Output<float> values(device, {batch, n, kNumValues}), prob(device, {batch, n});
    device.run(Device::merge_shards,
               {given.template flat<float>(tile_max, batch * n * tiles, "tile_max"),
                given.template flat<float>(tile_mass, batch * n * tiles, "tile_mass"),
                given.template flat<float>(logits_at, batch * n, "logits_at"), batch, n, int32_t(tiles),
                given.params(asked.params, per_sequence, 0, batch), asked.probs != 0, values.data, prob.data});
    return {std::move(values.tensor), std::move(prob.tensor)};
  }

  static ThreeTensors shard_draw(const Tensor& logits, const Tensor& values, const Tensor& argmax,
                                 const MaybeTensor& draft_logits, const MaybeTensor& draft_probs,
                                 const MaybeTensor& draft_values, const MaybeTensor& draft_argmax,
                                 const MaybeTensor& draft_status, const MaybeTensor& point_tokens,
                                 const Tensor& weights, const MaybeTensor& masses, const MaybeTensor& uniform_samples,
                                 const MaybeTensor& noise_keys, int64_t first, const PerSequence& per_sequence,
                                 const Numbers& settings) {
    Device device("shard_draw", logits);
    Given given(device);
    const auto asked = settings_of<ShardDrawSettings>(settings);
    check_per_sequence(per_sequence, 2);
    const Leading leading(logits, false);
    const int64_t batch = leading.batch, n = leading.n, count = batch * n;
    ShardDrawArgs args{};
    args.logits = given.rows(logits);
    SPECDEC_CHECK(0 <= first && first % kTile == 0 && first <= kMostNumbers - args.logits.vocab - kTile,
                  "specdec: first must be a multiple of 1024");
    SPECDEC_CHECK(bool(draft_logits) + bool(draft_probs) + bool(point_tokens) <= 1 &&
                      bool(draft_values) == bool(draft_logits) && bool(draft_argmax) == bool(draft_logits) &&
                      bool(draft_status) == (draft_logits || draft_probs),
                  "specdec: a draft has logits and stats, probabilities and a status, or points");
    SPECDEC_CHECK(bool(masses) == bool(uniform_samples) && !(masses && noise_keys),
                  "specdec: give masses and uniform_samples, or noise_keys");
    for (const auto& [draft, rows] :
         {std::pair(&draft_logits, &args.draft), std::pair(&draft_probs, &args.draft_probs)}) {
      if (!*draft) continue;
      *rows = given.rows(**draft);
      SPECDEC_CHECK((*draft)->dim() == 3 && (*draft)->size(0) == batch && (*draft)->size(1) == n &&
                        rows->vocab == args.logits.vocab,
                    "specdec: the draft's rows have another shape than logits");
    }
    SPECDEC_CHECK(!draft_probs || args.draft_probs.dtype == DType::kFloat32, "specdec: draft_probs must be float32");
    args.first = int32_t(first);
    args.batch = batch;
    args.n = n;
    args.values = given.template flat<float>(values, count * kNumValues, "values");
    args.argmax = given.template flat<int64_t>(argmax, count, "argmax");
    args.draft_values = given.template flat<float>(draft_values, count * kNumValues, "draft_values");
    args.draft_argmax = given.template flat<int64_t>(draft_argmax, count, "draft_argmax");
    args.draft_status = given.template flat<int32_t>(draft_status, count, "draft_status");
    args.point_tokens = given.template flat<int64_t>(point_tokens, count, "point_tokens");
    args.weights = given.template flat<float>(weights, count, "weights");
    const int64_t tiles = tiles_of(args.logits.vocab);
    if (masses) {
      const int64_t all = masses->dim() == 3 ? masses->size(2) : 0;
      SPECDEC_CHECK(first / kTile + tiles <= all && all <= kMostNumbers, "specdec: masses must be [batch, n, tiles]");
      args.all_tiles = int32_t(all);
      args.masses = given.template flat<float>(masses, count * all, "masses");
    }
    args.uniform_samples = given.uniforms(uniform_samples, count, "uniform_samples");
    args.noise_keys = given.template flat<int64_t>(noise_keys, count, "noise_keys");
    args.params = given.params(asked.params, per_sequence, 0, batch);
    args.draft_params = given.params(asked.draft_params, per_sequence, kNumPerSequence, batch);
    const bool drawn = masses || noise_keys;
    Output<float> out = drawn ? Output<float>(device, {0}) : Output<float>(device, {batch, n, tiles});
    Output<int64_t> token = drawn ? Output<int64_t>(device, {batch, n}) : Output<int64_t>(device, {0});
    Output<float> score = noise_keys ? Output<float>(device, {batch, n}) : Output<float>(device, {0});
    args.out = out.data;
    args.token = token.data;
    args.score = score.data;
    device.run(Device::shard_draw, args);
    return {std::move(out.tensor), std::move(token.tensor), std::move(score.tensor)};
  }

  static SevenTensors token_logprobs(const Tensor& logits, const Tensor& tokens, const MaybeTensor& rows,
                                     const MaybeTensor& num_tokens, int64_t num_top, const PerSequence& processors,
                                     const PerSequence& per_sequence, const Numbers& settings) {
    Device device("token_logprobs", logits);
    Given given(device);
    const auto asked = settings_of<TokenLogprobsSettings>(settings);
    check_per_sequence(per_sequence, 1);
    const Leading leading(logits, false);
    const int64_t batch = leading.batch;
    SPECDEC_CHECK(tokens.dim() == 2 && tokens.size(0) == batch, "specdec: logits and tokens disagree in shape");
    SPECDEC_CHECK(0 <= num_top && num_top <= kMostTop, "specdec: num_top must be in [0, ", kMostTop, "]");
    const int64_t width = tokens.size(1), count = batch * width;
    Output<float> raw_log_prob(device, {batch, width}), log_prob(device, {batch, width});
    Output<int32_t> rank(device, {batch, width}), status(device, {batch, width});
    Output<int64_t> top_ids(device, {batch, width, num_top});
    Output<float> top_log_prob(device, {batch, width, num_top}), top_processed(device, {batch, width, num_top});
    const Rows target = given.rows(logits);
    device.run(Device::token_logprobs,
               {target, batch, leading.n, width, given.params(asked.params, per_sequence, 0, batch),
                given.template flat<int64_t>(tokens, count, "tokens"),
                given.template flat<int64_t>(rows, count, "rows"), given.ids(num_tokens, batch, "num_tokens"),
                int32_t(num_top), raw_log_prob.data, log_prob.data, rank.data, status.data, top_ids.data,
                top_log_prob.data, top_processed.data, given.processors(processors, target, batch, batch * leading.n)});
    return {std::move(raw_log_prob.tensor), std::move(log_prob.tensor), std::move(rank.tensor),
            std::move(status.tensor),       std::move(top_ids.tensor),  std::move(top_log_prob.tensor),
            std::move(top_processed.tensor)};
  }

  static FiveTensors verify_chain(const Tensor& target_logits, const MaybeTensor& draft_logits,
                                  const MaybeTensor& draft_probs, const MaybeTensor& draft_values,
                                  const MaybeTensor& draft_argmax, const MaybeTensor& draft_status,
                                  const MaybeTensor& target_to_draft, const MaybeTensor& uniform_samples,
                                  const MaybeTensor& noise_keys, const MaybeTensor& seeds, const MaybeTensor& steps,
                                  const MaybeTensor& positions, int64_t step, const MaybeTensor& eos_token_ids,
                                  const PerSequence& processors, const Tensor& draft_tokens,
                                  const MaybeTensor& num_draft_tokens, const MaybeTensor& cu_num_draft_tokens,
                                  int64_t num_draft, const MaybeTensor& draft_index, const MaybeTensor& bonus_tokens,
                                  const PerSequence& per_sequence, const Numbers& settings) {
    Device device("verify_chain", target_logits);
    Given given(device);
    const auto asked = settings_of<VerifyChainSettings>(settings);
    const bool packed = cu_num_draft_tokens.has_value();
    const int64_t dim = packed ? 1 : 2, total = draft_tokens.numel();
    SPECDEC_CHECK(draft_tokens.dim() == dim && target_logits.dim() == dim + 1 && 0 <= num_draft &&
                      num_draft < kMostNumbers && (!packed || cu_num_draft_tokens->numel() >= 1) &&
                      (packed || draft_tokens.size(1) == num_draft),
                  "specdec: target_logits and draft_tokens disagree in shape");
    const int64_t batch = packed ? cu_num_draft_tokens->numel() - 1 : draft_tokens.size(0);
    SPECDEC_CHECK(batch <= INT32_MAX / (num_draft + 1), "specdec: batch * (num_draft + 1) must be in [0, 2**31)");
    const int64_t bonus_rows = bonus_tokens ? 0 : 1;
    SPECDEC_CHECK(packed ? target_logits.size(0) == total + batch * bonus_rows
                         : target_logits.size(0) == batch && target_logits.size(1) == num_draft + bonus_rows,
                  "specdec: target_logits and draft_tokens disagree in shape");
    VerifyChainArgs args{};
    args.batch = batch;
    args.num_draft = num_draft;
    args.total = total;
    args.draft_tokens = given.ids(draft_tokens, total, "draft_tokens");
    args.num_draft_tokens = given.ids(num_draft_tokens, batch, "num_draft_tokens");
    args.cu = given.template flat<int32_t>(cu_num_draft_tokens, batch + 1, "cu_num_draft_tokens");
    args.acceptance = Acceptance(integer(asked.acceptance, 0, kNumAcceptances - 1, "acceptance"));
    SPECDEC_CHECK(asked.shared.target_probs == 0 || args.acceptance != Acceptance::kMatch,
                  "specdec: match needs logits");
    args.bonus_tokens = given.ids(bonus_tokens, batch, "bonus_tokens");
    const int64_t numbers = packed ? total + batch : batch * (num_draft + 1);
    const bool cascade_bonus = asked.shared.law.cascade_bonus != 0;
    SPECDEC_CHECK(!cascade_bonus || !bonus_tokens, "specdec: a bonus is given or drawn from the law");
    set_shared(args, given, asked.shared, per_sequence, target_logits, draft_logits, draft_probs,
               {draft_values, draft_argmax, draft_status}, target_to_draft,
               {uniform_samples, noise_keys, seeds, steps, positions, step}, eos_token_ids, processors,
               {bonus_tokens ? total : numbers, cascade_bonus ? numbers : total, numbers,
                draft_index ? num_draft + cascade_bonus : -1});
    SPECDEC_CHECK(!draft_index || ((draft_logits || draft_probs) && !args.draft_values),
                  "specdec: draft_index needs the draft's rows, without their stats");
    if (draft_index)
      args.draft_of = {given.ids(*draft_index, batch, "draft_index"),
                       (draft_logits ? *draft_logits : *draft_probs).size(0)};
    Results results(device, batch, num_draft + 1, args);
    Made overlap;
    if (asked.return_acceptance != 0) {
      Output<float> made(device, {batch, num_draft});
      args.overlap = made.data;
      overlap = std::move(made.tensor);
    } else if constexpr (std::is_same_v<Made, StableTensor>) {
      overlap = Output<float>(device, {0}).tensor;  // the schema promises a tensor
    }
    device.run(Device::verify_chain, args);
    return results.with(overlap);
  }

  static FiveTensors verify_tree(const Tensor& target_logits, const MaybeTensor& draft_logits,
                                 const MaybeTensor& draft_probs, const MaybeTensor& draft_values,
                                 const MaybeTensor& draft_argmax, const MaybeTensor& draft_status,
                                 const MaybeTensor& target_to_draft, const MaybeTensor& uniform_samples,
                                 const MaybeTensor& noise_keys, const MaybeTensor& seeds, const MaybeTensor& steps,
                                 const MaybeTensor& positions, int64_t step, const MaybeTensor& eos_token_ids,
                                 const PerSequence& processors, const Tensor& node_tokens, const Tensor& links,
                                 const Tensor& tree_status, int64_t max_depth, const PerSequence& per_sequence,
                                 const Numbers& settings) {
    Device device("verify_tree", target_logits);
    Given given(device);
    const auto asked = settings_of<VerifyTreeSettings>(settings);
    SPECDEC_CHECK(target_logits.dim() == 3 && node_tokens.dim() == 2 && target_logits.size(0) == node_tokens.size(0) &&
                      target_logits.size(1) == node_tokens.size(1),
                  "specdec: target_logits and node_tokens disagree in shape");
    const int64_t batch = node_tokens.size(0), num_nodes = node_tokens.size(1);
    SPECDEC_CHECK(1 <= num_nodes && num_nodes <= kMostNodes && 0 <= max_depth && max_depth <= kMostDepth,
                  "specdec: a tree has 1 to 1024 nodes and is at most 64 deep");
    const bool per_tree = links.dim() == 3;
    const int64_t trees = per_tree ? batch : 1, nodes_of_trees = trees * num_nodes;
    VerifyTreeArgs args{};
    args.batch = batch;
    args.num_nodes = num_nodes;
    args.max_depth = max_depth;
    args.node_tokens = given.ids(node_tokens, batch * num_nodes, "node_tokens");
    args.parents = given.template flat<int64_t>(links, 3 * nodes_of_trees, "links");
    args.first_child = args.parents + nodes_of_trees;
    args.next_sibling = args.first_child + nodes_of_trees;
    args.tree_status = given.template flat<int32_t>(tree_status, trees, "tree_status");
    args.tree_per_sequence = per_tree;
    args.acceptance = TreeAcceptance(integer(asked.acceptance, 0, kNumTreeAcceptances - 1, "acceptance"));
    SPECDEC_CHECK(asked.shared.target_probs == 0 ||
                      (args.acceptance != TreeAcceptance::kMatch && args.acceptance != TreeAcceptance::kTypical),
                  "specdec: match and typical need logits");
    args.epsilon = float(asked.epsilon);
    args.delta = float(asked.delta);
    set_shared(args, given, asked.shared, per_sequence, target_logits, draft_logits, draft_probs,
               {draft_values, draft_argmax, draft_status}, target_to_draft,
               {uniform_samples, noise_keys, seeds, steps, positions, step}, eos_token_ids, processors,
               {batch * num_nodes, batch * num_nodes, batch * num_nodes});
    Results results(device, batch, max_depth + 1, args);
    Output<int64_t> nodes(device, {batch, max_depth});
    args.accepted_nodes = nodes.data;
    device.run(Device::verify_tree, args);
    return results.with(nodes.tensor);
  }

  static TwoTensors gather_kv_(const std::vector<Tensor>& cache, const std::vector<int64_t>& key_layout,
                               const std::vector<int64_t>& value_layout, const Tensor& accepted_nodes,
                               const Tensor& context_lengths, const MaybeTensor& block_table) {
    Device device("gather_kv_", context_lengths);
    const int64_t batch = context_lengths.numel();
    SPECDEC_CHECK(accepted_nodes.dim() == 2 && accepted_nodes.size(0) == batch &&
                      (!block_table || (block_table->dim() == 2 && block_table->size(0) == batch)),
                  "specdec: accepted_nodes, context_lengths and block_table disagree in shape");
    Given given(device);
    std::vector<CacheTensor> tensors;
    tensors.reserve(cache.size());
    constexpr int64_t kAny = std::numeric_limits<int32_t>::max();
    int64_t num_blocks = block_table ? kAny : batch, block_size = kAny;
    for (size_t i = 0; i < cache.size(); ++i) {
      device.check(cache[i]);
      const CacheTensor& added = tensors.emplace_back(cache[i], i % 2 == 0 ? key_layout : value_layout, batch);
      SPECDEC_CHECK(block_table || added.block.size == batch, "specdec: the cache has another batch size");
      SPECDEC_CHECK(!block_table || i == 0 || added.row.size == block_size, "specdec: blocks of several sizes");
      num_blocks = std::min(num_blocks, added.block.size);
      block_size = std::min(block_size, added.row.size);
    }
    const bool wide = context_lengths.scalar_type() == ScalarType::Long;
    Made lengths = empty<Made>(device.type(), device.index(), {batch},
                               wide ? TorchDType<int64_t>::code() : TorchDType<int32_t>::code());
    Output<int32_t> status(device, {batch});
    GatherKVArgs args{};
    args.accepted_nodes = given.ids(accepted_nodes, accepted_nodes.numel(), "accepted_nodes");
    args.context_lengths = given.ids(context_lengths, batch, "context_lengths");
    args.block_table = given.ids(block_table, block_table ? block_table->numel() : 0, "block_table");
    args.batch = batch;
    args.max_depth = accepted_nodes.size(1);
    args.max_blocks = block_table ? block_table->size(1) : 1;
    args.block_size = block_size;
    args.num_blocks = num_blocks;
    args.lengths = lengths.mutable_data_ptr();
    args.status = status.data;
    run_on_planes(tensors, args, [&](const GatherKVArgs& some) { device.run(Device::gather_kv_, some); });
    return {std::move(lengths), std::move(status.tensor)};
  }

  static Made count_tokens_(const Tensor& ids, const Tensor& counts, const Tensor& num_output, const Tensor& tokens,
                            const MaybeTensor& num_tokens) {
    Device device("count_tokens_", ids);
    Given given(device);
    SPECDEC_CHECK(ids.dim() == 2 && tokens.dim() == 2 && ids.size(0) == tokens.size(0) &&
                      std::max(ids.size(1), tokens.size(1)) <= kMostNumbers / 2,
                  "specdec: ids and tokens must be [batch, capacity] and [batch, n]");
    const int64_t batch = ids.size(0), capacity = ids.size(1), n = tokens.size(1);
    Output<int32_t> status(device, {batch});
    device.run(Device::count_tokens_,
               {given.template written<int32_t>(ids, batch * capacity, "ids"),
                given.template written<int32_t>(counts, batch * capacity, "counts"),
                given.template written<int32_t>(num_output, batch, "num_output"), batch, n, int32_t(capacity),
                given.ids(tokens, batch * n, "tokens"), given.ids(num_tokens, batch, "num_tokens"), status.data});
    return std::move(status.tensor);
  }

 private:
  using Given = bind::Given<Device, Tensor>;

  static constexpr int64_t kMostNumbers = std::numeric_limits<int32_t>::max(), kMostSamples = 1024;

  struct Stats {
    Output<float> values;
    Output<int64_t> argmax;
    Output<int32_t> status;
    Stats(const Device& device, const Leading& leading)
        : values(leading.output<Output<float>>(device, kNumValues)),
          argmax(leading.output<Output<int64_t>>(device)),
          status(leading.output<Output<int32_t>>(device)) {}
    StatsOut out() const { return {values.data, argmax.data, status.data}; }
  };

  struct KeptStats {
    const MaybeTensor &values, &argmax, &status;
  };
  struct RandomNumbers {
    const MaybeTensor &uniform_samples, &noise_keys, &seeds, &steps, &positions;
    int64_t step;
  };
  struct RowCounts {
    int64_t target, draft, numbers;
    int64_t of_request = -1;  // at least this many for each of the draft's requests, if an index picks the rows
  };

  // What every verify step returns; tells the kernels where to write it.
  struct Results {
    Output<int64_t> tokens;
    Output<int32_t> accepted, emitted, status;
    Results(const Device& device, int64_t batch, int64_t width, VerifyArgs& args)
        : tokens(device, {batch, width}), accepted(device, {batch}), emitted(device, {batch}), status(device, {batch}) {
      args.tokens = tokens.data;
      args.num_accepted = accepted.data;
      args.num_tokens = emitted.data;
      args.status = status.data;
    }
    FiveTensors with(Made& further) {
      return {std::move(tokens.tensor), std::move(accepted.tensor), std::move(emitted.tensor), std::move(status.tensor),
              std::move(further)};
    }
  };

  // What chains and trees have in common; args.batch is set.
  static void set_shared(VerifyArgs& args, Given& given, const VerifySettings& asked, const PerSequence& per_sequence,
                         const Tensor& target_logits, const MaybeTensor& draft_logits, const MaybeTensor& draft_probs,
                         const KeptStats& kept, const MaybeTensor& target_to_draft, const RandomNumbers& numbers,
                         const MaybeTensor& eos_token_ids, const PerSequence& processors, const RowCounts& count) {
    args.law = {LawKind(integer(asked.law.number, 0, kNumLaws - 1, "law")),
                asked.law.variant != 0,
                float(asked.law.alpha),
                float(1.0 - asked.law.alpha),
                float(asked.law.beta),
                asked.law.cascade_bonus != 0};
    SPECDEC_CHECK(!is_cascade(args.law.kind) || draft_logits, "specdec: this law needs draft_logits");
    SPECDEC_CHECK(!draft_logits || !draft_probs, "specdec: give draft_logits or draft_probs");
    args.target = given.rows(target_logits);
    args.map_size = target_to_draft ? target_to_draft->numel() : 0;
    args.target_to_draft = given.template flat<int64_t>(target_to_draft, args.map_size, "target_to_draft");
    args.draft = draft_rows(given, draft_logits, target_logits, count, args);
    args.draft_probs = draft_rows(given, draft_probs, target_logits, count, args);
    SPECDEC_CHECK(!draft_probs || args.draft_probs.dtype == DType::kFloat32, "specdec: draft_probs must be float32");
    SPECDEC_CHECK(bool(kept.values) == bool(kept.argmax) && bool(kept.values) == bool(kept.status) &&
                      (!kept.values || draft_logits),
                  "specdec: kept stats are three tensors, and those of draft_logits");
    args.draft_values = given.template flat<float>(kept.values, count.draft * kNumValues, "draft_values");
    args.draft_argmax = given.template flat<int64_t>(kept.argmax, count.draft, "draft_argmax");
    args.draft_status = given.template flat<int32_t>(kept.status, count.draft, "draft_status");
    args.uniform_samples = given.uniforms(numbers.uniform_samples, count.numbers, "uniform_samples");
    args.noise_keys = given.template flat<int64_t>(numbers.noise_keys, count.numbers, "noise_keys");
    SPECDEC_CHECK(
        numbers.seeds ? !numbers.uniform_samples && !numbers.noise_keys : !numbers.steps && !numbers.positions,
        "specdec: seeds replace uniform_samples or noise_keys");
    args.coins = {given.template flat<int64_t>(numbers.seeds, args.batch, "seeds"),
                  given.template flat<int64_t>(numbers.steps, args.batch, "steps"), numbers.step,
                  given.ids(numbers.positions, count.numbers, "positions")};
    args.num_eos = eos_token_ids ? eos_token_ids->numel() : 0;
    args.eos_token_ids = given.template flat<int64_t>(eos_token_ids, args.num_eos, "eos_token_ids");
    check_per_sequence(per_sequence, 2);
    args.params = given.params(asked.params, per_sequence, 0, args.batch);
    if (asked.target_probs != 0) args.params.rows = RowKind::kProbs;
    SPECDEC_CHECK(asked.target_probs == 0 || (args.target.dtype == DType::kFloat32 && !processors &&
                                              !is_cascade(args.law.kind) && !numbers.noise_keys && !numbers.positions),
                  "specdec: target_probs must be float32, without noise, processors or a cascade");
    args.processors = given.processors(processors, args.target, args.batch, count.target);
    args.draft_params = given.params(asked.draft_params, per_sequence, kNumPerSequence, args.batch);
  }

  // As many rows as required, in the target's batches; as wide as the target's rows, or with a map no wider.
  static Rows draft_rows(const Given& given, const MaybeTensor& x, const Tensor& target_logits, const RowCounts& count,
                         const VerifyArgs& args) {
    if (!x) return {};
    const Rows rows = given.rows(*x);
    const int64_t dim = target_logits.dim();
    const bool fits = count.of_request >= 0
                          ? x->dim() == 3 && x->size(0) <= kMostNumbers && x->size(1) >= count.of_request
                          : x->dim() == dim && (dim == 2 || x->size(0) == args.batch) &&
                                (dim == 2 ? x->size(0) : x->size(0) * x->size(1)) == count.draft;
    SPECDEC_CHECK(fits && (args.target_to_draft ? rows.vocab <= args.target.vocab : rows.vocab == args.target.vocab),
                  "specdec: target_logits and the draft's rows disagree in shape");
    return rows;
  }
};

template <class Device, class Library>
void register_ops(Library& library) {
#define OP(Name, op) library.impl(#op, TORCH_BOX((&Ops<Device, StableTensor>::op)));
  SPECDEC_OPS(OP)
#undef OP
}

}  // namespace specdec::bind

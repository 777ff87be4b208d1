// What the bindings of every device share: from the ops' arguments to the structs that kernels take. Arguments are validated
// in specdec_kernels/ops, with better words than C++ has; here, only what memory safety needs when the dispatcher is called
// directly: the layout of the rows, that target_logits and draft_tokens agree, that a law has the rows that it looks at, and
// that all tensors are on one device.
//
// A `Device` is made for each call and says where outputs go and how kernels run:
//   Device(op, like)          for op `op`, on the device of tensor `like`
//   type(), index()           of that device
//   check(tensor)             throws if the tensor is elsewhere
//   run(kernel, args)         runs one of its kernels: kRowStats, kWarpProbs, kUniformSamples, kNoiseKeys, kSample, kVerify,
//                             kVerifyTree, kGatherKV
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "bind_cache.h"
#include "common/law.h"

namespace specdec::bind {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline Tensor empty(int32_t device_type, int32_t device_index, std::initializer_list<int64_t> sizes, int32_t dtype) {
  // The C call itself: going through the dispatcher as torch::stable::empty does costs twice as much.
  int64_t strides[4] = {}, running = 1;
  const int64_t dim = int64_t(sizes.size());
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = running;
    running *= std::max<int64_t>(1, sizes.begin()[d]);
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes.begin(), strides, dtype, device_type, device_index, &handle));
  return Tensor(handle);
}

template <class T>
struct TorchDType;
template <>
struct TorchDType<float> {
  static int32_t code() { return aoti_torch_dtype_float32(); }
};
template <>
struct TorchDType<int32_t> {
  static int32_t code() { return aoti_torch_dtype_int32(); }
};
template <>
struct TorchDType<int64_t> {
  static int32_t code() { return aoti_torch_dtype_int64(); }
};

// An output on the call's device, and where its elements start.
template <class T>
struct Output {
  Tensor tensor;
  T* data;
  template <class Device>
  Output(const Device& device, std::initializer_list<int64_t> sizes)
      : tensor(empty(device.type(), device.index(), sizes, TorchDType<T>::code())),
        data(tensor.mutable_data_ptr<T>()) {}
};

inline DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, "specdec: logits must be float32, bfloat16 or float16");
      __builtin_unreachable();
  }
}

// [batch, n, vocab], or [n, vocab] as one batch.
template <class Device>
Rows rows_of(const Device& device, const Tensor& x) {
  const int64_t dim = x.dim();
  STD_TORCH_CHECK((dim == 2 || dim == 3) && x.stride(dim - 1) == 1,
                  "specdec: rows must be contiguous in the last dimension");
  device.check(x);
  return {x.const_data_ptr(), dtype_of(x), int32_t(x.size(dim - 1)), dim == 3 ? x.stride(0) : 0, x.stride(dim - 2)};
}

template <class Device>
Rows rows_of(const Device& device, const MaybeTensor& x) {
  return x ? rows_of(device, *x) : Rows{};
}

// Keeps a contiguous copy alive where the tensor given was not contiguous: these are all small.
class Flat {
 public:
  template <class Device>
  Flat(const Device& device, const MaybeTensor& x) {
    if (!x) return;
    device.check(*x);
    kept_ = x->is_contiguous() ? *x : torch::stable::contiguous(*x);
  }
  template <class T>
  const T* data() const {
    return kept_ ? static_cast<const T*>(kept_->const_data_ptr()) : nullptr;
  }
  Ids ids() const { return {data<void>(), kept_ && kept_->scalar_type() == ScalarType::Long}; }
  Ids checked_ids() const {
    STD_TORCH_CHECK(!kept_ || kept_->scalar_type() == ScalarType::Long || kept_->scalar_type() == ScalarType::Int,
                    "specdec: indices must be int32 or int64");
    return ids();
  }
  int64_t size() const { return kept_ ? kept_->numel() : 0; }

 private:
  MaybeTensor kept_;
};

// One set of sampling parameters as the ops take them: PARAMS_SCHEMA in specdec_kernels/ops/_common.py.
struct Params {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
  bool min_p_first;
  Flat temperatures, top_ks, top_ps, min_ps;
  SamplingArgs args() const {
    return {float(temperature),
            top_k,
            float(top_p),
            float(min_p),
            min_p_first,
            temperatures.data<float>(),
            top_ks.data<int64_t>(),
            top_ps.data<float>(),
            min_ps.data<float>()};
  }
};

#define SPECDEC_PARAMS(p)                                                                         \
  double p##temperature, int64_t p##top_k, double p##top_p, double p##min_p, bool p##min_p_first, \
      MaybeTensor p##temperatures, MaybeTensor p##top_ks, MaybeTensor p##top_ps, MaybeTensor p##min_ps
#define SPECDEC_MAKE_PARAMS(p)                                                                   \
  Params {                                                                                       \
    p##temperature, p##top_k, p##top_p, p##min_p, p##min_p_first, Flat(device, p##temperatures), \
        Flat(device, p##top_ks), Flat(device, p##top_ps), Flat(device, p##min_ps)                \
  }

struct Stats {
  Output<float> values;
  Output<int64_t> argmax;
  Output<int32_t> status;
  template <class Device>
  Stats(const Device& device, int64_t batch, int64_t n)
      : values(device, {batch, n, kNumValues}), argmax(device, {batch, n}), status(device, {batch, n}) {}
  StatsOut out() const { return {values.data, argmax.data, status.data}; }
};

// What verify_chain and verify_packed share: SHARED_SCHEMA in specdec_kernels/ops/verify_chain.py.
struct Shared {
  MaybeTensor draft_logits, draft_probs;
  Flat draft_values, draft_argmax, draft_status, uniform_samples, noise_keys, target_to_draft, num_draft_tokens,
      eos_token_ids;
  int64_t acceptance;
  bool return_acceptance;
  TargetLaw law;
  Params params, draft_params;
};

#define SPECDEC_SHARED_ARGUMENTS                                                                                  \
  MaybeTensor draft_logits, MaybeTensor draft_probs, MaybeTensor draft_values, MaybeTensor draft_argmax,          \
      MaybeTensor draft_status, MaybeTensor uniform_samples, MaybeTensor noise_keys, MaybeTensor target_to_draft, \
      MaybeTensor num_draft_tokens, MaybeTensor eos_token_ids, int64_t acceptance, bool return_acceptance,        \
      int64_t law, bool law_variant, double law_alpha, double law_beta, bool cascade_bonus, SPECDEC_PARAMS(),     \
      SPECDEC_PARAMS(draft_)
#define SPECDEC_MAKE_SHARED                                                                                            \
  Shared {                                                                                                             \
    draft_logits, draft_probs, Flat(device, draft_values), Flat(device, draft_argmax), Flat(device, draft_status),     \
        Flat(device, uniform_samples), Flat(device, noise_keys), Flat(device, target_to_draft),                        \
        Flat(device, num_draft_tokens), Flat(device, eos_token_ids), acceptance, return_acceptance,                    \
        TargetLaw{LawKind(law), law_variant, float(law_alpha), float(law_beta), cascade_bonus}, SPECDEC_MAKE_PARAMS(), \
        SPECDEC_MAKE_PARAMS(draft_)                                                                                    \
  }

using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Device>
struct Ops {
  static ThreeTensors row_stats(const Tensor& logits, bool raw, SPECDEC_PARAMS()) {
    Device device("row_stats", logits);
    const Params params = SPECDEC_MAKE_PARAMS();
    const int64_t batch = logits.size(0), n = logits.size(1);
    const Stats stats(device, batch, n);
    device.run(Device::kRowStats, {rows_of(device, logits), batch, n, params.args(), raw, stats.out()});
    return {stats.values.tensor, stats.argmax.tensor, stats.status.tensor};
  }

  static Tensor warp_probs(const Tensor& logits, SPECDEC_PARAMS()) {
    Device device("warp_probs", logits);
    const Params params = SPECDEC_MAKE_PARAMS();
    const int64_t batch = logits.size(0), n = logits.size(1);
    const Output<float> out(device, {batch, n, logits.size(2)});
    device.run(Device::kWarpProbs, {rows_of(device, logits), batch, n, params.args(), out.data});
    return out.tensor;
  }

  static Tensor uniform_samples(const Tensor& seeds, MaybeTensor steps, int64_t step, int64_t num, int64_t purpose) {
    Device device("uniform_samples", seeds);
    const Output<float> out(device, {seeds.size(0), num});
    const Flat flat_seeds(device, seeds), flat_steps(device, steps);
    device.run(Device::kUniformSamples, {flat_seeds.data<int64_t>(), flat_steps.data<int64_t>(), step, seeds.size(0),
                                         num, uint32_t(purpose), out.data});
    return out.tensor;
  }

  static Tensor noise_keys(const Tensor& seeds, const Tensor& positions, MaybeTensor steps, int64_t step,
                           int64_t purpose) {
    Device device("noise_keys", seeds);
    const int64_t batch = positions.size(0), n = positions.size(1);
    const Output<int64_t> out(device, {batch, n});
    const Flat flat_seeds(device, seeds), flat_positions(device, positions), flat_steps(device, steps);
    device.run(Device::kNoiseKeys, {flat_seeds.data<int64_t>(), flat_positions.ids(), flat_steps.data<int64_t>(), step,
                                    batch, n, uint32_t(purpose), out.data});
    return out.tensor;
  }

  static FiveTensors sample(const Tensor& logits, MaybeTensor uniforms, MaybeTensor keys, int64_t num_samples,
                            MaybeTensor draft_to_target, SPECDEC_PARAMS()) {
    Device device("sample", logits);
    const Params params = SPECDEC_MAKE_PARAMS();
    const int64_t batch = logits.size(0), n = logits.size(1);
    const Output<int64_t> token(device, {batch, n, num_samples});
    const Output<float> log_prob(device, {batch, n, num_samples});
    const Stats stats(device, batch, n);
    const Flat flat_uniforms(device, uniforms), flat_keys(device, keys), map(device, draft_to_target);
    device.run(Device::kSample, {rows_of(device, logits), batch, n, params.args(), flat_uniforms.data<float>(),
                                 flat_keys.data<int64_t>(), map.data<int64_t>(), int32_t(num_samples), token.data,
                                 log_prob.data, stats.out()});
    return {token.tensor, log_prob.tensor, stats.values.tensor, stats.argmax.tensor, stats.status.tensor};
  }

  static FiveTensors verify_chain(const Tensor& target_logits, const Tensor& draft_tokens, SPECDEC_SHARED_ARGUMENTS) {
    Device device("verify_chain", target_logits);
    const int64_t batch = draft_tokens.size(0), num_draft = draft_tokens.size(1);
    STD_TORCH_CHECK(
        target_logits.dim() == 3 && target_logits.size(0) == batch && target_logits.size(1) == num_draft + 1,
        "specdec: target_logits and draft_tokens disagree in shape");
    return verify(device, target_logits, draft_tokens, nullptr, batch, num_draft, SPECDEC_MAKE_SHARED);
  }

  static FiveTensors verify_packed(const Tensor& target_logits, const Tensor& draft_tokens,
                                   const Tensor& cu_num_draft_tokens, int64_t max_num_draft_tokens,
                                   SPECDEC_SHARED_ARGUMENTS) {
    Device device("verify_packed", target_logits);
    const int64_t batch = cu_num_draft_tokens.size(0) - 1;
    STD_TORCH_CHECK(target_logits.dim() == 2 && target_logits.size(0) == draft_tokens.size(0) + batch,
                    "specdec: target_logits and draft_tokens disagree in shape");
    const Flat cu(device, cu_num_draft_tokens);
    return verify(device, target_logits, draft_tokens, cu.data<int32_t>(), batch, max_num_draft_tokens,
                  SPECDEC_MAKE_SHARED);
  }

  static FiveTensors verify_tree(const Tensor& target_logits, const Tensor& node_tokens, const Tensor& parents,
                                 const Tensor& first_child, const Tensor& next_sibling, const Tensor& tree_status,
                                 int64_t max_depth, MaybeTensor draft_logits, MaybeTensor draft_probs,
                                 MaybeTensor draft_values, MaybeTensor draft_argmax, MaybeTensor draft_status,
                                 MaybeTensor uniform_samples, MaybeTensor noise_keys, MaybeTensor target_to_draft,
                                 MaybeTensor eos_token_ids, int64_t acceptance, double epsilon, double delta,
                                 int64_t law, bool law_variant, double law_alpha, double law_beta, bool cascade_bonus,
                                 SPECDEC_PARAMS(), SPECDEC_PARAMS(draft_)) {
    Device device("verify_tree", target_logits);
    const MaybeTensor num_draft_tokens;
    const bool return_acceptance = false;
    const Shared in = SPECDEC_MAKE_SHARED;
    const int64_t batch = node_tokens.size(0), num_nodes = node_tokens.size(1);
    STD_TORCH_CHECK(target_logits.dim() == 3 && target_logits.size(0) == batch && target_logits.size(1) == num_nodes,
                    "specdec: target_logits and node_tokens disagree in shape");
    STD_TORCH_CHECK(1 <= num_nodes && num_nodes <= kMostNodes && 0 <= max_depth && max_depth <= kMostDepth,
                    "specdec: a tree has 1 to 1024 nodes and is at most 64 deep");
    const Flat tokens_in(device, node_tokens), parent_links(device, parents), child_links(device, first_child),
        sibling_links(device, next_sibling), flags(device, tree_status);
    const bool per_sequence = parents.dim() == 2;
    for (const Flat* links : {&parent_links, &child_links, &sibling_links})
      STD_TORCH_CHECK(
          links->size() == (per_sequence ? batch : 1) * num_nodes && flags.size() == (per_sequence ? batch : 1),
          "specdec: the tree and node_tokens disagree in shape");
    const Output<int64_t> tokens(device, {batch, max_depth + 1}), nodes(device, {batch, max_depth});
    const Output<int32_t> accepted(device, {batch}), emitted(device, {batch}), status(device, {batch});
    VerifyTreeArgs args{};
    set_inputs(args, device, target_logits, in, batch);
    args.tokens = tokens.data;
    args.num_accepted = accepted.data;
    args.num_tokens = emitted.data;
    args.status = status.data;
    args.node_tokens = tokens_in.ids();
    args.parents = parent_links.template data<int64_t>();
    args.first_child = child_links.template data<int64_t>();
    args.next_sibling = sibling_links.template data<int64_t>();
    args.tree_status = flags.template data<int32_t>();
    args.tree_per_sequence = per_sequence;
    args.num_nodes = num_nodes;
    args.max_depth = max_depth;
    args.acceptance = TreeAcceptance(acceptance);
    args.epsilon = float(epsilon);
    args.delta = float(delta);
    args.accepted_nodes = nodes.data;
    device.run(Device::kVerifyTree, args);
    return {tokens.tensor, accepted.tensor, emitted.tensor, status.tensor, nodes.tensor};
  }

  static TwoTensors gather_kv_(std::vector<Tensor> cache, std::vector<int64_t> key_layout,
                               std::vector<int64_t> value_layout, const Tensor& accepted_nodes,
                               const Tensor& context_lengths, MaybeTensor block_table) {
    Device device("gather_kv_", context_lengths);
    const int64_t batch = context_lengths.numel();
    STD_TORCH_CHECK(accepted_nodes.dim() == 2 && accepted_nodes.size(0) == batch &&
                        (!block_table || (block_table->dim() == 2 && block_table->size(0) == batch)),
                    "specdec: accepted_nodes, context_lengths and block_table disagree in shape");
    const Flat nodes(device, accepted_nodes), contexts(device, context_lengths), table(device, block_table);
    std::vector<CacheTensor> tensors;
    tensors.reserve(cache.size());
    constexpr int64_t kAny = std::numeric_limits<int32_t>::max();
    int64_t num_blocks = block_table ? kAny : batch, block_size = kAny;
    for (size_t i = 0; i < cache.size(); ++i) {
      device.check(cache[i]);
      const CacheTensor& added = tensors.emplace_back(cache[i], i % 2 == 0 ? key_layout : value_layout, batch);
      STD_TORCH_CHECK(block_table || added.block.size == batch, "specdec: the cache has another batch size");
      STD_TORCH_CHECK(!block_table || i == 0 || added.row.size == block_size, "specdec: blocks of several sizes");
      num_blocks = std::min(num_blocks, added.block.size);
      block_size = std::min(block_size, added.row.size);
    }
    const bool wide = context_lengths.scalar_type() == ScalarType::Long;
    const Tensor lengths =
        empty(device.type(), device.index(), {batch}, wide ? TorchDType<int64_t>::code() : TorchDType<int32_t>::code());
    const Output<int32_t> status(device, {batch});
    GatherKVArgs args{};
    args.accepted_nodes = nodes.checked_ids();
    args.context_lengths = contexts.checked_ids();
    args.block_table = table.checked_ids();
    args.batch = batch;
    args.max_depth = accepted_nodes.size(1);
    args.max_blocks = block_table ? block_table->size(1) : 1;
    args.block_size = block_size;
    args.num_blocks = num_blocks;
    args.lengths = lengths.mutable_data_ptr();
    args.status = status.data;
    run_on_planes(tensors, args, [&](const GatherKVArgs& some) { device.run(Device::kGatherKV, some); });
    return {lengths, status.tensor};
  }

 private:
  // What chains and trees have in common.
  static void set_inputs(VerifyArgs& args, const Device& device, const Tensor& target_logits, const Shared& in,
                         int64_t batch) {
    STD_TORCH_CHECK(!is_cascade(in.law.kind) || in.draft_logits, "specdec: this law needs draft_logits");
    args.target = rows_of(device, target_logits);
    args.draft = rows_of(device, in.draft_logits);
    args.draft_probs = rows_of(device, in.draft_probs);
    args.batch = batch;
    args.draft_values = in.draft_values.data<float>();
    args.draft_argmax = in.draft_argmax.data<int64_t>();
    args.draft_status = in.draft_status.data<int32_t>();
    args.uniform_samples = in.uniform_samples.data<float>();
    args.noise_keys = in.noise_keys.data<int64_t>();
    args.target_to_draft = in.target_to_draft.data<int64_t>();
    args.map_size = in.target_to_draft.size();
    args.eos_token_ids = in.eos_token_ids.data<int64_t>();
    args.num_eos = in.eos_token_ids.size();
    args.law = in.law;
    args.params = in.params.args();
    args.draft_params = in.draft_params.args();
  }

  static FiveTensors verify(Device& device, const Tensor& target_logits, const Tensor& draft_tokens, const int32_t* cu,
                            int64_t batch, int64_t num_draft, const Shared& in) {
    const Flat drafted(device, draft_tokens);
    const Output<int64_t> tokens(device, {batch, num_draft + 1});
    const Output<int32_t> accepted(device, {batch}), emitted(device, {batch}), status(device, {batch});
    const Output<float> overlap =
        in.return_acceptance ? Output<float>(device, {batch, num_draft}) : Output<float>(device, {0});
    VerifyChainArgs args{};
    set_inputs(args, device, target_logits, in, batch);
    args.draft_tokens = drafted.ids();
    args.num_draft_tokens = in.num_draft_tokens.ids();
    args.cu = cu;
    args.num_draft = num_draft;
    args.total = drafted.size();
    args.acceptance = Acceptance(in.acceptance);
    args.tokens = tokens.data;
    args.num_accepted = accepted.data;
    args.num_tokens = emitted.data;
    args.status = status.data;
    args.overlap = in.return_acceptance ? overlap.data : nullptr;
    device.run(Device::kVerify, args);
    return {tokens.tensor, accepted.tensor, emitted.tensor, status.tensor, overlap.tensor};
  }
};

template <class Device, class Library>
void register_ops(Library& library) {
  library.impl("row_stats", TORCH_BOX(&Ops<Device>::row_stats));
  library.impl("warp_probs", TORCH_BOX(&Ops<Device>::warp_probs));
  library.impl("uniform_samples", TORCH_BOX(&Ops<Device>::uniform_samples));
  library.impl("noise_keys", TORCH_BOX(&Ops<Device>::noise_keys));
  library.impl("sample", TORCH_BOX(&Ops<Device>::sample));
  library.impl("verify_chain", TORCH_BOX(&Ops<Device>::verify_chain));
  library.impl("verify_packed", TORCH_BOX(&Ops<Device>::verify_packed));
  library.impl("verify_tree", TORCH_BOX(&Ops<Device>::verify_tree));
  library.impl("gather_kv_", TORCH_BOX(&Ops<Device>::gather_kv_));
}

}  // namespace specdec::bind

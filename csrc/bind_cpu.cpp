// Registers the CPU kernels with torch through its stable ABI. Arguments are validated in specdec_kernels/ops, with better
// words than C++ has; here, only the layout of the rows and that target_logits and draft_tokens agree.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <optional>
#include <tuple>

#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace specdec::cpu {

int num_threads() { return int(torch::stable::get_num_threads()); }

void parallel_for(int64_t n, const std::function<void(int64_t, int64_t)>& f) {
  torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) { f(begin, end); });
}

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  // The C call itself: going through the dispatcher as torch::stable::empty does costs twice as much.
  int64_t strides[4] = {}, running = 1;
  const int64_t dim = int64_t(sizes.size());
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = running;
    running *= std::max<int64_t>(1, sizes.begin()[d]);
  }
  AtenTensorHandle handle = nullptr;
  const int32_t code = dtype == ScalarType::Float ? aoti_torch_dtype_float32()
                       : dtype == ScalarType::Int ? aoti_torch_dtype_int32()
                                                  : aoti_torch_dtype_int64();
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes.begin(), strides, code, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

DType dtype_of(const Tensor& x) {
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
Rows rows_of(const Tensor& x) {
  const int64_t dim = x.dim();
  STD_TORCH_CHECK((dim == 2 || dim == 3) && x.stride(dim - 1) == 1,
                  "specdec: rows must be contiguous in the last dimension");
  return {x.const_data_ptr(), dtype_of(x), int32_t(x.size(dim - 1)), dim == 3 ? x.stride(0) : 0, x.stride(dim - 2)};
}

Rows rows_of(const MaybeTensor& x) { return x ? rows_of(*x) : Rows{}; }

// Keeps a contiguous copy alive where the tensor given was not contiguous: these are all small.
class Flat {
 public:
  explicit Flat(const MaybeTensor& x) {
    if (x) kept_ = x->is_contiguous() ? *x : torch::stable::contiguous(*x);
  }
  template <class T>
  const T* data() const {
    return kept_ ? static_cast<const T*>(kept_->const_data_ptr()) : nullptr;
  }
  Ids ids() const { return {data<void>(), kept_ && kept_->scalar_type() == ScalarType::Long}; }
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
#define SPECDEC_MAKE_PARAMS(p)                                                                            \
  Params {                                                                                                \
    p##temperature, p##top_k, p##top_p, p##min_p, p##min_p_first, Flat(p##temperatures), Flat(p##top_ks), \
        Flat(p##top_ps), Flat(p##min_ps)                                                                  \
  }

struct Stats {
  Tensor values, argmax, status;
  Stats(int64_t batch, int64_t n)
      : values(empty({batch, n, kNumValues}, ScalarType::Float)),
        argmax(empty({batch, n}, ScalarType::Long)),
        status(empty({batch, n}, ScalarType::Int)) {}
  StatsOut out() {
    return {values.mutable_data_ptr<float>(), argmax.mutable_data_ptr<int64_t>(), status.mutable_data_ptr<int32_t>()};
  }
};

std::tuple<Tensor, Tensor, Tensor> row_stats_op(const Tensor& logits, bool raw, SPECDEC_PARAMS()) {
  const Params params = SPECDEC_MAKE_PARAMS();
  Stats stats(logits.size(0), logits.size(1));
  row_stats({rows_of(logits), logits.size(0), logits.size(1), params.args(), raw, stats.out()});
  return {stats.values, stats.argmax, stats.status};
}

Tensor warp_probs_op(const Tensor& logits, SPECDEC_PARAMS()) {
  const Params params = SPECDEC_MAKE_PARAMS();
  Tensor out = empty({logits.size(0), logits.size(1), logits.size(2)}, ScalarType::Float);
  warp_probs({rows_of(logits), logits.size(0), logits.size(1), params.args(), out.mutable_data_ptr<float>()});
  return out;
}

Tensor uniform_samples_op(const Tensor& seeds, MaybeTensor steps, int64_t step, int64_t num, int64_t purpose) {
  Tensor out = empty({seeds.size(0), num}, ScalarType::Float);
  const Flat flat_seeds(seeds), flat_steps(steps);
  uniform_samples({flat_seeds.data<int64_t>(), flat_steps.data<int64_t>(), step, seeds.size(0), num, uint32_t(purpose),
                   out.mutable_data_ptr<float>()});
  return out;
}

Tensor noise_keys_op(const Tensor& seeds, const Tensor& positions, MaybeTensor steps, int64_t step, int64_t purpose) {
  const int64_t batch = positions.size(0), n = positions.size(1);
  Tensor out = empty({batch, n}, ScalarType::Long);
  const Flat flat_seeds(seeds), flat_positions(positions), flat_steps(steps);
  noise_keys({flat_seeds.data<int64_t>(), flat_positions.ids(), flat_steps.data<int64_t>(), step, batch, n,
              uint32_t(purpose), out.mutable_data_ptr<int64_t>()});
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sample_op(const Tensor& logits, MaybeTensor uniforms,
                                                             MaybeTensor keys, int64_t num_samples,
                                                             MaybeTensor draft_to_target, SPECDEC_PARAMS()) {
  const Params params = SPECDEC_MAKE_PARAMS();
  const int64_t batch = logits.size(0), n = logits.size(1);
  Tensor token = empty({batch, n, num_samples}, ScalarType::Long),
         log_prob = empty({batch, n, num_samples}, ScalarType::Float);
  Stats stats(batch, n);
  const Flat flat_uniforms(uniforms), flat_keys(keys), map(draft_to_target);
  sample({rows_of(logits), batch, n, params.args(), flat_uniforms.data<float>(), flat_keys.data<int64_t>(),
          map.data<int64_t>(), int32_t(num_samples), token.mutable_data_ptr<int64_t>(),
          log_prob.mutable_data_ptr<float>(), stats.out()});
  return {token, log_prob, stats.values, stats.argmax, stats.status};
}

using VerifyResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// What verify_chain and verify_packed share: SHARED_SCHEMA in specdec_kernels/ops/verify_chain.py.
struct Shared {
  MaybeTensor draft_logits, draft_probs;
  Flat draft_values, draft_argmax, draft_status, uniform_samples, noise_keys, target_to_draft, num_draft_tokens,
      eos_token_ids;
  int64_t acceptance;
  bool return_acceptance;
  Params params, draft_params;
};

#define SPECDEC_SHARED                                                                                            \
  MaybeTensor draft_logits, MaybeTensor draft_probs, MaybeTensor draft_values, MaybeTensor draft_argmax,          \
      MaybeTensor draft_status, MaybeTensor uniform_samples, MaybeTensor noise_keys, MaybeTensor target_to_draft, \
      MaybeTensor num_draft_tokens, MaybeTensor eos_token_ids, int64_t acceptance, bool return_acceptance,        \
      SPECDEC_PARAMS(), SPECDEC_PARAMS(draft_)
#define SPECDEC_MAKE_SHARED                                                                                       \
  Shared {                                                                                                        \
    draft_logits, draft_probs, Flat(draft_values), Flat(draft_argmax), Flat(draft_status), Flat(uniform_samples), \
        Flat(noise_keys), Flat(target_to_draft), Flat(num_draft_tokens), Flat(eos_token_ids), acceptance,         \
        return_acceptance, SPECDEC_MAKE_PARAMS(), SPECDEC_MAKE_PARAMS(draft_)                                     \
  }

VerifyResult run_verify(const Tensor& target_logits, const Tensor& draft_tokens, const int32_t* cu, int64_t batch,
                        int64_t num_draft, const Shared& in) {
  const Flat drafted(draft_tokens);
  Tensor tokens = empty({batch, num_draft + 1}, ScalarType::Long);
  Tensor accepted = empty({batch}, ScalarType::Int), emitted = empty({batch}, ScalarType::Int);
  Tensor status = empty({batch}, ScalarType::Int);
  Tensor overlap = in.return_acceptance ? empty({batch, num_draft}, ScalarType::Float) : empty({0}, ScalarType::Float);
  VerifyArgs args{};
  args.target = rows_of(target_logits);
  args.draft = rows_of(in.draft_logits);
  args.draft_probs = rows_of(in.draft_probs);
  args.draft_tokens = drafted.ids();
  args.cu = cu;
  args.batch = batch;
  args.num_draft = num_draft;
  args.total = drafted.size();
  args.draft_values = in.draft_values.data<float>();
  args.draft_argmax = in.draft_argmax.data<int64_t>();
  args.draft_status = in.draft_status.data<int32_t>();
  args.uniform_samples = in.uniform_samples.data<float>();
  args.noise_keys = in.noise_keys.data<int64_t>();
  args.target_to_draft = in.target_to_draft.data<int64_t>();
  args.map_size = in.target_to_draft.size();
  args.num_draft_tokens = in.num_draft_tokens.ids();
  args.eos_token_ids = in.eos_token_ids.data<int64_t>();
  args.num_eos = in.eos_token_ids.size();
  args.acceptance = Acceptance(in.acceptance);
  args.params = in.params.args();
  args.draft_params = in.draft_params.args();
  args.tokens = tokens.mutable_data_ptr<int64_t>();
  args.num_accepted = accepted.mutable_data_ptr<int32_t>();
  args.num_tokens = emitted.mutable_data_ptr<int32_t>();
  args.status = status.mutable_data_ptr<int32_t>();
  args.overlap = in.return_acceptance ? overlap.mutable_data_ptr<float>() : nullptr;
  verify(args);
  return {tokens, accepted, emitted, status, overlap};
}

VerifyResult verify_chain_op(const Tensor& target_logits, const Tensor& draft_tokens, SPECDEC_SHARED) {
  const int64_t batch = draft_tokens.size(0), num_draft = draft_tokens.size(1);
  STD_TORCH_CHECK(target_logits.dim() == 3 && target_logits.size(0) == batch && target_logits.size(1) == num_draft + 1,
                  "specdec: target_logits and draft_tokens disagree in shape");
  return run_verify(target_logits, draft_tokens, nullptr, batch, num_draft, SPECDEC_MAKE_SHARED);
}

VerifyResult verify_packed_op(const Tensor& target_logits, const Tensor& draft_tokens,
                              const Tensor& cu_num_draft_tokens, int64_t max_num_draft_tokens, SPECDEC_SHARED) {
  const int64_t batch = cu_num_draft_tokens.size(0) - 1;
  STD_TORCH_CHECK(target_logits.dim() == 2 && target_logits.size(0) == draft_tokens.size(0) + batch,
                  "specdec: target_logits and draft_tokens disagree in shape");
  const Flat cu(cu_num_draft_tokens);
  return run_verify(target_logits, draft_tokens, cu.data<int32_t>(), batch, max_num_draft_tokens, SPECDEC_MAKE_SHARED);
}

}  // namespace
}  // namespace specdec::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("row_stats", TORCH_BOX(&specdec::cpu::row_stats_op));
  m.impl("warp_probs", TORCH_BOX(&specdec::cpu::warp_probs_op));
  m.impl("uniform_samples", TORCH_BOX(&specdec::cpu::uniform_samples_op));
  m.impl("noise_keys", TORCH_BOX(&specdec::cpu::noise_keys_op));
  m.impl("sample", TORCH_BOX(&specdec::cpu::sample_op));
  m.impl("verify_chain", TORCH_BOX(&specdec::cpu::verify_chain_op));
  m.impl("verify_packed", TORCH_BOX(&specdec::cpu::verify_packed_op));
}

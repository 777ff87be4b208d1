#include "common/philox.h"
#include "cpu/ops.h"

namespace specdec::cpu {

void uniform_samples(const UniformSamplesArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b)
    for (int64_t i = 0; i < args.num; ++i)
      args.out[b * args.num + i] =
          uniform_sample(args.seeds[b], args.steps ? args.steps[b] : args.step, args.purpose, uint32_t(i));
}

}  // namespace specdec::cpu

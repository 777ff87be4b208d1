#include "common/ids.h"
#include "common/philox.h"
#include "cpu/ops.h"

namespace specdec::cpu {

void noise_keys(const NoiseKeysArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b)
    for (int64_t i = 0; i < args.n; ++i)
      args.out[b * args.n + i] = noise_key(args.seeds[b], id_at(args.positions, b * args.n + i),
                                           args.steps ? args.steps[b] : args.step, args.purpose);
}

}  // namespace specdec::cpu

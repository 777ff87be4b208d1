// The CPU kernels: one function per op, each in the file of its name.
#pragma once
#include "common/ops.h"
#include "common/params.h"

namespace specdec::cpu {

#define OP(Name, op) void op(const Name##Args& args);
SPECDEC_OPS(OP)
#undef OP

// The same for csrc/bind_ops.h, which does not know the device.
struct OpKernels {
#define OP(Name, op) static constexpr auto op = cpu::op;
  SPECDEC_OPS(OP)
#undef OP
};

}  // namespace specdec::cpu

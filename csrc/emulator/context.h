// Switching between stacks.
#pragma once
#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#define SPECDEC_EMULATOR_UCONTEXT 1
#endif
#ifdef SPECDEC_EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace specdec::emulator {

#ifdef SPECDEC_EMULATOR_UCONTEXT

struct Context {
  ucontext_t registers;
};

inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack;
  context.registers.uc_stack.ss_size = bytes;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
}

inline void switch_context(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }

#else

struct Context {
  void* stack_pointer = nullptr;
};

inline void make_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15));
  *--top = nullptr;                         // where `entry` would return to; it also aligns the stack as after a call
  *--top = reinterpret_cast<void*>(entry);  // where the first switch jumps to
  context.stack_pointer = top;
}

// Everything that may be live is named as clobbered, so that only the stack pointer and rbp are saved here. No call and no
// return: the processor's return predictor stays in step, since the fibers of a warp mostly wait at the same place.
inline __attribute__((always_inline)) void switch_context(Context& from, Context& to) {
  void** save = &from.stack_pointer;
  void* load = to.stack_pointer;
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n\t"  // below the red zone
      "pushq %%rbp\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "pushq %%rax\n\t"
      "movq %%rsp, (%0)\n\t"
      "movq %1, %%rsp\n\t"
      "popq %%rax\n\t"
      "jmpq *%%rax\n"
      "1:\n\t"
      "popq %%rbp\n\t"
      "leaq 128(%%rsp), %%rsp"
      : "+D"(save), "+S"(load)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2",
        "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
        "cc", "memory");
}

#endif

}  // namespace specdec::emulator

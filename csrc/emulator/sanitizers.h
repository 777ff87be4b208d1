// What the sanitizers must be told: ASan about stacks that change hands and memory that may not be touched, TSan about
// what orders memory on the device. Without a sanitizer all of it is nothing.
#pragma once
#include <cstddef>

// The scheduler is compiled without -fsanitize=thread, so that its bookkeeping is not watched; a macro tells it.
#if defined(__SANITIZE_THREAD__) && !defined(SPECDEC_EMULATOR_TSAN)
#define SPECDEC_EMULATOR_TSAN 1
#endif
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SPECDEC_EMULATOR_ASAN 1
#endif
#if __has_feature(thread_sanitizer) && !defined(SPECDEC_EMULATOR_TSAN)
#define SPECDEC_EMULATOR_TSAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define SPECDEC_EMULATOR_ASAN 1
#endif

#ifdef SPECDEC_EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef SPECDEC_EMULATOR_TSAN
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}
#endif

namespace specdec::emulator {

#ifdef SPECDEC_EMULATOR_ASAN
constexpr bool kAsan = true;
inline void forbid(void* p, size_t n) { __asan_poison_memory_region(p, n); }
inline void permit(void* p, size_t n) { __asan_unpoison_memory_region(p, n); }
#else
constexpr bool kAsan = false;
inline void forbid(void*, size_t) {}
inline void permit(void*, size_t) {}
#endif

#ifdef SPECDEC_EMULATOR_TSAN
constexpr bool kTsan = true;
// A point that orders memory: whoever acquires it sees what was done before it was released.
struct Token {
  char unused = 0;
  void release() { __tsan_release(this); }
  void acquire() { __tsan_acquire(this); }
};
struct IgnoreReads {
  IgnoreReads() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); }
  ~IgnoreReads() { AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};
#else
constexpr bool kTsan = false;
struct Token {
  void release() {}
  void acquire() {}
};
struct IgnoreReads {
  IgnoreReads() {}
};
#endif

}  // namespace specdec::emulator

// Run CUDA C++ kernels on the CPU: one cooperative fiber per CUDA thread. Compile csrc/emulator/*.cpp beside the kernels.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <tuple>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define CUSHIM_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#define CUSHIM_TSAN 1
#endif
#if !defined(__x86_64__) || defined(CUSHIM_UCONTEXT)
#define CUSHIM_USE_UCONTEXT 1
#include <ucontext.h>
#endif


#include <utility>
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#ifndef __restrict__
#define __restrict__ __restrict
#endif
struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) double2 { double x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = struct CUstream_st*;
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlock = 8, cudaDevAttrMultiProcessorCount = 16, cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
inline int g_specdec_multiprocessors = 8;
inline cudaError_t cudaGetDevice(int* d) { *d = 0; return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  switch (a) { case cudaDevAttrMaxSharedMemoryPerBlock: *v = 48 << 10; break; case cudaDevAttrMultiProcessorCount: *v = g_specdec_multiprocessors; break;
  case cudaDevAttrComputeCapabilityMajor: *v = 9; break; case cudaDevAttrComputeCapabilityMinor: *v = 0; break; case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 227 << 10; break; default: return cudaErrorInvalidValue; }
  return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "invalid configuration"; }
inline cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t) { __builtin_memset(p, v, n); return cudaSuccess; }
namespace specdec_emu {

// ---- options -------------------------------------------------------------------------------
enum class Order { forward, reverse, random };
struct Options {
  Order order = Order::forward;
  uint64_t seed = 0;
  bool shuffle_blocks = false;
  size_t stack_bytes = 0;  // 0: default
  int smem_fill = 0xFF;  // float NaN
  bool strict = true;    // threads that have returned may not be waited for
};
inline Options& options() { static Options o; return o; }

[[noreturn]] inline void fail(const std::string& m) { throw std::runtime_error("specdec_emu: " + m); }

#ifdef CUSHIM_TSAN
struct Quiet {  // the shim's own bookkeeping is not what is being checked
  Quiet() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__); AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
  ~Quiet() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__); AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};
inline void hb_release(void* p) { __tsan_release(p); }
inline void hb_acquire(void* p) { __tsan_acquire(p); }
#else
struct Quiet { Quiet() {} };
inline void hb_release(void*) {}
inline void hb_acquire(void*) {}
#endif

// ---- contexts ------------------------------------------------------------------------------
#ifdef CUSHIM_USE_UCONTEXT
struct Context { ucontext_t uc; };
inline void raw_switch(Context& from, Context& to) { swapcontext(&from.uc, &to.uc); }
inline void raw_make(Context& c, char* stack, size_t n, void (*fn)()) {
  getcontext(&c.uc); c.uc.uc_stack.ss_sp = stack; c.uc.uc_stack.ss_size = n; c.uc.uc_link = nullptr; makecontext(&c.uc, fn, 0);
}
#else
struct Context { void* sp = nullptr; };
__attribute__((naked, noinline)) inline void raw_switch_sp(void**, void*) {
  asm volatile("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
               "movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
               "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}
inline void raw_switch(Context& from, Context& to) { raw_switch_sp(&from.sp, to.sp); }
inline void raw_make(Context& c, char* stack, size_t n, void (*fn)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + n) & ~uintptr_t(15);
  auto* p = reinterpret_cast<void**>(top);
  *--p = nullptr;                          // fake return address: keeps rsp % 16 == 8 at entry
  *--p = reinterpret_cast<void*>(fn);      // popped by ret
  for (int i = 0; i < 6; ++i) *--p = nullptr;
  c.sp = p;
}
#endif

enum class St : uint8_t { ready, warp, block, cluster, done };
enum class Op : uint8_t { none, syncwarp, shfl, vote, match, reduce };
inline const char* name(Op o) { static const char* n[] = {"-", "__syncwarp", "__shfl*_sync", "vote", "__match*_sync", "__reduce_*_sync"}; return n[int(o)]; }

struct Rendezvous {  // one warp collective in progress
  unsigned mask = 0, arrived = 0; int readers = 0; bool ready = false; Op op = Op::none; int site = 0;
  uint64_t slot[32]; char hb = 0;
};
struct Fiber {
  Context ctx; St st = St::ready; uint3 tid{}; int lin = 0, lane = 0, warp = 0, site = 0; unsigned bars = 0, cls = 0;
  Rendezvous* rv = nullptr; char* stack = nullptr; size_t stack_n = 0;
#ifdef CUSHIM_ASAN
  void* fake = nullptr;
#endif
#ifdef CUSHIM_TSAN
  void* tsan = nullptr;
#endif
};
struct Block;
struct SharedVar { const void* key; size_t off, bytes; };
struct Layout { std::vector<SharedVar> vars; size_t used = 128; };  // one per cluster: the same offsets in each of its blocks
constexpr size_t kArena = 320 << 10;
struct Cluster {  // blocks that live at the same time: an OS thread each (their own thread-local __shared__), one running at a time
  std::mutex m; std::condition_variable cv; int arrived = 0, alive = 0, turn = -1; uint64_t gen = 0; bool aborted = false;
  std::vector<char> st;  // r: may run, w: waits for the cluster, d: done
  std::vector<Block*> blocks; Layout layout; std::mt19937_64 rng; char hb[2] = {};
  void open() { arrived = 0; ++gen; for (char& c : st) if (c == 'w') c = 'r'; }
  void arrive() { std::unique_lock<std::mutex> l(m); if (++arrived == alive) open(); }
  void pick() {
    std::vector<int> v; for (size_t i = 0; i < st.size(); ++i) if (st[i] == 'r') v.push_back(int(i));
    if (!v.empty()) turn = options().order == Order::random ? v[rng() % v.size()] : options().order == Order::reverse ? v.back() : v[0];
    else if (alive) aborted = true;
    cv.notify_all();
  }
  void start(int rank) { std::unique_lock<std::mutex> l(m); cv.wait(l, [&] { return turn == rank || aborted; }); }
  void wait(int rank, uint64_t g) {
    std::unique_lock<std::mutex> l(m); if (gen == g) st[rank] = 'w';
    pick(); cv.wait(l, [&] { return (turn == rank && st[rank] == 'r') || aborted; });
    if (aborted) fail("every block of the cluster waits, or one has failed");
  }
  void leave(int rank, bool failed) { std::unique_lock<std::mutex> l(m); st[rank] = 'd'; --alive; aborted |= failed; if (alive > 0 && arrived == alive) open(); pick(); }
};

inline thread_local char tls_anchor = 0;  // same module as the __shared__ statics, so offsets from it are equal in all threads

struct Block {
  dim3 grid, dim; uint3 idx{}; int n = 0, alive = 0; std::vector<Fiber> f; std::vector<std::vector<std::unique_ptr<Rendezvous>>> warps;
  std::vector<unsigned> exited; std::vector<Fiber*> cur, next; Context main; Fiber* run = nullptr;
  int bar_n = 0, bar_site = 0; int bar_cnt = 0, bar_all = 1; int res_cnt = 0, res_all = 1;
  int cl_arrived = 0; uint64_t cl_gen = 0; bool cl_done = false; Cluster* cluster = nullptr; unsigned rank = 0; char* anchor = nullptr;
  unsigned char* smem = nullptr; size_t smem_n = 0; unsigned char* arena = nullptr; Layout own_layout; Layout* layout = nullptr; std::exception_ptr err; std::mt19937_64 rng; std::vector<uint32_t> prio;
  void (*body)(void*) = nullptr; void* body_arg = nullptr; char hb_bar[2] = {}, hb_start = 0, hb_end = 0; uint64_t switches = 0;
#ifdef CUSHIM_ASAN
  void* main_fake = nullptr; const void* main_stack = nullptr; size_t main_stack_n = 0;
#endif
#ifdef CUSHIM_TSAN
  void* main_tsan = nullptr;
#endif
};
inline thread_local Block* g_block = nullptr;
inline thread_local Fiber* g_fiber = nullptr;
inline Fiber& me() { return *g_fiber; }
inline Block& blk() { return *g_block; }

struct StackPool {  // one for all OS threads; a guard page below each stack
  std::mutex m; std::vector<char*> free_; size_t size_ = 0;
  void get(size_t n, size_t count, std::vector<char*>& out) {
    std::unique_lock<std::mutex> l(m);
    if (n != size_) { for (char* p : free_) munmap(p - 4096, size_ + 4096); free_.clear(); size_ = n; }
    while (count--) {
      if (!free_.empty()) { out.push_back(free_.back()); free_.pop_back(); continue; }
      void* p = mmap(nullptr, n + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (p == MAP_FAILED) fail("mmap of a fiber stack failed");
      mprotect(p, 4096, PROT_NONE); out.push_back(static_cast<char*>(p) + 4096);
    }
  }
  void put(std::vector<char*>& v) { std::unique_lock<std::mutex> l(m); free_.insert(free_.end(), v.begin(), v.end()); v.clear(); }
};
inline StackPool& stacks() { static StackPool p; return p; }

// ---- switching -----------------------------------------------------------------------------
inline void to_main(bool dying) {
  Block& b = blk(); Fiber& x = me();
  (void)dying;
#ifdef CUSHIM_ASAN
  __sanitizer_start_switch_fiber(dying ? nullptr : &x.fake, b.main_stack, b.main_stack_n);
#endif
#ifdef CUSHIM_TSAN
  __tsan_switch_to_fiber(b.main_tsan, 1);
#endif
  raw_switch(x.ctx, b.main);
#ifdef CUSHIM_ASAN
  __sanitizer_finish_switch_fiber(x.fake, &b.main_stack, &b.main_stack_n);
#endif
}
inline void to_fiber(Block& b, Fiber& x) {
  g_fiber = &x; b.run = &x; ++b.switches;
#ifdef CUSHIM_ASAN
  __sanitizer_start_switch_fiber(&b.main_fake, x.stack, x.stack_n);
#endif
#ifdef CUSHIM_TSAN
  __tsan_switch_to_fiber(x.tsan, 1);
#endif
  raw_switch(b.main, x.ctx);
#ifdef CUSHIM_ASAN
  __sanitizer_finish_switch_fiber(b.main_fake, nullptr, nullptr);
#endif
}
inline void wake(Block& b, Fiber& x) { x.st = St::ready; b.next.push_back(&x); }

inline void try_finish(Block& b, int w, Rendezvous& r) {
  if (r.ready || ((r.mask & ~b.exited[w]) & ~r.arrived)) return;
  if (options().strict && (r.mask & b.exited[w])) fail(std::string(name(r.op)) + " at line " + std::to_string(r.site) + ": the mask names lanes that have returned");
  r.ready = true; r.readers = __builtin_popcount(r.arrived);
  for (int l = 0; l < 32; ++l) if (r.arrived >> l & 1) wake(b, b.f[w * 32 + l]);
}
inline void bar_release(Block& b) {
  if (options().strict && b.alive < b.n) fail("__syncthreads() at line " + std::to_string(b.bar_site) + ": " + std::to_string(b.n - b.alive) + " threads have returned without it");
  b.res_cnt = b.bar_cnt; b.res_all = b.bar_all; b.bar_n = 0; b.bar_cnt = 0; b.bar_all = 1; b.bar_site = 0;
  for (auto& x : b.f) if (x.st == St::block) wake(b, x);
}
inline void cl_try(Block& b) {
  if (b.cl_done || b.cl_arrived == 0 || b.cl_arrived < b.alive) return;
  b.cl_done = true; b.cl_gen = b.cluster->gen; b.cluster->arrive();
}

inline void fiber_main() {
  Block& b = blk(); Fiber& x = me();
#ifdef CUSHIM_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &b.main_stack, &b.main_stack_n);
#endif
  hb_acquire(&b.hb_start);
  try { b.body(b.body_arg); } catch (...) { if (!b.err) b.err = std::current_exception(); }
  hb_release(&b.hb_end);
  {
    Quiet q;
    x.st = St::done; --b.alive;
    try {
      b.exited[x.warp] |= 1u << x.lane;
    for (auto& r : b.warps[x.warp]) if (r->mask && !r->ready && r->arrived) try_finish(b, x.warp, *r);
    if (b.alive && b.bar_n == b.alive) bar_release(b);
    if (b.alive && b.cluster) cl_try(b);
    } catch (...) { if (!b.err) b.err = std::current_exception(); }
  }
  to_main(true);
  __builtin_unreachable();
}

// ---- collectives ---------------------------------------------------------------------------
inline void syncthreads(int site, int pred, int* cnt, int* all) {
  Block& b = blk(); Fiber& x = me();
  char* hb = &b.hb_bar[x.bars++ & 1];
  hb_release(hb);
  {
    Quiet q;
    if (b.bar_n && b.bar_site != site) fail("threads of one block wait at different __syncthreads(): lines " + std::to_string(b.bar_site) + " and " + std::to_string(site));
    b.bar_site = site; ++b.bar_n; b.bar_cnt += pred != 0; b.bar_all &= pred != 0; x.st = St::block; x.site = site;
    if (b.bar_n == b.alive) bar_release(b);
    to_main(false);
    if (cnt) *cnt = b.res_cnt;
    if (all) *all = b.res_all;
  }
  hb_acquire(hb);
}
// Deposits `v`; returns when every live lane of `mask` has come. The caller reads r->slot[] and calls leave().
inline Rendezvous* meet(unsigned mask, Op op, uint64_t v, int site) {
  Block& b = blk(); Fiber& x = me(); auto& list = b.warps[x.warp];
  if (!(mask >> x.lane & 1)) fail(std::string(name(op)) + " at line " + std::to_string(site) + ": lane " + std::to_string(x.lane) + " is not in its own mask");
  Rendezvous *r = nullptr, *spare = nullptr;
  for (auto& p : list) { if (p->mask == 0) spare = p.get(); else if (p->mask == mask && !p->ready) { r = p.get(); break; } }
  if (!r) {
    if (!spare) { list.push_back(std::make_unique<Rendezvous>()); spare = list.back().get(); }
    r = spare; r->mask = mask; r->arrived = 0; r->ready = false; r->op = op; r->site = site;
  }
  if (r->op != op) fail(std::string("lanes of one warp meet in different collectives: ") + name(r->op) + " line " + std::to_string(r->site) + ", " + name(op) + " line " + std::to_string(site));
  r->arrived |= 1u << x.lane; r->slot[x.lane] = v; x.st = St::warp; x.rv = r; x.site = site;
  if (op == Op::syncwarp) hb_release(&r->hb);  // shuffles and votes order no memory
  try_finish(b, x.warp, *r);
  to_main(false);
  return r;
}
inline void leave(Rendezvous* r) { if (--r->readers == 0) r->mask = 0; }

template <class T> inline uint64_t pack(T v) { static_assert(sizeof(T) <= 8); uint64_t u = 0; std::memcpy(&u, &v, sizeof(T)); return u; }
template <class T> inline T unpack(uint64_t u) { T v; std::memcpy(&v, &u, sizeof(T)); return v; }

template <class T> inline T shfl(unsigned mask, T v, int src, int site) {
  Quiet q; auto* r = meet(mask, Op::shfl, pack(v), site);
  if (src >= 0 && !(r->arrived >> src & 1)) fail("__shfl*_sync at line " + std::to_string(site) + " reads lane " + std::to_string(src) + ", which takes no part");
  T o = src < 0 ? v : unpack<T>(r->slot[src]); leave(r); return o;
}
inline unsigned ballot(unsigned mask, int pred, int site) {
  Quiet q; auto* r = meet(mask, Op::vote, pred != 0, site); unsigned o = 0;
  for (int l = 0; l < 32; ++l) if ((r->arrived >> l & 1) && r->slot[l]) o |= 1u << l;
  leave(r); return o;
}
inline void syncwarp(unsigned mask, int site) { Quiet q; auto* r = meet(mask, Op::syncwarp, 0, site); hb_acquire(&r->hb); leave(r); }
template <class T, class F> inline T warp_reduce(unsigned mask, T v, F f, int site) {
  Quiet q; auto* r = meet(mask, Op::reduce, pack(v), site); bool first = true; T o{};
  for (int l = 0; l < 32; ++l) if (r->arrived >> l & 1) { T t = unpack<T>(r->slot[l]); o = first ? t : f(o, t); first = false; }
  leave(r); return o;
}
template <class T> inline unsigned match_any(unsigned mask, T v, int site) {
  Quiet q; auto* r = meet(mask, Op::match, pack(v), site); unsigned o = 0;
  for (int l = 0; l < 32; ++l) if ((r->arrived >> l & 1) && r->slot[l] == pack(v)) o |= 1u << l;
  leave(r); return o;
}
inline void cluster_arrive() {
  Block& b = blk(); if (!b.cluster) return;
  hb_release(&b.cluster->hb[me().cls & 1]);
  Quiet q; ++b.cl_arrived; cl_try(b);
}
inline void cluster_wait(int site) {
  Block& b = blk(); Fiber& x = me(); if (!b.cluster) return syncthreads(site, 0, nullptr, nullptr);
  { Quiet q; x.st = St::cluster; x.site = site; to_main(false); }
  hb_acquire(&b.cluster->hb[x.cls++ & 1]);
}
// Shared variables declared with the SHARED macro: per block, filled, with redzones under ASan, also in templates.
inline void* shared_var(const void* key, size_t bytes) {
  Quiet q; Block& b = blk(); Layout& L = *b.layout;
  for (auto& v : L.vars) if (v.key == key) return b.arena + v.off;
  SharedVar v{key, L.used, bytes}; L.used += (bytes + 127) / 128 * 128 + 128; L.vars.push_back(v);
  if (L.used > kArena) fail("static shared memory is over " + std::to_string(kArena) + " bytes");
#ifdef CUSHIM_ASAN
  if (b.cluster) for (Block* o : b.cluster->blocks) __asan_unpoison_memory_region(o->arena + v.off, bytes);
  else __asan_unpoison_memory_region(b.arena + v.off, bytes);
#endif
  return b.arena + v.off;
}
template <class T> inline T* map_rank(T* p, unsigned rank) {
  Block& b = blk(); if (!b.cluster) return p;
  Block& o = *b.cluster->blocks.at(rank); auto* c = (unsigned char*)p;
  if (c >= b.smem && c < b.smem + b.smem_n) return (T*)(o.smem + (c - b.smem));
  if (c >= b.arena && c < b.arena + kArena) return (T*)(o.arena + (c - b.arena));
#ifndef CUSHIM_TLS_SHARED
  fail("map_shared_rank on static shared memory needs -DCUSHIM_TLS_SHARED");
#endif
  return (T*)(o.anchor + ((char*)p - b.anchor));
}

// ---- running a block -----------------------------------------------------------------------
inline void run_block(Block& b) {
  Quiet q;
  const Options& o = options(); b.anchor = &tls_anchor;
#if defined(CUSHIM_ASAN) || defined(CUSHIM_TSAN)
  size_t sn = o.stack_bytes ? o.stack_bytes : 256 << 10;
#else
  size_t sn = o.stack_bytes ? o.stack_bytes : 64 << 10;
#endif
  b.n = int(b.dim.x * b.dim.y * b.dim.z); b.alive = b.n;
  if (b.n < 1 || b.n > 1024) fail("block size " + std::to_string(b.n));
  int nw = (b.n + 31) / 32; b.f.resize(b.n); b.warps.resize(nw); b.exited.assign(nw, 0);
  if (b.n % 32) b.exited[nw - 1] = ~0u << (b.n % 32);
  Block* outer = g_block; g_block = &b;
#ifdef CUSHIM_TSAN
  b.main_tsan = __tsan_get_current_fiber();
#endif
  std::vector<char*> st; stacks().get(sn, b.n, st);
  for (int i = 0; i < b.n; ++i) {
    Fiber& x = b.f[i]; x.lin = i; x.lane = i % 32; x.warp = i / 32;
    x.tid = {i % b.dim.x, i / b.dim.x % b.dim.y, i / (b.dim.x * b.dim.y)};
    x.stack = st[i]; x.stack_n = sn; raw_make(x.ctx, x.stack, sn, fiber_main);
#ifdef CUSHIM_TSAN
    x.tsan = __tsan_create_fiber(0);
#endif
    b.next.push_back(&x);
  }
  hb_release(&b.hb_start);
  try {
    while (b.alive && !b.err) {
      if (b.next.empty()) {
        if (b.cluster && b.cl_done) {  // all of this block has arrived: wait for the other blocks
          b.cluster->wait(int(b.rank), b.cl_gen); b.cl_done = false; b.cl_arrived = 0;
          for (auto& x : b.f) if (x.st == St::cluster) wake(b, x);
          continue;
        }
        int c[5] = {}, s[5] = {}; for (auto& x : b.f) { ++c[int(x.st)]; s[int(x.st)] = x.site; }
        fail("deadlock in block " + std::to_string(b.idx.x) + ": " + std::to_string(c[2]) + " threads in __syncthreads (line " + std::to_string(s[2]) + "), " + std::to_string(c[1]) +
             " in a warp collective (line " + std::to_string(s[1]) + "), " + std::to_string(c[3]) + " in cluster.sync (line " + std::to_string(s[3]) + "), " + std::to_string(c[4]) + " returned");
      }
      b.cur.clear(); b.cur.swap(b.next);
      if (o.order == Order::reverse) std::reverse(b.cur.begin(), b.cur.end());
      if (o.order == Order::random) {  // one warp, by random and changing priority, runs as far ahead as it can
        std::shuffle(b.cur.begin(), b.cur.end(), b.rng);
        if (b.rng() % 64 == 0 || b.prio.empty()) { b.prio.resize(nw); for (auto& p : b.prio) p = uint32_t(b.rng()); }
        uint32_t top = 0; for (Fiber* x : b.cur) top = std::max(top, b.prio[x->warp]);
        auto it = std::partition(b.cur.begin(), b.cur.end(), [&](Fiber* x) { return b.prio[x->warp] == top; });
        if (b.rng() % 4 == 0) it = b.cur.begin() + 1;  // and sometimes one thread
        b.next.assign(it, b.cur.end()); b.cur.erase(it, b.cur.end());
      }
      for (Fiber* x : b.cur) { to_fiber(b, *x); if (b.err) break; }
    }
  } catch (...) { if (!b.err) b.err = std::current_exception(); }
#ifdef CUSHIM_TSAN
  hb_acquire(&b.hb_end);
  for (auto& x : b.f) __tsan_destroy_fiber(x.tsan);
#endif
#ifdef CUSHIM_ASAN
  for (auto& x : b.f) { size_t dirty = x.st == St::done ? 8192 : x.stack_n; __asan_unpoison_memory_region(x.stack + x.stack_n - dirty, dirty); }  // a fiber that ended leaves only its first frame poisoned
#endif
  stacks().put(st);
  g_block = outer; g_fiber = nullptr;
}

struct Config { dim3 grid, block; size_t smem = 0; dim3 cluster{1, 1, 1}; bool cooperative = false; };
inline uint64_t g_switches = 0;

template <class... P, class... A> inline void launch(void (*k)(P...), const Config& c, A&&... a) {
  Quiet quiet;
  std::tuple<std::decay_t<P>...> args(static_cast<std::decay_t<P>>(a)...);
  struct Call { void (*k)(P...); decltype(args)* t; } call{k, &args};
  auto body = [](void* p) { auto* q = static_cast<Call*>(p); std::apply([q](auto... v) { q->k(v...); }, *q->t); };
  const Options& o = options(); std::mt19937_64 rng(o.seed);
  auto setup = [&](Block& b, unsigned x, unsigned y, unsigned z) {
    b.grid = c.grid; b.dim = c.block; b.idx = {x, y, z}; b.body = body; b.body_arg = &call; b.rng.seed(rng()); b.smem_n = c.smem;
    b.smem = static_cast<unsigned char*>(std::aligned_alloc(128, (c.smem + 127) / 128 * 128 + 128)); std::memset(b.smem, o.smem_fill, (c.smem + 127) / 128 * 128);
    b.layout = &b.own_layout; b.arena = static_cast<unsigned char*>(std::aligned_alloc(128, kArena)); std::memset(b.arena, o.smem_fill, kArena);
#ifdef CUSHIM_ASAN
    __asan_poison_memory_region(b.smem + c.smem, (c.smem + 127) / 128 * 128 + 128 - c.smem); __asan_poison_memory_region(b.arena, kArena);
#endif
  };
  auto teardown = [&](Block& b) {
#ifdef CUSHIM_ASAN
    __asan_unpoison_memory_region(b.smem, (c.smem + 127) / 128 * 128 + 128); __asan_unpoison_memory_region(b.arena, kArena);
#endif
    std::free(b.smem); std::free(b.arena); g_switches += b.switches;
  };
  dim3 cl = c.cooperative ? c.grid : c.cluster; unsigned cn = cl.x * cl.y * cl.z;
  if (c.grid.x % cl.x || c.grid.y % cl.y || c.grid.z % cl.z) fail("the grid is no multiple of the cluster");
  std::vector<uint3> ids;
  for (unsigned z = 0; z < c.grid.z; z += cl.z) for (unsigned y = 0; y < c.grid.y; y += cl.y) for (unsigned x = 0; x < c.grid.x; x += cl.x) ids.push_back({x, y, z});
  if (o.shuffle_blocks) std::shuffle(ids.begin(), ids.end(), rng);
  for (uint3 id : ids) {
    if (cn == 1) { Block b; setup(b, id.x, id.y, id.z); run_block(b); teardown(b); if (b.err) std::rethrow_exception(b.err); continue; }
#ifndef CUSHIM_TLS_SHARED
    if (c.cooperative || cn > 1) { /* static __shared__ would be one copy for all blocks: only dynamic shared memory is safe */ }
#endif
    Cluster k; k.alive = int(cn); k.st.assign(cn, 'r'); k.rng.seed(rng()); std::vector<std::unique_ptr<Block>> bs;
    for (unsigned r = 0; r < cn; ++r) {
      bs.push_back(std::make_unique<Block>()); Block& b = *bs.back(); setup(b, id.x + r % cl.x, id.y + r / cl.x % cl.y, id.z + r / (cl.x * cl.y));
      b.cluster = &k; b.layout = &k.layout; b.rank = r; k.blocks.push_back(&b);
    }
    std::vector<std::thread> ts; std::mutex gm; std::condition_variable gcv; unsigned finished = 0, started = 0;
    for (unsigned r = 0; r < cn; ++r) ts.emplace_back([&, r] {
      { std::unique_lock<std::mutex> l(gm); bs[r]->anchor = &tls_anchor; if (++started == cn) { std::unique_lock<std::mutex> lk(k.m); k.pick(); } gcv.notify_all(); gcv.wait(l, [&] { return started == cn; }); }
      k.start(int(r));
      run_block(*bs[r]);
#ifdef CUSHIM_ASAN
      if (c.smem) __asan_poison_memory_region(bs[r]->smem, c.smem);
      __asan_poison_memory_region(bs[r]->arena, kArena);  // shared memory of a block that has ended
#endif
      k.leave(int(r), bs[r]->err != nullptr);
      std::unique_lock<std::mutex> l(gm); ++finished; gcv.notify_all(); gcv.wait(l, [&] { return finished == cn; });  // keep thread-local shared memory alive
    });
    for (auto& t : ts) t.join();
    std::exception_ptr e;
    for (auto& b : bs) { teardown(*b); if (b->err && !e) e = b->err; }
    if (e) std::rethrow_exception(e);
  }
}
}  // namespace specdec_emu

// ---- CUDA names ----------------------------------------------------------------------------
#define threadIdx (::specdec_emu::me().tid)
#define blockIdx (::specdec_emu::blk().idx)
#define blockDim (::specdec_emu::blk().dim)
#define gridDim (::specdec_emu::blk().grid)
inline constexpr int warpSize = 32;
#define __syncthreads() ::specdec_emu::syncthreads(__LINE__, 0, nullptr, nullptr)
#define __syncthreads_count(p) ([&](int p_) { int c_; ::specdec_emu::syncthreads(__LINE__, p_, &c_, nullptr); return c_; }((p) != 0))
#define __syncthreads_or(p) (__syncthreads_count(p) != 0)
#define __syncthreads_and(p) ([&](int p_) { int c_; ::specdec_emu::syncthreads(__LINE__, p_, nullptr, &c_); return c_; }((p) != 0))
inline void specdec_emu_syncwarp(int site, unsigned m = 0xffffffffu) { specdec_emu::syncwarp(m, site); }
#define __syncwarp(...) specdec_emu_syncwarp(__LINE__ __VA_OPT__(,) __VA_ARGS__)
namespace specdec_emu {
template <class T> inline T shfl_idx(int s, unsigned m, T v, int l, int w = 32) { int b = me().lane & ~(w - 1); return shfl(m, v, b + (l & (w - 1)), s); }
template <class T> inline T shfl_xor(int s, unsigned m, T v, int x, int w = 32) { int l = me().lane ^ x; return shfl(m, v, (l & ~(w - 1)) > (me().lane & ~(w - 1)) ? -1 : l, s); }
template <class T> inline T shfl_up(int s, unsigned m, T v, unsigned d, int w = 32) { int l = me().lane - int(d); return shfl(m, v, l < (me().lane & ~(w - 1)) ? -1 : l, s); }
template <class T> inline T shfl_down(int s, unsigned m, T v, unsigned d, int w = 32) { int l = me().lane + int(d); return shfl(m, v, l > (me().lane | (w - 1)) ? -1 : l, s); }
}
#define __shfl_sync(...) ::specdec_emu::shfl_idx(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) ::specdec_emu::shfl_xor(__LINE__, __VA_ARGS__)
#define __shfl_up_sync(...) ::specdec_emu::shfl_up(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) ::specdec_emu::shfl_down(__LINE__, __VA_ARGS__)
#define __ballot_sync(m, p) ::specdec_emu::ballot(m, p, __LINE__)
#define __any_sync(m, p) (::specdec_emu::ballot(m, p, __LINE__) != 0)
#define __all_sync(m, p) (::specdec_emu::ballot(m, !(p), __LINE__) == 0)
#define __match_any_sync(m, v) ::specdec_emu::match_any(m, v, __LINE__)
#define __reduce_add_sync(m, v) ::specdec_emu::warp_reduce(m, v, [](auto a, auto b) { return a + b; }, __LINE__)
#define __reduce_max_sync(m, v) ::specdec_emu::warp_reduce(m, v, [](auto a, auto b) { return a > b ? a : b; }, __LINE__)
#define __reduce_min_sync(m, v) ::specdec_emu::warp_reduce(m, v, [](auto a, auto b) { return a < b ? a : b; }, __LINE__)
#define __reduce_or_sync(m, v) ::specdec_emu::warp_reduce(m, v, [](auto a, auto b) { return a | b; }, __LINE__)

namespace specdec_emu {
template <class T, class F> inline T rmw(T* p, F f) {  // works for float too
  using U = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  U* q = reinterpret_cast<U*>(p); U old = __atomic_load_n(q, __ATOMIC_RELAXED);
  for (;;) { T o = unpack<T>(old); U nw = U(pack<T>(f(o))); if (__atomic_compare_exchange_n(q, &old, nw, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return o; }
}
template <class T> struct same_ { using type = T; };
}
template <class T> inline T atomicAdd(T* p, typename specdec_emu::same_<T>::type v) { return specdec_emu::rmw(p, [v](T o) { return T(o + v); }); }
template <class T> inline T atomicSub(T* p, typename specdec_emu::same_<T>::type v) { return specdec_emu::rmw(p, [v](T o) { return T(o - v); }); }
template <class T> inline T atomicMax(T* p, typename specdec_emu::same_<T>::type v) { return specdec_emu::rmw(p, [v](T o) { return o < v ? v : o; }); }
template <class T> inline T atomicMin(T* p, typename specdec_emu::same_<T>::type v) { return specdec_emu::rmw(p, [v](T o) { return v < o ? v : o; }); }
template <class T> inline T atomicOr(T* p, typename specdec_emu::same_<T>::type v) { return specdec_emu::rmw(p, [v](T o) { return T(o | v); }); }
template <class T> inline T atomicAnd(T* p, typename specdec_emu::same_<T>::type v) { return specdec_emu::rmw(p, [v](T o) { return T(o & v); }); }
template <class T> inline T atomicXor(T* p, typename specdec_emu::same_<T>::type v) { return specdec_emu::rmw(p, [v](T o) { return T(o ^ v); }); }
template <class T> inline T atomicExch(T* p, typename specdec_emu::same_<T>::type v) { return specdec_emu::rmw(p, [v](T) { return v; }); }
template <class T> inline T atomicCAS(T* p, typename specdec_emu::same_<T>::type c, typename specdec_emu::same_<T>::type v) { return specdec_emu::rmw(p, [c, v](T o) { return o == c ? v : o; }); }
inline unsigned atomicInc(unsigned* p, unsigned m) { return specdec_emu::rmw(p, [m](unsigned o) { return o >= m ? 0u : o + 1; }); }

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_block() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i); return r; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline unsigned __float_as_uint(float f) { return uint32_t(specdec_emu::pack(f)); }
inline int __float_as_int(float f) { return int(uint32_t(specdec_emu::pack(f))); }
inline float __uint_as_float(unsigned u) { return specdec_emu::unpack<float>(u); }
inline float __int_as_float(int u) { return specdec_emu::unpack<float>(uint32_t(u)); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
using std::max; using std::min;
inline unsigned max(unsigned a, int b) { return std::max<unsigned>(a, unsigned(b)); }
template <class T> inline T __ldg_(const T* p) { return *p; }
#define __ldg(p) __ldg_(p)
#define __ldcs(p) __ldg_(p)
#define __ldcg(p) __ldg_(p)
template <class T> inline void __stcs_(T* p, T v) { *p = v; }
#define __stcs(p, v) __stcs_(p, v)

inline int __popcll_(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
inline unsigned long long __float2ull_rn(float x) { return (unsigned long long)__builtin_rintf(x); }
inline unsigned long long __double2ull_rn(double x) { return (unsigned long long)__builtin_rint(x); }
inline float __ull2float_rn(unsigned long long x) { return (float)x; }
inline double __ull2double_rn(unsigned long long x) { return (double)x; }

#define SPECDEC_SHARED(type, name, count) \
  static char name##_key;                 \
  type(&name)[count] = *static_cast<type(*)[count]>(::specdec_emu::shared_var(&name##_key, sizeof(type) * (count)))
#define SPECDEC_DYNAMIC_SHARED(name) unsigned char* name = ::specdec_emu::blk().smem

namespace specdec::cuda {
struct Shape {
  dim3 grid, block;
  size_t shared = 0;
  unsigned cluster = 1;
  bool overlapping = false;
};
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const Shape& shape, cudaStream_t, Arguments&&... arguments) {
  ::specdec_emu::launch(kernel, {shape.grid, shape.block, shape.shared, dim3(shape.cluster), false}, std::forward<Arguments>(arguments)...);
  return cudaSuccess;
}
inline void wait_for_previous() {}
inline void allow_next() {}
inline float fast_exp2(float x) { const float y = ::exp2f(x); return y < 0x1p-126f ? 0.0f : y; }
inline float half_bits_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) return __uint_as_float(sign | 0x7F800000u | (magnitude & 0x3FF) << 13);
  if (magnitude < 0x400) return __uint_as_float(sign | 0x3F800000u) * (float(magnitude) * 0x1p-24f);
  return __uint_as_float(sign | ((magnitude << 13) + 0x38000000u));
}
inline unsigned cluster_rank() { return ::specdec_emu::blk().rank; }
inline unsigned cluster_size() { auto* c = ::specdec_emu::blk().cluster; return c ? unsigned(c->blocks.size()) : 1; }
inline void emu_cluster_sync(int site) { ::specdec_emu::cluster_arrive(); ::specdec_emu::cluster_wait(site); }
#define cluster_sync() emu_cluster_sync(__LINE__)
template <class T> inline T* in_cluster_block(T* address, unsigned rank) { return ::specdec_emu::map_rank(address, rank); }
}  // namespace specdec::cuda

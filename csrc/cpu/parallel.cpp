#include "cpu/parallel.h"

#include <memory>
#include <thread>

namespace specdec::cpu {
namespace {

// Waits by spinning, as what is waited for comes within microseconds; where it does not, others may need the processor.
class Wait {
 public:
  void operator()() {
    if (++turns_ > kSpins) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  static constexpr int kSpins = 4096;
  int turns_ = 0;
};

template <class Fn>
struct AtEnd {
  Fn f;
  ~AtEnd() { f(); }
};

}  // namespace

struct Team::Pass {
  const int64_t n;
  const Part& f;
  std::atomic<int64_t> next{0};
};

// The parts get smaller, so that all are done at about the same time.
void Team::take_parts(Pass& pass) const {
  for (int64_t begin = pass.next.load(std::memory_order_relaxed); begin < pass.n;) {
    const int64_t end = begin + std::max<int64_t>((pass.n - begin) / threads_, 1);
    if (!pass.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
    pass.f(begin, end);
    begin = pass.next.load(std::memory_order_relaxed);
  }
}

// A helper says that it is inside before it looks for a pass, and the leader takes the pass away before it looks for those
// inside, all in one order: so either the helper finds none, or the leader waits for it.
void Team::share(int64_t n, const Part& f) {
  if (threads_ == 1) return f(0, n);
  Pass pass{n, f};
  const AtEnd ended{[&] {
    pass_.store(nullptr);
    for (Wait wait; inside_.load() != 0;) wait();
  }};
  pass_.store(&pass);
  take_parts(pass);
}

void Team::help() {
  if (!pass_.load(std::memory_order_relaxed)) return;
  inside_.fetch_add(1);
  const AtEnd left{[&] { inside_.fetch_sub(1); }};
  if (Pass* pass = pass_.load()) take_parts(*pass);
}

// A thread takes the next rows when it is done with its last: some sequences are rejected at once, and others read to the end.
void Team::gather(int threads, int64_t n, const std::function<void(int64_t, Team*)>& f) {
  const auto teams = std::make_unique<Team[]>(threads);
  const int64_t share = std::max<int64_t>(n / (8 * threads), 1);
  std::atomic<int64_t> next{0};
  std::atomic<int> leading{0};
  parallel_for(threads, [&](int64_t number, int64_t) {
    Team& own = teams[number];
    own.threads_ = threads;
    leading.fetch_add(1);
    {
      const AtEnd led{[&] { leading.fetch_sub(1); }};
      for (int64_t begin; (begin = next.fetch_add(share)) < n;)
        for (int64_t i = begin; i < std::min(begin + share, n); ++i) f(i, &own);
    }
    for (Wait wait; leading.load() > 0; wait())
      for (int i = 0; i < threads; ++i) teams[i].help();
  });
}

}  // namespace specdec::cpu

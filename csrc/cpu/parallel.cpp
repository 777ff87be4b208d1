#include "cpu/parallel.h"

#include <exception>
#include <memory>
#include <thread>

namespace specdec::cpu {
namespace {

// Waits by spinning, as the wait usually ends within microseconds; if it does not, others may need the processor.
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
  bool is_long() const { return turns_ > kSpins + kYields; }

 private:
  static constexpr int kSpins = 4096, kYields = 256;
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
  std::atomic_flag failed{};
  std::exception_ptr error{};  // of the first helper that failed
};

// The parts get smaller, so that all end at about the same time. Whoever takes the last one removes the pass: nobody
// needs to look at it any more.
bool Team::take_parts(Pass& pass) {
  bool took = false;
  for (int64_t begin = pass.next.load(std::memory_order_relaxed); begin < pass.n;) {
    const int64_t end = std::min(begin + std::max<int64_t>((pass.n - begin) / threads_, kSmallestPart), pass.n);
    if (!pass.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
    if (end == pass.n) pass_.store(nullptr);
    pass.f(begin, end);
    took = true;
    begin = pass.next.load(std::memory_order_relaxed);
  }
  return took;
}

// A helper announces itself before it looks for a pass, and the pass is removed before the leader looks for helpers,
// all in one order: so either the helper finds no pass, or the leader waits for it.
void Team::share(int64_t n, const Part& f) {
  if (next_row_ == nullptr || next_row_->load(std::memory_order_relaxed) < rows_) return f(0, n);  // nobody is free
  Pass pass{n, f};
  {
    const AtEnd ended{[&] {
      pass_.store(nullptr);
      for (Wait wait; inside_.load() != 0;) wait();
    }};
    pass_.store(&pass);
    take_parts(pass);
  }
  if (pass.error) std::rethrow_exception(pass.error);
}

bool Team::help() {
  if (!pass_.load(std::memory_order_relaxed)) return false;
  inside_.fetch_add(1);
  const AtEnd left{[&] { inside_.fetch_sub(1); }};
  Pass* const pass = pass_.load();
  if (!pass) return false;
  try {
    return take_parts(*pass);
  } catch (...) {
    if (!pass->failed.test_and_set()) pass->error = std::current_exception();
    return true;
  }
}

// A thread takes the next rows when it is done with its last: some sequences are rejected at once, others are read to
// the end. Nobody waits for a thread that has not come yet, so a thread that has long waited without helping may leave.
void Team::gather(int threads, int64_t n, const std::function<void(int64_t, Team*)>& f) {
  const auto teams = std::make_unique<Team[]>(threads);
  const int64_t share = std::max<int64_t>(n / (8 * threads), 1);
  std::atomic<int64_t> next{0};
  std::atomic<int> leading{0};
  for (int i = 0; i < threads; ++i) teams[i].threads_ = threads, teams[i].rows_ = n, teams[i].next_row_ = &next;
  parallel_for(threads, [&](int64_t number, int64_t) {
    leading.fetch_add(1);
    {
      const AtEnd led{[&] { leading.fetch_sub(1); }};
      for (int64_t begin; (begin = next.fetch_add(share)) < n;)
        for (int64_t i = begin; i < std::min(begin + share, n); ++i) f(i, &teams[number]);
    }
    for (Wait wait; leading.load() > 0 && !wait.is_long(); wait()) {
      for (int i = 0; i < threads; ++i)
        if (teams[(number + i) % threads].help()) wait = {};
    }
  });
}

}  // namespace specdec::cpu

// torch's thread pool, without torch's headers, and which thread works on which row.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

namespace specdec::cpu {

// Both are defined in bind_cpu.cpp.
int num_threads();
// f(begin, end) over [0, n) in chunks; inline when called from inside another parallel_for.
void parallel_for(int64_t n, const std::function<void(int64_t, int64_t)>& f);

// The work of a thread that has a row; threads without a row, or with none left, may take parts of it.
class Team {
 public:
  using Part = std::function<void(int64_t begin, int64_t end)>;

  // Runs f over parts of [0, n) on any of the threads; returns when all are done. For the thread that has the row.
  void share(int64_t n, const Part& f);

  // f(i, team) for each of n rows, by so many threads. A thread without a row waits for what the others share out.
  static void gather(int threads, int64_t n, const std::function<void(int64_t, Team*)>& f);

 private:
  struct Pass;
  bool help();  // whether there was a part to take
  bool take_parts(Pass& pass);

  static constexpr int64_t kSmallestPart = 2;
  int threads_ = 1;
  int64_t rows_ = 0;
  const std::atomic<int64_t>* next_row_ = nullptr;  // first row that no thread has; null: there are no other threads
  alignas(64) std::atomic<Pass*> pass_{nullptr};    // the pass that is shared out at present
  alignas(64) std::atomic<int> inside_{0};          // helpers that may be working on it
};

// A thread is worth waking for this many numbers of rows: it takes microseconds, on a busy machine milliseconds.
#ifndef SPECDEC_WORTH_WAKING
#define SPECDEC_WORTH_WAKING (1 << 16)  // fewer in the tests under TSan
#endif

// f(i, team) for each of n independent rows or sequences, each of which reads so many numbers. If other threads have no
// row, `team` gives them parts of f's own work.
template <class Fn>
void for_each_row(int64_t n, int64_t numbers, Fn f) {
  const int64_t threads = std::min<int64_t>(num_threads(), n * numbers / SPECDEC_WORTH_WAKING);
  if (threads > 1) return Team::gather(int(threads), n, f);
  Team alone;
  for (int64_t i = 0; i < n; ++i) f(i, &alone);
}

}  // namespace specdec::cpu

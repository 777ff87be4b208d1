// torch's thread pool, without torch's headers: defined in bind_cpu.cpp.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

namespace specdec::cpu {

int num_threads();
// f(begin, end) over [0, n) in chunks; inline when called from inside another parallel_for.
void parallel_for(int64_t n, const std::function<void(int64_t, int64_t)>& f);

// The work of a thread that has a row, of which those may take parts that have none, or none left.
class Team {
 public:
  using Part = std::function<void(int64_t begin, int64_t end)>;

  // f of parts of [0, n) on any threads, until all are done: by the one that has the row.
  void share(int64_t n, const Part& f);

  // f(i, team) for each of n rows, by so many threads. One that has no row waits for what the others share out.
  static void gather(int threads, int64_t n, const std::function<void(int64_t, Team*)>& f);

 private:
  struct Pass;
  void help();  // take part, if there is a pass
  void take_parts(Pass& pass) const;

  int threads_ = 1;
  alignas(64) std::atomic<Pass*> pass_{nullptr};  // the present one
  alignas(64) std::atomic<int> inside_{0};        // helpers that may be at it
};

// So many numbers of rows are worth a thread: waking one takes microseconds, on a busy machine milliseconds.
constexpr int64_t kWorthWaking = 1 << 15;

// f(i, team) for each of n independent rows or sequences, that read so many numbers each. `team` takes parts of f's own work,
// where other threads have no row.
template <class Fn>
void for_each_row(int64_t n, int64_t numbers, Fn f) {
  const int64_t threads = std::min<int64_t>(num_threads(), n * numbers / kWorthWaking);
  if (threads > 1) return Team::gather(int(threads), n, f);
  Team alone;
  for (int64_t i = 0; i < n; ++i) f(i, &alone);
}

}  // namespace specdec::cpu

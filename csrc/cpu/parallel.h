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

// So many numbers of rows are worth a second thread: waking one takes as long, on a busy machine milliseconds.
constexpr int64_t kWorthWaking = 1 << 16;

// f(i, split) for each of n independent rows or sequences, that read so many numbers each. `split`: f may spread its own work
// over the threads, since there are too few rows to keep every thread busy. A thread takes the next rows when it is done with
// its last: some sequences are rejected at once, and others read to the end.
template <class Fn>
void for_each_row(int64_t n, int64_t numbers, Fn f) {
  const bool few = n == 1 || 2 * n < num_threads();
  if (few || n * numbers < kWorthWaking) {
    for (int64_t i = 0; i < n; ++i) f(i, few);
  } else {
    const int64_t workers = std::min<int64_t>(n, num_threads()), share = std::max<int64_t>(n / (8 * workers), 1);
    std::atomic<int64_t> next{0};
    parallel_for(workers, [&](int64_t, int64_t) {
      for (int64_t begin; (begin = next.fetch_add(share, std::memory_order_relaxed)) < n;)
        for (int64_t i = begin; i < std::min(begin + share, n); ++i) f(i, false);
    });
  }
}

}  // namespace specdec::cpu

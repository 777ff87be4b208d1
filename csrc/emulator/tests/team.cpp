// Threads that share out the work of rows (cpu/parallel.h), without torch's: every part is done once, even if one of
// them ends with an error. Under TSan it shows whether each thread sees what another writes.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "threads.h"

namespace {

using specdec::cpu::for_each_row;
using specdec::cpu::Team;

constexpr int64_t kMany = 1 << 18;  // numbers per row: enough for every thread
constexpr int kParts = 100, kPasses = 5;

void expect(bool good, const char* what) {
  if (good) return;
  std::printf("%s\n", what);
  std::exit(1);
}

// Each pass over a row adds what the previous one has left.
void every_part_is_done_once(int64_t rows) {
  std::vector<std::vector<int64_t>> seen(rows, std::vector<int64_t>(kParts, 1));
  for_each_row(rows, kMany, [&](int64_t row, Team* team) {
    int64_t before = 1;
    for (int pass = 0; pass < kPasses; ++pass) {
      team->share(kParts, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) seen[row][part] += before;
      });
      before = seen[row][kParts - 1];
    }
  });
  for (const std::vector<int64_t>& row : seen)
    for (int64_t each : row) expect(each == 1 << kPasses, "a part was left out, or done twice");
}

bool throws(auto f) {
  try {
    f();
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

// And their errors end the pass for the thread that has the row.
void others_take_part() {
  bool went_on = false;
  const auto failing = [&](int64_t, Team* team) {
    const std::thread::id own = std::this_thread::get_id();
    team->share(kParts, [&](int64_t begin, int64_t end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(end - begin));
      if (std::this_thread::get_id() != own) throw std::runtime_error("meant");
    });
    went_on = true;
  };
  expect(throws([&] { for_each_row(1, kMany, failing); }) && !went_on, "no helper took part, or its error was lost");
}

void an_error_comes_through() {
  constexpr int64_t kRows = 5, kBad = 3;
  const auto failing = [](int64_t row, Team* team) {
    team->share(kParts, [&](int64_t begin, int64_t end) {
      if (row == kBad && begin <= kParts / 2 && kParts / 2 < end) throw std::runtime_error("meant");
    });
  };
  expect(throws([&] { for_each_row(kRows, kMany, failing); }), "an error was swallowed");
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) return 0;  // see the Makefile
  others_take_part();
  for (int round = 0; round < 200; ++round) {
    for (int64_t rows : {1, 2, 3, 7, 40}) every_part_is_done_once(rows);
    an_error_comes_through();
  }
  const std::thread::id here = std::this_thread::get_id();
  for_each_row(40, 1, [&](int64_t, Team*) { expect(here == std::this_thread::get_id(), "threads woke for little"); });
}

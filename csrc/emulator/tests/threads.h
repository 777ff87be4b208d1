// What csrc/bind_cpu.cpp takes from torch, for programs without torch.
#pragma once
#include <exception>
#include <thread>
#include <vector>

#include "cpu/parallel.h"

namespace specdec::cpu {

int num_threads() { return 3; }

void parallel_for(int64_t n, const std::function<void(int64_t, int64_t)>& f) {
  std::vector<std::exception_ptr> errors(n);
  const auto run = [&](int64_t i) {
    try {
      f(i, i + 1);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < n; ++i) threads.emplace_back(run, i);
  run(0);
  for (std::thread& each : threads) each.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace specdec::cpu

// The kernels of csrc/cuda in the emulator, and those of csrc/cpu beside them, on random cases, without torch: for the
// sanitizers. Each case must give the same bits in all strategies and schedules, and the CPU kernels' tokens.
//
//   kernels_main CASES [FIRST_SEED [LARGE]]       LARGE: how many of the cases have rows of many tiles
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>

#include "cases.h"
#include "cpu/ops.h"
#include "cuda/ops.h"
#include "cuda/strategy.h"
#include "threads.h"

extern "C" void specdec_emulator_schedule(int order, uint64_t seed);
extern "C" void specdec_emulator_resident(int count);

namespace {

using namespace specdec;
using namespace specdec::tests;

// Scratch memory of one call, allocated before its first kernel: TSan takes an allocation for a write of the host, and
// a kernel that overlaps the previous one does not wait for what the host does between the two.
class Scratch {
 public:
  Scratch() : bytes_(kBytes) { emulator::forbid(bytes_.data(), kBytes); }
  ~Scratch() { emulator::permit(bytes_.data(), kBytes); }
  void clear() {
    emulator::permit(bytes_.data(), used_);
    std::memset(bytes_.data(), 0xFF, used_);
    emulator::forbid(bytes_.data(), used_);
    used_ = 0;
  }
  void* take(int64_t bytes) {
    unsigned char* begin = bytes_.data() + used_;
    begin += -reinterpret_cast<uintptr_t>(begin) & 255;
    used_ = size_t(begin - bytes_.data()) + size_t(bytes) + 64;
    if (used_ > kBytes) throw std::runtime_error("a case needs more scratch memory than there is");
    emulator::permit(begin, size_t(bytes));
    return begin;
  }

 private:
  static constexpr size_t kBytes = 4 << 20;
  std::vector<unsigned char> bytes_ = std::vector<unsigned char>(kBytes, 0xFF);
  size_t used_ = 0;
};

// `called` counts the calls.
template <class Args>
auto on_device(cudaError_t (*op)(const Args&, const cuda::Launch&), Scratch& scratch, int64_t& called) {
  return [op, &scratch, &called](const Args& args) {
    ++called;
    scratch.clear();
    cudaStreamSynchronize(nullptr);
    const cudaError_t error = op(args, {nullptr, [&](int64_t bytes) { return scratch.take(bytes); }});
    cudaStreamSynchronize(nullptr);
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  };
}

// Where two outcomes of a case first differ.
std::string difference(const Outputs& a, const Outputs& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t at = 0; at < a[i].size(); at += 4) {
      uint32_t x, y;
      std::memcpy(&x, a[i].data() + at, 4);
      std::memcpy(&y, b[i].data() + at, 4);
      if (x == y) continue;
      char text[120];
      std::snprintf(text, sizeof text, "output %zu, word %zu: %08x (%g) and %08x (%g)", i, at / 4, x,
                    __uint_as_float(x), y, __uint_as_float(y));
      return text;
    }
  }
  return "";
}

struct Way {
  cuda::Strategy strategy;
  int order;
  uint64_t seed;
  int resident = 0;  // clusters that run at a time; 0: as the order has it
};

constexpr Way kWays[] = {
    {cuda::Strategy::kSplit, 0, 0},       {cuda::Strategy::kWalk, 0, 0},        {cuda::Strategy::kCluster, 0, 0},
    {cuda::Strategy::kResident, 0, 0, 1}, {cuda::Strategy::kEarly, 0, 0},       {cuda::Strategy::kSplit, 2, 1},
    {cuda::Strategy::kWalk, 2, 2},        {cuda::Strategy::kCluster, 2, 3},     {cuda::Strategy::kResident, 2, 4, 3},
    {cuda::Strategy::kEarly, 2, 10, 3},   {cuda::Strategy::kAuto, 1, 0},        {cuda::Strategy::kSplit, 2, 5},
    {cuda::Strategy::kWalk, 2, 6},        {cuda::Strategy::kCluster, 2, 7},     {cuda::Strategy::kResident, 2, 8, 1},
    {cuda::Strategy::kResident, 1, 0, 2}, {cuda::Strategy::kResident, 2, 9, 2}, {cuda::Strategy::kEarly, 2, 11, 3},
};
constexpr size_t kAlways = 5;                      // ways that each case is run
constexpr int kFurther = emulator::kTsan ? 7 : 3;  // TSan is slow, and finds most races in any schedule

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: kernels_main CASES [FIRST_SEED [LARGE]]\n");
    return 2;
  }
  const int64_t cases = std::atoll(argv[1]), first = argc > 2 ? std::atoll(argv[2]) : 0;
  const int64_t large = argc > 3 ? std::atoll(argv[3]) : 0;
  Scratch scratch;
  std::map<std::string, int64_t> calls;
#define SPECDEC_ON_DEVICE(Name, op) on_device(cuda::op, scratch, calls[#op]),
#define SPECDEC_ON_HOST(Name, op) cpu::op,
  const Backend device{SPECDEC_OPS(SPECDEC_ON_DEVICE)}, host{SPECDEC_OPS(SPECDEC_ON_HOST)};
#undef SPECDEC_ON_DEVICE
#undef SPECDEC_ON_HOST

  int64_t failed = 0, differ = 0;
  for (int64_t i = 0; i < cases; ++i) {
    const Case c = make_case(uint64_t(first + i), i < large);
    // Each strategy in every case, and some of the further schedules.
    Outputs expected;
    for (size_t w = 0; w < std::size(kWays); ++w) {
      if (w >= kAlways && (int64_t(w) + i) % kFurther != 0) continue;
      const Way& way = kWays[w];
      specdec_cuda_force_strategy(int(way.strategy));
      specdec_emulator_schedule(way.order, way.seed + uint64_t(i));
      specdec_emulator_resident(way.resident);
      std::string problem;
      try {
        const Outputs outputs = c.run(device);
        if (expected.empty()) expected = outputs;
        if (outputs != expected) problem = "other bits than in the first: " + difference(expected, outputs);
      } catch (const std::exception& error) {
        problem = error.what();
      }
      if (problem.empty()) continue;
      ++failed;
      std::printf("case %lld (%s), strategy %d, order %d, seed %llu, %d at a time: %s\n",
                  static_cast<long long>(first + i), c.name.c_str(), int(way.strategy), way.order,
                  static_cast<unsigned long long>(way.seed + uint64_t(i)), way.resident, problem.c_str());
    }
    if (expected.empty()) continue;
    const std::string other = difference({expected[0]}, {c.run(host)[0]});
    if (other.empty() || c.at_border) continue;
    ++differ;
    std::printf("case %lld (%s): the CPU kernels draw otherwise: %s\n", static_cast<long long>(first + i),
                c.name.c_str(), other.c_str());
  }
  std::printf("%lld cases, %lld failures; the CPU kernels draw otherwise in %lld\n", static_cast<long long>(cases),
              static_cast<long long>(failed), static_cast<long long>(differ));
  constexpr int64_t kMany = 50;  // so many cases include some of every op
  for (const auto& [op, count] : calls) {
    if (count > 0 || cases < kMany) continue;
    std::printf("no case calls %s: csrc/emulator/tests/cases.cpp is to have one\n", op.c_str());
    ++failed;
  }
  // Now and then a uniform lies within the float error of a border, where backends may differ; that must be rare.
  return failed > 0 || differ * 100 > cases ? 1 : 0;
}

// The planted defects of bulk copies, their barriers, and blocks that wait for each other; in planted_defects.cpp's
// namespace.

// Whether a launch ends at all: if the effect of a defect depends on the schedule, a deadlock counts as a wrong result.
template <class Launch>
bool ends(Launch launch) {
  try {
    launch();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

constexpr int kPart = 64, kParts = 4;  // floats per copy, and number of copies

// Sums what arrives in parts through a ring of two buffers. Each defect leaves out one thing.
template <bool kWaits, bool kSyncs, bool kTurns>
__global__ void sum_of_ring(const float* x, float* out) {
  SPECDEC_SHARED(float4, buffers, 2 * kPart / 4);
  SPECDEC_SHARED(uint64_t, full, 2);
  float* const ring = reinterpret_cast<float*>(&buffers[0]);
  const auto bring = [&](int part) {
    expect_bytes(&full[part % 2], kPart * sizeof(float));
    bulk_copy(ring + part % 2 * kPart, x + part * kPart, kPart * sizeof(float), &full[part % 2]);
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) init_mbarrier(&full[i], 1);
    publish_mbarriers();
    for (int i = 0; i < 2; ++i) bring(i);
  }
  __syncthreads();
  float sum = 0.0f;
  for (int part = 0; part < kParts; ++part) {
    if (kWaits) wait_for_phase(&full[part % 2], kTurns ? part / 2 % 2 : 0);
    __syncwarp();
    sum += ring[part % 2 * kPart + threadIdx.x];
    if (kSyncs) __syncthreads();
    if (threadIdx.x == 0 && part + 2 < kParts) bring(part + 2);
  }
  for (int i = 0; i < 2; ++i) wait_for_phase(&full[i], (kParts / 2 - 1) % 2);
  out[threadIdx.x] = sum;
}

template <bool kWaits, bool kSyncs, bool kTurns>
bool run_ring() {
  std::vector<float4> memory(kParts * kPart / 4);  // aligned as a copy needs
  float* const x = &memory[0].x;
  std::vector<float> out(kPart);
  for (int i = 0; i < kParts * kPart; ++i) x[i] = float(i / kPart + 1);
  const bool ended =
      ends([&] { launch_kernel((sum_of_ring<kWaits, kSyncs, kTurns>), {1, kPart}, nullptr, x, out.data()); });
  return ended && all_equal(out, 10.0f);
}

template <bool kGood>
bool copy_without_wait() {
  return run_ring<kGood, true, true>();
}

template <bool kGood>
bool copy_into_buffer_in_use() {
  return run_ring<true, kGood, true>();
}

template <bool kGood>
bool wait_for_wrong_phase() {
  return run_ring<true, true, kGood>();
}

// Two copies whose barrier is told to count `expected` bytes.
template <bool kInitialised, bool kAligned, bool kWaits, bool kPublishes>
__global__ void two_copies(const float* x, float* out, unsigned expected) {
  SPECDEC_SHARED(float4, buffers, 3 * kPart / 4);
  SPECDEC_SHARED(uint64_t, full, 2);
  float* const both = reinterpret_cast<float*>(&buffers[0]);
  if (threadIdx.x == 0) {
    if (kInitialised) init_mbarrier(full, 1);
    init_mbarrier(full + 1, 1);
    if (kPublishes) publish_mbarriers();
    expect_bytes(full, expected);
    for (int i = 0; i < 2; ++i)
      bulk_copy(both + i * kPart, x + i * kPart + (kAligned ? 0 : 1), kPart * sizeof(float), full);
  }
  __syncthreads();
  if (kWaits) wait_for_phase(full, 0);
  out[threadIdx.x] = kWaits ? both[threadIdx.x] : 1.0f;
  if (!kWaits) return;
  if (threadIdx.x == 0) {  // one more copy, so that the block lasts until the others may have landed
    expect_bytes(full + 1, kPart * sizeof(float));
    bulk_copy(both + 2 * kPart, x, kPart * sizeof(float), full + 1);
  }
  __syncthreads();
  wait_for_phase(full + 1, 0);
  wait_for_phase(full, 0);
}

template <bool kInitialised, bool kAligned, bool kWaits, bool kPublishes = true>
bool run_two_copies(unsigned expected) {
  std::vector<float4> x(kPart, make_float4(1.0f, 1.0f, 1.0f, 1.0f));
  std::vector<float> out(2 * kPart);
  launch_kernel((two_copies<kInitialised, kAligned, kWaits, kPublishes>), {1, 2 * kPart}, nullptr, &x[0].x, out.data(),
                expected);
  return all_equal(out, 1.0f);
}

constexpr unsigned kBoth = 2 * kPart * sizeof(float);

template <bool kGood>
bool expected_bytes_too_few() {
  return run_two_copies<true, true, true>(kGood ? kBoth : kBoth / 2);
}

template <bool kGood>
bool expected_bytes_too_many() {
  return run_two_copies<true, true, true>(kGood ? kBoth : 2 * kBoth);
}

template <bool kGood>
bool barrier_not_published() {
  return run_two_copies<true, true, true, kGood>(kBoth);
}

template <bool kGood>
bool copy_not_waited_for() {
  return run_two_copies<true, true, kGood>(kBoth);
}

template <bool kGood>
bool barrier_not_initialised() {
  return run_two_copies<kGood, true, true>(kBoth);
}

template <bool kGood>
bool copy_misaligned() {
  return run_two_copies<true, kGood, true>(kBoth);
}

// Lets this many blocks run at a time.
struct AtOnce {
  explicit AtOnce(int blocks) { specdec_emulator_resident(blocks); }
  ~AtOnce() { specdec_emulator_resident(0); }
};

// Blocks hand on a sum: each is told it by the one before, which started before it.
template <bool kTells, bool kSees>
__global__ void hand_on(unsigned* ticket, unsigned* told, float* sums) {
  SPECDEC_SHARED(unsigned, mine, 1);
  if (threadIdx.x == 0) mine[0] = atomicAdd(ticket, 1u);
  __syncthreads();
  const unsigned place = mine[0];
  float sum = 1.0f;
  if (threadIdx.x == 0) {
    if (place > 0) {
      wait_for_bits(told, 1u << (place - 1));
      if (kSees) __threadfence();
      sum += sums[place - 1];
    }
    sums[place] = sum;
    if (kTells) __threadfence();
    atomicOr(told, 1u << place);
  }
}

template <bool kTells, bool kSees>
bool run_hand_on(int at_once) {
  std::vector<unsigned> ticket(1), told(1);
  std::vector<float> sums(6);
  const AtOnce limit(at_once);
  launch_kernel((hand_on<kTells, kSees>), {6, 32}, nullptr, ticket.data(), told.data(), sums.data());
  for (int i = 0; i < 6; ++i)
    if (sums[i] != float(i + 1)) return false;
  return true;
}

// Two places wait for each other; with room for one block only the later one may wait.
template <bool kGood>
__global__ void wait_for_partner(unsigned* ticket, unsigned* told) {
  if (threadIdx.x != 0) return;
  const unsigned place = kGood ? atomicAdd(ticket, 1u) : blockIdx.x;
  const unsigned other = place ^ 1u;
  atomicOr(told, 1u << place);
  if (!kGood || other < place) wait_for_bits(told, 1u << other);
}

template <bool kGood>
bool wait_for_later_block() {
  std::vector<unsigned> ticket(1), told(1);
  const AtOnce limit(1);
  launch_kernel(wait_for_partner<kGood>, {4, 32}, nullptr, ticket.data(), told.data());
  return told[0] == 15u && run_hand_on<true, true>(1) && run_hand_on<true, true>(3);
}

template <bool kGood>
bool told_without_fence() {
  return run_hand_on<kGood, true>(2);
}

template <bool kGood>
bool seen_without_fence() {
  return run_hand_on<true, kGood>(2);
}

// The last block to arrive clears what was told, while the other warp of a block may still wait for it.
template <bool kGood>
__global__ void clear_when_done(unsigned* arrived, unsigned* told) {
  if (threadIdx.x == 0) atomicOr(told, 1u);
  if (threadIdx.x % 32 == 0) wait_for_bits(told, 1u);
  if (kGood) __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(arrived, 1u) + 1 == gridDim.x) atomicExch(told, 0u);
}

template <bool kGood>
bool flags_cleared_in_use() {
  std::vector<unsigned> arrived(1), told(1);
  return ends([&] { launch_kernel(clear_when_done<kGood>, {2, kThreads}, nullptr, arrived.data(), told.data()); }) &&
         told[0] == 0u;
}

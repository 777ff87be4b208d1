// Bulk copies into shared memory, barriers that count their bytes, and waiting for memory to change.
#pragma once
#include "emulator/runtime.h"

namespace specdec::emulator {

void init_barrier(uint64_t* barrier, unsigned arrivals, Site site);
// Lets copies see the block's mbarriers.
void publish_barriers();
// Arrives, and extends the barrier's phase until so many more bytes have landed.
void expect_bytes(uint64_t* barrier, unsigned bytes, Site site);
// Starts a copy that ends at some later point.
void start_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier, Site site);
// Waits until the phase of this parity has ended.
void wait_for_barrier(uint64_t* barrier, unsigned parity, Site site);
// Waits until atomics of any block have set all these bits.
void wait_for_bits(unsigned* flags, unsigned bits, Site site);

// For the scheduler: lets whatever can go on do so, or else lands a copy; false if there is neither.
bool go_on_beside();
void check_ended(const Block& block);  // that nothing is still on its way into its shared memory

}  // namespace specdec::emulator

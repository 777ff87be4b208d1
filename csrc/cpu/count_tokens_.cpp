#include <algorithm>
#include <cstring>
#include <vector>

#include "common/count_tokens_.h"
#include "cpu/ops.h"
#include "cpu/row.h"

namespace specdec::cpu {
namespace {

// Merges ascending ids, some of them equal, into the list of one sequence, from the list's end, so that each entry
// moves once. Returns whether there is room for all.
bool merge(const std::vector<int32_t>& added, int32_t* ids, int32_t* counts, int32_t capacity) {
  int32_t from = first_at_least(ids, capacity, INT32_MAX);
  int64_t to = from;
  for (size_t i = 0; i < added.size(); ++i) {
    if (i > 0 && added[i] == added[i - 1]) continue;
    const int32_t entry = first_at_least(ids, from, added[i]);
    to += entry == from || ids[entry] != added[i];
  }
  const bool fits = to <= capacity;
  for (auto last = added.rbegin(); last != added.rend();) {
    const int32_t id = *last;
    int32_t count = 0;
    for (; last != added.rend() && *last == id; ++last) count += 2;
    const int32_t entry = first_at_least(ids, from, id), above = entry + (entry < from && ids[entry] == id);
    to -= from - above;
    if (const int64_t kept = std::min<int64_t>(from - above, capacity - to); to > above && kept > 0) {
      std::memmove(ids + to, ids + above, size_t(kept) * sizeof *ids);
      std::memmove(counts + to, counts + above, size_t(kept) * sizeof *counts);
    }
    if (above > entry) count = plus(count, counts[entry]);
    from = entry;
    if (--to >= capacity) continue;
    ids[to] = id;
    counts[to] = count;
  }
  return fits;
}

}  // namespace

void count_tokens_(const CountTokensArgs& args) {
  std::vector<int32_t> added;
  added.reserve(size_t(args.n));  // here, so that no sequence has been counted if memory runs out
  for (int64_t b = 0; b < args.batch; ++b) {
    int32_t* ids = args.ids + b * args.capacity;
    const bool good = ascends(ids, args.capacity);
    args.status[b] = good ? 0 : kBadParam;
    if (!good) continue;
    added.clear();
    for (int64_t j = 0; j < args.n; ++j) {
      const int32_t id = id_to_count(args, b, j);
      if (id != INT32_MAX) added.push_back(id);
    }
    args.num_output[b] = plus(args.num_output[b], int32_t(added.size()));
    std::sort(added.begin(), added.end());
    if (!merge(added, ids, args.counts + b * args.capacity, args.capacity)) args.status[b] = kBadParam;
  }
}

}  // namespace specdec::cpu

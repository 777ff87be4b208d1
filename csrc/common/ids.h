#pragma once
#include "common/host_device.h"
#include "common/params.h"

namespace specdec {

SPECDEC_HD int64_t id_at(const Ids& ids, int64_t index) {
  return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[index] : static_cast<const int32_t*>(ids.data)[index];
}

// The batch that an index names for sequence b; -1 where it names none.
SPECDEC_HD int64_t named_batch(const BatchIndex& index, int64_t b) {
  const int64_t named = id_at(index.of, b);
  return named >= 0 && named < index.num ? named : -1;
}

// The batch that sequence b has.
SPECDEC_HD int64_t batch_of(const BatchIndex& index, int64_t b) { return index.of.data ? named_batch(index, b) : b; }

}  // namespace specdec

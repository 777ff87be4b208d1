#pragma once
#include "common/host_device.h"
#include "common/params.h"

namespace specdec {

SPECDEC_HD int64_t id_at(const Ids& ids, int64_t index) {
  return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[index] : static_cast<const int32_t*>(ids.data)[index];
}

// The batch that sequence b has; -1 where its index names none.
SPECDEC_HD int64_t batch_of(const BatchIndex& index, int64_t b) {
  if (!index.of.data) return b;
  const int64_t named = id_at(index.of, b);
  return named >= 0 && named < index.num ? named : -1;
}

}  // namespace specdec

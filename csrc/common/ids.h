#pragma once
#include "common/host_device.h"
#include "common/params.h"

namespace specdec {

SPECDEC_HD int64_t id_at(const Ids& ids, int64_t index) {
  return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[index] : static_cast<const int32_t*>(ids.data)[index];
}

}  // namespace specdec

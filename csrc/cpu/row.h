// One row of logits: its law, and the scratch memory that a draw from it reuses.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "common/law.h"
#include "common/params.h"
#include "common/processors.h"
#include "cpu/isa/kernels.h"

namespace specdec::cpu {

struct RowView;
class Team;

// Some logits of a row, as its kernels take them.
class Logits {
 public:
  Logits(const RowView& row, int32_t begin, int n);
  Logits(const Logits&) = delete;
  operator const void*() const { return data_; }

 private:
  void process(const RowView& row, int32_t begin, int n);
  const void* data_;
  alignas(64) float made_[kTile];
};

// A view of one row.
struct RowView {
  const char* data;
  DType dtype;
  int32_t vocab;
  bool processed = false;
  Overlay overlay{};  // of its sequence, if `processed`,
  int32_t place = 0;  // and which of its rows this is
  const void* in_memory(int32_t id) const { return data + int64_t(id) * size_of(dtype); }
  // The n <= kTile logits from id `begin` on: n is 1, or `begin` a multiple of 32.
  Logits at(int32_t begin, int n) const { return {*this, begin, n}; }
  Logits tile(int tile) const { return at(tile * kTile, tile_size(tile)); }
  int tiles() const { return tiles_of(vocab); }
  int tile_size(int tile) const { return vocab - tile * kTile < kTile ? vocab - tile * kTile : kTile; }
  const LogitKernels& kernels() const { return cpu::kernels().logits[int(processed ? DType::kFloat32 : dtype)]; }
};

// The kernels that weigh a row's ids, which may hold weights.
inline const LogitKernels& weighing(const RowView& row, bool weights) {
  return weights ? kernels().logits[kOfWeights] : row.kernels();
}

inline Logits::Logits(const RowView& row, int32_t begin, int n) : data_(row.in_memory(begin)) {
  if (row.processed) process(row, begin, n);
}

// Whether ids are a list of processors: see may_follow.
bool ascends(const int32_t* ids, int32_t n);

RowView row_view(const Rows& rows, int64_t b, int64_t i);
// The row as processors make it: row `place` of a sequence whose first row is number `first` of all rows of the call,
// whatever batches they lie in.
RowView row_view(const Rows& rows, int64_t b, int64_t i, const ProcessorArgs& processors, int64_t sequence,
                 int64_t first, int64_t place = 0, const Drafted& drafted = {});

// What reading a row leaves behind. Nothing here is as wide as the vocabulary: V / 64 maxima, V / 1024 masses and at most
// kMaxKept ids that truncation kept.
struct RowScratch {
  static constexpr int kMaxKept = 4096;
  std::vector<float> group_max, tile_max;
  bool summed = false, listed = false;
  std::vector<float> tile_mass;   // sum of exp((x - max) / T) over each tile's kept ids, if summed
  std::vector<int32_t> kept_id;   // the kept ids in index order, if listed
  std::vector<float> kept_logit;  // and their logits
  std::vector<float> kept_mass, sorted;
};

// A row that was read.
struct Reading {
  RowView row{};
  RowLaw law{};
  RowScratch scratch;
  Team* team = nullptr;  // helps with draws from it; set when it is read
};

// Reads a row and finds its law: once, or several times if truncation leaves more than kMaxKept ids to choose from.
void read_row(const RowView& row, const Sampling& sampling, Team* team, Reading& out);

// One pass over a row: the maxima of groups and tiles and, if `sum`, each tile's sum of exp((x - its max) / T), or of
// `weights` (infinite if one is negative); kNaN or 0. `only_max`: -inf may replace maxima that are not the row's.
int32_t scan_tiles(const RowView& row, float inverse_temperature, bool sum, Team* team, RowScratch& scratch,
                   bool weights = false, bool only_max = false);

// The lowest id of the largest logit of a scanned row; 0 if nothing is possible.
int32_t find_argmax(const RowView& row, const RowScratch& scratch);

// Turns masses relative to each tile's maximum into masses relative to the row's.
void scale_masses(const float* tile_max, float max, float inverse_temperature, std::vector<float>& mass);

// log sum exp and entropy of the raw row (temperature 1, nothing cut), given its maximum.
void raw_moments(const RowView& row, float max, Team* team, float* log_normalizer, float* entropy);

// P over one tile, times scale.
void tile_probs(const RowView& row, const RowLaw& law, int tile, float scale, float* out);

// P of one id, bit for bit what tile_probs gives.
float prob_at(const RowView& row, const RowLaw& law, int32_t id);

// exp((x - max) * inverse_temperature) * scale for a list of logits x; for `weights`, x * inverse_temperature * scale.
void list_weights(const std::vector<float>& x, bool weights, float max, float inverse_temperature, float scale,
                  std::vector<float>& out);

// Runs f(begin, end) over the tiles of a row, in parts that are shared out if the row is long enough to pay.
void share_tiles(const RowView& row, Team* team, const std::function<void(int64_t, int64_t)>& f);

// Runs f(tile) for each tile of a row.
void for_each_tile(const RowView& row, Team* team, const std::function<void(int)>& f);

}  // namespace specdec::cpu

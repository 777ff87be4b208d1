// Rows of logits in tiles of 1024 ids. A warp works on a tile: each lane holds 32 ids of it, the same ones for every dtype
// and alignment, so that sums over a tile always add in the same order.
//
// Wherever a row starts, it is read in aligned pieces of 16 bytes, shifted if they do not start with one of a lane's
// values. Before the row's start at most the rest of its first piece is read; nothing is read beyond its end.
#pragma once
#include "common/law.h"
#include "cuda/overlay.cuh"
#include "cuda/warp.cuh"

namespace specdec::SPECDEC_CUDA_ROWS {

constexpr int kRuns = 4, kRun = 8, kHeld = kRuns * kRun;  // a lane's ids: run j is 8 ids from (j * 32 + lane) * 8
constexpr int kGroups = 8;                                // per tile: the ids of four neighbouring lanes, 128 each
static_assert(kHeld * 32 == kTile);

struct RowView {
  const char* data = nullptr;
  DType dtype = DType::kFloat32;
  int32_t vocab = 0;
  // Where a cluster holds the row in its shared memory: block r has the tiles from r * part on, at this many bytes of
  // its dynamic shared memory. -1: nowhere.
  int32_t held = -1, part = 0;
#ifdef SPECDEC_PROCESSED
  Overlaid over{};
#endif
  __host__ __device__ int tiles() const { return tiles_of(vocab); }
  // The dtype of its values once loaded: processors give float32.
  __device__ DType loaded() const { return overlay() ? DType::kFloat32 : dtype; }
  // What processors do to it. (No empty member if they do nothing: structs would otherwise be copied.)
#ifdef SPECDEC_PROCESSED
  __device__ Overlaid overlay() const { return over; }
  __device__ void lay_over(int64_t i) { over = overlaid(i); }
#else
  __device__ Overlaid overlay() const { return {}; }
  __device__ void lay_over(int64_t) {}
#endif
};

SPECDEC_HD RowView row_view(const Rows& rows, int64_t b, int64_t i) {
  return {static_cast<const char*>(rows.data) + (b * rows.stride_batch + i * rows.stride_row) * size_of(rows.dtype),
          rows.dtype, rows.vocab};
}

// The id of the k-th value that a lane holds.
__device__ __forceinline__ int32_t held_id(int tile, int k) {
  return tile * kTile + (k / kRun * 32 + lane_id()) * kRun + k % kRun;
}

// Where the row would start if all of it lay with this tile.
__device__ __forceinline__ const char* start_of(const RowView& row, int tile) {
  if (row.held < 0) return row.data;
  SPECDEC_DYNAMIC_SHARED(shared);
  const int block = tile / row.part;
  return reinterpret_cast<const char*>(in_cluster_block(shared + row.held, unsigned(block))) -
         int64_t(block) * row.part * kTile * size_of(row.dtype);
}

template <bool kAnywhere, class T>
__device__ __forceinline__ T load_from(const T* address) {
  if constexpr (kAnywhere)
    return load_anywhere(address);
  else
    return __ldg(address);
}

// The logit as the model gave it.
__device__ __forceinline__ float model_logit_at(const RowView& row, int32_t id) {
  const char* const start = start_of(row, id / kTile);
  if (row.dtype == DType::kFloat32) return load_anywhere(reinterpret_cast<const float*>(start) + id);
  const uint16_t bits = load_anywhere(reinterpret_cast<const uint16_t*>(start) + id);
  return row.dtype == DType::kBFloat16 ? __uint_as_float(uint32_t(bits) << 16) : half_bits_to_float(bits);
}

inline __device__ __noinline__ float processed_logit(Overlaid overlay, int32_t id, float x) {
  return processed(overlay, id, x);
}

__device__ __forceinline__ float logit_at(const RowView& row, int32_t id) {
  const float x = model_logit_at(row, id);
  return row.overlay() ? processed_logit(row.overlay(), id, x) : x;
}

// Values from words as they are in memory: two per word in half precision.
template <int kValues>
__device__ __forceinline__ void unpack(const uint32_t* words, DType dtype, float* x) {
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) x[k] = __uint_as_float(words[k]);
  } else if (dtype == DType::kBFloat16) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) x[k] = __uint_as_float(k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16);
  } else {
#pragma unroll
    for (int k = 0; k < kValues; ++k) x[k] = half_bits_to_float(uint16_t(words[k / 2] >> (k % 2 * 16)));
  }
}

// A row of values of kSize bytes, in pieces. It starts at the start of a piece unless kShifted; it is in device memory
// unless kAnywhere.
template <int kSize, bool kShifted = true, bool kAnywhere = false>
class Pieces {
 public:
  static constexpr int kBytes = kSize;  // per value

 private:
  static constexpr int kEach = 16 / kSize;         // values per piece
  static constexpr int kOfRun = kRun / kEach;      // pieces as long as one run
  static constexpr int kWords = kRun * kSize / 4;  // words per run

 public:
  // `start`: see start_of.
  __device__ Pieces(const char* start, int32_t vocab) {
    const unsigned skipped = kShifted ? unsigned(reinterpret_cast<uintptr_t>(start)) % 16 : 0;
    pieces_ = reinterpret_cast<const uint4*>(start - skipped);
    offset_ = skipped / kSize;
    end_ = offset_ + unsigned(vocab);
  }

  // Loads runs of a whole tile of an aligned row, given the lane's first piece.
  template <int kCount>
  __device__ __forceinline__ static void load_whole(const uint4* first, uint32_t* words) {
#pragma unroll
    for (int p = 0; p < kCount * kOfRun; ++p) load_piece(first + p / kOfRun * 32 * kOfRun + p % kOfRun, words + p * 4);
  }

  // Loads kCount of the lane's runs from run j of a tile on, wherever they are; puts `infinity` beyond the row.
  template <int kCount>
  __device__ __forceinline__ void load(int tile, int j, uint32_t infinity, uint32_t* words) const {
    constexpr int kPieces = kOfRun + (kShifted ? 1 : 0);    // that may hold a part of a run
    const int first = (tile * kRuns + j) * 32 + lane_id();  // the run's number in the row
    const uint4* const mine = pieces_ + int64_t(first) * kOfRun;
    const int full = int(end_ / kEach) - first * kOfRun;  // whole pieces from the lane's first on
    uint32_t raw[kCount * kPieces * 4] = {};
#pragma unroll
    for (int p = 0; p < kCount * kPieces; ++p) {
      const int piece = p / kPieces * 32 * kOfRun + p % kPieces;
      if (piece < full) load_piece(mine + piece, raw + p * 4);
    }
    const int until = first / 32 * 32 * kRun + (kCount * 32 + 1) * kRun;  // including a run the shift may reach into
    const bool whole = until <= int(end_ - offset_);
    if (!whole) {
      uint32_t last[4];
      load_last(last);
#pragma unroll
      for (int p = 0; p < kCount * kPieces; ++p)
        if (p / kPieces * 32 * kOfRun + p % kPieces == full) copy(last, raw + p * 4);
    }
    if constexpr (!kShifted) {
#pragma unroll
      for (int w = 0; w < kCount * kWords; ++w) words[w] = raw[w];
    } else {
      switch (offset_ * kSize / 4) {
        case 0:
          shift<kCount, 0>(raw, words);
          break;
        case 1:
          shift<kCount, 1>(raw, words);
          break;
        case 2:
          shift<kCount, 2>(raw, words);
          break;
        default:
          shift<kCount, 3>(raw, words);
      }
    }
    if (whole) return;
    const int values = int(end_ - offset_) - first * kRun;
#pragma unroll
    for (int w = 0; w < kCount * kWords; ++w) {
      const int left = values - w / kWords * 32 * kRun - w % kWords * (4 / kSize);
      if (kSize == 2 && left == 1)
        words[w] = (words[w] & 0xFFFFu) | (infinity & 0xFFFF0000u);
      else if (left <= 0)
        words[w] = infinity;
    }
  }

 private:
  __device__ __forceinline__ static void copy(const uint32_t (&from)[4], uint32_t* words) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = from[i];
  }

  __device__ __forceinline__ static void load_piece(const uint4* piece, uint32_t* words) {
    const uint4 x = load_from<kAnywhere>(piece);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  }

  // The part of its last piece that belongs to the row, if that is not all of it.
  __device__ __forceinline__ void load_last(uint32_t (&words)[4]) const {
    const uint4* const at = pieces_ + end_ / kEach;
    const int left = int(end_ % kEach);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = 0;
      if (kSize == 4) {
        if (i < left) words[i] = load_from<kAnywhere>(reinterpret_cast<const uint32_t*>(at) + i);
      } else {
        if (i * 2 < left) words[i] = load_from<kAnywhere>(reinterpret_cast<const uint16_t*>(at) + i * 2);
        if (i * 2 + 1 < left)
          words[i] |= uint32_t(load_from<kAnywhere>(reinterpret_cast<const uint16_t*>(at) + i * 2 + 1)) << 16;
      }
    }
  }

  // Takes each run from where it begins in its pieces: kFirst words in, plus half a word if offset_ is odd.
  template <int kCount, int kFirst>
  __device__ __forceinline__ void shift(const uint32_t* raw, uint32_t* words) const {
#pragma unroll
    for (int w = 0; w < kCount * kWords; ++w) {
      const uint32_t* const from = raw + w / kWords * (kOfRun + 1) * 4 + w % kWords + kFirst;
      words[w] = kSize == 2 ? __funnelshift_r(from[0], from[1], offset_ % 2 * 16) : from[0];
    }
  }

  const uint4* pieces_;
  unsigned offset_, end_;  // in values from the start of the first piece: the row's first, and one past its last
};

__device__ __forceinline__ uint32_t negative_infinity(DType dtype) {
  return dtype == DType::kFloat32 ? 0xFF800000u : dtype == DType::kBFloat16 ? 0xFF80FF80u : 0xFC00FC00u;
}

__device__ __forceinline__ bool aligned(const RowView& row) { return reinterpret_cast<uintptr_t>(row.data) % 16 == 0; }

// A lane's first piece of a tile of an aligned row, from run j on; the next tile's is tile_pieces further on.
SPECDEC_HD int tile_pieces(DType dtype) { return kTile * size_of(dtype) / 16; }
__device__ __forceinline__ const uint4* lane_pieces(const char* start, DType dtype, int tile, int j = 0) {
  return reinterpret_cast<const uint4*>(start) + tile * tile_pieces(dtype) +
         (j * 32 + lane_id()) * (kRun * size_of(dtype) / 16);
}
__device__ __forceinline__ const uint4* lane_pieces(const RowView& row, int tile, int j = 0) {
  return lane_pieces(row.data, row.dtype, tile, j);
}

// Loads kCount of a lane's runs of a whole tile of an aligned row, given the first piece.
template <int kCount, bool kAnywhere = false>
__device__ __forceinline__ void load_whole(const uint4* first, DType dtype, uint32_t* words) {
  if (dtype == DType::kFloat32)
    Pieces<4, true, kAnywhere>::template load_whole<kCount>(first, words);
  else
    Pieces<2, true, kAnywhere>::template load_whole<kCount>(first, words);
}

// Whether each run of a row lies entirely within it or entirely beyond its end, and starts at a multiple of 16 bytes.
__device__ __forceinline__ bool in_whole_runs(const RowView& row) { return aligned(row) && row.vocab % kRun == 0; }

// Loads kCount of a lane's runs of any tile of such a row, which starts at `start`; -inf beyond it.
template <int kCount, bool kAnywhere = false>
__device__ __forceinline__ void load_runs(const RowView& row, const char* start, int tile, int j, uint32_t* words) {
  const auto load = [&](auto pieces) {
    constexpr int kWords = kRun * decltype(pieces)::kBytes / 4;
#pragma unroll
    for (int w = 0; w < kCount * kWords; ++w) words[w] = negative_infinity(row.dtype);
#pragma unroll
    for (int p = 0; p < kCount; ++p)
      if (held_id(tile, (j + p) * kRun) < row.vocab)
        decltype(pieces)::template load_whole<1>(lane_pieces(start, row.dtype, tile, j + p), words + p * kWords);
  };
  if (row.dtype == DType::kFloat32)
    load(Pieces<4, true, kAnywhere>(start, row.vocab));
  else
    load(Pieces<2, true, kAnywhere>(start, row.vocab));
}

// The same for any tile and, if kShifted, any row; -inf beyond the row. NaN stays NaN. With more kSteps fewer loads are
// in flight at once and fewer registers are used.
template <bool kShifted = true, int kSteps = 1, bool kAnywhere = false>
__device__ __forceinline__ void load_any(const RowView& row, int tile, uint32_t (&words)[kHeld]) {
  const uint32_t infinity = negative_infinity(row.dtype);
  const char* const start = kAnywhere ? start_of(row, tile) : row.data;
  if (row.dtype == DType::kFloat32 && !kShifted) {  // this takes the fewest registers
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      words[k] = infinity;
      if (held_id(tile, k) < row.vocab)
        words[k] = __ldg(reinterpret_cast<const uint32_t*>(row.data) + held_id(tile, k));
    }
  } else if (row.dtype == DType::kFloat32) {
    const Pieces<4, true, kAnywhere> pieces(start, row.vocab);
    constexpr int kAtOnce = kRuns / 2 / kSteps;
#pragma unroll
    for (int j = 0; j < kRuns; j += kAtOnce) pieces.template load<kAtOnce>(tile, j, infinity, words + j * kRun);
  } else {
    const Pieces<2, kShifted, kAnywhere> pieces(start, row.vocab);
    constexpr int kAtOnce = kSteps == 1 ? kRuns : 1;
#pragma unroll
    for (int j = 0; j < kRuns; j += kAtOnce) pieces.template load<kAtOnce>(tile, j, infinity, words + j * kRun / 2);
  }
}

// Out of line, with the result in registers.
template <DType kType>
struct TileWords {
  uint32_t words[kType == DType::kFloat32 ? kHeld : kHeld / 2];
};
template <DType kType>
__device__ __noinline__ TileWords<kType> load_shifted(RowView row, int tile) {
  uint32_t words[kHeld];
  TileWords<kType> out;
  row.dtype = kType;
  load_any(row, tile, words);
#pragma unroll
  for (int w = 0; w < int(sizeof out / 4); ++w) out.words[w] = words[w];
  return out;
}

__device__ __forceinline__ bool is_whole(const RowView& row, int tile) {
  return aligned(row) && unsigned(tile) < unsigned(row.vocab) / kTile;
}

// Prefetches a lane's runs of a tile from run j on.
__device__ __forceinline__ void prefetch_tile(const RowView& row, int tile, int j = 0) {
#pragma unroll
  for (; j < kRuns; ++j) {
    const int32_t id = held_id(tile, j * kRun);
    if (id < row.vocab) prefetch(row.data + int64_t(id) * size_of(row.dtype));
  }
}

struct Run {
  float x[kRun];
};

// One run as values, as the model gave them. Out of line, with the result in registers: it has a branch for each dtype
// and alignment.
inline __device__ __noinline__ Run load_run_of_model(RowView row, int tile, int j) {
  const char* const start = start_of(row, tile);
  uint32_t words[kRun];
  Run run;
  if (in_whole_runs(row))
    load_runs<1, true>(row, start, tile, j, words);
  else if (row.dtype == DType::kFloat32)
    Pieces<4, true, true>(start, row.vocab).load<1>(tile, j, negative_infinity(row.dtype), words);
  else
    Pieces<2, true, true>(start, row.vocab).load<1>(tile, j, negative_infinity(row.dtype), words);
  unpack<kRun>(words, row.dtype, run.x);
  return run;
}

// A run as processors make it, and how far they have got in their lists.
struct ProcessedRun {
  Run run;
  Cursors cursors;
};
inline __device__ __noinline__ ProcessedRun processed_run(Overlaid overlay, int32_t vocab, int32_t first,
                                                          ProcessedRun of) {
  process<kRun>(overlay, vocab, first, of.run.x, &of.cursors);
  return of;
}

// One run as processed values, by a whole warp.
__device__ __forceinline__ Run load_run(const RowView& row, int tile, int j) {
  const Run run = load_run_of_model(row, tile, j);
  return row.overlay() ? processed_run(row.overlay(), row.vocab, held_id(tile, j * kRun), {run, {}}).run : run;
}

// A lane's values of a tile, as words of row.loaded().
template <bool kAnywhere = false>
__device__ __forceinline__ void load_words(const RowView& row, int tile, uint32_t (&words)[kHeld]) {
  if (is_whole(row, tile)) {
    const char* const start = kAnywhere ? start_of(row, tile) : row.data;
    load_whole<kRuns, kAnywhere>(lane_pieces(start, row.dtype, tile), row.dtype, words);
  } else {
    load_any<true, 2, kAnywhere>(row, tile, words);
  }
  if (!row.overlay()) return;
  uint32_t of_model[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) of_model[k] = words[k];
  ProcessedRun at{};
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    if (row.dtype == DType::kFloat32)
      unpack<kRun>(of_model + j * kRun, DType::kFloat32, at.run.x);
    else
      unpack<kRun>(of_model + j * kRun / 2, row.dtype, at.run.x);
    at = processed_run(row.overlay(), row.vocab, held_id(tile, j * kRun), at);
#pragma unroll
    for (int k = 0; k < kRun; ++k) words[j * kRun + k] = __float_as_uint(at.run.x[k]);
  }
}

}  // namespace specdec::SPECDEC_CUDA_ROWS

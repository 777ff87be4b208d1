// What the kernels take: plain structs without any torch type, shared by CPU and CUDA. Strides count elements.
#pragma once
#include <cstdint>

#include "common/target_law.h"

namespace specdec {

constexpr int kTile = 1024;  // ids per tile; partial sums are per tile and added as in tile_sums.h
SPECDEC_HD int tiles_of(int32_t vocab) { return (vocab + kTile - 1) / kTile; }
// RowStats.values: max, cutoff, log_normalizer, normalizer, raw_log_normalizer, raw_entropy
constexpr int kNumValues = 6;

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

SPECDEC_HD int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

enum class Acceptance : int32_t { kToken = 0, kBlock = 1, kMatch = 2, kGreedy = 3 };
constexpr int kNumAcceptances = 4;

// Rows of logits or probabilities: row (b, i) starts at data + b * stride_batch + i * stride_row.
struct Rows {
  const void* data;  // null: not given
  DType dtype;
  int32_t vocab;
  int64_t stride_batch, stride_row;
};

// Token ids of either integer width.
struct Ids {
  const void* data;  // null: not given
  bool is_int64;
};

// Which batch of some rows belongs to each sequence: its own, or the one that an index names.
struct BatchIndex {
  Ids of;           // [batch]; null: each has its own
  int64_t num = 0;  // batches that can be named, from number 0 on
};

// Uniforms of either width.
struct Uniforms {
  const void* data;  // null: not given
  bool is_float64;
};

// What rows hold: logits, weights that are proportional to probabilities, or probabilities, which sum to 1.
enum class RowKind : int8_t { kLogits, kWeights, kProbs };

// The sampling parameters of one law, and its kind of rows. Each array is [batch] or null; if it is null, the scalar
// beside it applies.
struct SamplingArgs {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
  bool min_p_first;
  const float* temperatures;
  const int64_t* top_ks;
  const float* top_ps;
  const float* min_ps;
  RowKind rows = RowKind::kLogits;
};

// Lists of one call: one for each sequence or, with stride 0, one for all.
template <class T>
struct Lists {
  const T* data;  // null: not given
  int64_t width, stride;
  SPECDEC_MEMBER const T* of(int64_t b) const { return data ? data + b * stride : nullptr; }
};

// Logits processors (specdec_kernels/processors.py): ids ascend; entries that are no id come last.
struct ProcessorArgs {
  bool on;
  const int32_t* bitmask;  // rows of target x words, or null
  int64_t words;
  Lists<int32_t> allowed;  // words
  Lists<int32_t> bias_ids, bias_until;
  Lists<float> bias_values;
  Lists<float> penalties;  // repetition, frequency, presence
  Lists<int32_t> count_ids, counts;
  Lists<int32_t> num_output;  // 1
};

// Row stats of [batch, n] rows, contiguous.
struct StatsOut {
  float* values;    // [batch, n, 6]
  int64_t* argmax;  // [batch, n]
  int32_t* status;  // [batch, n]
};

struct RowStatsArgs {
  Rows logits;  // [batch, n, vocab]
  int64_t batch, n;
  SamplingArgs params;
  StatsOut out;
  ProcessorArgs processors{};
};

struct WarpProbsArgs {
  Rows logits;  // [batch, n, vocab]
  int64_t batch, n;
  SamplingArgs params;
  float* out;  // [batch, n, vocab]
  ProcessorArgs processors{};
};

// Writes -inf below a row's cutoff.
struct MaskLogitsArgs {
  Rows logits;  // [batch, n, vocab], written: no two elements share memory
  int64_t batch, n;
  SamplingArgs params;
  int32_t* status;  // [batch, n]
};

struct UniformSamplesArgs {
  const int64_t* seeds;  // [batch]
  const int64_t* steps;  // [batch] or null: step
  int64_t step, batch, num;
  uint32_t purpose;
  double* out;  // [batch, num]
};

struct NoiseKeysArgs {
  const int64_t* seeds;  // [batch]
  Ids positions;         // [batch, n]
  const int64_t* steps;  // [batch] or null: step
  int64_t step, batch, n;
  uint32_t purpose;
  int64_t* out;  // [batch, n]
};

struct SampleArgs {
  Rows logits;  // [batch, n, vocab], or with row_of [row_of.num, n, vocab]
  int64_t batch, n;
  SamplingArgs params;
  Uniforms uniform_samples;        // [batch, n]
  const int64_t* noise_keys;       // [batch, n] or null; neither: every row is greedy
  const int64_t* draft_to_target;  // [vocab] or null
  int32_t num_samples;
  int64_t* token;   // [batch, n, num_samples]
  float* log_prob;  // [batch, n, num_samples]
  StatsOut out;
  ProcessorArgs processors{};
  BatchIndex row_of{};
};

// ---- Sharded rows: each rank has the ids from a multiple of kTile on ----

struct ShardStatsArgs {
  Rows logits;  // [batch, n, width]
  int64_t batch, n;
  SamplingArgs params;
  bool probs;       // the rows are probabilities (float32)
  float* tile_max;  // [batch, n, tiles]
  float*
      tile_mass;    // the same: relative to the tile's maximum; of probabilities their sum, infinite if one is negative
  int64_t* argmax;  // [batch, n]
  int32_t* status;  // [batch, n]
};

struct MergeShardsArgs {
  const float* tile_max;   // [batch, n, tiles]
  const float* tile_mass;  // the same
  const float* logits_at;  // [batch, n]
  int64_t batch, n;
  int32_t tiles;
  SamplingArgs params;
  bool probs;
  float* values;  // [batch, n, 6]
  float* prob;    // [batch, n]
};

// The draft's rows are logits with stats of the whole rows, probabilities with a status, or points; or there is none.
struct ShardDrawArgs {
  Rows logits, draft, draft_probs;  // [batch, n, width], the ids from `first` on
  int32_t first;
  int64_t batch, n;
  const float* values;  // [batch, n, 6], and the rest [batch, n]
  const int64_t* argmax;
  const float* draft_values;
  const int64_t* draft_argmax;
  const int32_t* draft_status;
  const int64_t* point_tokens;
  const float* weights;       // w, negative: all of P
  const float* masses;        // [batch, n, all_tiles] of all ranks, or null
  Uniforms uniform_samples;   // with masses
  const int64_t* noise_keys;  // or null; with neither, the tiles' masses are the result
  int32_t all_tiles;
  SamplingArgs params, draft_params;
  float* out;      // [batch, n, tiles]
  int64_t* token;  // [batch, n]
  float* score;    // [batch, n], of noisy tokens
};

constexpr int kMostTop = 20;  // the most ids that token_logprobs lists per row

// Log-probabilities of tokens [batch, width], each drawn from a row of its sequence.
struct TokenLogprobsArgs {
  Rows logits;  // [batch, n, vocab]
  int64_t batch, n, width;
  SamplingArgs params;
  const int64_t* tokens;                         // [batch, width]; -1: no token
  const int64_t* rows;                           // [batch, width] or null: token j was drawn from row j
  Ids num_tokens;                                // [batch] or null: width
  int32_t num_top;                               // at most kMostTop
  float *raw_log_prob, *log_prob;                // [batch, width]
  int32_t *rank, *status;                        // [batch, width]
  int64_t* top_ids;                              // [batch, width, num_top]
  float *top_log_prob, *top_processed_log_prob;  // [batch, width, num_top]
  ProcessorArgs processors{};
};

// What a verify step derives its random numbers from if they are not given: those of uniform_samples or, if there are
// positions, those of noise_keys.
struct Coins {
  const int64_t* seeds;  // [batch] or null
  const int64_t* steps;  // [batch] or null: step
  int64_t step;
  Ids positions;  // rows of target, or null
};

// What verify steps of chains and of trees have in common.
struct VerifyArgs {
  Rows target;       // logits
  Rows draft;        // logits of the draft, or null
  Rows draft_probs;  // or its probabilities, or null; neither: point masses on the draft tokens
  int64_t batch;
  const float* draft_values;       // draft rows x 6, or null: computed when a row is needed
  const int64_t* draft_argmax;     // draft rows
  const int32_t* draft_status;     // draft rows
  Uniforms uniform_samples;        // rows of target
  const int64_t* noise_keys;       // rows of target, or null
  Coins coins;                     // used where these are not given
  const int64_t* target_to_draft;  // [map_size], -1 where unmapped, or null
  int64_t map_size;
  const int64_t* eos_token_ids;  // [num_eos] or null
  int64_t num_eos;
  TargetLaw law;
  SamplingArgs params, draft_params;
  ProcessorArgs processors;  // of the target's rows
  int64_t* tokens;           // [batch, width of the result]
  int32_t* num_accepted;     // [batch]
  int32_t* num_tokens;       // [batch]
  int32_t* status;           // [batch]
};

// One verify step of a padded ("chain") or ragged ("packed") batch: target is [batch, num_draft + 1, vocab] or
// [1, total + batch, vocab]. With cu null, sequence b's draft rows are (b, i) and its target rows (b, i); else its
// draft rows are (0, cu[b] + i) and its target rows, uniforms and keys (0, cu[b] + b + i). With draft_of its draft rows
// are those named there. With law.cascade_bonus its draft rows (and stats) lie as its target rows. With bonus_tokens,
// which exclude law.cascade_bonus, no row is there to draw a bonus from: its target rows lie as its draft tokens.
struct VerifyChainArgs : VerifyArgs {
  Ids draft_tokens;          // [batch, num_draft] or [total]
  const int32_t* cu;         // [batch + 1] or null
  int64_t num_draft, total;  // num_draft: width of the result less one
  Ids num_draft_tokens;      // [batch]
  BatchIndex draft_of;       // of the draft's requests
  Ids bonus_tokens;          // [batch] or null: they are drawn
  Acceptance acceptance;
  float* overlap;  // [batch, num_draft] or null
};

enum class TreeAcceptance : int32_t {
  kSample = 0,
  kGreedy = 1,
  kMatch = 2,
  kTypical = 3,
  kRecursive = 4,
  kTraversal = 5
};
constexpr int kNumTreeAcceptances = 6;

constexpr int kMostNodes = 1024, kMostDepth = 64;  // of a tree, as in specdec_kernels/tree.py

// One verify step of token trees: node i's rows, uniform and key are number i of its sequence. Links are node ids, -1 where
// there is none; a parent stands before its children, and siblings are linked in their order. The result is max_depth + 1
// tokens wide.
struct VerifyTreeArgs : VerifyArgs {
  Ids node_tokens;                                      // [batch, num_nodes]; -1: no such node, or an idle sequence
  const int64_t *parents, *first_child, *next_sibling;  // [num_nodes], or [batch, num_nodes] where tree_per_sequence
  const int32_t* tree_status;                           // [1] or [batch]
  bool tree_per_sequence;
  int64_t num_nodes, max_depth;
  TreeAcceptance acceptance;
  float epsilon, delta;     // of kTypical
  int64_t* accepted_nodes;  // [batch, max_depth]
};

// How the rows of one tensor of a key-value cache lie, in bytes: row r of head h in a block (or, without a block table, of a
// sequence) starts at block * stride_block + r * stride_row + h * stride_head. It is `units` pieces of `unit_bytes`,
// stride_unit apart: pieces as wide as alignment and strides allow, of 16 bytes at most.
struct CacheShape {
  int64_t stride_block, stride_row, stride_head, stride_unit;
  int32_t heads, units, unit_bytes;
};

// The most that one launch takes: a kernel's parameters are at most 4096 bytes.
constexpr int kMostPlanes = 256, kMostCacheShapes = 24;

// Moves the rows of accepted nodes: from position context_length + node to context_length + 1 + j.
struct GatherKVArgs {
  int32_t num_planes;                // keys or values of a layer
  unsigned char* data[kMostPlanes];  // no two of them share a byte
  uint8_t shape_of[kMostPlanes];
  CacheShape shapes[kMostCacheShapes];
  Ids accepted_nodes;   // [batch, max_depth]
  Ids context_lengths;  // [batch]
  Ids block_table;      // [batch, max_blocks], or null: sequence b has block b alone, and max_blocks is 1
  int64_t batch, max_depth, max_blocks;
  int64_t block_size, num_blocks;  // of the smallest plane
  void* lengths;                   // [batch], as wide as context_lengths
  int32_t* status;                 // [batch]
};

// Counts tokens in lists of processors (`count_ids` and so on), in place. If there are more than `capacity` ids, the
// lowest stay.
struct CountTokensArgs {
  int32_t* ids;         // [batch, capacity]
  int32_t* counts;      // the same
  int32_t* num_output;  // [batch]
  int64_t batch, n;
  int32_t capacity;
  Ids tokens;       // [batch, n]; negative: no token
  Ids num_tokens;   // [batch] or null: n
  int32_t* status;  // [batch]
};

}  // namespace specdec

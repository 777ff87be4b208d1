// verify with every row split over many blocks, all rows at once, in three launches: the tiles of all rows; a block a row
// for its law; then what is left (residual masses, noise), where the last block to arrive at a sequence decides it.
#include "cuda/rows.cuh"
#include "cuda/verify.cuh"

namespace specdec::cuda {
namespace {

// What the kernels hand over, in device memory. Rows are numbered as in the flat arrays of args.
struct Workspace {
  float *target_tables, *draft_tables;  // [rows, tiles, TileTable::kNumbers]; the draft's only where reads_draft
  RowLaw *target_laws, *draft_laws;     // [rows]; the draft's only where reads_draft
  float* mass;                          // [target rows, tiles] for the block rule, else [batch, tiles]
  Fixed* best;                          // [target rows] noisy keys, match rule
  unsigned* arrived;                    // [batch]
  int64_t chunks;                       // blocks that share a row
};

__device__ __forceinline__ TileTable table_of(float* tables, int64_t index, int tiles) {
  return TileTable(tables + index * tiles * TileTable::kNumbers, tiles);
}

// A row of some sequence, numbered from 0: its target rows, then its draft rows if those are read.
struct Task {
  Span span;
  int64_t b, i, index;
  bool is_draft, needed;
  RowView row;
  Sampling sampling;

  __device__ Task(const VerifyArgs& args, int64_t task) {
    const int64_t rows = args.num_draft + 1 + (reads_draft(args) ? args.num_draft : 0);
    b = task / rows;
    i = task % rows;
    is_draft = i > args.num_draft;
    if (is_draft) i -= args.num_draft + 1;
    span = find_span(args, b);
    needed = !span.idle && (is_draft ? i < span.length : i <= span.length - (span.ends_in_eos ? 1 : 0));
    index = (is_draft ? span.draft_index : span.target_index) + i;
    row = is_draft ? draft_row(args, span, i) : target_row(args, span, i);
    sampling = is_draft ? sampling_of(args.draft_params, b) : target_sampling(args, b);
    if (is_draft && args.draft_probs.data) sampling = made_greedy(sampling);  // only the flags are wanted
  }
};

int64_t tasks(const VerifyArgs& args) {
  const bool drafts = args.draft_probs.data || (args.draft.data && !args.draft_values);
  return args.batch * (args.num_draft + 1 + (drafts ? args.num_draft : 0));
}

__global__ void __launch_bounds__(kRowThreads, 2)
    verify_scan_kernel(const __grid_constant__ VerifyArgs args, const __grid_constant__ Workspace work) {
  allow_next();
  const Task task(args, blockIdx.x / work.chunks);
  if (!task.needed) return;
  const ScanPlan plan = scan_plan(task.sampling, task.row.vocab, false);
  const TileTable table =
      table_of(task.is_draft ? work.draft_tables : work.target_tables, task.index, task.row.tiles());
  for (int tile = int(blockIdx.x % work.chunks) * num_warps() + warp_id(); tile < task.row.tiles();
       tile += int(work.chunks) * num_warps())
    scan_tile(task.row, tile, plan, table, [](auto* address, auto value) { *address = value; });
}

__global__ void __launch_bounds__(kRowThreads, 2)
    verify_laws_kernel(const __grid_constant__ VerifyArgs args, const __grid_constant__ Workspace work) {
  SPECDEC_DYNAMIC_SHARED(shared);
  SPECDEC_SHARED(Reading, read, 1);
  allow_next();
  const Task task(args, blockIdx.x);
  wait_for_previous();
  if (threadIdx.x == 0 && task.i == 0 && !task.is_draft) work.arrived[task.b] = 0;
  if (!task.needed) return;
  float* tables = task.is_draft ? work.draft_tables : work.target_tables;
  by_one([&] {
    read[0] = {task.row, task.sampling, table_of(tables, task.index, task.row.tiles()),
               reinterpret_cast<float*>(shared), RowLaw{}};
  });
  find_law(read[0], false);
  if (threadIdx.x != 0) return;
  RowLaw law = read[0].law;
  if (task.is_draft && args.draft_probs.data) law = flags_alone(law);
  (task.is_draft ? work.draft_laws : work.target_laws)[task.index] = law;
  if (!task.is_draft && work.best) work.best[task.index] = 0;
}

// One sequence in the last kernel. Every thread of a block goes the same way; so does every block of the sequence until
// they hand over.
class Decision {
 public:
  // `span` and `from` are in shared memory: what all threads know alike.
  __device__ Decision(const VerifyArgs& args, const Workspace& work, int64_t b, Span& span, Remainder& from)
      : args_(args), work_(work), b_(b), span_(span), from_(from) {
    const Span found = find_span(args, b);
    by_one([&] { span = found; });
    out_.status = span_.status;
    tiles_ = (args.target.vocab + kTile - 1) / kTile;
    writes_ = chunk() == 0;
    cut_ = cut_of(target_sampling(args, b), args.target.vocab).any;
  }

  __device__ void run() {
    if (!span_.idle) {
      if (args_.acceptance == Acceptance::kMatch || args_.acceptance == Acceptance::kGreedy)
        match_rule();
      else if (by_block(args_, b_))
        block_rule();
      else
        token_rule();
    }
    if (writes_) write_outcome(args_, span_, b_, out_);
  }

 private:
  __device__ int64_t token(int64_t i) const { return token_at(args_, span_, i); }
  __device__ RowView row(int64_t i) const { return target_row(args_, span_, i); }
  __device__ const RowLaw& target(int64_t i) const { return work_.target_laws[span_.target_index + i]; }
  __device__ DraftLaw draft(int64_t i) const {
    return draft_law(args_, span_, b_, i, reads_draft(args_) ? work_.draft_laws[span_.draft_index + i] : RowLaw{});
  }
  __device__ TileTable table(int64_t i) const { return table_of(work_.target_tables, span_.target_index + i, tiles_); }
  __device__ int64_t rows() const { return span_.length + (span_.ends_in_eos ? 0 : 1); }  // whose laws are known
  __device__ int chunk() const { return int(blockIdx.x % work_.chunks); }

  template <class F>
  __device__ void for_each_tile(F f) const {
    for (int tile = chunk() * num_warps() + warp_id(); tile < tiles_; tile += int(work_.chunks) * num_warps()) f(tile);
  }

  // True in the one block that arrives last: what the others have written is there to be read.
  __device__ bool last_to_arrive() {
    SPECDEC_SHARED(bool, last, 1);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last[0] = atomicAdd(&work_.arrived[b_], 1u) + 1 == unsigned(work_.chunks);
    __syncthreads();
    __threadfence();
    writes_ = last[0];
    return writes_;
  }

  // What is left of P at position i, by the target's law alone (a bonus) or after scale P has lost Q.
  __device__ void set_remainder(int64_t i, float scale) {
    by_one([&] {
      const bool bonus = i == span_.length;
      from_ = {row(i), target(i), cut_, bonus ? 1.0f : scale, bonus ? DraftLaw{} : draft(i)};
    });
  }

  // Its masses, this block's share of the tiles.
  __device__ void find_masses(const TileTable& table, float* mass) {
    if (!from_.law.one_hot) masses_of(from_, table, mass, chunk(), int(work_.chunks));
  }

  // By the last block: an id from the masses that all have left; from P where nothing is left.
  __device__ void draw(const TileTable& table, float* mass, float uniform) {
    SPECDEC_SHARED(int32_t, box, 1);
    if (from_.law.one_hot) {
      out_.final = from_.law.argmax;
      return;
    }
    for (int attempt = 0; attempt < 2; ++attempt) {
      if (warp_id() == 0) {
        const int32_t id = draw_id(from_, mass, uniform);
        if (lane_id() == 0) box[0] = id;
      }
      __syncthreads();
      out_.final = box[0];
      if (out_.final >= 0) return;
      by_one([&] { from_.draft = DraftLaw{}; });
      masses_of(from_, table, mass, 0, 1);
      __syncthreads();
    }
  }

  // A position a lane, so that their loads are in flight together; then the first at which the rule stops counts.
  template <class F>
  __device__ void stop_at_first(F stops) {
    for (int64_t begin = 0;; begin += 32) {
      const int64_t i = begin + lane_id();
      int32_t status = 0;
      const bool stop = i >= span_.length || stops(i, &status);
      if (i < rows()) status |= target(i).status;
      const unsigned stopping = __ballot_sync(kAllLanes, stop);
      const int first = stopping ? __ffs(int(stopping)) - 1 : 31;
      out_.status |= warp_reduce(lane_id() <= first ? status : 0, Or{});
      out_.accepted = begin + first;
      if (stopping) return;
    }
  }

  __device__ void token_rule() {
    stop_at_first([&](int64_t i, int32_t* status) {
      const RowLaw& law = target(i);
      const int32_t x = int32_t(token(i));
      if (law.one_hot) return x != law.argmax;
      const DraftLaw q = draft(i);
      *status |= q.law.status;
      return !accept_token(uniform_at(args_, span_, i + 1, status), prob_at(row(i), law, x), q.prob(x));
    });
    const int64_t i = out_.accepted;
    if (i >= rows()) return;
    if (target(i).one_hot) {
      out_.final = target(i).argmax;
      return;
    }
    const float uniform = coin(0);
    // Beside sequences under the block rule, which have room at every position, only the same layout is safe.
    float* mass = args_.acceptance == Acceptance::kBlock ? block_mass(i) : work_.mass + b_ * tiles_;
    set_remainder(i, 1.0f);
    find_masses(table(i), mass);
    if (last_to_arrive()) draw(table(i), mass, uniform);
  }

  __device__ float* block_mass(int64_t i) const { return work_.mass + (span_.target_index + i) * tiles_; }

  __device__ void block_rule() {
    // All that could be needed: what is left of P at each position given w, which its own past decides.
    float w = 1.0f;
    for (int64_t i = 0; i < rows() && w > 0; ++i) {
      set_remainder(i, w);
      find_masses(table(i), block_mass(i));
      if (i < span_.length) w = next_weight(i, w);
    }
    if (!last_to_arrive()) return;
    // The last i with u_i < h_i counts, so the walk goes on after a failure; it ends where w has become 0.
    float best_w = 1.0f;
    w = 1.0f;
    for (int64_t i = 0; i < span_.length; ++i) {
      set_remainder(i, w);
      out_.status |= from_.law.status | from_.draft.law.status;
      if (i > 0 && coin(i) < block_threshold(w, residual_mass(from_, block_mass(i)))) {
        out_.accepted = i;
        best_w = w;
      }
      w = next_weight(i, w);
      if (w > 0 && i + 1 < span_.length) continue;
      if (coin(i + 1) < w) out_.accepted = span_.length;
      break;
    }
    if (out_.accepted >= rows()) return;
    set_remainder(out_.accepted, best_w);
    out_.status |= from_.law.status;
    draw(table(out_.accepted), block_mass(out_.accepted), from_.law.one_hot ? 0.0f : coin(0));
  }

  __device__ float coin(int64_t i) { return uniform_at(args_, span_, i, &out_.status); }

  // w after position i, at which the remainder stands.
  __device__ float next_weight(int64_t i, float w) const {
    const int32_t x = int32_t(token(i));
    return next_block_weight(w, prob_at(from_.row, from_.law, x), from_.draft.prob(x));
  }

  __device__ void match_rule() {
    const bool noisy = args_.acceptance == Acceptance::kMatch && args_.noise_keys != nullptr;
    if (noisy) {
      for (int64_t i = 0; i < rows(); ++i) {
        const RowLaw law = target(i);
        if (law.one_hot) continue;
        const TileTable tiles = table(i);
        BestNoisy best;
        for_each_tile([&](int tile) {
          if (tiles.max[tile] >= law.cutoff)
            best.see(row(i), law, tile, args_.noise_keys[span_.target_index + i], nullptr);
        });
        const Fixed key = warp_reduce(best.key, Max{});
        if (lane_id() == 0 && key) atomicMax(&work_.best[span_.target_index + i], key);
      }
      if (!last_to_arrive()) return;
    }
    const auto wanted = [&](int64_t i) -> int64_t {
      if (!noisy || target(i).one_hot) return target(i).argmax;
      return noisy_id(atomicMax(&work_.best[span_.target_index + i], Fixed(0)));
    };
    stop_at_first([&](int64_t i, int32_t*) { return token(i) != wanted(i); });
    if (out_.accepted < rows()) out_.final = wanted(out_.accepted);
  }

  const VerifyArgs& args_;
  const Workspace& work_;
  const int64_t b_;
  const Span& span_;
  Remainder& from_;
  Outcome out_;
  int tiles_;
  bool cut_, writes_;  // writes_: this block writes the outputs
};

__global__ void __launch_bounds__(kRowThreads, 2)
    verify_decide_kernel(const __grid_constant__ VerifyArgs args, const __grid_constant__ Workspace work) {
  SPECDEC_SHARED(Span, span, 1);
  SPECDEC_SHARED(Remainder, from, 1);
  wait_for_previous();
  Decision(args, work, blockIdx.x / work.chunks, span[0], from[0]).run();
}

template <class T>
T* scratch(const Launch& launch, int64_t count) {
  return static_cast<T*>(launch.scratch(count * int64_t(sizeof(T))));
}

}  // namespace

cudaError_t verify_split(const VerifyArgs& args, const Launch& launch) {
  const int64_t target_rows = args.cu ? args.total + args.batch : args.batch * (args.num_draft + 1);
  const int64_t tiles = (args.target.vocab + kTile - 1) / kTile;
  const bool noisy = args.acceptance == Acceptance::kMatch && args.noise_keys;
  Workspace work{};
  work.target_tables = scratch<float>(launch, target_rows * tiles * TileTable::kNumbers);
  work.target_laws = scratch<RowLaw>(launch, target_rows);
  if (args.draft_probs.data || (args.draft.data && !args.draft_values)) {
    const int64_t draft_tiles = ((args.draft.data ? args.draft.vocab : args.draft_probs.vocab) + kTile - 1) / kTile;
    work.draft_tables = scratch<float>(launch, args.total * draft_tiles * TileTable::kNumbers);
    work.draft_laws = scratch<RowLaw>(launch, args.total);
  }
  if (args.acceptance == Acceptance::kToken || args.acceptance == Acceptance::kBlock)
    work.mass = scratch<float>(launch, tiles * (args.acceptance == Acceptance::kBlock ? target_rows : args.batch));
  if (noisy) work.best = scratch<Fixed>(launch, target_rows);
  work.arrived = scratch<unsigned>(launch, args.batch);

  const int64_t rows = tasks(args);
  work.chunks = chunks_of(int(tiles), rows, kRowThreads / 32);
  Shape shape{dim3(unsigned(rows * work.chunks)), dim3(kRowThreads)};
  cudaError_t error = launch_kernel(verify_scan_kernel, shape, launch.stream, args, work);
  if (error) return error;
  shape.grid = dim3(unsigned(rows));
  shape.shared = may_cut(args.params) || may_cut(args.draft_params) ? kMaxListed * sizeof(float) : 0;
  shape.overlapping = true;
  error = launch_kernel(verify_laws_kernel, shape, launch.stream, args, work);
  if (error) return error;
  work.chunks = args.acceptance == Acceptance::kGreedy ? 1 : chunks_of(int(tiles), args.batch, kRowThreads / 32);
  shape.grid = dim3(unsigned(args.batch * work.chunks));
  shape.shared = 0;
  return launch_kernel(verify_decide_kernel, shape, launch.stream, args, work);
}

}  // namespace specdec::cuda

// Attention forward: validate -> plan -> launch.
//
// Dimension letters: B batch, Sq / Sk queries / keys of a sequence, Tq / Tk tokens of all sequences, Hq / Hk heads of q
// / of k and v, D head dim of q and k, Dv head dim of v and out.
#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "hopper_attention/errors.h"
#include "hopper_attention/types.h"

namespace hopper_attention {

// One call as the user states it. Nothing in it is trusted before validate(). Tensors of lengths are int32 on the
// device of q and are read by the kernels alone, which clamp what they find there: B = the batch of q, of cu_seqlens_q
// or of the page table. Tensors without a note on it are optional.
struct Arguments {
  Tensor q;    // (B, Sq, Hq, D), or (Tq, Hq, D) with cu_seqlens_q; bf16 or fp16; required
  Tensor k;    // (B, Sk, Hk, D), (Tk, Hk, D) with cu_seqlens_k, or (pages, page size, Hk, D) with page_table; required
  Tensor v;    // as k with Dv; required
  Tensor out;  // as q with Dv, dtype of q; written; required
  Tensor softmax_lse;  // (B, Hq, Sq), or (Hq, Tq) with cu_seqlens_q; float32, contiguous; written when given
  Tensor sinks;        // (Hq,), bf16, fp16 or fp32, contiguous

  Tensor cu_seqlens_q;      // (B + 1,): where each sequence starts in q
  Tensor cu_seqlens_k;      // (B + 1,): where each sequence starts in k and v
  Tensor seqused_q;         // (B,): queries of a sequence that count
  Tensor seqused_k;         // (B,): keys of a sequence that count, before seqlen_k_new or cu_seqlens_k_new are added
  Tensor page_table;        // (B, pages of a sequence), last stride 1
  Tensor cache_batch_idx;   // (B,): which sequence of k and v belongs to a sequence of q; not with pages
  Tensor cache_leftpad;     // (B,): keys at the start of a sequence of k and v that do not count
  Tensor cu_seqlens_k_new;  // (B + 1,): differences are keys that were appended behind seqused_k
  Tensor cp_tot_seqused_k;  // (B,): keys of a sequence on all ranks of context parallelism
  std::int64_t seqlen_k_new = 0;    // keys that were appended behind seqused_k, in every sequence
  std::int64_t seqused_k_all = -1;  // instead of seqused_k, the same for all sequences; -1: not given
  // Bounds, for speed; -1: what the shapes allow. Rows of a sequence with more queries may be left unwritten.
  std::int64_t max_seqlen_q = -1;
  std::int64_t max_seqlen_k = -1;
  std::int64_t cp_world_size = 1;  // local key j is key j * cp_world_size + cp_rank of the sequence
  std::int64_t cp_rank = 0;

  Tensor scheduler_metadata;  // int32, from make_schedule()
  Tensor workspace;           // uint8, 16-byte aligned, Plan::workspace_bytes or more; contents are undefined

  std::optional<double> softmax_scale;  // default D^-1/2
  bool causal = false;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  std::int64_t attention_chunk = 0;
  double softcap = 0.0;
  std::int64_t num_splits = 1;
  std::int64_t sm_margin = 0;
  bool batch_invariant = false;
};

enum class KeyLayout : std::uint8_t { kDense, kVarlen, kPaged };

// What is asked, checked and in canonical form. Holds no pointer: calls of the same problem share a plan.
struct Problem {
  DataType dtype = DataType::kUnsupported;
  int batch = 0;
  int seqlen_q = 0;  // of each sequence; where lengths are on the device, a bound
  int seqlen_k = 0;
  int total_q = 0;          // rows of q in all sequences, at most
  int total_k = 0;          // rows of a packed k, where they decide something; 0: not known
  bool ragged = false;      // lengths are on the device
  bool packed_q = false;    // q is (Tq, Hq, D)
  bool seqused_q = false;   // of the rows of a sequence in q some may not count
  bool keys_known = false;  // packed k has as many rows as if each sequence had seqlen_k keys
  KeyLayout keys = KeyLayout::kDense;
  int page_size = 0;          // 0: no pages
  bool has_metadata = false;  // the schedule was made before
  int heads_q = 0;
  int heads_k = 0;
  int head_dim = 0;
  int head_dim_v = 0;
  MaskParams mask;
  float softmax_scale = 0.0F;
  float softcap = 0.0F;  // 0 is off
  bool has_sinks = false;
  int num_splits = 1;
  int sm_margin = 0;
  bool batch_invariant = false;

  friend bool operator==(Problem const&, Problem const&) = default;
};

// The facts of a card that decisions depend on.
struct DeviceInfo {
  std::string name;
  int sm_count = 0;
  int compute_major = 0;
  int compute_minor = 0;
  std::int64_t l2_bytes = 0;
  double memory_gbs = 4917;  // of device memory, by its clock and width: 10^9 bytes a second; an H200's if not known
};

// One attention kernel of a plan.
struct KernelPlan {
  KernelFamily family = KernelFamily::kNone;
  TileConfig tile;
  int ctas = 0;  // size of the grid, persistent unless each tile has a block
  int threads = 0;
  bool may_split = false;          // tiles may be cut along the keys, so that every block gets the same share
  std::int64_t most_tiles = 0;     // bounds of what the schedule may hold
  std::int64_t most_units = 0;     // key blocks of all tiles, or splits of fixed size
  std::int64_t partial_slots = 0;  // parts of tiles that the workspace has room for
  int partial_rows = 0;            // query rows of each
  int least_queries = 0;           // of the sequences that it takes
  int most_queries = std::numeric_limits<int>::max();
  int tiles_of_group = 1;     // of few queries: of a sequence and group of heads, each with blocks of its own
  bool packed_tiles = false;  // as many for each sequence as hold the queries that it has
  bool merges_parts = false;  // the blocks that leave parts of a tile do, not the combine kernel
  bool shares_parts = false;  // its parts of tiles lie in the slots of the last kernel
  int equal_parts = 1;        // of each tile, a block for each, which follow from their index
  int pairs = 0;              // of tiles that the blocks of a cluster share, found by their rank (PairedTiles)
  int blocks_of_pair = 0;     // of a cluster
  bool ranked = false;        // blocks find the tiles of few sequences by their rank
  int leaves = 0;             // SMs that the grid leaves to the kernel behind it

  constexpr bool has_several_tiles() const { return packed_tiles || tiles_of_group > 1; }  // of a sequence and group
};

// What was decided, and why. The fields that KernelPlan has, too, are those of the first kernel.
struct Plan {
  KernelFamily kernel = KernelFamily::kNone;
  DataType dtype = DataType::kUnsupported;
  TileConfig tile;
  int packed_heads = 1;    // query heads of one K/V head that share a tile
  int num_splits = 1;      // of many and of few queries apart: those of few
  std::int64_t tiles = 0;  // of all kernels
  int ctas = 0;            // size of the grid, persistent unless each tile has a block
  int threads = 0;
  int heads_per_pass =
      0;  // of a dense call: head groups (of all sequences) whose tiles run together, so that their K and V stay in L2
  bool listed = false;  // tiles come from the schedule of the step, not from their index alone; where those of many
                        // queries have ranks (KernelPlan), tiles of few queries
  int cluster = 0;      // thread blocks that share each tile of few queries, of each sequence and group of heads,
                        // and merge in shared memory; 0: tiles are shared out in another way
  // With a schedule, which knows on the device what lengths are and not only their bound:
  int cluster_if_alike = 0;       // as cluster, if it finds no sequence much longer than the others; 0: not asked
  bool draws_if_whole = false;    // tiles are drawn in its order if it cuts none
  bool starts_early = true;       // kernels are set up while the one before on the stream still runs
  bool next_starts_early = true;  // and the next call before this one ends, also if no tile is cut
  bool makes_schedule = false;    // which has to be computed first
  FewReaders readers;             // for the kernel that makes it
  bool fixed_splits = false;      // splits depend on a sequence alone (batch_invariant)
  bool forces_splits = false;     // by units also where whole tiles fill the grid
  bool for_both = false;          // one kernel for many queries takes sequences of few, too, whatever these are
  bool decode_first = false;      // of two kernels, on a part of the SMs; otherwise prefill, which leaves it SMs if cut
  int readers_beside_prefill = 0;   // thread blocks of decode that read as fast as all
  int chunks_beside_decode = 0;     // of prefill in front of decode, so many at least
  int prefill_at_par = 0;           // of prefill that take as long for a unit each as memory for as many of decode
  int max_splits = 0;               // of a tile; 0: no bound
  int keys_in_l2 = 0;               // of one K/V head
  std::vector<KernelPlan> kernels;  // one, or prefill and decode; the combine kernel follows if any may split and
                                    // leaves merging to it
  std::int64_t workspace_bytes = 0;
  std::vector<std::string> reasons;  // one line for each decision

  HOPPER_ATTENTION_EXPORT std::string explain() const;
};

// A kernel that this library contains.
struct KernelInfo {
  KernelFamily family;
  DataType dtype;
  TileConfig tile;
};

// Arguments -> Problem. Every user error raises InvalidArgument, InvalidType or NotImplemented, before any CUDA call.
HOPPER_ATTENTION_EXPORT Problem validate(Arguments const& args);

// A problem as the user states it, without tensors: for plans that need neither memory nor a GPU.
struct ProblemShape {
  DataType dtype = DataType::kUnsupported;
  std::int64_t batch = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t heads_q = 0;
  std::int64_t heads_k = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;
  bool has_sinks = false;
  std::int64_t page_size = 0;  // of k and v; 0: no pages
};

// What validate() does once the tensors are known to be good: checks the shape and the options of `options` and brings
// them into canonical form. Of the tensors of `options` it only counts which ones of lengths are given: the problem is
// ragged if any is, its q packed if cu_seqlens_q is. Raises as validate() does.
HOPPER_ATTENTION_EXPORT Problem make_problem(ProblemShape const& shape, Arguments const& options);

// How many int32 scheduler metadata of `batch` sequences take: 1 + 4 * batch rounded up to a multiple of 4.
HOPPER_ATTENTION_EXPORT std::int64_t schedule_size(std::int64_t batch);

// What the schedule of a step depends on; all layers of the step share it.
struct ScheduleArguments {
  ProblemShape shape;  // seqlen_q and seqlen_k are bounds; they apply where a tensor of lengths is not given
  Arguments options;   // lengths, mask and batch_invariant; its q, k, v, out and what the results need are ignored
  Tensor metadata;     // (schedule_size(batch),) int32, contiguous; written
};

// As for Arguments: checks the options, the tensors of lengths and the metadata, which all are on one device.
HOPPER_ATTENTION_EXPORT Problem validate(ScheduleArguments const& args);

// Computes scheduler metadata on `stream` of the device of `metadata`. Neither synchronises nor allocates.
HOPPER_ATTENTION_EXPORT void make_schedule(ScheduleArguments const& args, Stream stream);

// Problem -> Plan. Pure; raises NotImplemented when no kernel exists for the problem, whether built or not.
HOPPER_ATTENTION_EXPORT Plan plan(Problem const& problem, DeviceInfo const& device);

// Starts the planned kernel on `stream`. Neither synchronises nor allocates on the device. Raises NotImplemented if
// the kernel was left out of this build, CudaError if the launch fails. `args` must have given `problem`.
HOPPER_ATTENTION_EXPORT void launch(Plan const& plan, Problem const& problem, Arguments const& args, Stream stream);

// Raises what forward() would raise for `args` before its first launch, and does nothing else.
// Bytes of workspace that the call needs. Raises what check_call() raises of its arguments.
HOPPER_ATTENTION_EXPORT std::int64_t workspace_bytes(Arguments const& args);

HOPPER_ATTENTION_EXPORT void check_call(Arguments const& args);

// validate, plan (kept for the next call of the same problem) and launch on the device of `args.q`. Raises
// InvalidArgument if the plan needs a workspace and args.workspace is not given or too small.
HOPPER_ATTENTION_EXPORT void forward(Arguments const& args, Stream stream);

// The same for callers that learn the size of the workspace only here: `allocate(bytes)` is called at most once, if the
// plan needs a workspace and args.workspace is not given.
HOPPER_ATTENTION_EXPORT void forward(Arguments const& args, Stream stream,
                                     std::function<Tensor(std::int64_t bytes)> const& allocate);

// Facts of CUDA device `ordinal`; raises CudaError without driver or device.
HOPPER_ATTENTION_EXPORT DeviceInfo const& device_info(int ordinal);

// Facts of a card by name ("H100", "H100 PCIe", "H200", ...), so that a plan needs no GPU. Raises InvalidArgument for
// an unknown name and lists those that are known.
HOPPER_ATTENTION_EXPORT DeviceInfo device_info(std::string const& name);

// Raises CudaError, saying what is needed and what was found, unless `ordinal` can run the kernels (sm_90, driver).
HOPPER_ATTENTION_EXPORT void require_supported_device(int ordinal);

// Versions of the linked CUDA runtime and of the installed driver, as 1000 * major + 10 * minor. Driver 0: there is
// none. Runtime 0: a host-only build.
struct CudaVersions {
  int runtime = 0;
  int driver = 0;
};
HOPPER_ATTENTION_EXPORT CudaVersions cuda_versions();

// Loads every built kernel on device `ordinal`, so that no first call pays for it.
HOPPER_ATTENTION_EXPORT void warmup(int ordinal);

HOPPER_ATTENTION_EXPORT std::vector<KernelInfo> const& built_kernels();

HOPPER_ATTENTION_EXPORT char const* version();

}  // namespace hopper_attention

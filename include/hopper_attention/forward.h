// Attention forward: validate -> plan -> launch.
//
// Dimension letters: B batch, Sq / Sk queries / keys of a sequence, Hq / Hk heads of q / of k and v, D head dim of q
// and k, Dv head dim of v and out.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "hopper_attention/errors.h"
#include "hopper_attention/types.h"

namespace hopper_attention {

// One call as the user states it. Nothing in it is trusted before validate().
struct Arguments {
  Tensor q;                             // (B, Sq, Hq, D), bf16 or fp16
  Tensor k;                             // (B, Sk, Hk, D)
  Tensor v;                             // (B, Sk, Hk, Dv)
  Tensor out;                           // (B, Sq, Hq, Dv), dtype of q; written
  Tensor softmax_lse;                   // (B, Hq, Sq) float32, contiguous; written when given
  Tensor sinks;                         // (Hq,), bf16, fp16 or fp32, contiguous; optional
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

// What is asked, checked and in canonical form. Holds no pointer: calls of the same problem share a plan.
struct Problem {
  DataType dtype = DataType::kUnsupported;
  int batch = 0;
  int seqlen_q = 0;
  int seqlen_k = 0;
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
};

// What was decided, and why.
struct Plan {
  KernelFamily kernel = KernelFamily::kNone;
  DataType dtype = DataType::kUnsupported;
  TileConfig tile;
  int packed_heads = 1;  // query heads of one K/V head that share a tile
  int num_splits = 1;
  std::int64_t tiles = 0;
  int ctas = 0;  // size of the persistent grid
  int threads = 0;
  int heads_per_pass = 0;  // head groups (of all sequences) whose tiles run together, so that their K and V stay in L2
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
};

// What validate() does once the tensors are known to be good: checks the shape and the options of `options` (its
// tensors are ignored) and brings them into canonical form. Raises as validate() does.
HOPPER_ATTENTION_EXPORT Problem make_problem(ProblemShape const& shape, Arguments const& options);

// Problem -> Plan. Pure; raises NotImplemented when no kernel exists for the problem, whether built or not.
HOPPER_ATTENTION_EXPORT Plan plan(Problem const& problem, DeviceInfo const& device);

// Starts the planned kernel on `stream`. Neither synchronises nor allocates on the device. Raises NotImplemented if
// the kernel was left out of this build, CudaError if the launch fails. `args` must have given `problem`.
HOPPER_ATTENTION_EXPORT void launch(Plan const& plan, Problem const& problem, Arguments const& args, Stream stream);

// validate, plan (kept for the next call of the same problem) and launch on the device of `args.q`.
HOPPER_ATTENTION_EXPORT void forward(Arguments const& args, Stream stream);

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

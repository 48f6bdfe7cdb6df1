// Plain types shared by the public API, the host code and the kernels. No CUDA, CuTe or torch header.
#pragma once

#include <array>
#include <cstdint>

#define HOPPER_ATTENTION_EXPORT __attribute__((visibility("default")))

struct CUstream_st;

namespace hopper_attention {

using Stream = CUstream_st*;  // the same type as cudaStream_t

enum class DataType : std::uint8_t { kUnsupported, kBFloat16, kFloat16, kFloat32, kInt32, kUInt8 };

inline constexpr int kMaxRank = 5;
inline constexpr int kCpuDevice = -1;

// A strided view of somebody else's memory. Shape and strides count elements.
struct Tensor {
  void* data = nullptr;
  DataType dtype = DataType::kUnsupported;
  int device = kCpuDevice;  // CUDA ordinal
  int rank = -1;            // -1: not given
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};

  bool given() const { return rank >= 0; }
};

inline constexpr int kUnlimited = -1;

// Which keys a query may see, in canonical form; the meaning is visible() in src/kernels/interval_mask.h.
struct MaskParams {
  int left = kUnlimited;   // keys to the left of the diagonal, inclusive
  int right = kUnlimited;  // keys to the right of the diagonal, inclusive; causal is 0
  int chunk = 0;           // queries and keys of one chunk of this length see each other; 0 is off
  int cp_world = 1;        // context parallelism: local key j is key j * cp_world + cp_rank of the sequence
  int cp_rank = 0;

  friend bool operator==(MaskParams const&, MaskParams const&) = default;
};

// Which calls a kernel has the code for. What it does not run costs it all the same: up to 1k tokens softcap 6 to 12 %
// of the time, pages and parts of tiles 4 to 5 %.
enum class Calls : std::uint8_t {
  kAll,
  kCapped,     // with softcap
  kUncapped,   // without it
  kUncut,      // without it, and the tiles are whole
  kWhole,      // as kUncut, and keys are not in pages
  kDense,      // without it, and the tiles are whole and follow from their index
  kPaired,     // without it, and the CTAs of a cluster share tiles, which they find by their rank
  kByIndex,    // without it, tiles of few rows follow from their index, and keys are not gathered
  kMixed,      // as kUncapped, and tiles of at most 16 rows are computed as kernels for few rows do
  kMixedMany,  // as kMixed, of many sequences, whose tiles of few rows are found one by one
  kInParts,    // as kAll, and tiles are in parts that follow from them alone (batch_invariant)
};

constexpr bool is_mixed(Calls calls) { return calls == Calls::kMixed || calls == Calls::kMixedMany; }

// Thread blocks that read tiles of few queries, whatever the bounds of a call and its sm_margin: metadata are made
// without knowing those.
struct FewReaders {
  int ctas = 1;            // that fit on the card
  int beside_prefill = 1;  // so many as slow as the slowest beside prefill read as fast as all
  int cluster = 1;         // of a cluster, if clusters share tiles
  int by_schedule = 0;     // of a call that shares out what a schedule cuts (EvenParts); 0: with batch_invariant
  int of_parts = 0;        // of the kernel whose tiles of many queries may be in even parts; 0: there is none
  int of_many = 1;         // of one for many queries
};

// The shape of one tile of work. A structural type: kernels take it as a template value.
struct TileConfig {
  int rows = 0;        // query rows, 64 for each consumer warpgroup
  int keys = 0;        // keys of one block
  int head_dim = 0;    // of q and k
  int head_dim_v = 0;  // of v and out
  int stages = 0;      // slots of the ring that K and V blocks share
  int per_sm = 1;      // thread blocks that share an SM
  Calls calls = Calls::kAll;
  int slab_keys = 0;  // of tiles with one block: those that 64 rows read of it, from the first that they see. 0: of any

  friend bool operator==(TileConfig const&, TileConfig const&) = default;
};

enum class KernelFamily : std::uint8_t {
  kNone,     // the problem has no output elements
  kPrefill,  // tiles of two to four warpgroups of queries
  kDecode,   // tiles of one warpgroup: what a few queries need is to stream K and V
};

}  // namespace hopper_attention

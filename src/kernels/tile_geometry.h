// How tiles lie in shared memory and which rows of the problem they hold: what the host's tensor maps and the kernels
// agree on.
#pragma once

#include <cstdint>

#include "hopper_attention/types.h"
#include "kernels/fast_divmod.h"
#include "kernels/host_device.h"

namespace hopper_attention {

inline constexpr int kSlabRows = 64;    // query rows of one consumer warpgroup
inline constexpr int kRowsOfWarp = 16;  // of these

// Query rows that the tiles for few of them hold, and those for some more.
inline constexpr int kMostFewRows = 16;
inline constexpr int kMostSomeRows = 32;

// Tiles for windows: one block holds all that their rows see, and each slab reads its own part of it.
constexpr bool has_one_block(TileConfig const& tile) { return tile.slab_keys > 0; }

// Keys of a block that a slab reads, and those that its product P V reads, in steps of a WGMMA: behind the slab's own
// there may be some whose probabilities are 0.
inline constexpr int kKeysOfStep = 16;
constexpr int keys_of_slab(TileConfig const& tile) { return has_one_block(tile) ? tile.slab_keys : tile.keys; }
constexpr int steps_of_slab(TileConfig const& tile) { return ceil_div(keys_of_slab(tile), kKeysOfStep); }

// The most keys of a page that a box of such a block brings: boxes begin where these do, before what a tile sees.
inline constexpr int kMostKeysOfWindowBox = 16;

// Whether the mask leaves so little that one block holds what a tile sees, and a slab's part of it what the slab sees.
// The same with pages of any size and without, so that bits do not depend on that.
constexpr bool one_block_holds(TileConfig const& tile, MaskParams const& mask, int packed_heads) {
  if (mask.left == kUnlimited || mask.right == kUnlimited || mask.chunk != 0 || mask.cp_world != 1) { return false; }
  std::int64_t const queries = kSlabRows / packed_heads;  // of a slab
  std::int64_t const of_slab = std::int64_t{mask.left} + mask.right + queries;
  std::int64_t const of_tile = kMostKeysOfWindowBox - 1 + (tile.rows / kSlabRows - 1) * queries + of_slab;
  int const unseen = steps_of_slab(tile) * kKeysOfStep - tile.slab_keys;  // behind what the last slab sees
  return of_slab <= tile.slab_keys && of_tile + unseen <= tile.keys;
}

// Whether the slabs of a tile visit only blocks of which they see something. Where a tile has more rows than its blocks
// have keys, a mask may hide its last blocks from its upper slabs.
constexpr bool slabs_skip_blocks(TileConfig const& tile) { return tile.rows > tile.keys && !has_one_block(tile); }

// CTAs that may share a tile.
inline constexpr int kMostCluster = 16;
// Columns of a row that a thread merges at once, a float4 of each part, of so many parts; neighbouring threads have the
// others.
inline constexpr int kMergeColumns = 4;
inline constexpr int kMergeParts = 4;
// Rows of a tile that `ctas` can merge, each with one warpgroup. For more of the widest heads there is no room in
// float32.
constexpr int most_merge_rows(TileConfig const& tile, int ctas = 1) {
  constexpr int kThreads = 128;
  constexpr int kOfWidest = 32;
  int const rows = min_of(tile.rows, kThreads / ceil_div(ctas, kMergeParts));
  return tile.head_dim_v > 192 ? min_of(rows, kOfWidest) : rows;
}
// Parts that follow from a tile alone which are merged with each other before they are merged with others.
inline constexpr int kPartsOfGroup = 4;

// A tile is stored as column slabs as wide as the shared-memory swizzle: 64 columns (128 bytes) or 32 (64 bytes).
constexpr int slab_columns(int head_dim) { return head_dim % 64 == 0 ? 64 : 32; }

// 16 bytes of a slab's row are the unit of the swizzle.
inline constexpr int kPieceBytes = 16;

// Where the swizzle puts piece `piece` of row `row`, among the row's own 8 pieces (slabs of 64 columns) or 4.
HA_HOST_DEVICE constexpr int swizzled_piece(int row, int piece, int pieces) {
  return piece ^ (row * pieces / 8 % pieces);
}

// How the query heads of one K/V head share a 64-row slab: row = query * heads + head.
struct Packing {
  FastDivmod heads;                  // query heads of a group; 1 is off
  int queries_per_slab = kSlabRows;  // rows / heads: the slab's other rows are idle
  FastDivmod slab{kSlabRows};        // queries -> full slabs of them
};

inline Packing make_packing(int heads, int rows = kSlabRows) {
  return {FastDivmod(heads), rows / heads, FastDivmod(rows / heads)};
}

// A box that leaves out the rows behind those that are wanted. Its tensor map has rows of the tensor up to `copies`
// times, as often as a box has rows but no more often than there are: (y, x) with x < copies is row y + x, and there
// are rows + 1 - copies values of y, so that no part of the map lies behind the tensor. The box begins at (y, x); what
// lies past x = copies is outside the map, arrives as zeros without being read, and is not written. (Source of the
// idea: the ragged descriptors of Triton and FlashAttention-4, whose y begins far before the tensor, which loads must
// not.)
struct ClippedBox {
  int y;
  int x;
  bool exact;  // without rows but those that are wanted: not if these are a few of the tensor's first

  // Rows from `first` on; `wanted`, at least 1, may be more than a box has, but first + wanted not more than the tensor
  // has: a map that has rows several times does not end with the tensor.
  HA_HOST_DEVICE constexpr ClippedBox(int first, int wanted, int copies) {
    int const left_out = max_of(copies - wanted, 0);
    exact = first >= left_out;
    y = exact ? first - left_out : 0;
    x = exact ? left_out : first;
  }
};

// Rows of a tile's slabs, up to the last one that holds one of its first `queries`.
HA_HOST_DEVICE constexpr int rows_of_queries(Packing const& packing, int queries) {
  if (queries <= 0) { return 0; }
  int const full = packing.slab.quotient(queries - 1);  // slabs before the last
  return full * kSlabRows + (queries - full * packing.queries_per_slab) * packing.heads.divisor;
}

// Queries [first, last].
struct QueryRange {
  int first;
  int last;
};

// Those that tile `m` holds, in tiles of `slabs`; last is an existing query, before first if there are none. The first
// tile has the slabs that are left over, since of all tiles it is the one that a causal mask leaves the fewest keys.
HA_HOST_DEVICE constexpr QueryRange query_range(Packing const& packing, int slabs, int m, int seqlen_q) {
  int missing = 0;  // slabs that the first tile lacks
  if (slabs > 1) {
    int const count = packing.slab.quotient(seqlen_q + packing.queries_per_slab - 1);
    missing = ceil_div(count, slabs) * slabs - count;
  }
  int const first = max_of(m * slabs - missing, 0);
  int const end = (m + 1) * slabs - missing;
  return {first * packing.queries_per_slab, min_of(end * packing.queries_per_slab, seqlen_q) - 1};
}

// Those of them that slab `slab` holds; none, with last before first, behind the tile's last.
HA_HOST_DEVICE constexpr QueryRange queries_of_slab(Packing const& packing, QueryRange const& tile, int slab) {
  int const first = tile.first + slab * packing.queries_per_slab;
  return {first, min_of(first + packing.queries_per_slab - 1, tile.last)};
}

}  // namespace hopper_attention

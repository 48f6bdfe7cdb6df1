// Which pages hold the keys of a block: entries of the page table, spread over the lanes of a warp.
#pragma once

#include "kernels/cute.h"

#include "kernels/params.h"
#include "kernels/tile_work.h"

namespace hopper_attention {

using namespace cute;

// Pages of the boxes of one block that this lane brings: box lane, lane + 32, ...
template <int kKeys>
struct BlockPages {
  int id[ceil_div(kKeys, 32)];
};

// -1 where the tile sees no key of a box or the table has no entry; other entries are what the table says, which need
// not be a page that exists. Called for blocks before the first one, too.
template <int kKeys>
__device__ __forceinline__ BlockPages<kKeys> find_pages(PageParams const& p, TileWork const& work, int n, int lane) {
  // Read once, not for each box: what is read from shared memory counts as changed after every barrier and copy.
  KeyInterval const seen = work.range.keys;
  int const first = work.first_key(n, kKeys);
  int const row = work.sequence.k_row + first;
  // By all lanes, also by those that bring no box (kActingLane).
  int const batch = static_cast<int const volatile&>(work.sequence.batch);
  int const* const table = p.table + batch * p.stride;
  bool const in_range = n >= work.range.begin;
  BlockPages<kKeys> pages;
  CUTE_UNROLL
  for (int i = 0; i < ceil_div(kKeys, 32); ++i) {
    int const box = (i * 32 + lane) * p.box_keys;
    int const key = first + box;
    int const index = p.size.quotient(row + box);
    pages.id[i] = -1;
    if (in_range && box < kKeys && key < seen.end && key + p.box_keys > seen.begin && index < p.width) {
      pages.id[i] = table[index];
    }
  }
  return pages;
}

}  // namespace hopper_attention

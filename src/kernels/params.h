// What the host hands to a kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "hopper_attention/types.h"
#include "kernels/fast_divmod.h"
#include "kernels/interval_mask.h"
#include "kernels/tile_geometry.h"
#include "kernels/tile_scheduler.h"

namespace hopper_attention {

struct LoadParams {
  CUtensorMap q;  // (D, packed heads, Sq, head groups, B), box (64, packed heads, queries per slab, 1, 1)
  CUtensorMap k;  // (D, Sk, Hk, B), box (64, keys of a block, 1, 1)
  CUtensorMap v;  // (Dv, Sk, Hk, B), box (64, keys of a block, 1, 1)
  FastDivmod groups_per_head_k;  // head groups that read one K/V head
  std::uint32_t query_rows;      // rows of a slab that a box of q fills: packed heads x queries per slab
};

struct SoftmaxParams {
  float scale_log2;     // softmax scale * log2(e): scores -> exponents of 2; with softcap, softcap * log2(e)
  float softcap_inner;  // softmax scale / softcap, 0 without softcap
};

struct EpilogueParams {
  CUtensorMap out;  // as q, with Dv; used when out_by_tma
  void* out_pointer;
  std::int64_t out_stride_batch, out_stride_row, out_stride_head;  // elements
  float* lse;                                                      // (B, Hq, Sq) or nullptr
  void const* sinks;
  DataType sinks_type;
  int heads_q;
  int head_dim_v;  // of the tensor: at most the tile's
  bool out_by_tma;
};

struct PrefillParams {
  LoadParams load;
  EpilogueParams epilogue;
  SchedulerParams scheduler;
  SoftmaxParams softmax;
  Packing packing;
  MaskParams mask;
  SeqlenQK len;
};

}  // namespace hopper_attention

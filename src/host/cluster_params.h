// Plan -> what the kernels are told about clusters.
#pragma once

#include "hopper_attention/forward.h"
#include "host/schedule_shape.h"
#include "kernels/params.h"

namespace hopper_attention {

// All but where the schedule of the step lies.
inline ClusterParams cluster_params(Plan const& plan, KernelPlan const& kernel, int heads_q) {
  ClusterParams p;
  p.head_groups = FastDivmod(heads_q / plan.packed_heads);
  p.tiles_of_group = FastDivmod(kernel.tiles_of_group);
  p.packed = kernel.packed_tiles;
  p.by_schedule = plan.cluster_if_alike > 0 || plan.draws_if_whole;
  p.size = cluster_of(plan, kernel);
  if (p.size == 0 && !p.by_schedule) { return p; }
  p.of_tile = p.by_schedule ? 1 : clusters_of_tile(kernel);
  p.few_keys = kFewBlocksOfShare * kernel.tile.keys * p.size;
  p.at_once = kernel.ctas / (max_of(1, p.size) * p.of_tile);
  p.tiles = static_cast<int>(kernel.most_tiles);
  // Blocks 2i and 2i + 1 of a grid go to a pair of SMs, which share a way to memory.
  p.every_other = p.by_schedule && p.size == 1 && kernel.ctas % 2 == 0 && 2 * p.tiles <= kernel.ctas;
  bool const draws = plan.draws_if_whole && !plan.fixed_splits;  // parts of a tile begin with its first keys
  bool const one_each = draws || (p.on() && p.size == 1 && p.of_tile == 1);
  p.fetches_early = one_each && p.tiles > p.at_once && !kernel.has_several_tiles() && !plan.makes_schedule &&
                    plan.kernels.size() == 1;
  p.own_first = card_share(plan, kernel) != CardShare::kTakes;
  if (kernel.tile.calls == Calls::kInParts) {
    p.longest_part = tile_shape(kernel.tile, plan.packed_heads, true).fixed_split;
  }
  p.ctas_of_tile = FastDivmod(max_of(1, p.size) * p.of_tile);
  return p;
}

// For those whose thread blocks look at it.
inline void set_metadata(ClusterParams& p, Plan const& plan, int* metadata) {
  if (plan.listed && (p.size > 0 || p.by_schedule)) { p.metadata = metadata; }
}

}  // namespace hopper_attention

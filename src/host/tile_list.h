// Plan -> what the kernels are told about tiles that follow from their index.
#pragma once

#include "hopper_attention/forward.h"
#include "host/schedule_shape.h"
#include "kernels/params.h"
#include "kernels/tile_scheduler.h"

namespace hopper_attention {

inline SchedulerParams tile_list(Plan const& plan, KernelPlan const& kernel, Problem const& problem) {
  int const queries_per_tile = packing_of(plan, kernel).queries_per_slab * slabs_of(kernel.tile);
  return make_scheduler_params(problem.batch, problem.heads_q / plan.packed_heads,
                               ceil_div(query_rows_of_sequence(problem), queries_per_tile), plan.heads_per_pass,
                               first_tiles_are_shortest(problem.mask), kernel.ctas / kernel.equal_parts);
}

inline EqualParts equal_parts(KernelPlan const& kernel) {
  return {FastDivmod(kernel.equal_parts), kFewBlocksOfTile * kernel.tile.keys};
}

}  // namespace hopper_attention

// Problem + device facts -> Plan. Pure: no pointers, no CUDA calls. Decides how the tiles of a call are shared out;
// plan_dense.cpp, plan_clusters.cpp, plan_several.cpp, plan_prefill.cpp, plan_pairs.cpp, plan_classes.cpp,
// plan_both.cpp and plan_listed.cpp plan the rest.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "hopper_attention/forward.h"
#include "hopper_attention/testing.h"
#include "host/page_boxes.h"
#include "host/plan_request.h"
#include "host/require.h"
#include "host/schedule_shape.h"

namespace hopper_attention {
namespace {

std::string text_of(MaskParams const& mask) {
  if (mask == MaskParams{}) { return "no mask"; }
  std::string text;
  auto const add = [&](std::string const& part) { text += (text.empty() ? "" : ", ") + part; };
  if (mask.left == kUnlimited && mask.right == 0) {
    add("causal");
  } else if (mask.left != kUnlimited || mask.right != kUnlimited) {
    auto const side = [](int n) { return n == kUnlimited ? std::string("unlimited") : std::to_string(n); };
    add(concat("window (", side(mask.left), ", ", side(mask.right), ")"));
  }
  if (mask.chunk != 0) { add(concat("chunk ", mask.chunk)); }
  return text;
}

std::string text_of(Problem const& p) {
  return concat(dtype_name(p.dtype), ", batch ", p.batch, ", ", p.seqlen_q, " queries on ", p.seqlen_k, " keys, heads ",
                p.heads_q, "/", p.heads_k, ", head dims ", p.head_dim, "/", p.head_dim_v, ", ", text_of(p.mask),
                p.softcap == 0.0F ? "" : ", softcap", p.has_sinks ? ", sinks" : "",
                p.batch_invariant ? ", batch invariant" : "");
}

void check(PlanRequest const& request) {
  Problem const& problem = request.problem;
  require(problem.heads_k > 0 && problem.heads_q % problem.heads_k == 0,
          "problem: heads of q must be a multiple of heads of k, at least one: found ", problem.heads_q, " and ",
          problem.heads_k);
  require(request.device.sm_count > 0, "device: the number of SMs must be at least 1, found ", request.device.sm_count);
  double const memory = request.device.memory_gbs;
  require(memory > 0 && std::isfinite(memory), "device: memory_gbs must be a positive number, found ", memory);
}

bool has_output(Problem const& problem) {
  return problem.batch != 0 && problem.heads_q != 0 && problem.seqlen_q != 0 && problem.head_dim_v != 0;
}

// Why a schedule has to share the tiles out; nullptr: they follow from their index.
char const* reason_for_a_schedule(PlanRequest const& request) {
  Problem const& problem = request.problem;
  if (problem.ragged) { return "lengths are on the device"; }
  if (problem.keys == KeyLayout::kPaged) {
    return "keys are in pages, for which the tiles of dense calls have no code";
  }
  if (problem.batch_invariant) { return "parts that follow from a sequence alone, so that none depends on another"; }
  if (request.forces_splits()) { return "splits are forced"; }
  if (problem.num_splits != 1 && splitting_pays(request)) { return "whole tiles would leave SMs idle"; }
  return nullptr;
}

// Who computes the schedule: a kernel of this call, another call before (metadata), or nobody.
void choose_schedule(PlanRequest const& request, Plan& plan, char const* reason) {
  Problem const& problem = request.problem;
  // Metadata count queries by cu_seqlens_q and keys as one rank does. Splits of fixed size would differ where the call
  // counts other queries (a dense q may have others than the metadata were made for, seqused_q leaves some out) or
  // other keys (on another rank a chunk may have more).
  bool const others_count = !problem.packed_q || problem.seqused_q || problem.mask.cp_world > 1;
  bool const may_differ = problem.has_metadata && problem.batch_invariant && others_count && plan.cluster == 0;
  plan.makes_schedule = problem.ragged && (!problem.has_metadata || may_differ);
  if (plan.makes_schedule) { plan.readers = readers_of_few(problem, request.device); }
  char const* const maker =
      may_differ
          ? "a kernel makes it first: with batch_invariant, metadata serve packed queries without seqused_q on one rank"
          : "a kernel makes it first (get_scheduler_metadata makes it once for all layers)";
  because(plan, "schedule", reason, "; ",
          plan.makes_schedule    ? maker
          : problem.has_metadata ? "the scheduler metadata given"
                                 : "all sequences are alike, so that it follows from their number");
}

std::string sequences_of(Problem const& problem) {
  return problem.batch == 1         ? "one sequence"
         : tiles_are_known(problem) ? "sequences that are alike"
                                    : concat(problem.batch, " sequences, ranked by the blocks themselves");
}

void share_out(PlanRequest const& request, Plan& plan) {
  plan.fixed_splits = request.problem.batch_invariant;
  plan.cluster = cluster_size(request);
  bool const clusters = plan.cluster > 0;
  bool const draws = plan.cluster == 1 && draws_tiles(request);
  bool const evenly = !clusters && cuts_step_evenly(request);
  std::optional<ClassesChoice> const classes = evenly ? std::nullopt : choose_classes(request);
  if (classes) {
    plan.listed = classes->draws;
    if (plan.listed) {
      choose_schedule(request, plan, "whole tiles of few queries, drawn in its order, the longest first");
    } else {
      because(plan, "schedule", "none: tiles of many queries have ranks",
              classes->has_few ? ", those of few follow from their index" : "");
    }
    plan_classes(request, plan, *classes);
    return;
  }
  PrefillChoice prefill;
  if (!clusters && !request.decodes()) { prefill = choose_prefill(request); }
  bool const paired = !evenly && prefill.use == TileUse::kPaired;
  bool const whole = !clusters && prefill.parts == 1 && !paired;
  bool const known = whole && lengths_are_known(request);
  bool const alike = known || (whole && order_saves_little(request, prefill));
  bool const in_order = !clusters && !evenly && needs_no_schedule(request, prefill);
  char const* const reason = alike || prefill.parts > 1 ? nullptr
                             : !clusters                ? reason_for_a_schedule(request)
                             : draws                    ? "whole tiles, drawn in its order, the longest first"
                                                        : nullptr;
  plan.listed = reason != nullptr && !paired && !in_order;
  if (plan.listed) { choose_schedule(request, plan, reason); }
  if (clusters) {
    if (!plan.listed) {
      because(plan, "schedule", "none: ", request.several_tiles > 0 ? "several tiles" : "one tile",
              " for each sequence and group of heads, all at once or short");
    }
    plan_clusters(request, plan);
  } else if (plan.listed) {
    plan_listed(request, plan, prefill);
  } else if (reason != nullptr && in_order) {
    because(plan, "schedule", "none: ", sequences_of(request.problem), ", whose tiles are whole and few");
    plan_in_order(request, plan, prefill);
  } else if (paired && reason != nullptr) {
    because(plan, "schedule", "none: ", sequences_of(request.problem),
            ", of whose tiles the blocks of a cluster share two");
    take_scheduled_packing(request, plan);
    plan_pairs(request, plan, request.tile_row(prefill.use));
  } else if (prefill.parts > 1) {
    because(plan, "schedule", "none: ", request.problem.ragged ? "one sequence" : "sequences that are alike",
            ", whose tiles are all in as many parts");
    plan_equal_parts(request, plan, prefill);
  } else if (alike) {
    because(plan, "schedule",
            known ? "none: there are as many rows of q and k as if all sequences were as long as they may be"
                  : "none: sequences have so few keys that the order of their tiles hardly counts");
    plan_alike(request, plan, prefill);
  } else {
    plan_dense(request, plan);
  }
}

// Tiles of few rows that follow from their index have kernels of their own, with the same tile.
void take_kernels_by_index(Problem const& problem, Plan& plan) {
  bool const by_schedule = plan.listed || plan.cluster_if_alike > 0 || plan.draws_if_whole;
  if (by_schedule || problem.softcap != 0.0F) { return; }
  for (KernelPlan& kernel : plan.kernels) {
    TileConfig const& tile = kernel.tile;
    bool const few_rows = tile.rows <= kMostSomeRows && tile.calls == Calls::kAll;
    if (few_rows && !gathers_keys(problem, tile)) { kernel.tile.calls = Calls::kByIndex; }
  }
}

}  // namespace

Plan testing::plan_with(Problem const& problem, DeviceInfo const& device, ForcedPlan const& forced) {
  PlanRequest const asked{problem, device, forced};
  check(asked);
  Plan plan;
  plan.dtype = problem.dtype;
  because(plan, "problem", text_of(problem));
  because(plan, "device", device.name, ", ", device.sm_count, " SMs, ", megabytes(device.l2_bytes), " L2, memory of ",
          static_cast<std::int64_t>(device.memory_gbs), " GB/s");
  if (!has_output(problem)) {
    because(plan, "kernel", "none: the output has no elements");
    return plan;
  }
  share_out(take_several_tiles(asked, plan), plan);
  // What only another kernel would ask of its schedule takes the kernel that makes it 3 us.
  bool const parts =
      std::ranges::any_of(plan.kernels, [&](auto const& k) { return k.may_split && may_part_many(plan, k, problem); });
  if (!parts) { plan.readers.of_parts = 0; }
  take_kernels_by_index(problem, plan);
  KernelPlan const& first = plan.kernels.front();
  plan.kernel = first.family;
  plan.tile = first.tile;
  plan.ctas = first.ctas;
  plan.threads = first.threads;
  return plan;
}

Plan plan(Problem const& problem, DeviceInfo const& device) { return testing::plan_with(problem, device, {}); }

std::string Plan::explain() const {
  bool const tiles_are_bounds = listed || kernels.size() > 1 || (kernels.size() == 1 && kernels.front().packed_tiles);
  std::string text =
      kernel == KernelFamily::kNone
          ? std::string("plan: nothing to run\n")
          : concat("plan: ", family_name(kernel), " kernel, ", dtype_name(dtype), ", tile ", tile.rows, "x", tile.keys,
                   ", ", tiles_are_bounds ? "up to " : "", counted(tiles, "tile"), " on ", counted(ctas, "block"),
                   kernels.size() > 1 ? concat(", and ", kernels.size() == 2 ? "a decode kernel" : "2 decode kernels")
                                      : "",
                   "\n");
  for (std::string const& reason : reasons) {
    std::size_t const colon = reason.find(':');
    std::string decision = reason.substr(0, colon);
    constexpr std::size_t kColumn = 10;
    decision.resize(std::max(kColumn, decision.size()), ' ');
    text += concat("  ", decision, reason.substr(colon + 1), "\n");
  }
  return text;
}

}  // namespace hopper_attention

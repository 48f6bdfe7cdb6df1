// Which tiles are in parts, and where the parts lie: what the combine kernel derives from the schedule alone.
#pragma once

#include "kernels/cluster_tiles.h"
#include "kernels/host_device.h"
#include "kernels/places.h"
#include "kernels/split_combine_params.h"
#include "kernels/work_item.h"
#include "kernels/work_source.h"

namespace hopper_attention {

// A tile in parts, and which share of its rows is to be merged.
struct PartedTile {
  int place = -1;  // -1: none
  int head = 0;
  int m = 0;
  TileParts parts;
  int share = 0;  // of `shares` alike
  int shares = 1;
};

// The tile that holds the border behind chunk `chunk`; none if the border lies between two tiles. The borders inside a
// tile share its rows, so that each has about as much to read.
template <KernelFamily kFamily>
HA_HOST_DEVICE PartedTile tile_of_border(SplitCombineTask const& task, Schedule const& schedule,
                                         SequenceParams const& sequences, Sequence& sequence, int chunk) {
  ScheduleParams const& params = task.schedule;
  PartedTile parted;
  Chunks const chunks = schedule.chunks();
  int const border = chunks.begin(chunk + 1);
  if (chunk + 1 >= chunks.cutting || border >= schedule.units()) { return parted; }
  int const in_group = params.head_groups.quotient(border);
  FoundPlace const found = place_of_unit(schedule, in_group);
  if (!found.holds(in_group)) { return parted; }  // in damaged metadata none may hold it
  sequence = sequence_at(sequences, schedule.sequence(found.place));
  TilesOfUnits const tiles = tiles_of_units(params, task.mask, task.packing, task.slabs, task.keys, sequence.len.q,
                                            schedule.numbers().even_parts());
  UnitTile const tile = unit_tile<kFamily>(found, tiles, border, params.head_groups.divisor);
  if (tile.begin == border || tile.m >= tiles.tiles) { return parted; }
  parted.place = tile.place;
  parted.head = tile.head;
  parted.m = tile.m;
  parted.parts = parts_of_tile(chunks, tile.begin, tile.begin + tile.units);
  parted.share = chunk - chunks.of(tile.begin);
  parted.shares = parted.parts.count - 1;
  return parted;
}

// Tile `index` of the list, whose units are its parts; none if it has one.
HA_HOST_DEVICE PartedTile tile_of_fixed_parts(SplitCombineTask const& task, Schedule const& schedule,
                                              SequenceParams const& sequences, Sequence& sequence, int index) {
  ScheduleParams const& params = task.schedule;
  PartedTile parted;
  if (index >= schedule.tiles()) { return parted; }
  int const heads = params.head_groups.divisor;
  int const in_group = params.head_groups.quotient(index);
  int const place =
      find_place(schedule.begin(), schedule.end(), in_group, [&](int p) { return schedule.tiles_before(p + 1); });
  if (place >= schedule.end()) { return parted; }
  FoundPlace const found{place, schedule.tiles_before(place), schedule.tiles_before(place + 1)};
  if (!found.holds(in_group)) { return parted; }
  sequence = sequence_at(sequences, schedule.sequence(place));
  int const tiles = ceil_div(sequence.len.q, task.packing.queries_per_slab * task.slabs);
  int const tiles_of_place = found.until - found.before;
  int const within = index - found.before * heads;
  int const head = within / tiles_of_place;
  int const m = within - head * tiles_of_place;
  int const units_before = schedule.units_before(place);
  int const units_of_place = schedule.units_before(place + 1) - units_before;
  int const units = max_of(1, units_of_place / max_of(1, tiles));
  if (units < 2 || m >= tiles) { return parted; }
  parted.place = place;
  parted.head = head;
  parted.m = m;
  int const first_slot = units_before * heads + head * units_of_place + m * units;
  parted.parts = {units, first_slot, first_slot};
  return parted;
}

// The tile that candidate `index` merges rows of. With clusters, equal parts and fixed splits a candidate is a tile;
// otherwise it is the border between two chunks. All lanes of a warp. kFamily: kDecode if all tasks are of few queries.
template <KernelFamily kFamily>
HA_HOST_DEVICE PartedTile find_parted_tile(SplitCombineTask const& task, SequenceParams const& sequences,
                                           Sequence& sequence, int index) {
  ScheduleParams const& params = task.schedule;
  PartedTile parted;
  if (task.cluster.on()) {
    Tile const tile = tile_of_several(task.cluster, sequences, task.packing, index);
    if (tile.batch < 0) { return parted; }
    sequence = sequence_at(sequences, tile.batch);
    bool const exists = tile.m == 0 || tile.m * task.packing.queries_per_slab < sequence.len.q;
    if (!exists || task.cluster.first_takes_all(sequence.len)) { return parted; }
    parted.place = tile.batch;
    parted.head = tile.head;
    parted.m = tile.m;
    int const first_slot = index * task.cluster.of_tile;
    parted.parts = {task.cluster.of_tile, first_slot, first_slot};
    return parted;
  }
  if (kFamily != KernelFamily::kDecode && task.parts.on()) {
    Tile const tile = tile_at(task.tiles, index);
    sequence = sequence_at(sequences, tile.batch);
    bool const exists = tile.m < ceil_div(sequence.len.q, task.packing.queries_per_slab * task.slabs);
    if (!exists || task.parts.first_takes_all(sequence.len)) { return parted; }
    parted.place = tile.batch;
    parted.head = tile.head;
    parted.m = tile.m;
    int const first_slot = index * task.parts.of_tile.divisor;
    parted.parts = {task.parts.of_tile.divisor, first_slot, first_slot};
    return parted;
  }
  if (task.cluster.by_schedule && work_from(task.cluster, params, params.metadata) != WorkFrom::kSchedule) {
    return parted;
  }
  Schedule const schedule(params);
  if (!schedule.by_units()) { return parted; }
  return params.fixed_splits ? tile_of_fixed_parts(task, schedule, sequences, sequence, index)
                             : tile_of_border<kFamily>(task, schedule, sequences, sequence, index);
}

}  // namespace hopper_attention

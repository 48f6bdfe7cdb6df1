// Where sequences of few queries stand in the list of tiles of a kernel for many.
#pragma once

#include "kernels/host_device.h"
#include "kernels/schedule.h"

namespace hopper_attention {

// How the list of tiles of a kernel for many queries has those of sequences of few: as metadata count them, resized
// like all others, where the second of each does not exist.
struct FewAsMany {
  static constexpr bool kAlone = false;

  HA_HOST_DEVICE explicit FewAsMany(Schedule const& /*made*/) {}
  HA_HOST_DEVICE static int tiles_before(Schedule const& made, int place) { return made.resized_before(place); }
  HA_HOST_DEVICE static int tiles_of_all(Schedule const& made) { return made.tiles(); }
  HA_HOST_DEVICE static int entry(int drawn) { return drawn; }
};

// Each is one tile, so that its place follows from its number in the list and is brought alone. If prompts keep most
// CTAs busy, and memory has more to do for few queries than a tile of a prompt takes, both classes alternate, so that
// half of the CTAs have tiles of each: 512 queries on 4k beside 64 singles on 2k, 32/8 heads, 177 us with all tiles of
// the prompt in front, and 161 so.
struct FewAlone {
  static constexpr bool kAlone = true;

  int begin;        // the first of their places
  int counted = 0;  // tiles before it, as metadata count them
  int entries = 0;  // of the list before it, tiles or units, of one head group
  int rounds = 0;   // in which both alternate, each with so many tiles of all head groups
  int prompts_of_round = 0;
  int few_of_round = 0;
  int prompts = 0;

  HA_HOST_DEVICE explicit FewAlone(Schedule const& made) : begin(made.few_begin()) {
    if (made.by_units()) {
      entries = made.units_before(begin);
      return;
    }
    counted = made.tiles_before(begin);
    entries = made.resized_before(begin);
    alternate(made);
  }

  HA_HOST_DEVICE int tiles_before(Schedule const& made, int place) const {
    if (place <= begin) { return made.resized_before(place); }
    return entries + max_of(0, made.tiles_before(place) - counted);  // damaged metadata may count fewer
  }
  HA_HOST_DEVICE int tiles_of_all(Schedule const& made) const {
    return tiles_before(made, made.end()) * made.head_groups();
  }

  // Which entry of the list is the one that is drawn as number `drawn`. Behind the last round come the prompts that are
  // left, then all others.
  HA_HOST_DEVICE int entry(int drawn) const {
    if (rounds == 0) { return drawn; }
    int const of_round = prompts_of_round + few_of_round;
    int const round = min_of(static_cast<int>(static_cast<unsigned>(drawn) / static_cast<unsigned>(of_round)), rounds);
    int const within = drawn - round * of_round;
    int const of_prompts = round < rounds ? prompts_of_round : prompts - rounds * prompts_of_round;
    return within < of_prompts ? round * prompts_of_round + within
                               : prompts + round * few_of_round + within - of_prompts;
  }

 private:
  // Units of both classes take about as long, a prompt's on an SM and those of few queries on as many SMs as read as
  // fast as all.
  HA_HOST_DEVICE void alternate(Schedule const& made) {
    int const groups = made.head_groups();
    int const ctas = made.ctas();
    int const units = made.units_before(begin);
    int const units_of_few = max_of(0, made.numbers().units - units);
    int const tiles_of_few = max_of(1, tiles_before(made, made.end()) - entries);
    int const tile = units / max_of(1, counted);
    prompts = entries * groups;
    if (prompts <= ctas - ctas / 4 || units_of_few * groups / ctas < tile) { return; }
    constexpr int kMostOfFew = 1 << 10;
    prompts_of_round = max_of(1, ctas / 2);
    few_of_round = prompts_of_round * clamped(tile / max_of(1, units_of_few / tiles_of_few), 1, kMostOfFew);
    rounds = min_of(prompts / prompts_of_round, tiles_of_few * groups / few_of_round);
  }
};

}  // namespace hopper_attention

// The first items of CTAs in grids of clusters, for device_components.cu.
#pragma once

#include "kernels/host_device.h"
#include "kernels/params.h"
#include "kernels/tile_sources.h"

namespace hopper_attention {

inline constexpr int kMostItems = 64;  // that are listed of a CTA

struct ListedItem {
  WorkItem item;
  Sequence sequence;
};

template <class Tiles>
HA_HOST_DEVICE void list_cluster_items(AttentionParams const& params, int cta, ListedItem* items) {
  ClusterWorkSource<Tiles> source(params, cta);
  for (int i = 0; i < kMostItems; ++i) {
    WorkItem item;
    Sequence sequence{};
    source.next(item, sequence, 0);
    if (item.place < 0) { sequence = {}; }
    items[i] = {item, sequence};
    if (item.place < 0) { break; }
  }
}

// By the host's compiler: nvcc 13.5 hands it the designated initializers of a class template as positional ones.
void list_clusters_on_host(AttentionParams const& params, bool several, int cta, ListedItem* items);

}  // namespace hopper_attention

#include "listed_clusters.h"

namespace hopper_attention {

void list_clusters_on_host(AttentionParams const& params, bool several, int cta, ListedItem* items) {
  several ? list_cluster_items<SeveralTilesEach>(params, cta, items)
          : list_cluster_items<OneTileEach>(params, cta, items);
}

}  // namespace hopper_attention

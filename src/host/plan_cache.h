// Plans of the problems seen so far: a model repeats a few problems at every step.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "hopper_attention/forward.h"

namespace hopper_attention {

struct PlanKey {
  Problem problem;
  int device = 0;

  friend bool operator==(PlanKey const&, PlanKey const&) = default;
};

struct PlanKeyHash {
  std::size_t operator()(PlanKey const& key) const {
    std::size_t hash = 0;
    auto const mix = [&hash](auto value) {
      constexpr std::size_t kGolden = 0x9e3779b97f4a7c15;
      hash = (hash ^ std::hash<decltype(value)>{}(value)) * kGolden;
      hash ^= hash >> 32;
    };
    Problem const& p = key.problem;
    for (int const value : {static_cast<int>(p.dtype),
                            p.batch,
                            p.seqlen_q,
                            p.seqlen_k,
                            p.total_q,
                            p.total_k,
                            static_cast<int>(p.ragged),
                            static_cast<int>(p.packed_q),
                            static_cast<int>(p.seqused_q),
                            static_cast<int>(p.keys_known),
                            static_cast<int>(p.keys),
                            p.page_size,
                            static_cast<int>(p.has_metadata),
                            p.heads_q,
                            p.heads_k,
                            p.head_dim,
                            p.head_dim_v,
                            p.mask.left,
                            p.mask.right,
                            p.mask.chunk,
                            p.mask.cp_world,
                            p.mask.cp_rank,
                            static_cast<int>(p.has_sinks),
                            p.num_splits,
                            p.sm_margin,
                            static_cast<int>(p.batch_invariant),
                            key.device}) {
      mix(value);
    }
    mix(p.softmax_scale);
    mix(p.softcap);
    return hash;
  }
};

// Thread-safe. Holds at most `capacity` plans; when full it starts anew: only ever new lengths fill it.
class PlanCache {
 public:
  explicit PlanCache(std::size_t capacity) : capacity_(capacity) {}

  // The plan of `key`, made by `make()` if it is not there. `make` runs without the lock.
  template <class Make>
  std::shared_ptr<Plan const> get(PlanKey const& key, Make const& make) {
    {
      std::lock_guard const lock(mutex_);
      if (auto const found = plans_.find(key); found != plans_.end()) { return found->second; }
    }
    auto made = std::make_shared<Plan const>(make());
    std::lock_guard const lock(mutex_);
    if (plans_.size() >= capacity_) { plans_.clear(); }
    return plans_.try_emplace(key, std::move(made)).first->second;
  }

  std::size_t size() const {
    std::lock_guard const lock(mutex_);
    return plans_.size();
  }

  void clear() {
    std::lock_guard const lock(mutex_);
    plans_.clear();
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<PlanKey, std::shared_ptr<Plan const>, PlanKeyHash> plans_;
  std::size_t capacity_;
};

}  // namespace hopper_attention

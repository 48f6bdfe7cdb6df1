// Stands in for CUDA's header in a host-only build, where params.h is read for what it says of work, not of tensors.
#pragma once

struct CUtensorMap {
  alignas(64) char opaque[128];
};

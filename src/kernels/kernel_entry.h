// What the host must know of a compiled kernel to start it. The kernel table is made of these.
#pragma once

#include <span>

#include "hopper_attention/types.h"

namespace hopper_attention {

struct KernelEntry {
  KernelFamily family;
  DataType dtype;
  TileConfig tile;
  void const* function;  // for cudaLaunchKernelExC
  int threads;
  int shared_bytes;
};

}  // namespace hopper_attention

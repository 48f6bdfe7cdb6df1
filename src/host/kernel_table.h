// The kernels that this build contains. CMake writes kernel_table.cpp from the list of instantiations.
#pragma once

#include <span>

#include "kernels/kernel_entry.h"

namespace hopper_attention {

// One span for each instantiated translation unit; empty in a host-only build.
std::span<std::span<KernelEntry const> const> kernel_table();

// The kernel for `tile`; raises NotImplemented, naming what was built and how to build more, if there is none.
KernelEntry const& find_kernel(KernelFamily family, DataType dtype, TileConfig const& tile);

}  // namespace hopper_attention

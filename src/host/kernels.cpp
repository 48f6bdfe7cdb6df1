// What this build contains.
#include <algorithm>
#include <set>
#include <string>

#include "hopper_attention/forward.h"
#include "host/kernel_table.h"
#include "host/require.h"

namespace hopper_attention {
namespace {

std::string built_text() {
  std::set<std::string> dims;
  std::set<std::string> dtypes;
  for (KernelInfo const& kernel : built_kernels()) {
    dims.insert(kernel.tile.head_dim == kernel.tile.head_dim_v
                    ? concat(kernel.tile.head_dim)
                    : concat(kernel.tile.head_dim, "/", kernel.tile.head_dim_v));
    dtypes.insert(dtype_name(kernel.dtype));
  }
  if (dims.empty()) { return "no kernels at all (a host-only build)"; }
  std::string text = "head dims";
  for (std::string const& dim : dims) { text += " " + dim; }
  text += ", dtypes";
  for (std::string const& dtype : dtypes) { text += " " + dtype; }
  return text;
}

}  // namespace

std::vector<KernelInfo> const& built_kernels() {
  static std::vector<KernelInfo> const kernels = [] {
    std::vector<KernelInfo> list;
    for (auto const& unit : kernel_table()) {
      for (KernelEntry const& entry : unit) { list.push_back({entry.family, entry.dtype, entry.tile}); }
    }
    return list;
  }();
  return kernels;
}

KernelEntry const& find_kernel(KernelFamily family, DataType dtype, TileConfig const& tile) {
  for (auto const& unit : kernel_table()) {
    auto const found = std::find_if(unit.begin(), unit.end(), [&](KernelEntry const& entry) {
      return entry.family == family && entry.dtype == dtype && entry.tile == tile;
    });
    if (found != unit.end()) { return *found; }
  }
  raise<NotImplemented>(
      "no ", family_name(family), " kernel for ", dtype_name(dtype), " and head dims up to (", tile.head_dim, ", ",
      tile.head_dim_v, ") was built; this build has ", built_text(),
      "; rebuild with these in HOPPER_ATTENTION_HEAD_DIMS and HOPPER_ATTENTION_DTYPES, or with neither set");
}

}  // namespace hopper_attention

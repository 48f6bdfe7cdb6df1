// Room for what a plan keeps between its launches.
#pragma once

#include "hopper_attention/forward.h"
#include "host/require.h"

namespace hopper_attention {

// `workspace` was given and is large enough for `plan`.
inline void require_workspace(Plan const& plan, Tensor const& workspace) {
  std::int64_t const found = workspace.given() ? workspace.shape[0] : 0;
  require(workspace.given() && found >= plan.workspace_bytes, "workspace: this call needs ", plan.workspace_bytes,
          " bytes, found ", found, "; pass a larger one, or None in Python to have it allocated");
}

}  // namespace hopper_attention

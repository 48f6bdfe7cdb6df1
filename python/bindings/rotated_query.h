// Where the rotated q of a call with rotary embedding goes.
#pragma once

#include <cstdint>

#include "hopper_attention/append.h"
#include "hopper_attention/forward.h"

namespace hopper_attention::python {

// From the start of the workspace; torch allocates at multiples of 512.
inline constexpr std::int64_t kRotatedQueryAlignment = 256;

// The bytes of a workspace that has room for what the plan needs and for a rotated q behind it.
std::int64_t workspace_with_rotated_query(std::int64_t plan_bytes, std::int64_t query_bytes);

// Cuts a rotated q like `args.q` off the end of `args.workspace`. False, with nothing changed, if it is too small for
// that and what the plan needs, or if that part of it touches another tensor. Raises what is wrong with `args`.
bool take_from_workspace(Arguments& args, AppendArguments& appended);

}  // namespace hopper_attention::python

// Raises with a message made of parts: the argument's name, the rule, what was found, the way out.
#pragma once

#include "hopper_attention/errors.h"
#include "host/text.h"

namespace hopper_attention {

template <class ErrorType, class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void raise(Parts const&... parts) {
  throw ErrorType(concat(parts...));
}

// The message is built only when the check fails: pass values, not strings made for the occasion.
template <class ErrorType = InvalidArgument, class... Parts>
void require(bool ok, Parts const&... parts) {
  if (!ok) [[unlikely]] { raise<ErrorType>(parts...); }
}

}  // namespace hopper_attention

"""Whether torch has to see a call: while it traces, counts or transforms, calls go through its operators."""

from __future__ import annotations

import sys
from typing import Any


def is_traced() -> bool:
    """Whether torch.compile or torch.export traces the caller. `gpu.use_torch` puts torch's own function here, which
    costs 0.02 us instead of 0.1.
    """
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def is_watched(x: Any, others: tuple = ()) -> bool:
    """Whether a call with the tensor `x`, its first, and `others` has to go through `hopper_attention.torch_ops` instead
    of to the kernels.

    True while torch.compile, torch.export or torch.jit.trace traces, under a dispatch mode (FakeTensorMode,
    FlopCounterMode, make_fx) or a torch.func transform, for an `x` without memory of its own (FakeTensor, meta) and where
    the class of any tensor takes the operators on it (`__torch_dispatch__`). Costs 0.4 us, with 17 others 0.8.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch._C._is_tracing():
        return True
    plain = torch.Tensor.__torch_dispatch__
    for y in (x, *others):
        if y is None or type(y) is torch.Tensor or type(y) is int:  # isinstance asks torch's metaclass: 0.1 us
            continue
        if isinstance(y, torch.Tensor) and type(y).__torch_dispatch__ is not plain:
            return True
    return x.is_meta

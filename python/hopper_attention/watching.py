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


def is_watched(x: Any) -> bool:
    """Whether a call with the tensor `x` has to go through `hopper_attention.torch_ops` instead of to the kernels.

    True while torch.compile or torch.export traces, under a dispatch mode (FakeTensorMode, FlopCounterMode, make_fx) or
    a torch.func transform, and for tensors without memory of their own (FakeTensor, meta). Costs 0.2 us.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if type(x) is not torch.Tensor and type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return True
    return x.is_meta

"""What fake kernels refuse: with the checks and words of the reference, the shapes that no device takes, so that tracing does
not go on with them. A size that is a symbol counts as what it is in the example; where torch has none, the run refuses. All
that depends on the device, on strides or on addresses, and lengths, are left to the run, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hopper_attention import interface, schedule
from hopper_attention.reference.arrays import dtype_name
from hopper_attention.reference.checks import check_kv, require, shape_is


class UnknownSize(Exception):
    """A size that only the run knows."""


@dataclass(frozen=True)
class Seen:
    """What the checks of the reference look at."""

    shape: tuple[int, ...]
    dtype: str


def known(value: Any) -> Any:
    """The number that stands for a SymInt in the example, also in a window; other values as they are. Raises UnknownSize."""
    if isinstance(value, (tuple, list)):
        return tuple(map(known, value))
    if not isinstance(value, torch.SymInt):
        return value
    hint = getattr(value.node, "hint", None)
    if hint is None:
        raise UnknownSize
    return hint


def seen(given: dict[str, Any], name: str) -> Seen:
    require(given[name] is not None, name, " is None; a tensor is needed")
    return Seen(tuple(map(known, given[name].shape)), dtype_name(given[name]))


def check_shapes(given: dict[str, Any], **shapes: tuple[int, ...]) -> None:
    """ValueError unless those of the tensors that are given have these shapes."""
    for name, shape in shapes.items():
        if given.get(name) is not None:
            shape_is(name, seen(given, name), shape)


def check_rank(name: str, x: Seen, rank: int) -> None:
    require(len(x.shape) == rank, name, " has ", len(x.shape), " dimensions; ", rank, " are needed")


def of_known_sizes(check: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Leaves calls with sizes that are not known alone."""

    @functools.wraps(check)
    def checked(given: dict[str, Any]) -> None:
        with contextlib.suppress(UnknownSize):
            check(given)

    return checked


@of_known_sizes
def attention(given: dict[str, Any]) -> None:
    """Of fwd, varlen_fwd, kvcache, kvcache_append and their forms with _out."""
    cached = "k_cache" in given
    names = ("k_cache", "v_cache") if cached else ("k", "v")
    varlen = "cu_seqlens_q" in given and not cached
    packed = varlen or given.get("cu_seqlens_q") is not None
    rank = 3 if varlen and given.get("page_table") is None else 4
    q, k, v = (seen(given, name) for name in ("q", *names))
    for name, x, wanted in (("q", q, 3 if packed else 4), (names[0], k, rank), (names[1], v, rank)):
        check_rank(name, x, wanted)
    check_kv(q, k, v, names)
    if not packed and given.get("page_table") is None and given.get("cache_batch_idx") is None:
        batch = q.shape[0], k.shape[0]
        require(batch[0] == batch[1], names[0], " has batch ", batch[1], " and q ", batch[0], "; they must be equal")
    if cached and given.get("k") is not None:
        rows = seen(given, "k").shape[:-2]
        check_shapes(given, k=(*rows, *k.shape[-2:]), v=(*rows, *v.shape[-2:]))
    lse = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    check_shapes(given, out=(*q.shape[:-1], v.shape[-1]), softmax_lse=lse, s_aux=(q.shape[-2],))


@of_known_sizes
def combine(given: dict[str, Any]) -> None:
    """Of combine and combine_out."""
    parts = seen(given, "out_partial")
    check_rank("out_partial", parts, 5)
    check_shapes(given, lse_partial=parts.shape[:-1], out=parts.shape[1:])


@of_known_sizes
def merge(given: dict[str, Any]) -> None:
    """Of merge_states and merge_states_out."""
    shape = seen(given, "out_a").shape
    require(len(shape) in (3, 4), "out_a has ", len(shape), " dimensions; 3 or 4 are needed")
    lse = (*shape[:-3], shape[-2], shape[-3])
    check_shapes(given, out_b=shape, out=shape, lse_a=lse, lse_b=lse, lse=lse)


_SCHEDULE = inspect.signature(interface.get_scheduler_metadata).parameters
_NUMBERS = inspect.signature(schedule.numbers).parameters


@of_known_sizes
def schedule_options(given: dict[str, Any]) -> None:
    """Of get_scheduler_metadata and get_scheduler_metadata_out: all that is no tensor."""
    options = {name: known(given.get(name, _SCHEDULE[name].default)) for name in _NUMBERS}
    schedule.check_numbers(schedule.numbers(**options), given.get("cu_seqlens_q") is not None)

"""One call of a public function: its operands, checked, and the loop over K/V heads of each sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from hopper_attention.reference.arrays import FP8_DTYPES, View, new_array
from hopper_attention.reference.checks import check_written, floats, number, shape_is, softcap_of
from hopper_attention.reference.core import Softmax, attend_sequence, keys_seen
from hopper_attention.reference.keys import Keys, rotate
from hopper_attention.reference.mask import Lengths, Mask


def packed_queries(starts: np.ndarray, used: np.ndarray | None, total: int) -> list[slice]:
    """Rows of each sequence of a packed tensor with `total` rows: inside the tensor, never negative."""
    begin = np.clip(starts[:-1], 0, total)
    end = np.clip(starts[1:], begin, total)
    if used is not None:
        end = begin + np.clip(used, 0, end - begin)
    return [slice(int(b), int(e)) for b, e in zip(begin, end, strict=True)]


class Call:
    """q (B, Sq, Hq, D) or (T, Hq, D), k and v with Hk heads in any of the layouts of keys.py, qv as q with Dv or
    None.
    """

    def __init__(self, q: View, k: View, v: View, qv: Any, mask: Mask, batch: int):
        self.q, self.k, self.v, self.mask, self.batch = q, k, v, mask, batch
        self.group = q.shape[-2] // k.shape[-2]
        self.out_shape = (*q.shape[:-1], v.shape[-1])
        self.qv = None if qv is None else floats("qv", qv, len(q.shape), (q.dtype,))
        if self.qv is not None:
            shape_is("qv", self.qv, self.out_shape)
            if k.dtype in FP8_DTYPES:
                raise NotImplementedError(f"qv with k of {k.dtype} is not there; use a 16- or 32-bit dtype")

    def set_softmax(self, scale: Any, softcap: Any, sinks: Any, q_descale: Any, k_descale: Any, v_descale: Any) -> None:
        """Scale (default (D + D_qv) ** -0.5), softcap, sinks (Hq,) and, for fp8, descales (B, Hk)."""
        columns = self.q.shape[-1] + (self.v.shape[-1] if self.qv is not None else 0)
        self.scale = columns**-0.5 if scale is None else number("softmax_scale", scale)
        self.softcap = softcap_of(softcap)
        self.sinks = None
        if sinks is not None:
            view = floats("s_aux", sinks, 1, ("bfloat16", "float16", "float32", "float64"))
            shape_is("s_aux", view, (self.q.shape[-2],))
            self.sinks = view.read()
        self.q_descale = self.descale("q_descale", q_descale, self.q)
        self.k_descale = self.descale("k_descale", k_descale, self.k)
        self.v_descale = self.descale("v_descale", v_descale, self.v)

    def descale(self, name: str, given: Any, of: View) -> np.ndarray:
        """(B, Hk) factors; 1 unless `of` is fp8."""
        shape = (self.batch, self.k.shape[-2])
        if given is None or of.dtype not in FP8_DTYPES:
            return np.ones(shape, np.float32)
        view = floats(name, given, 2, ("float32",))
        shape_is(name, view, shape)
        return view.read()

    def set_outputs(self, out: Any, softmax_lse: Any) -> None:
        """The caller's arrays, or new ones: out in q's dtype (bfloat16 for fp8), LSE (B, Hq, Sq) or (Hq, T)."""
        dtype = "bfloat16" if self.q.dtype in FP8_DTYPES else self.q.dtype
        if out is None:
            out = new_array(self.q.x, self.out_shape, dtype, 0.0)
        self.out = floats("out", out, len(self.out_shape), (dtype,))
        shape_is("out", self.out, self.out_shape)
        shape = (*self.q.shape[:-3], self.q.shape[-2], self.q.shape[-3])
        lse_dtype = "float64" if self.q.dtype == "float64" else "float32"
        if softmax_lse is None:
            softmax_lse = new_array(self.q.x, shape, lse_dtype, -np.inf)
        self.lse = floats("softmax_lse", softmax_lse, len(shape), ("float32", lse_dtype))
        shape_is("softmax_lse", self.lse, shape)
        written = {"out": self.out, "softmax_lse": self.lse}
        check_written(written, {"q": self.q, "k": self.k, "v": self.v, "qv": self.qv})

    def attend(
        self, b: int, rows: tuple, keys: Keys, length: Lengths, leftpad: int = 0, rotation: tuple | None = None
    ) -> None:
        """Sequence `b`: queries at index `rows` (..., slice), keys from slot `leftpad` on; `rotation` as rotate()
        takes it.
        """
        if length.q == 0 or self.group == 0:
            return
        first, last = keys_seen(self.mask, length)
        for head in range(self.k.shape[-2]):
            heads = slice(head * self.group, (head + 1) * self.group)
            q = self.q.read((*rows, heads))
            if rotation is not None:
                q = self.q.round(rotate(q, *rotation))
            k = keys.read(self.k, head, leftpad + first, leftpad + last)
            v = keys.read(self.v, head, leftpad + first, leftpad + last)
            if self.qv is not None:
                q = np.concatenate([q, self.qv.read((*rows, heads))], axis=-1)
                k = np.concatenate([k, v], axis=-1)
            scale = self.scale * float(self.q_descale[b, head]) * float(self.k_descale[b, head])
            softmax = Softmax(scale, self.softcap, None if self.sinks is None else self.sinks[heads])
            for block, out, lse in attend_sequence(q.swapaxes(0, 1), k, v, self.mask, length, first, softmax):
                offset = rows[-1].start
                tile = slice(offset + block.start, offset + block.stop)
                self.out.write(
                    (*rows[:-1], tile, heads), (out * self.v_descale[b, head].astype(out.dtype)).swapaxes(0, 1)
                )
                self.lse.write((*rows[:-1], heads, tile), lse)

    def result(self, with_lse: bool) -> Any:
        """out, or (out, LSE)."""
        return (self.out.x, self.lse.x) if with_lse else self.out.x

"""The implementations behind one interface: `refusal(case)` says why one cannot run a case, `prepare` makes its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from hopper_attention.bench import fa3
from hopper_attention.bench.case import Case

PEERS = ("cudnn", "flash", "triton", "fa3")


@dataclass
class Prepared:
    """One call for each input set, and how its return value becomes (out in the layout of q, lse or None). A call returns
    tensors that it wrote. case and sets: what is computed, where that is not what `prepare` was given.
    """

    calls: list[Callable[[], Any]]
    result: Callable[[Any], tuple[Any, Any]]
    note: str = ""
    case: Case | None = None
    sets: list[Any] | None = None


class Implementation:
    """Something that computes attention. `name` is its column."""

    name = ""

    def refusal(self, case: Case) -> str:
        """Why it cannot run the case; "" if it may."""
        return ""

    def prepare(self, case: Case, sets: list[Any]) -> Prepared:
        """Calls on the sets of `inputs.make`. May raise NotImplementedError."""
        raise NotImplementedError


def results_for(case: Case, inputs: Any) -> tuple[Any, Any]:
    """out and lse to be written, full of NaN so that what is not written is found."""
    import torch

    q = inputs.q
    out = torch.full((*q.shape[:-1], case.dv), torch.nan, dtype=q.dtype, device=q.device)
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return out, torch.full(shape, torch.nan, dtype=torch.float32, device=q.device)


class Ours(Implementation):
    """The public function that the case names, with out and LSE given; metadata made before where there is some."""

    name = "ours"
    with_metadata = True
    extra: ClassVar[dict[str, Any]] = {}  # options of every varlen and cache call and of its metadata

    def splits(self, case: Case) -> int:
        """The plan decides, as by default, but for packed keys, whose calls and metadata are without splits."""
        return 0 if case.is_decode or case.page_size else 1

    def prepare(self, case: Case, sets: list[Any]) -> Prepared:
        make = {"dense": self.dense, "varlen": self.varlen, "cache": self.cache}[case.call]
        metadata, note = None, ""
        if case.call != "dense" and self.with_metadata:
            metadata, note = self.metadata(case, sets[0])
        return Prepared([make(case, inputs, metadata) for inputs in sets], lambda pair: pair, note)

    def metadata(self, case: Case, inputs: Any) -> tuple[Any, str]:
        """The schedule of the step, and a note if the library has none yet."""
        import hopper_attention

        try:
            found = hopper_attention.get_scheduler_metadata(
                case.batch,
                max(case.q_lengths),
                case.most_keys,
                case.heads_q,
                case.heads_k,
                case.head_dim,
                inputs.used_k,
                qkv_dtype=inputs.q.dtype,
                headdim_v=case.dv,
                cu_seqlens_q=inputs.cu_q if case.call == "varlen" else None,
                page_size=case.page_size or None,
                causal=case.causal,
                window_size=case.window,
                has_softcap=case.softcap > 0,
                num_splits=self.splits(case),
                **self.extra,
            )
        except NotImplementedError:
            return None, "without metadata"
        return found, ""

    def mask(self, case: Case, inputs: Any) -> dict[str, Any]:
        options = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap}
        return {**options, "s_aux": inputs.sinks}

    def dense(self, case: Case, inputs: Any, metadata: Any) -> Callable[[], Any]:
        from hopper_attention import flash_attn_func

        out, lse = results_for(case, inputs)
        q, k, v, mask = inputs.q, inputs.k, inputs.v, self.mask(case, inputs)

        def call() -> tuple[Any, Any]:
            flash_attn_func(q, k, v, out=out, softmax_lse=lse, **mask)
            return out, lse

        return call

    def varlen(self, case: Case, inputs: Any, metadata: Any) -> Callable[[], Any]:
        from hopper_attention import flash_attn_varlen_func

        out, lse = results_for(case, inputs)
        options = {
            "cu_seqlens_q": inputs.cu_q,
            "max_seqlen_q": max(case.q_lengths),
            "max_seqlen_k": case.most_keys,
            "scheduler_metadata": metadata,
            "num_splits": self.splits(case),
            **self.extra,
            **self.mask(case, inputs),
        }
        if inputs.page_table is None:
            options["cu_seqlens_k"] = inputs.cu_k
        else:
            options.update(page_table=inputs.page_table, seqused_k=inputs.used_k)
        q, k, v = inputs.q, inputs.k, inputs.v

        def call() -> tuple[Any, Any]:
            flash_attn_varlen_func(q, k, v, out=out, softmax_lse=lse, **options)
            return out, lse

        return call

    def cache(self, case: Case, inputs: Any, metadata: Any) -> Callable[[], Any]:
        from hopper_attention import flash_attn_with_kvcache

        out, lse = results_for(case, inputs)
        q, k, v, mask = inputs.q, inputs.k, inputs.v, self.mask(case, inputs)
        options = {"cache_seqlens": inputs.used_k, "page_table": inputs.page_table, "scheduler_metadata": metadata}
        options.update(self.extra)

        def call() -> tuple[Any, Any]:
            flash_attn_with_kvcache(q, k, v, out=out, softmax_lse=lse, **options, **mask)
            return out, lse

        return call


class OursWithoutMetadata(Ours):
    """The varlen call when no schedule was made before."""

    name = "ours, no metadata"
    with_metadata = False

    def refusal(self, case: Case) -> str:
        return "" if case.call == "varlen" else "for varlen cases"


class OursBatchInvariant(Ours):
    """What batch_invariant costs."""

    name = "ours, batch_invariant"
    extra: ClassVar[dict[str, Any]] = {"batch_invariant": True}

    def refusal(self, case: Case) -> str:
        return "" if case.suite in ("decode", "mixed") else "for decode and mixed batches"


class OursDense(Ours):
    """The dense call on the tensors of a varlen case with equal lengths: what varlen is measured by."""

    name = "ours, dense"

    def refusal(self, case: Case) -> str:
        usable = case.call == "varlen" and case.equal_lengths and not case.page_size
        return "" if usable else "for varlen cases with equal lengths"

    def prepare(self, case: Case, sets: list[Any]) -> Prepared:
        import dataclasses

        calls = []
        for inputs in sets:
            q, k, v = (x.unflatten(0, (case.batch, -1)) for x in (inputs.q, inputs.k, inputs.v))
            calls.append(self.dense(case, dataclasses.replace(inputs, q=q, k=k, v=v), None))
        return Prepared(calls, lambda pair: (pair[0].flatten(0, 1), pair[1].transpose(0, 1).flatten(1)))


class OursBeside(Ours):
    """Ours on a case with one thing changed, timed in turn with the case, so that the card's drift does not enter."""

    def __init__(self, name: str, change: Callable[[Case, Any], tuple[Case, Any]]) -> None:
        self.name, self.change = name, change

    def refusal(self, case: Case) -> str:
        return "" if any(within.of == self.name for within in case.within) else "for cases that are compared with it"

    def prepare(self, case: Case, sets: list[Any]) -> Prepared:
        changed = [self.change(case, inputs) for inputs in sets]
        new_case, new_sets = changed[0][0], [inputs for _, inputs in changed]
        found = super().prepare(new_case, new_sets)
        found.case, found.sets = new_case, new_sets
        return found


def without_sinks(case: Case, inputs: Any) -> tuple[Case, Any]:
    import dataclasses

    return dataclasses.replace(case, sinks=False), dataclasses.replace(inputs, sinks=None)


def as_bf16(case: Case, inputs: Any) -> tuple[Case, Any]:
    import dataclasses

    import torch

    q, k, v = (x.to(torch.bfloat16) for x in (inputs.q, inputs.k, inputs.v))
    return dataclasses.replace(case, dtype="bf16"), dataclasses.replace(inputs, q=q, k=k, v=v)


def last_query(case: Case, inputs: Any) -> tuple[Case, Any]:
    """For calls whose q is (B, Sq, Hq, D)."""
    import dataclasses

    import torch

    cu_q = torch.arange(case.batch + 1, dtype=torch.int32, device=inputs.q.device)
    q = inputs.q[:, -1:].contiguous()
    return dataclasses.replace(case, seqlen_q=1), dataclasses.replace(inputs, q=q, cu_q=cu_q)


class Sdpa(Implementation):
    """torch.nn.functional.scaled_dot_product_attention with one backend."""

    def __init__(self, name: str, backend: str) -> None:
        self.name, self.backend = name, backend

    def refusal(self, case: Case) -> str:
        if case.call != "dense":
            return "SDPA takes dense batches only"
        if case.softcap or case.sinks or case.window != (-1, -1):
            return "SDPA has no softcap, sinks or window"
        if case.causal and case.seqlen_q != case.seqlen_k:
            return "SDPA's causal mask starts at the first key"
        return ""

    def prepare(self, case: Case, sets: list[Any]) -> Prepared:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        backend = getattr(SDPBackend, self.backend)

        def make(inputs: Any) -> Callable[[], Any]:
            q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
            grouped = case.heads_q != case.heads_k

            def call() -> Any:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)

            return call

        return Prepared([make(inputs) for inputs in sets], lambda out: (out.transpose(1, 2), None))


class Triton(Implementation):
    """FlashAttention-2 forward in Triton, written for this comparison (triton_fa2.py)."""

    name = "triton"

    def refusal(self, case: Case) -> str:
        if case.call != "dense" or case.softcap or case.sinks or case.window != (-1, -1):
            return "the Triton kernel is dense, full or causal"
        if case.head_dim not in (64, 128, 256) or case.dv != case.head_dim:
            return "the Triton kernel has head dims 64, 128, 256"
        return ""

    def prepare(self, case: Case, sets: list[Any]) -> Prepared:
        try:
            from hopper_attention.bench.triton_fa2 import attention
        except ImportError as error:
            raise NotImplementedError(f"triton cannot be imported: {error}") from error

        def make(inputs: Any) -> Callable[[], Any]:
            out, lse = results_for(case, inputs)
            return lambda: attention(inputs.q, inputs.k, inputs.v, causal=case.causal, out=out, lse=lse)

        return Prepared([make(inputs) for inputs in sets], lambda pair: pair)


class Fa3(Implementation):
    """The FA3 library; dense batches as varlen. As engines do, metadata is made before for pages and for decode steps,
    and it may split keys there and up to SPLITTING_UP_TO queries.
    """

    name = "fa3"
    metadata_always = False

    def __init__(self, path: str, convention_path: str | None = None) -> None:
        self.library = fa3.convention(convention_path)
        if convention_path is None or not path.endswith(".xz"):
            self.library.load(path)
        else:
            fa3.load(path)

    def prepare(self, case: Case, sets: list[Any]) -> Prepared:
        longest_q, longest_k = max(case.q_lengths), case.most_keys
        few = longest_q <= fa3.SPLITTING_UP_TO or case.page_size
        masked = case.window != (-1, -1)
        mask = {
            "causal": case.causal and not masked,
            "window": (case.window[0], 0 if case.causal else case.window[1]) if masked else (-1, -1),
            "softcap": case.softcap,
        }
        splits = 0 if few and not self.metadata_always else 1
        metadata = None
        if case.page_size or case.is_decode or self.metadata_always:
            metadata = self.library.scheduler_metadata(
                batch=case.batch,
                max_seqlen_q=longest_q,
                max_seqlen_k=longest_k,
                heads=case.heads_q,
                kv_heads=case.heads_k,
                d=case.head_dim,
                dv=case.dv,
                dtype=sets[0].q.dtype,
                seqused_k=sets[0].used_k,
                cu_seqlens_q=sets[0].cu_q,
                page_size=case.page_size or None,
                num_splits=splits,
                **mask,
            )
        fixed = {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k, "metadata": metadata, "num_splits": splits}
        fixed["softmax_scale"] = case.head_dim**-0.5
        calls = [self.call(case, inputs, {**fixed, **mask}) for inputs in sets]
        return Prepared(calls, lambda pair: as_given(case, *pair))

    def call(self, case: Case, inputs: Any, options: dict[str, Any]) -> Callable[[], Any]:
        out, _ = results_for(case, inputs)
        q = inputs.q.flatten(0, -3)
        k, v = inputs.k, inputs.v
        options = {**options, "cu_seqlens_q": inputs.cu_q, "out": out.flatten(0, -3), "sinks": inputs.sinks}
        if case.page_size:
            options.update(page_table=inputs.page_table, seqused_k=inputs.used_k)
        elif case.equal_lengths or case.call == "varlen":
            k, v = k.flatten(0, -3), v.flatten(0, -3)
            options["cu_seqlens_k"] = inputs.cu_k
        else:
            raise NotImplementedError("FA3 is not asked for contiguous caches of different lengths")
        return lambda: self.library.forward(q, k, v, **options)


class Fa3WithMetadata(Fa3):
    """The varlen call with metadata made before and without splits, as ours is called."""

    name = "fa3, metadata"
    metadata_always = True

    def __init__(self, plain: Fa3) -> None:
        self.library = plain.library

    def refusal(self, case: Case) -> str:
        usable = case.call == "varlen" and not case.page_size
        return "" if usable else "for varlen cases; with pages fa3 has metadata"


def as_given(case: Case, out: Any, lse: Any) -> tuple[Any, Any]:
    """FA3's out (T, H, Dv) and lse (H, T) in the layouts of the case."""
    if case.call == "varlen":
        return out, lse
    return out.unflatten(0, (case.batch, -1)), lse.unflatten(1, (case.batch, -1)).transpose(0, 1)


def implementations(names: list[str], fa3_path: str | None, fa3_py: str | None) -> list[Implementation]:
    """Ours and the named peers. FA3 is left out if no library is given. Raises OSError if it cannot be loaded."""
    found: list[Implementation] = [Ours(), OursDense(), OursWithoutMetadata(), OursBatchInvariant()]
    found += [
        OursBeside("ours, no sinks", without_sinks),
        OursBeside("ours, bf16", as_bf16),
        OursBeside("ours, one query", last_query),
    ]
    fa3_library = [Fa3(fa3_path, fa3_py)] if "fa3" in names and fa3_path else []
    makers: dict[str, Callable[[], Implementation]] = {
        "cudnn": lambda: Sdpa("cudnn", "CUDNN_ATTENTION"),
        "flash": lambda: Sdpa("flash", "FLASH_ATTENTION"),
        "triton": Triton,
    }
    found += [make() for name, make in makers.items() if name in names]
    return [*found, *fa3_library, *(Fa3WithMetadata(plain) for plain in fa3_library)]

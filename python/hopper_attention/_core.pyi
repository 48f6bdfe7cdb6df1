"""
Attention kernels for NVIDIA Hopper: the C++ API. Use the functions of hopper_attention instead.
"""

from typing import overload


def version() -> str:
    """Version of the library."""

class DeviceInfo:
    """The facts of a card that decisions depend on."""

    def __init__(self, name: str, sm_count: int, compute_major: int = 9, compute_minor: int = 0, l2_bytes: int = 52428800, memory_gbs: float = 4917.0) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def sm_count(self) -> int: ...

    @property
    def compute_major(self) -> int: ...

    @property
    def compute_minor(self) -> int: ...

    @property
    def l2_bytes(self) -> int: ...

    @property
    def memory_gbs(self) -> float: ...

    def __repr__(self) -> str: ...

@overload
def device_info(ordinal: int) -> DeviceInfo:
    """Facts of CUDA device `ordinal`; RuntimeError without driver or device."""

@overload
def device_info(name: str) -> DeviceInfo:
    """Facts of a card by name ("H100", "H200"); needs no GPU."""

def require_supported_device(ordinal: int) -> None:
    """
    RuntimeError, saying what is needed and what was found, unless device `ordinal` can run the kernels.
    """

def warmup(ordinal: int) -> None:
    """Loads every built kernel on device `ordinal`."""

def cuda_versions() -> tuple[int, int]:
    """
    (runtime linked in, installed driver) as 1000 * major + 10 * minor; driver 0: none.
    """

class Tile:
    """
    The shape of one tile of work: query rows x keys of a block, head dims, ring stages.
    """

    @property
    def rows(self) -> int: ...

    @property
    def keys(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def head_dim_v(self) -> int: ...

    @property
    def stages(self) -> int: ...

    @property
    def slab_keys(self) -> int:
        """
        Of a tile with one block: the keys that 64 rows read of it. 0: tiles have several blocks.
        """

    @property
    def calls(self) -> str:
        """
        What its kernel has the code for: 'all' calls, all with softcap ('capped'), all without it
        ('uncapped'); of these those whose tiles are never cut ('uncut'), without pages ('whole'), 'dense'
        ones, those of which the blocks of a cluster share tiles ('paired'), or which computes tiles of few rows as
        kernels for these do ('mixed'); of few rows those without softcap
        whose tiles follow from their index ('by index'), and all with batch_invariant, in which tiles are in
        parts that follow from them alone ('in parts').
        """

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class KernelInfo:
    """A kernel that this build contains."""

    @property
    def family(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def tile(self) -> Tile: ...

    def __repr__(self) -> str: ...

def built_kernels() -> list[KernelInfo]:
    """The kernels of this build; empty in a host-only build."""

class Plan:
    """What was decided for a call, and why. print() explains it."""

    @property
    def kernel(self) -> str:
        """Kernel family."""

    @property
    def dtype(self) -> str: ...

    @property
    def tile(self) -> Tile: ...

    @property
    def packed_heads(self) -> int:
        """Query heads of one K/V head that share a tile."""

    @property
    def num_splits(self) -> int: ...

    @property
    def tiles(self) -> int: ...

    @property
    def ctas(self) -> int:
        """Thread blocks of the persistent grid."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def heads_per_pass(self) -> int:
        """Head groups whose tiles run together, so that K and V stay in L2."""

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def reasons(self) -> list[str]:
        """One line for each decision."""

    def explain(self) -> str:
        """The plan as text for a person."""

    def __str__(self) -> str: ...

    def __repr__(self) -> str: ...

def plan(device: DeviceInfo, *, dtype: str, batch: int, seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, head_dim: int, head_dim_v: int, has_sinks: bool = False, causal: bool = False, window_left: int = -1, window_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 0, sm_margin: int = 0, batch_invariant: bool = False, page_size: int = 0, ragged: bool = False, total_q: int | None = None, total_k: int | None = None, has_metadata: bool = False, rotary: bool = False) -> Plan:
    """
    The plan of a call of this shape on `device`; needs no GPU. ragged: lengths are on the device, seqlen_* are
    bounds. total_q, total_k: rows of a packed q, which is ragged, too, and of its k. rotary: workspace_bytes have
    room for the rotated q.
    """

def forward(q: object, k: object, v: object, out: object, softmax_lse: object | None = None, sinks: object | None = None, softmax_scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, sm_margin: int = 0, batch_invariant: bool = False, stream: int | None = None, workspace: object | None = None, allocate: object | None = None, cu_seqlens_q: object | None = None, cu_seqlens_k: object | None = None, seqused_q: object | None = None, seqused_k: object | None = None, page_table: object | None = None, cache_batch_idx: object | None = None, cache_leftpad: object | None = None, cu_seqlens_k_new: object | None = None, cp_tot_seqused_k: object | None = None, scheduler_metadata: object | None = None, seqlen_k_new: int = 0, seqused_k_all: int = -1, max_seqlen_q: int = -1, max_seqlen_k: int = -1, cp_world_size: int = 1, cp_rank: int = 0) -> None:
    """
    Attention of CUDA tensors q (B, Sq, Hq, D), or (Tq, Hq, D) with cu_seqlens_q; k and v (B, Sk, Hk, D / Dv),
    (Tk, Hk, D / Dv) with cu_seqlens_k, or (pages, page size, Hk, D / Dv) with page_table; into out, as q with Dv,
    and, if given, softmax_lse (B, Hq, Sq) or (Hq, Tq) float32; on `stream` (default: the current stream of q's
    framework). Tensors of lengths are int32: cu_* (B + 1,), page_table (B, n), all others (B,). -1 for
    seqused_k_all is not given, for max_seqlen_* what the shapes allow. allocate(bytes, q) is called at most once,
    if a workspace is needed and not given, and returns a uint8 tensor on the device of q.
    """

def check(q: object, k: object, v: object, out: object, softmax_lse: object | None = None, sinks: object | None = None, softmax_scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, sm_margin: int = 0, batch_invariant: bool = False, stream: int | None = None, workspace: object | None = None, allocate: object | None = None, cu_seqlens_q: object | None = None, cu_seqlens_k: object | None = None, seqused_q: object | None = None, seqused_k: object | None = None, page_table: object | None = None, cache_batch_idx: object | None = None, cache_leftpad: object | None = None, cu_seqlens_k_new: object | None = None, cp_tot_seqused_k: object | None = None, scheduler_metadata: object | None = None, seqlen_k_new: int = 0, seqused_k_all: int = -1, max_seqlen_q: int = -1, max_seqlen_k: int = -1, cp_world_size: int = 1, cp_rank: int = 0) -> None:
    """
    Raises what forward() would raise for these arguments, and does nothing else.
    """

def has_exchange_api(type: type) -> bool:
    """
    Whether tensors of `type` come in through the DLPack C exchange API (else through nb::ndarray, 30 times slower).
    """

def attend_dense(q, k, v, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, sm_margin, return_lse, s_aux, out, softmax_lse, batch_invariant, workspace, /):
    """
    flash_attn_func of plain torch tensors that nothing watches; None, with nothing launched, for all else.
    """

def attend_packed(q, k, v, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, sm_margin, return_lse, s_aux, out, softmax_lse, batch_invariant, workspace, cu_seqlens_q, seqused_k, page_table, max_seqlen_q, cp_world_size, cp_rank, cp_tot_seqused_k, scheduler_metadata, cu_seqlens_k, seqused_q, max_seqlen_k, /):
    """flash_attn_varlen_func; as attend_dense."""

def attend_cache(q, k_cache, v_cache, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, sm_margin, return_lse, s_aux, out, softmax_lse, batch_invariant, workspace, cu_seqlens_q, cache_seqlens, page_table, max_seqlen_q, cp_world_size, cp_rank, cp_tot_seqused_k, scheduler_metadata, cache_batch_idx, cache_leftpad, k, v, cu_seqlens_k_new, rotary, /):
    """
    flash_attn_with_kvcache; as attend_dense. rotary: (rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved), or None, which is (None, None, None, True).
    """

def plain_arguments(arguments, /):
    """
    The list as a tuple; None if it holds anything but plain torch tensors, None, ints, floats and lists.
    """

def fits(arguments, kinds, /):
    """
    Whether no more arguments than kinds are in the tuple, each of exactly its kind, a byte: t plain torch tensor,
    T the same or None, i int, f int or float, F the same or None, l list of ints or None, n None.
    """

def use_torch(tensor: object, parameter: object, is_grad_enabled: object, dispatch_modes: object, transform: object, is_tracing: object, empty_like: object, empty_output: object, empty_lse: object, empty_workspace: object) -> None:
    """
    What attend_*() needs of torch: types of plain tensors; whether grad mode is on, how many dispatch modes and
    which transform there are, whether torch.jit.trace records; empty_like(x), empty_output(q, v), empty_lse(q),
    empty_workspace(bytes, q).
    Without effect if tensors of that type do not come in through the DLPack C exchange API.
    """

def schedule_size(batch: int) -> int:
    """
    How many int32 the metadata of `batch` sequences take: 1 + 4 * batch rounded up to a multiple of 4.
    """

def make_schedule(metadata: object, *, dtype: str, batch: int, seqlen_q: int, seqlen_k: int, heads_q: int, heads_k: int, head_dim: int, head_dim_v: int, page_size: int = 0, seqused_k: object | None = None, seqused_k_all: int = -1, cu_seqlens_q: object | None = None, cu_seqlens_k_new: object | None = None, cache_leftpad: object | None = None, seqlen_k_new: int = 0, causal: bool = False, window_left: int = -1, window_right: int = -1, attention_chunk: int = 0, num_splits: int = 0, sm_margin: int = 0, batch_invariant: bool = False, stream: int | None = None) -> None:
    """
    Writes the schedule of a step to `metadata`, an int32 CUDA tensor of schedule_size(batch) or more elements, on
    `stream` (default: the current stream of its framework). seqlen_q and seqlen_k are bounds, or the lengths where
    no tensor gives them. page_size 0: no pages. Neither synchronises nor allocates.
    """

def append(k_new: object, v_new: object, k_cache: object, v_cache: object, *, seqused_k: object | None = None, seqused_k_all: int = -1, cu_seqlens_k_new: object | None = None, page_table: object | None = None, cache_batch_idx: object | None = None, rotary_cos: object | None = None, rotary_sin: object | None = None, q: object | None = None, q_rotated: object | None = None, cu_seqlens_q: object | None = None, rotary_seqlens: object | None = None, rotary_interleaved: bool = True, rotate_q_per_position: bool = False, stream: int | None = None) -> None:
    """
    Appends k_new (B, Sn, Hk, D) and v_new (B, Sn, Hk, Dv), or (Tn, Hk, ...) with cu_seqlens_k_new (B + 1,), in
    place to k_cache (Bc, S, Hk, D) and v_cache (Bc, S, Hk, Dv), or (pages, page size, Hk, ...) with page_table
    (B, n). Key j of sequence b goes to slot seqused_k[b] + j (seqused_k (B,), or seqused_k_all for all sequences;
    one of them is needed) of row cache_batch_idx[b] (default b) or of its pages; what does not fit is dropped.
    cache_leftpad has no part in it: slots count from the start of the sequence's memory.

    With rotary_cos and rotary_sin (positions, rotary_dim / 2) new keys are rotated on the way, at rotary_seqlens[b]
    (default seqused_k[b]) + j, and q (B, Sq, Hq, D), or (Tq, Hq, D) with cu_seqlens_q, goes to q_rotated of the same
    shape: at rotary_seqlens[b] + i with rotate_q_per_position (causal, windowed or chunked attention), else at
    rotary_seqlens[b]. Rows of a packed q outside all sequences are left as they are in q_rotated. Without rotary_cos
    q_rotated must be None, and q is not read: it is only made sure that it is not in the caches.

    One launch on `stream` (default: the current stream of the framework of k_cache); neither synchronises nor
    allocates. Lengths and indices are int32 on the device, read there and clamped. Raises ValueError, TypeError or
    NotImplementedError, naming the argument of flash_attn_with_kvcache, before anything is written.
    """

def combine(out_partial: object, lse_partial: object, out: object, lse: object, stream: int | None = None) -> None:
    """
    CUDA tensors out_partial (S, B, M, H, D) and lse_partial (S, B, M, H), float32, into out (B, M, H, D) and lse
    (B, M, H) float32, on `stream` (default: the current stream of out_partial's framework).
    """

def merge_states(out_a: object, lse_a: object, out_b: object, lse_b: object, out: object, lse: object, stream: int | None = None) -> None:
    """
    CUDA tensors out_a, out_b (B, M, H, D) and lse_a, lse_b (B, H, M) float32, or without B, into out and lse of
    the same shapes, on `stream` (default: the current stream of out_a's framework).
    """

class ForcedPlan:
    """
    For tests: choices that the plan would not make; 0 leaves a choice open.
    """

    def __init__(self, *, rows: int = 0, keys: int = 0, stages: int = 0, packed_heads: int = 0, heads_per_pass: int = 0, ctas: int = 0, num_splits: int = 0, cluster: int = 0, one_tile: bool = False) -> None: ...

def force_plan(forced: ForcedPlan | None) -> ForcedPlan | None:
    """
    For tests: applies to calls of forward() on this thread until called again; None ends it. Returns what was in force before.
    """

def cached_plans() -> int:
    """For tests: plans that forward() keeps."""

def stub_backend(device: DeviceInfo | None) -> None:
    """
    For tests: forward() plans for `device`, and launches, also those of append(), are recorded instead of made; None
    brings the GPU back.
    """

def time_backend(device: DeviceInfo | None) -> None:
    """
    For the host time of a call: as stub_backend(), but launches are only counted.
    """

def count_host_memory_as_cuda(counts: bool) -> None:
    """
    For tests: whether tensors in host memory count as tensors of CUDA device 0.
    """

def launches() -> int:
    """For tests: launches of attention since the backend was replaced."""

def appends() -> int:
    """For tests: launches of append(), likewise."""

def last_append() -> dict:
    """For tests: what the last recorded append was given."""

def last_launch() -> dict:
    """For tests: what the last recorded launch was given."""

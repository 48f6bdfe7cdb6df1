"""check_metadata names what is wrong, and says nothing of what is right."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import hopper_attention
from hopper_attention import check


def int32(*values):
    return np.array(values, np.int32)


def shaped(*shape):
    return SimpleNamespace(shape=shape)


VARLEN = {
    "q": shaped(10, 4, 64),
    "k": shaped(12, 2, 64),
    "cu_seqlens_q": int32(0, 3, 3, 9),
    "cu_seqlens_k": int32(0, 5, 5, 12),
}
PAGED = {
    "q": shaped(3, 2, 4, 64),
    "k": shaped(6, 4, 2, 64),
    "page_table": np.array([[5, 0, -7], [2147480000, 9, 9], [1, 2, 3]], np.int32),
    "seqused_k": int32(7, 0, 12),
}
CACHE = {
    "q": shaped(2, 1, 4, 64),
    "k": shaped(5, 8, 2, 64),
    "cache_seqlens": int32(8, 3),
    "cache_batch_idx": int32(4, 0),
    "cache_leftpad": int32(8, 0),
}
RIGHT = {
    "packed": VARLEN,
    "packed with used lengths": {**VARLEN, "seqused_q": int32(3, 0, 1), "seqused_k": int32(0, 3, 7)},
    "lengths from seqused_k may pass the next offset": {**VARLEN, "seqused_k": int32(12, 7, 2)},
    "pages, with anything in unused slots": PAGED,
    "a cache": CACHE,
    "one length for all": {**CACHE, "cache_seqlens": 8},
    "a full cache": {**CACHE, "cache_seqlens": None},
    "new keys": {**CACHE, "cache_seqlens": int32(5, 3), "cu_seqlens_k_new": int32(0, 3, 8), "cache_leftpad": None},
    "bounds": {**VARLEN, "max_seqlen_q": 6, "max_seqlen_k": np.int32(7)},
    "no sequence": {**VARLEN, "cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0)},
    "ranks": {**CACHE, "cp_world_size": 3, "cp_rank": 1, "cp_tot_seqused_k": int32(24, 10)},
}
WRONG = [
    ("cu_seqlens_q: must start with 0, found 1", VARLEN, {"cu_seqlens_q": int32(1, 3, 3, 9)}),
    ("cu_seqlens_q: of sequence 1 decreases from 3 to 2", VARLEN, {"cu_seqlens_q": int32(0, 3, 2, 9)}),
    ("cu_seqlens_q: ends at 11, past the 10 rows of q", VARLEN, {"cu_seqlens_q": int32(0, 3, 3, 11)}),
    ("cu_seqlens_q: must have 1 dim and not be empty", VARLEN, {"cu_seqlens_q": int32()}),
    ("cu_seqlens_k: must have 4 elements, found 3", VARLEN, {"cu_seqlens_k": int32(0, 5, 12)}),
    ("cu_seqlens_k: of sequence 2 decreases from 5 to 4", VARLEN, {"cu_seqlens_k": int32(0, 5, 5, 4)}),
    ("cu_seqlens_k: ends at 13, past the 12 rows of k", VARLEN, {"cu_seqlens_k": int32(0, 5, 5, 13)}),
    ("seqused_q: of sequence 2 is 7, more than 6", VARLEN, {"seqused_q": int32(3, 0, 7)}),
    ("seqused_q: of sequence 0 is -1, must not be negative .and 1 more", VARLEN, {"seqused_q": int32(-1, 0, -2)}),
    ("seqused_q: must have an element for each of 3", VARLEN, {"seqused_q": int32(1, 0)}),
    ("seqused_k: of sequence 1 is 8, more than 7", VARLEN, {"seqused_k": int32(1, 8, 1)}),
    ("seqused_k: must have 1 dim", VARLEN, {"seqused_k": np.zeros((3, 1), np.int32)}),
    ("max_seqlen_q: of sequence 2 is 5, but there are 6 queries", VARLEN, {"max_seqlen_q": 5}),
    ("max_seqlen_k: of sequence 2 is 6, but there are 7 keys", VARLEN, {"max_seqlen_k": 6}),
    ("seqused_k: is needed", PAGED, {"seqused_k": None}),
    ("seqused_k: of sequence 2 is 13, more than 12", PAGED, {"seqused_k": int32(7, 0, 13)}),
    ("page_table: slot 2 of sequence 0 is page -7, but there are 6 pages", PAGED, {"seqused_k": int32(9, 0, 12)}),
    ("page_table: slot 0 of sequence 1 is page 2147480000", PAGED, {"seqused_k": int32(7, 1, 12)}),
    ("page_table: slot 0 of sequence 1", PAGED, {"seqlen_k_new": 1, "seqused_k": int32(7, 0, 11)}),
    ("page_table: must have a row for each of 3", PAGED, {"page_table": np.zeros((2, 3), np.int32)}),
    ("cache_seqlens: of sequence 0 is 9, more than 8", CACHE, {"cache_seqlens": int32(9, 3)}),
    ("cache_seqlens: of sequence 0 is 9 with the new keys, more than 8", CACHE, {"seqlen_k_new": 1}),
    ("cache_batch_idx: of sequence 0 is 5, more than 4", CACHE, {"cache_batch_idx": int32(5, 0)}),
    ("cache_batch_idx: of sequence 1 is -1", CACHE, {"cache_batch_idx": int32(0, -1)}),
    ("cache_leftpad: of sequence 1 is 4, more than 3", CACHE, {"cache_leftpad": int32(8, 4)}),
    ("cu_seqlens_k_new: of sequence 1 decreases from 3 to 2", CACHE, {"cu_seqlens_k_new": int32(0, 3, 2)}),
    ("cu_seqlens_k_new: must have 3 elements", CACHE, {"cu_seqlens_k_new": int32(0, 3)}),
    ("rotary_seqlens: of sequence 0 is -1", CACHE, {"rotary_seqlens": int32(-1, 0)}),
    ("cp_tot_seqused_k: is needed", CACHE, {"cp_world_size": 2}),
    ("cache_seqlens: of sequence 1 is 3, more than 2, the keys of cp_tot_seqused_k on rank 1 of 2", CACHE,
        {"cp_world_size": 2, "cp_rank": 1, "cp_tot_seqused_k": int32(16, 5)}),
    ("q: must have 3 or 4 dims", CACHE, {"q": shaped(3)}),
]  # fmt: skip


@pytest.mark.parametrize("given", RIGHT.values(), ids=RIGHT.keys())
def test_nothing_is_said_of_what_is_right(given):
    assert hopper_attention.check_metadata(**given) is None


@pytest.mark.parametrize(("message", "given", "changes"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_wrong_is_named(message, given, changes):
    with pytest.raises(ValueError, match=f"^{message}"):
        hopper_attention.check_metadata(**{**given, **changes})


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_other_dtypes(name):
    given = {**VARLEN, "seqused_k": int32(1, 2, 3)}
    with pytest.raises(TypeError, match=f"^{name}: dtype must be int32, found int64"):
        hopper_attention.check_metadata(**{**given, name: given[name].astype(np.int64)})


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    given = {"q": torch.zeros(10, 4, 8), "k": torch.zeros(12, 2, 8)}
    given |= {name: torch.from_numpy(VARLEN[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    assert hopper_attention.check_metadata(**given, max_seqlen_q=torch.tensor(6)) is None
    given["cu_seqlens_k"][2] = 3
    with pytest.raises(ValueError, match="^cu_seqlens_k: of sequence 1 decreases from 5 to 3"):
        hopper_attention.check_metadata(**given)


def test_refused_while_a_graph_is_captured(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(check, "is_torch", lambda x: True)
    with pytest.raises(ValueError, match="^check_metadata: copies to the host, which a graph cannot capture"):
        hopper_attention.check_metadata(SimpleNamespace(is_cuda=True), None)

"""The backend that vLLM loads for CUSTOM: its FlashAttention backend with the attention of supported layers replaced.

Cache layout, cache updates, CUDA graphs and the choice of page sizes stay vLLM's. Written for vLLM 0.33.
"""

from __future__ import annotations

import copy

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import flash_attn as theirs

import hopper_attention
from hopper_attention.integrations import vllm as ours

_CACHE_DTYPES = ("auto", "float16", "bfloat16")


class HopperAttentionBackend(theirs.FlashAttentionBackend):
    """What vLLM asks for names and classes; every question of support is answered by vLLM's backend, to which layers
    fall back.
    """

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HopperAttentionImpl]:
        return HopperAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[HopperAttentionMetadataBuilder]:
        return HopperAttentionMetadataBuilder


class HopperAttentionImpl(theirs.FlashAttentionImpl):
    """The attention of one layer. `why_not` says why it stays with vLLM's; it is empty if it does not."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.why_not = self._why_not()
        if self.why_not:
            theirs.logger.info_once("A layer stays with vLLM's attention: %s", self.why_not)

    def _why_not(self) -> str:
        if self.attn_type != AttentionType.DECODER:
            return f"attention type {self.attn_type}"
        if self.alibi_slopes is not None:
            return "alibi slopes"
        if self.kv_cache_dtype not in _CACHE_DTYPES:
            return f"a cache of {self.kv_cache_dtype}"
        if self.dcp_world_size > 1:
            return "decode context parallelism"
        dtype = self.kv_cache_dtype if self.kv_cache_dtype != "auto" else torch.get_default_dtype()
        supported, reason = hopper_attention.is_supported(
            dtype=dtype,
            head_dim=self.head_size,
            page_size=16,  # vLLM's pages are multiples of it
            causal=True,
            window_size=self.sliding_window,
            softcap=self.logits_soft_cap,
            sinks=self.sinks is not None,
        )
        return "" if supported else reason

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        """As FlashAttentionImpl.forward: query (T, Hq, D), kv_cache (pages, Hk, page size, 2 D); writes output."""
        if self.why_not or attn_metadata is None or not _is_plain(attn_metadata, output_scale, output_block_scale):
            step = _without_our_schedule(attn_metadata)
            return super().forward(layer, query, key, value, kv_cache, step, output, output_scale, output_block_scale)
        tokens = attn_metadata.num_actual_tokens
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        ours.flash_attn_varlen_func(
            query[:tokens],
            key_cache,
            value_cache,
            attn_metadata.max_query_len,
            attn_metadata.query_start_loc,
            attn_metadata.max_seq_len,
            seqused_k=attn_metadata.seq_lens,
            softmax_scale=self.scale,
            causal=attn_metadata.causal,
            window_size=theirs._maybe_symmetrize_window(self.sliding_window, attn_metadata.causal),
            softcap=self.logits_soft_cap,
            block_table=attn_metadata.block_table,
            out=output[:tokens].view(tokens, self.num_heads, self.head_size),
            scheduler_metadata=attn_metadata.scheduler_metadata if _is_ours(attn_metadata) else None,
            num_splits=attn_metadata.max_num_splits,
            s_aux=self.sinks,
        )
        return output


class HopperAttentionMetadataBuilder(theirs.FlashAttentionMetadataBuilder):
    """Makes our schedule, once a step, for a group whose layers all run here. It has the size of FlashAttention-3's, so
    vLLM's buffer for CUDA graphs holds it. For a mixed group vLLM makes its own, and our layers do without.
    """

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        self.all_ours = bool(layers) and all(getattr(layer.impl, "why_not", "not ours") == "" for layer in layers)

    def _get_scheduler_metadata(
        self,
        *,
        aot_schedule,
        batch_size,
        cu_query_lens,
        max_query_len,
        seqlens,
        max_seq_len,
        causal,
        max_num_splits,
    ):
        if not aot_schedule or not self.all_ours or not isinstance(causal, bool):
            return super()._get_scheduler_metadata(
                aot_schedule=aot_schedule,
                batch_size=batch_size,
                cu_query_lens=cu_query_lens,
                max_query_len=max_query_len,
                seqlens=seqlens,
                max_seq_len=max_seq_len,
                causal=causal,
                max_num_splits=max_num_splits,
            )
        return ours.get_scheduler_metadata(
            batch_size,
            max_query_len,
            max_seq_len,
            self.num_heads_q,
            self.num_heads_kv,
            self.headdim,
            seqlens,
            self.kv_cache_dtype,
            cu_seqlens_q=cu_query_lens,
            page_size=self.block_size,
            causal=causal,
            window_size=theirs._maybe_symmetrize_window(self.aot_sliding_window, causal),
            num_splits=max_num_splits,
        )

    def build(self, *args, **kwargs):
        metadata = super().build(*args, **kwargs)
        metadata.hopper_attention_schedule = self.all_ours and isinstance(metadata.causal, bool)
        return metadata


def _is_ours(attn_metadata) -> bool:
    """Whether the schedule in the metadata was made here."""
    return getattr(attn_metadata, "hopper_attention_schedule", False)


def _without_our_schedule(attn_metadata):
    """The step for vLLM's attention, which would read our schedule as its own; it does without one then."""
    if not _is_ours(attn_metadata):
        return attn_metadata
    step = copy.copy(attn_metadata)
    step.scheduler_metadata = None
    return step


def _is_plain(attn_metadata, output_scale, output_block_scale) -> bool:
    """Whether a step asks for nothing but causal or full attention with a window."""
    special = (
        output_scale,
        output_block_scale,
        attn_metadata.mm_prefix_query_range_tensor,
        attn_metadata.rswa_prefix_lens,
    )
    return isinstance(attn_metadata.causal, bool) and all(x is None for x in special)

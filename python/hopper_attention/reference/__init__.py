"""The algorithms of this package, readable: from safe softmax to split-KV, and the public functions on CPU arrays.

Everything takes numpy arrays or CPU torch tensors and none of it imports torch. Reading order: softmax, attention,
flash1, flash2, flash3, split, heads, mask, variants; then core, keys, call and functions, which serve CPU tensors
given to the public functions; io predicts the memory traffic. docs/algorithm.md has the formulas beside the kernel's
names.
"""

from hopper_attention.reference.attention import one_pass_attention, standard_attention
from hopper_attention.reference.flash1 import dropout_keep, flash_attention_1
from hopper_attention.reference.flash2 import flash_attention_2, flash_attention_2_backward
from hopper_attention.reference.flash3 import flash_attention_3
from hopper_attention.reference.functions import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_states,
)
from hopper_attention.reference.heads import attention_by_heads, pack_group
from hopper_attention.reference.mask import Mask, block_range, dense_mask, lengths, visible
from hopper_attention.reference.softmax import online_softmax, safe_softmax
from hopper_attention.reference.split import combine_parts, sequential_merge, split_bounds, split_kv_attention
from hopper_attention.reference.variants import (
    paged_attention,
    sink_attention,
    soft_capped_attention,
    varlen_attention,
    windowed_attention,
)

__all__ = [
    "Mask",
    "attention_by_heads",
    "block_range",
    "combine_parts",
    "dense_mask",
    "dropout_keep",
    "flash_attention_1",
    "flash_attention_2",
    "flash_attention_2_backward",
    "flash_attention_3",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "lengths",
    "merge_states",
    "one_pass_attention",
    "online_softmax",
    "pack_group",
    "paged_attention",
    "safe_softmax",
    "sequential_merge",
    "sink_attention",
    "soft_capped_attention",
    "split_bounds",
    "split_kv_attention",
    "standard_attention",
    "varlen_attention",
    "visible",
    "windowed_attention",
]

"""Adapters for inference engines. Each is a module that is imported, and then switched on, by its user; none is imported
by `import hopper_attention`.

transformers: `transformers.register()`, then attn_implementation="hopper_attention"
flash_attn_3: `flash_attn_3.install()`: the modules and operators of FlashAttention-3, running this library
vllm, sglang: the attention functions in the spelling of these engines; vllm has a backend plugin as well
jax:          the functions on jax arrays, eager only
"""

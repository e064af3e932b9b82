"""The write of new keys and values into their pages, with QK norm and RoPE on the way."""

from smkern.ops.append.operators import append_kv, qk_norm_rope_append

__all__ = ["append_kv", "qk_norm_rope_append"]

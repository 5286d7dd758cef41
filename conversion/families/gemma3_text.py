"""Gemma 3, text models: Gemma 2 with normed queries and keys for soft-caps, and a RoPE of its own for windowed layers.

arXiv 2503.19786.
"""

from ..entries import Const
from ..rules import Family
from .common import CAUSAL_LM, QK_NORM, SPELLINGS, ropes_by_layer_type
from .gemma2 import GEMMA2, GEMMA2_WEIGHTS, SANDWICH

FAMILY = Family(
    "gemma3_text",
    config=[*GEMMA2, *SANDWICH, ropes_by_layer_type("rope_local_base_freq"), Const("qk_norm", "head")],
    weights=[*GEMMA2_WEIGHTS, *QK_NORM],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Gemma3ForCausalLM"},
    # The pattern is in layer_types by the time we read it.
    inert=("sliding_window_pattern", "_sliding_window_pattern", "cache_implementation"),
)

"""Gemma 3, text models: Gemma 2 with normed queries and keys for soft-caps, and a RoPE of its own for windowed layers.

arXiv 2503.19786.
"""

from typing import Any

from ..entries import Const, Derived, Values
from ..rules import Family
from .common import CAUSAL_LM, QK_NORM, SPELLINGS
from .gemma2 import GEMMA2, GEMMA2_WEIGHTS


def _rope_to_theirs(config: Any) -> Values:
    """Both spellings, as in transformers 5 and in 4."""
    by_type = config.rope_by_layer_type
    full, sliding = by_type.get("full_attention") or {}, by_type.get("sliding_attention") or {}
    scaling = {name: value for name, value in full.items() if name != "rope_theta"}
    return {
        "rope_parameters": by_type,
        **({"rope_theta": full["rope_theta"]} if full else {}),
        **({"rope_local_base_freq": sliding["rope_theta"]} if sliding else {}),
        "rope_scaling": scaling if full.get("rope_type", "default") != "default" else None,
    }


ROPES = Derived(
    ("rope_parameters", "rope_theta", "rope_local_base_freq", "rope_scaling"),
    to_ours=lambda native: {"rope_parameters": native.rope_parameters},
    to_theirs=_rope_to_theirs,
)

FAMILY = Family(
    "gemma3_text",
    config=[*GEMMA2, ROPES, Const("qk_norm", "head")],
    weights=[*GEMMA2_WEIGHTS, *QK_NORM],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Gemma3ForCausalLM"},
    # The pattern is in layer_types by the time we read it.
    inert=("sliding_window_pattern", "_sliding_window_pattern", "cache_implementation"),
)

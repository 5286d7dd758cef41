"""Command R7B and Command A: Command R with windowed layers that rotate and full ones without position. Cohere 2024."""

from typing import Any

from ..entries import Derived, Values
from ..rules import Family
from .cohere import COHERE, COHERE_WEIGHTS
from .common import CAUSAL_LM, LAYER_TYPES, SPELLINGS


def _nope(native: Any) -> Values:
    return {"nope_layers": [i for i, kind in enumerate(native.layer_types) if kind == "full_attention"]}


FAMILY = Family(
    "cohere2",
    config=[*COHERE, *LAYER_TYPES, Derived((), _nope, lambda config: {})],
    weights=COHERE_WEIGHTS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Cohere2ForCausalLM"},
    # The first is in layer_types by the time we read it.
    inert=("sliding_window_pattern", "cache_implementation"),
)

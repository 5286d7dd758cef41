"""Command R7B and Command A: Command R with windowed layers that rotate and full ones without position. Cohere 2024."""

from ..rules import Family
from .cohere import COHERE, COHERE_WEIGHTS
from .common import CAUSAL_LM, FULL_WITHOUT_POSITION, LAYER_TYPES, SPELLINGS

FAMILY = Family(
    "cohere2",
    config=[*COHERE, *LAYER_TYPES, FULL_WITHOUT_POSITION],
    weights=COHERE_WEIGHTS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Cohere2ForCausalLM"},
    # The first is in layer_types by the time we read it.
    inert=("sliding_window_pattern", "cache_implementation"),
)

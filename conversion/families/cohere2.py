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
    inert=(
        # In layer_types by the time we read it.
        *("sliding_window_pattern", "layer_switch", "order_of_interleaved_layers", "cache_implementation"),
        # Cohere's own trainer; transformers' class has one value of each.
        *("position_embedding_type", "rotary_pct", "use_embedding_sharing", "use_gated_activation"),
        *("use_parallel_block", "use_parallel_embedding"),
    ),
)

"""SmolLM3: LLaMA in which every fourth layer has no position. Hugging Face 2025."""

from typing import Any

from ..entries import Derived, Field, Values
from ..rules import Family
from .common import ATTENTION_BIAS, CAUSAL_LM, LLAMA_CONFIG, LLAMA_WEIGHTS, SPELLINGS, windows


def _layers(native: Any) -> Values:
    return {**windows(native), "nope_layers": [i for i, rotates in enumerate(native.no_rope_layers) if not rotates]}


def _layers_to_theirs(config: Any) -> Values:
    return {
        # Despite its name: 1 where a layer rotates.
        "no_rope_layers": [int(i not in (config.nope_layers or ())) for i in range(config.num_hidden_layers)],
        "layer_types": config.layer_types,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
    }


FAMILY = Family(
    "smollm3",
    config=[
        *LLAMA_CONFIG,
        *ATTENTION_BIAS,
        Field("mlp_bias", "ffn_bias"),
        Derived(
            (
                *("no_rope_layers", "no_rope_layer_interval", "layer_types", "use_sliding_window", "sliding_window"),
                "max_window_layers",
            ),
            _layers,
            _layers_to_theirs,
        ),
    ],
    weights=LLAMA_WEIGHTS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "SmolLM3ForCausalLM"},
)

"""Granite 3: LLaMA with a factor on embeddings, branches, scores and logits. IBM 2024."""

from ..entries import Derived, Entry, Field
from ..rules import Family
from .common import ATTENTION_BIAS, CAUSAL_LM, LLAMA_CONFIG, LLAMA_WEIGHTS, SPELLINGS

# Without the logits', which HyperCLOVA X says the other way round.
INNER_MULTIPLIERS: list[Entry] = [
    Field("embedding_multiplier", "embedding_scale"),
    Field("residual_multiplier", "residual_scale"),
    Derived(
        ("attention_multiplier",),
        to_ours=lambda native: {"attention_scale": native.attention_multiplier},
        to_theirs=lambda config: {"attention_multiplier": config.attention_scale or config.head_dim**-0.5},
    ),
]
MULTIPLIERS: list[Entry] = [
    *INNER_MULTIPLIERS,
    Derived(
        ("logits_scaling",),
        to_ours=lambda native: {"logit_scale": 1 / native.logits_scaling},
        to_theirs=lambda config: {"logits_scaling": 1 / config.logit_scale},
    ),
]

FAMILY = Family(
    "granite",
    config=[
        *LLAMA_CONFIG,
        *ATTENTION_BIAS,
        Field("mlp_bias", "ffn_bias"),
        *MULTIPLIERS,
    ],
    weights=LLAMA_WEIGHTS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "GraniteForCausalLM"},
)

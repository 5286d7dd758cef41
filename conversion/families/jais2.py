"""Jais 2: LLaMA with LayerNorm, a plain MLP with squared ReLU, and biases. Inception 2025."""

from ..entries import Field
from .common import ATTENTION_BIAS, HEAD_DIM, LAYER_NORM_MLP, LLAMA_WEIGHTS, MLP_BIAS, ROPE, SIZES
from .decoders import decoder

FAMILY = decoder(
    "jais2",
    "Jais2",
    [
        *SIZES,
        *HEAD_DIM,
        *ROPE,
        *ATTENTION_BIAS,
        *MLP_BIAS,
        *LAYER_NORM_MLP,
        Field("hidden_act"),
        Field("layer_norm_eps", "norm_eps"),
    ],
    LLAMA_WEIGHTS,
)

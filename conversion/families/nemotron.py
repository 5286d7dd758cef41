"""Nemotron-3, Nemotron-4 and Minitron: LayerNorm stored as gain - 1, squared ReLU, half of each head rotated.

arXiv 2402.16819, 2407.14679.
"""

from ..entries import Const, Field
from .common import ATTENTION_BIAS, HEAD_DIM, LAYER_NORM_MLP, LLAMA_WEIGHTS, MLP_BIAS, PARTIAL_ROPE, SIZES
from .decoders import ALL_HEADS, decoder

FAMILY = decoder(
    "nemotron",
    "Nemotron",
    [
        *SIZES,
        *HEAD_DIM,
        *PARTIAL_ROPE,
        *ATTENTION_BIAS,
        *MLP_BIAS,
        *LAYER_NORM_MLP,
        Field("hidden_act"),
        Field("norm_eps"),
        Const("norm_offset", 1.0),
    ],
    LLAMA_WEIGHTS,
    *ALL_HEADS,
)

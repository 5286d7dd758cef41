"""Seed-OSS-36B: LLaMA with biases on queries, keys and values, and dropout on each branch. ByteDance 2025."""

from ..entries import Field
from .common import LLAMA_CONFIG, LLAMA_WEIGHTS, MLP_BIAS
from .decoders import ALL_HEADS, decoder

FAMILY = decoder(
    "seed_oss",
    "SeedOss",
    [
        *LLAMA_CONFIG,
        *MLP_BIAS,
        Field("attention_bias"),
        Field("attention_out_bias", "attention_output_bias"),
        Field("residual_dropout", "hidden_dropout"),
    ],
    LLAMA_WEIGHTS,
    *ALL_HEADS,
)

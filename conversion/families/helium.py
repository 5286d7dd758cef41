"""Helium: LLaMA with interleaved RoPE and norms whose gain multiplies in fp32. Kyutai 2025."""

from ..entries import Const, Field
from ..rules import Family
from .common import CAUSAL_LM, LLAMA_CONFIG, LLAMA_WEIGHTS, SPELLINGS

FAMILY = Family(
    "helium",
    config=[
        *LLAMA_CONFIG,
        Field("attention_bias"),
        Field("mlp_bias", "ffn_bias"),
        Const("norm_weight_in_fp32", True),
        Const("rope_interleaved", True),
    ],
    weights=LLAMA_WEIGHTS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "HeliumForCausalLM"},
)

"""Helium: LLaMA with interleaved RoPE and norms whose gain multiplies in fp32. Kyutai 2025."""

from ..relation import Const, Field
from ..rules import Family
from .common import CAUSAL_LM, GLU, HEAD_DIM, LLAMA_WEIGHTS, RMS_NORM, ROPE, SIZES, SPELLINGS

FAMILY = Family(
    "helium",
    config=[
        *SIZES,
        *HEAD_DIM,
        *ROPE,
        *RMS_NORM,
        *GLU,
        Field("attention_bias"),
        Field("mlp_bias", "ffn_bias"),
        Const("norm_weight_in_fp32", True),
        Const("rope_interleaved", True),
    ],
    weights=LLAMA_WEIGHTS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "HeliumForCausalLM"},
)

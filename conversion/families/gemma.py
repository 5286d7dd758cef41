"""Gemma 1: gains stored as gain - 1, embeddings times sqrt(d), GEGLU with the tanh GELU. arXiv 2403.08295."""

from ..entries import Const, Derived, Entry, Field
from ..rules import Family
from .common import ATTENTION_BIAS, CAUSAL_LM, HEAD_DIM, LLAMA_WEIGHTS, RMS_NORM, ROPE, ROTARY_BUFFERS, SIZES, SPELLINGS

# Gemma's norm multiplies in fp32, before the cast; its checkpoints store how far the gain is from one.
GEMMA: list[Entry] = [
    *SIZES,
    *HEAD_DIM,
    *RMS_NORM,
    *ATTENTION_BIAS,
    Const("norm_offset", 1.0),
    Const("norm_weight_in_fp32", True),
    Derived((), to_ours=lambda native: {"embedding_scale": native.hidden_size**0.5}, to_theirs=lambda config: {}),
]

FAMILY = Family(
    "gemma",
    config=[*GEMMA, *ROPE, Field("hidden_act")],
    weights=LLAMA_WEIGHTS,
    drops=ROTARY_BUFFERS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "GemmaForCausalLM"},
)

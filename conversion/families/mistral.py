"""Mistral 7B and its kin: LLaMA with a window on every layer (null from v0.2 on). arXiv 2310.06825."""

from ..entries import Field
from ..rules import Family
from .common import CAUSAL_LM, LLAMA_CONFIG, LLAMA_WEIGHTS, ROTARY_BUFFERS, SPELLINGS

FAMILY = Family(
    "mistral",
    config=[*LLAMA_CONFIG, Field("sliding_window")],
    weights=LLAMA_WEIGHTS,
    drops=ROTARY_BUFFERS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "MistralForCausalLM"},
)

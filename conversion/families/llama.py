"""LLaMA 1, 2 and 3.x, Code Llama, TinyLlama, SmolLM2 and all that publish as `llama`. arXiv 2302.13971, 2407.21783."""

from ..entries import Field
from ..rules import Family
from .common import ATTENTION_BIAS, CAUSAL_LM, LLAMA_CONFIG, LLAMA_WEIGHTS, ROTARY_BUFFERS, SPELLINGS

FAMILY = Family(
    "llama",
    config=[*LLAMA_CONFIG, *ATTENTION_BIAS, Field("mlp_bias", "ffn_bias")],
    weights=LLAMA_WEIGHTS,
    drops=ROTARY_BUFFERS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "LlamaForCausalLM"},
    # The name of the first conversions of LLaMA 1, whose class was still spelt LLaMAForCausalLM.
    aliases={"max_sequence_length": "max_position_embeddings"},
)

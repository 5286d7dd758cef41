"""Qwen 1.5, 2 and 2.5: biases on queries, keys and values, an optional window on the last layers. arXiv 2407.10671."""

from ..entries import Const
from ..rules import Family
from .common import CAUSAL_LM, LLAMA_CONFIG, LLAMA_WEIGHTS, ROTARY_BUFFERS, SLIDING_TAIL, SPELLINGS

FAMILY = Family(
    "qwen2",
    config=[*LLAMA_CONFIG, *SLIDING_TAIL, Const("attention_bias", True)],
    weights=LLAMA_WEIGHTS,
    drops=ROTARY_BUFFERS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Qwen2ForCausalLM"},
)

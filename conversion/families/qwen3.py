"""Qwen 3, dense: a norm on each query and key head, no biases. arXiv 2505.09388."""

from ..entries import Const
from ..rules import Family
from .common import ATTENTION_BIAS, CAUSAL_LM, LLAMA_CONFIG, LLAMA_WEIGHTS, QK_NORM, SLIDING_TAIL, SPELLINGS

FAMILY = Family(
    "qwen3",
    config=[*LLAMA_CONFIG, *SLIDING_TAIL, *ATTENTION_BIAS, Const("qk_norm", "head")],
    weights=[*LLAMA_WEIGHTS, *QK_NORM],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Qwen3ForCausalLM"},
)

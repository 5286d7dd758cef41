"""Qwen3-30B-A3B and 235B-A22B: Qwen 3 with 128 fine-grained experts, none shared. arXiv 2505.09388."""

from ..entries import Const, Derived
from ..rules import Family
from .common import ATTENTION_BIAS, CAUSAL_LM, LAYER, LLAMA_CONFIG, LLAMA_WEIGHTS, QK_NORM, SPELLINGS
from .experts import LOSS_OUTPUT, QWEN_EXPERTS, experts, router

FAMILY = Family(
    "qwen3_moe",
    config=[
        *LLAMA_CONFIG,
        *ATTENTION_BIAS,
        Const("qk_norm", "head"),
        Derived(
            ("sliding_window", "use_sliding_window"),
            lambda native: {"sliding_window": native.sliding_window},
            lambda config: {
                "sliding_window": config.sliding_window,
                "use_sliding_window": config.sliding_window is not None,
            },
        ),
        *QWEN_EXPERTS,
    ],
    weights=[
        *LLAMA_WEIGHTS,
        *QK_NORM,
        *router(f"{LAYER}.mlp.gate"),
        *experts(f"{LAYER}.mlp.experts.{{e}}"),
    ],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Qwen3MoeForCausalLM"},
    inert=LOSS_OUTPUT,
    aliases={"num_local_experts": "num_experts"},
)

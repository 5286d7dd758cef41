"""Qwen1.5-MoE and Qwen2-57B-A14B: fine-grained experts beside a gated shared one. Qwen 2024, arXiv 2407.10671."""

from ..entries import Const, Field
from ..ops import weight
from ..rules import Family
from .common import CAUSAL_LM, LAYER, LLAMA_CONFIG, LLAMA_WEIGHTS, SLIDING_TAIL, SPELLINGS
from .experts import LOSS_OUTPUT, QWEN_EXPERTS, SHARED_WIDTH, experts, router, shared_experts

FAMILY = Family(
    "qwen2_moe",
    config=[
        *LLAMA_CONFIG,
        *SLIDING_TAIL,
        Field("qkv_bias", "attention_bias"),
        *QWEN_EXPERTS,
        *SHARED_WIDTH,
        Const("shared_expert_gate", True),
    ],
    weights=[
        *LLAMA_WEIGHTS,
        *router(f"{LAYER}.mlp.gate"),
        *experts(f"{LAYER}.mlp.experts.{{e}}"),
        *shared_experts(f"{LAYER}.mlp.shared_expert"),
        *weight(f"{LAYER}.mlp.shared_expert_gate"),
    ],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Qwen2MoeForCausalLM"},
    inert=LOSS_OUTPUT,
)

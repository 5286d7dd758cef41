"""OLMoE 1B-7B: 64 small experts, eight a token, and norms on all query and key heads together. arXiv 2409.02060."""

from ..entries import Const, Field
from ..rules import Family
from .common import (
    ATTENTION,
    ATTENTION_BIAS,
    CAUSAL_LM,
    HEAD,
    LAYER,
    PRE_NORMS,
    QK_NORM,
    RMS_NORM,
    ROPE,
    SIZES,
    SPELLINGS,
)
from .experts import AUXILIARY_LOSS, LOSS_OUTPUT, ONLY_EXPERTS, ROUTER_IN_MODEL_DTYPE, experts, router, routing

FAMILY = Family(
    "olmoe",
    # No head width: theirs is hidden / heads. No clip_qkv: they clip after the norms, we before.
    config=[
        *SIZES,
        *ROPE,
        *RMS_NORM,
        Field("hidden_act"),
        *ATTENTION_BIAS,
        Const("qk_norm", "projection"),
        *routing(),
        Field("norm_topk_prob"),
        *ONLY_EXPERTS,
        *AUXILIARY_LOSS,
        *ROUTER_IN_MODEL_DTYPE,
    ],
    weights=[
        *HEAD,
        *ATTENTION,
        *QK_NORM,
        *PRE_NORMS,
        *router(f"{LAYER}.mlp.gate"),
        *experts(f"{LAYER}.mlp.experts.{{e}}"),
    ],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "OlmoeForCausalLM"},
    inert=LOSS_OUTPUT,
)

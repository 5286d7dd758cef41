"""Hunyuan 3: Qwen 3's attention, and sigmoid-scored experts beside a shared one. Tencent 2026."""

from ..entries import Const, Field
from .common import ATTENTION_BIAS, LAYER, LLAMA_CONFIG, LLAMA_WEIGHTS, QK_NORM
from .decoders import decoder
from .experts import (
    ROUTER_STAYS_IN_FP32,
    always,
    experts,
    experts_where_listed,
    router,
    routing,
    selection_bias,
    shared_experts,
)

FAMILY = decoder(
    "hy_v3",
    "HYV3",
    [
        *LLAMA_CONFIG,
        *ATTENTION_BIAS,
        # Theirs is of dense and shared feed-forwards alone, ours of experts as well.
        always("mlp_bias", False),
        Const("qk_norm", "head"),
        *experts_where_listed(
            *routing(),
            Field("router_scaling_factor", "routed_scaling_factor"),
            Field("moe_intermediate_size"),
            Field("num_shared_experts"),
            *ROUTER_STAYS_IN_FP32,
            Const("router_score", "sigmoid"),
            Const("router_selection_bias", True),
            Const("norm_topk_prob", True),
        ),
    ],
    [
        *LLAMA_WEIGHTS,
        *QK_NORM,
        *router(f"{LAYER}.mlp.router.gate"),
        *experts(f"{LAYER}.mlp.experts.{{e}}"),
        *shared_experts(f"{LAYER}.mlp.shared_mlp"),
        *selection_bias(f"{LAYER}.mlp.expert_bias"),
    ],
    # In which dtype half-precision sums are made.
    inert=("enable_moe_fp32_combine",),
)

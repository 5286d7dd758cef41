"""DeepSeek-V2 and V2-Lite: latent attention, fine-grained experts beside shared ones. arXiv 2405.04434."""

from __future__ import annotations

from typing import Any

from ..entries import Const, Derived, Entry, Field, Values
from ..ops import both, weight
from ..rules import Family, Rule
from .common import (
    ATTENTION_BIAS,
    CAUSAL_LM,
    HEAD,
    LAYER,
    MLP,
    PRE_NORMS,
    RMS_NORM,
    ROPE,
    SIZES,
    SPELLINGS,
)
from .experts import (
    ROUTED,
    ROUTER_STAYS_IN_FP32,
    always,
    as_ours,
    as_theirs,
    expert_width,
    if_sparse,
    layer_kinds,
    routing,
    shared_experts,
)

ATTN = f"{LAYER}.self_attn"


def _dense_first(native: Any) -> Values:
    dense = min(native.first_k_dense_replace or 0, native.num_hidden_layers)
    return {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (native.num_hidden_layers - dense)}


def _first_sparse(config: Any) -> Values:
    kinds = layer_kinds(config)
    return {"first_k_dense_replace": next((i for i, kind in enumerate(kinds) if kind == "sparse"), len(kinds))}


# A group of all experts is no group.
def groups(native: Any) -> Values:
    grouped = native.n_group not in (None, 1)
    return {"n_group": native.n_group, "topk_group": native.topk_group} if grouped else {}


def groups_to_theirs(config: Any) -> Values:
    return {"n_group": config.n_group or 1, "topk_group": config.topk_group or 1}


LATENT_ATTENTION: list[Entry] = [
    *(Field(name) for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    *ATTENTION_BIAS,
    # Whatever rms_norm_eps says.
    Const("latent_norm_eps", 1e-6),
    # Follows from the widths above; transformers' class sets it to the rotated part of a head.
    as_theirs(("head_dim", "qk_head_dim"), lambda config: {}),
]
# Fine-grained experts of one width, and shared ones that are so many times as wide.
FINE_EXPERTS: list[Entry] = [
    *routing("n_routed_experts"),
    Field("routed_scaling_factor"),
    Derived(
        ("moe_intermediate_size", "n_shared_experts"),
        lambda native: {
            "moe_intermediate_size": native.moe_intermediate_size,
            "num_shared_experts": native.n_shared_experts,
        },
        lambda config: {
            "moe_intermediate_size": expert_width(config),
            "n_shared_experts": config.shared_width // expert_width(config),
        },
    ),
]


def experts_after_dense(*entries: Entry) -> list[Entry]:
    """Entries about experts of a family whose first layers are dense."""
    return [
        *if_sparse(_dense_first, [as_ours(_dense_first), *entries]),
        as_theirs(("first_k_dense_replace",), _first_sparse),
        always("moe_layer_freq", 1),
    ]


DEEPSEEK_CONFIG: list[Entry] = [
    *SIZES,
    *ROPE,
    *RMS_NORM,
    Field("hidden_act"),
    *LATENT_ATTENTION,
]
LATENT_WEIGHTS: list[Rule] = [
    *(rule for name in ("q_proj", "q_b_proj", "kv_b_proj") for rule in weight(f"{ATTN}.{name}")),
    *(rule for name in ("q_a_layernorm", "kv_a_layernorm") for rule in weight(f"{ATTN}.{name}")),
    *(rule for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") for rule in both(f"{ATTN}.{name}")),
]
FINE_WEIGHTS: list[Rule] = [
    *ROUTED,
    *shared_experts(f"{LAYER}.mlp.shared_experts"),
]
DEEPSEEK_WEIGHTS: list[Rule] = [
    *HEAD,
    *PRE_NORMS,
    *MLP,
    *LATENT_WEIGHTS,
    *FINE_WEIGHTS,
]


def _routing(native: Any) -> Values:
    return groups(native) if native.topk_method == "group_limited_greedy" else {}


def _routing_to_theirs(config: Any) -> Values:
    method = "greedy" if config.n_group is None else "group_limited_greedy"
    return {"topk_method": method, **groups_to_theirs(config)}


FAMILY = Family(
    "deepseek_v2",
    config=[
        *DEEPSEEK_CONFIG,
        Const("rope_interleaved", True),
        *experts_after_dense(
            *FINE_EXPERTS,
            *ROUTER_STAYS_IN_FP32,
            Const("norm_topk_prob", False),
            # transformers' class does not read it; DeepSeek's own code does.
            always("norm_topk_prob", False),
            always("scoring_func", "softmax"),
            always("topk_method", "greedy", "group_limited_greedy"),
            Derived(("topk_method", "n_group", "topk_group"), _routing, _routing_to_theirs),
        ),
    ],
    weights=DEEPSEEK_WEIGHTS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "DeepseekV2ForCausalLM"},
)

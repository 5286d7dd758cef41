"""Command A+: Command A with experts, the first layers dense. Cohere 2026."""

from __future__ import annotations

from typing import Any

from ..entries import Derived, Values
from ..errors import UnsupportedField
from .cohere import COHERE, COHERE_WEIGHTS
from .common import LAYER, LAYER_TYPES, full_layers
from .decoders import decoder
from .experts import LOSS_OUTPUT, MLP_LAYER_TYPES, ROUTED, ROUTER_IN_MODEL_DTYPE, routing, shared_experts


def _still(native: Any) -> Values:
    """Full layers know no position, but for dense ones where they are all full."""
    rotate = native.prefix_dense_sliding_window_pattern == 1
    kinds = native.mlp_layer_types
    return {"nope_layers": [i for i in full_layers(native) if not (rotate and kinds[i] == "dense")]}


def _still_to_theirs(config: Any) -> Values:
    kinds = config.mlp_layer_types or ["sparse"] * config.num_hidden_layers
    rotating = [
        kind == "dense" and config.layer_types[i] == "full_attention" and i not in (config.nope_layers or ())
        for i, kind in enumerate(kinds)
    ]
    return {"prefix_dense_sliding_window_pattern": 1 if any(rotating) or "dense" not in kinds else None}


def _widths(native: Any) -> Values:
    dense = native.prefix_dense_intermediate_size or native.intermediate_size
    return {"intermediate_size": dense, "moe_intermediate_size": native.intermediate_size}


def _widths_to_theirs(config: Any) -> Values:
    return {
        "intermediate_size": config.moe_intermediate_size or config.intermediate_size,
        "prefix_dense_intermediate_size": config.intermediate_size,
    }


def _shared(native: Any) -> Values:
    if native.num_shared_experts and native.shared_expert_combination_strategy != "sum":
        raise UnsupportedField(
            f"shared_expert_combination_strategy={native.shared_expert_combination_strategy!r} with num_shared_experts="
            f"{native.num_shared_experts}: shared and routed experts are added here, not averaged."
        )
    return {"num_shared_experts": native.num_shared_experts}


def _shared_to_theirs(config: Any) -> Values:
    count = config.shared_width // (config.moe_intermediate_size or config.intermediate_size)
    return {"num_shared_experts": count, "shared_expert_combination_strategy": "sum"}


def _norm(native: Any) -> Values:
    if native.rms_norm_eps is None:
        return {"norm_type": "layernorm", "norm_eps": native.layer_norm_eps}
    # LLaMA's norm, whose gain multiplies after the cast.
    return {"norm_type": "rmsnorm", "norm_eps": native.rms_norm_eps, "norm_weight_in_fp32": False}


def _norm_to_theirs(config: Any) -> Values:
    if config.norm_type == "layernorm":
        return {"layer_norm_eps": config.norm_eps, "rms_norm_eps": None}
    return {"rms_norm_eps": config.norm_eps}


def _score(native: Any) -> Values:
    normed = native.norm_topk_prob or native.expert_selection_fn == "softmax"
    return {"router_score": native.expert_selection_fn, "norm_topk_prob": normed}


FAMILY = decoder(
    "cohere2_moe",
    "Cohere2Moe",
    [
        *COHERE,
        Derived(("layer_norm_eps", "rms_norm_eps"), _norm, _norm_to_theirs),
        *LAYER_TYPES,
        *MLP_LAYER_TYPES,
        Derived(("prefix_dense_sliding_window_pattern",), _still, _still_to_theirs),
        Derived(("intermediate_size", "prefix_dense_intermediate_size"), _widths, _widths_to_theirs),
        *routing(),
        Derived(
            ("expert_selection_fn", "norm_topk_prob"),
            _score,
            lambda config: {"expert_selection_fn": config.router_score, "norm_topk_prob": config.norm_topk_prob},
        ),
        Derived(("num_shared_experts", "shared_expert_combination_strategy"), _shared, _shared_to_theirs),
        *ROUTER_IN_MODEL_DTYPE,
    ],
    [
        *COHERE_WEIGHTS,
        *ROUTED,
        *shared_experts(f"{LAYER}.mlp.shared_experts"),
    ],
    # In layer_types by the time we read it.
    inert=(*LOSS_OUTPUT, "sliding_window_pattern"),
)

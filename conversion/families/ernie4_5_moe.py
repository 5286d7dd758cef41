"""ERNIE 4.5 21B-A3B and 300B-A47B: ERNIE with experts that a bias picks, beside shared ones. Baidu 2025."""

from __future__ import annotations

from typing import Any

from ..entries import Const, Field, Values
from ..ops import row
from ..rules import Rule
from .common import LAYER, LLAMA_WEIGHTS
from .decoders import decoder
from .deepseek_v3 import BIAS
from .ernie4_5 import ERNIE
from .experts import (
    AUXILIARY_LOSS,
    LOSS_OUTPUT,
    ROUTED,
    ROUTER_STAYS_IN_FP32,
    always,
    as_ours,
    as_theirs,
    if_sparse,
    layer_kinds,
    shared_experts,
)


def _sparse_layers(native: Any) -> Values:
    last = native.moe_layer_end_index if native.moe_layer_end_index >= 0 else native.num_hidden_layers - 1
    sparse = [
        native.moe_layer_start_index <= i <= last and (i + 1) % native.moe_layer_interval == 0
        for i in range(native.num_hidden_layers)
    ]
    return {"mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse]}


def _sparse_layers_to_theirs(config: Any) -> Values:
    """Every layer from the first sparse one to the last."""
    kinds = layer_kinds(config)
    sparse = [i for i, kind in enumerate(kinds) if kind == "sparse"]
    return {
        "moe_layer_start_index": min(sparse, default=len(kinds)),
        "moe_layer_end_index": max(sparse, default=-1),
        "moe_layer_interval": 1,
    }


FAMILY = decoder(
    "ernie4_5_moe",
    "Ernie4_5_Moe",
    [
        *ERNIE,
        # Theirs is of attention, dense and shared feed-forwards, ours of experts as well.
        always("use_bias", False),
        *if_sparse(
            _sparse_layers,
            [
                as_ours(_sparse_layers),
                Field("moe_num_experts", "num_experts"),
                Field("moe_k", "num_experts_per_tok"),
                Field("moe_num_shared_experts", "num_shared_experts"),
                Field("moe_intermediate_size"),
                Const("router_selection_bias", True),
                Const("norm_topk_prob", True),
                # The least sum of weights to divide by, which those of a softmax never reach.
                as_theirs(("moe_norm_min",), lambda config: {}),
                *AUXILIARY_LOSS,
                *ROUTER_STAYS_IN_FP32,
            ],
        ),
        as_theirs(
            ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
            _sparse_layers_to_theirs,
        ),
    ],
    [
        *LLAMA_WEIGHTS,
        *ROUTED,
        *shared_experts(f"{LAYER}.mlp.shared_experts"),
        Rule((f"{LAYER}.mlp.moe_statics.e_score_correction_bias",), (BIAS,), row),
    ],
    inert=LOSS_OUTPUT,
)

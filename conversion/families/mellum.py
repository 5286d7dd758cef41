"""Mellum 2: Qwen 3's experts, with windows and a RoPE of their own by type of layer. JetBrains 2026."""

from ..entries import Const, Derived, Field
from .common import (
    ATTENTION_BIAS,
    HEAD_DIM,
    LLAMA_WEIGHTS,
    MASKED_LAYER_TYPES,
    QK_NORM,
    RMS_NORM,
    SIZES,
)
from .decoders import decoder
from .experts import AUXILIARY_LOSS, LOSS_OUTPUT, MLP_LAYER_TYPES, ROUTED, ROUTER_IN_MODEL_DTYPE, routing

FAMILY = decoder(
    "mellum",
    "Mellum",
    [
        *SIZES,
        *HEAD_DIM,
        *RMS_NORM,
        # Born with transformers 5: in one spelling.
        Derived(
            ("rope_parameters",),
            lambda native: {"rope_parameters": native.rope_parameters},
            lambda config: {"rope_parameters": config.rope_by_layer_type},
        ),
        Field("hidden_act"),
        *ATTENTION_BIAS,
        Const("qk_norm", "head"),
        *MASKED_LAYER_TYPES,
        *routing(),
        Field("norm_topk_prob"),
        Field("moe_intermediate_size"),
        *MLP_LAYER_TYPES,
        *AUXILIARY_LOSS,
        *ROUTER_IN_MODEL_DTYPE,
    ],
    [*LLAMA_WEIGHTS, *QK_NORM, *ROUTED],
    # Of a layer that looks further ahead, which transformers' class leaves out.
    inert=(*LOSS_OUTPUT, "num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
)

"""K-EXAONE 236B: EXAONE 4's windows with DeepSeek-V3's experts, and norms before each branch. LG 2026."""

from ..entries import Field
from .common import LAYER, LLAMA_WEIGHTS, QK_NORM
from .decoders import decoder
from .deepseek_v3 import SIGMOID_ROUTER
from .exaone4 import EXAONE4, PATTERN
from .experts import LOSS_OUTPUT, MLP_LAYER_TYPES, ROUTED, routing, selection_bias, shared_experts

FAMILY = decoder(
    "exaone_moe",
    "ExaoneMoe",
    [
        *EXAONE4,
        *routing(),
        Field("routed_scaling_factor"),
        Field("moe_intermediate_size"),
        Field("num_shared_experts"),
        *MLP_LAYER_TYPES,
        *SIGMOID_ROUTER,
    ],
    [
        *LLAMA_WEIGHTS,
        *QK_NORM,
        *ROUTED,
        *shared_experts(f"{LAYER}.mlp.shared_experts"),
        *selection_bias(f"{LAYER}.mlp.e_score_correction_bias"),
    ],
    # In mlp_layer_types by the time we read it.
    inert=(*PATTERN, *LOSS_OUTPUT, "first_k_dense_replace"),
)

"""MiniMax M2: Mixtral's names, sigmoid scores, part of each head rotated, norms on all query and key heads together.

MiniMax 2025.
"""

from ..entries import Const, Derived, Field
from .common import ATTENTION, HEAD, HEAD_DIM, PRE_NORMS, QK_NORM, RMS_NORM, SIZES, partial_rope
from .decoders import decoder
from .experts import AUXILIARY_LOSS, LOSS_OUTPUT, ONLY_EXPERTS, ROUTER_IN_MODEL_DTYPE, always, routing, selection_bias
from .mixtral import SPARSE, SPARSE_WEIGHTS

FAMILY = decoder(
    "minimax_m2",
    "MiniMaxM2",
    [
        *SIZES,
        *HEAD_DIM,
        *RMS_NORM,
        Derived(
            ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_dim"),
            lambda native: {"rope_parameters": native.rope_parameters},
            partial_rope("rope_theta", "partial_rotary_factor"),
        ),
        Field("hidden_act"),
        Const("qk_norm", "projection"),
        *routing("num_local_experts"),
        Const("router_score", "sigmoid"),
        Const("router_selection_bias", True),
        Const("norm_topk_prob", True),
        *ONLY_EXPERTS,
        *AUXILIARY_LOSS,
        *ROUTER_IN_MODEL_DTYPE,
        Field("router_jitter_noise"),
        # What MiniMax's own code reads besides, and transformers' class does in one way.
        always("use_qk_norm", True),
        always("qk_norm_type", "per_layer"),
        always("scoring_func", "sigmoid"),
        always("use_routing_bias", True),
        always("shared_intermediate_size", 0),
    ],
    [*HEAD, *ATTENTION, *QK_NORM, *PRE_NORMS, *SPARSE_WEIGHTS, *selection_bias(f"{SPARSE}.e_score_correction_bias")],
    inert=(
        *LOSS_OUTPUT,
        # All layers attend in full, and the layers that look further ahead are not in the release.
        *("attn_type_list", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    ),
)

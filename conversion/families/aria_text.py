"""Aria's text model: LLaMA with experts stored as [in, out], beside shared ones. arXiv 2410.05993."""

from ..entries import Const, Field
from ..ops import transpose_experts
from .common import ATTENTION, ATTENTION_BIAS, HEAD, LAYER, LLAMA_CONFIG, PRE_NORMS
from .decoders import decoder
from .experts import ONLY_EXPERTS, ROUTER_IN_MODEL_DTYPE, always, packed_experts, router, shared_experts

EXPERTS = f"{LAYER}.mlp.experts"

FAMILY = decoder(
    "aria_text",
    "AriaText",
    [
        *LLAMA_CONFIG,
        *ATTENTION_BIAS,
        # Of the shared experts alone; the routed ones have silu and no bias.
        always("mlp_bias", False),
        always("hidden_act", "silu"),
        Field("moe_num_experts", "num_experts"),
        Field("moe_topk", "num_experts_per_tok"),
        Field("moe_num_shared_experts", "num_shared_experts"),
        # Softmax over the picked logits alone.
        Const("norm_topk_prob", True),
        *ONLY_EXPERTS,
        *ROUTER_IN_MODEL_DTYPE,
    ],
    [
        *HEAD,
        *ATTENTION,
        *PRE_NORMS,
        *router(f"{LAYER}.mlp.router"),
        *packed_experts(
            f"{EXPERTS}.fc1.weight", f"{EXPERTS}.fc2.weight", transpose_experts, transpose_experts, ("", ".weight")
        ),
        *shared_experts(f"{LAYER}.mlp.shared_experts"),
    ],
    # Of the losses of Rhymes' own training code.
    inert=("moe_z_loss_coeff", "moe_aux_loss_coeff"),
)

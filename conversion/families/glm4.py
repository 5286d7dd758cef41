"""GLM-4-0414 and GLM-Z1, dense: GLM with norms on both sides of a branch. Zhipu 2025, arXiv 2406.12793."""

from ..entries import Const
from ..ops import weight
from .common import LAYER
from .decoders import CLASSIFIERS, decoder
from .glm import GLM, GLM_WEIGHTS

FAMILY = decoder(
    "glm4",
    "Glm4",
    [*GLM, Const("norm_placement", "sandwich")],
    [
        *GLM_WEIGHTS,
        *weight(f"{LAYER}.input_layernorm", f"{LAYER}.attn_norm.pre"),
        *weight(f"{LAYER}.post_self_attn_layernorm", f"{LAYER}.attn_norm.post"),
        *weight(f"{LAYER}.post_attention_layernorm", f"{LAYER}.mlp_norm.pre"),
        *weight(f"{LAYER}.post_mlp_layernorm", f"{LAYER}.mlp_norm.post"),
        *weight("model.norm", "model.norm"),
    ],
    *CLASSIFIERS,
)

"""VaultGemma: Gemma 2 with norms only before each branch, trained with differential privacy. arXiv 2510.15001."""

from ..entries import Field
from ..ops import weight
from .common import ATTENTION, HEAD, LAYER, MLP, ROPE
from .decoders import decoder
from .gemma2 import GEMMA2

FAMILY = decoder(
    "vaultgemma",
    "VaultGemma",
    [*GEMMA2, *ROPE, Field("attn_logit_softcapping")],
    [
        *HEAD,
        *ATTENTION,
        *MLP,
        *weight(f"{LAYER}.input_layernorm", f"{LAYER}.attn_norm.pre"),
        *weight(f"{LAYER}.pre_feedforward_layernorm", f"{LAYER}.mlp_norm.pre"),
        *weight("model.norm", "model.norm"),
    ],
    inert=("cache_implementation",),
)

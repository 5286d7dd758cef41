"""HyperCLOVA X SEED: Granite with norms after branches as well, whose logits are multiplied. NAVER 2025."""

from typing import Any

from ..entries import Derived, Field, Values
from ..ops import weight
from .common import ATTENTION_BIAS, LAYER, LLAMA_CONFIG, LLAMA_WEIGHTS, MLP_BIAS
from .decoders import decoder
from .granite import INNER_MULTIPLIERS


def _norms(native: Any) -> Values:
    return {"norm_placement": "sandwich" if native.use_post_norm else "pre"}


FAMILY = decoder(
    "hyperclovax",
    "HyperCLOVAX",
    [
        *LLAMA_CONFIG,
        *ATTENTION_BIAS,
        *MLP_BIAS,
        *INNER_MULTIPLIERS,
        Field("logits_scaling", "logit_scale"),
        Derived(("use_post_norm",), _norms, lambda config: {"use_post_norm": config.norm_placement == "sandwich"}),
    ],
    [
        *LLAMA_WEIGHTS,
        *weight(f"{LAYER}.post_norm1", f"{LAYER}.attn_norm.post"),
        *weight(f"{LAYER}.post_norm2", f"{LAYER}.mlp_norm.post"),
    ],
)

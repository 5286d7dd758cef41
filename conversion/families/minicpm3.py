"""MiniCPM3-4B: latent attention in a dense LLaMA, with factors on embeddings, branches and logits. arXiv 2404.06395."""

from math import sqrt
from typing import Any

from ..entries import Derived, Field, Values
from .common import HEAD, MLP, MLP_BIAS, PRE_NORMS, RMS_NORM, ROPE, SIZES
from .decoders import decoder
from .deepseek_v2 import LATENT_ATTENTION, LATENT_WEIGHTS
from .encoders import SEQUENCE


def _scales(native: Any) -> Values:
    return {
        "residual_scale": native.scale_depth / sqrt(native.num_hidden_layers),
        "logit_scale": native.dim_model_base / native.hidden_size,
    }


def _scales_to_theirs(config: Any) -> Values:
    depth, base = config.residual_scale * sqrt(config.num_hidden_layers), config.logit_scale * config.hidden_size
    # Rounded, so that a division and its inverse give back what was written.
    return {"scale_depth": float(f"{depth:.12g}"), "dim_model_base": round(base)}


FAMILY = decoder(
    "minicpm3",
    "MiniCPM3",
    [
        *SIZES,
        *ROPE,
        *RMS_NORM,
        *LATENT_ATTENTION,
        *MLP_BIAS,
        Field("hidden_act"),
        Field("scale_emb", "embedding_scale"),
        Derived(("scale_depth", "dim_model_base"), _scales, _scales_to_theirs),
    ],
    [*HEAD, *PRE_NORMS, *MLP, *LATENT_WEIGHTS],
    SEQUENCE,
)

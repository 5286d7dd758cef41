"""Youtu-LLM-2B: DeepSeek's latent attention in a dense LLaMA. arXiv 2512.24618."""

from ..entries import Field
from .common import HEAD, MLP, PRE_NORMS, RMS_NORM, ROPE, SIZES
from .decoders import decoder
from .deepseek_v2 import LATENT_ATTENTION, LATENT_WEIGHTS

FAMILY = decoder(
    "youtu",
    "Youtu",
    [*SIZES, *ROPE, *RMS_NORM, *LATENT_ATTENTION, Field("hidden_act"), Field("rope_interleave", "rope_interleaved")],
    [*HEAD, *PRE_NORMS, *MLP, *LATENT_WEIGHTS],
    # Of fresh weights.
    inert=("embedding_initializer_range",),
)

"""AFM-4.5B: LLaMA with a plain MLP and squared ReLU. Arcee 2025."""

from ..entries import Const
from .common import ATTENTION_BIAS, LLAMA_CONFIG, LLAMA_WEIGHTS, MLP_BIAS
from .decoders import ALL_HEADS, decoder

FAMILY = decoder(
    "arcee",
    "Arcee",
    [*LLAMA_CONFIG, *ATTENTION_BIAS, *MLP_BIAS, Const("ffn_type", "mlp")],
    LLAMA_WEIGHTS,
    *ALL_HEADS,
)

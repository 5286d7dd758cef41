"""ERNIE 4.5 0.3B, dense: LLaMA with interleaved RoPE and one flag for all biases. Baidu 2025."""

from ..entries import Const, Entry, Field
from .common import HEAD_DIM, LLAMA_WEIGHTS, RMS_NORM, ROPE, SIZES_ALONE
from .decoders import decoder

ERNIE: list[Entry] = [
    *SIZES_ALONE,
    *HEAD_DIM,
    *ROPE,
    *RMS_NORM,
    Field("hidden_act"),
    Const("rope_interleaved", True),
]

FAMILY = decoder(
    "ernie4_5",
    "Ernie4_5",
    [*ERNIE, Field("use_bias", "attention_bias", "attention_output_bias", "ffn_bias")],
    LLAMA_WEIGHTS,
)

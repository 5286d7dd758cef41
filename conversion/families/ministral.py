"""LLaMA with a window on the layers that a list names: Ministral 8B (Mistral AI 2024) and CWM (arXiv 2510.02387)."""

from .common import LLAMA_CONFIG, LLAMA_WEIGHTS, MASKED_LAYER_TYPES, MLP_BIAS
from .decoders import ALL_HEADS, decoder

WINDOWED = [*LLAMA_CONFIG, *MASKED_LAYER_TYPES]

FAMILIES = (
    decoder("ministral", "Ministral", WINDOWED, LLAMA_WEIGHTS, *ALL_HEADS),
    decoder("cwm", "Cwm", [*WINDOWED, *MLP_BIAS], LLAMA_WEIGHTS),
)

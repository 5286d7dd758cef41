"""OLMo 3: OLMo 2 with windows on three layers of four, and RoPE scaled on the full ones alone. Ai2 2025."""

from .common import MASKED_LAYER_TYPES, ropes_by_layer_type
from .decoders import decoder
from .encoders import SEQUENCE
from .olmo2 import OLMO2, OLMO2_WEIGHTS

FAMILY = decoder("olmo3", "Olmo3", [*OLMO2, *MASKED_LAYER_TYPES, ropes_by_layer_type()], OLMO2_WEIGHTS, SEQUENCE)

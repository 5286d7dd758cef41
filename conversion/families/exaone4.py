"""EXAONE 4.0: norms only after each branch and on each query and key head; where some layers have a window, the others
have no position. arXiv 2507.11407."""

from typing import Any

from ..entries import Const, Derived, Entry, Values
from .common import LLAMA_CONFIG, full_layers, windows
from .decoders import ALL_HEADS, decoder
from .olmo2 import OLMO2_WEIGHTS


def _layers(native: Any) -> Values:
    return {**windows(native), "nope_layers": [] if native.sliding_window is None else full_layers(native)}


def _layers_to_theirs(config: Any) -> Values:
    return {"layer_types": config.layer_types, "sliding_window": config.sliding_window}


EXAONE4: list[Entry] = [
    *LLAMA_CONFIG,
    Const("qk_norm", "head"),
    Derived(("layer_types", "sliding_window"), _layers, _layers_to_theirs),
]
# In layer_types by the time we read it.
PATTERN = ("sliding_window_pattern",)

FAMILY = decoder(
    "exaone4",
    "Exaone4",
    [*EXAONE4, Const("norm_placement", "branch")],
    OLMO2_WEIGHTS,
    *ALL_HEADS,
    inert=PATTERN,
)

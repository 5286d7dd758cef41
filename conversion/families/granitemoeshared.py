"""Granite 4 and 3 MoE with a feed-forward that every token passes beside the experts. IBM 2025.

With Granite's windows as well: `granitemoe_swa` (IBM 2026).
"""

from typing import Any

from ..entries import Derived, Entry, Values
from ..ops import rename, split_rows, weight
from ..rules import Rule
from .common import LAYER, ROPE, SINKS
from .decoders import decoder
from .experts import LOSS_OUTPUT, packed_experts, router
from .granite_swa import WINDOWED
from .granitemoe import FRAME, GRANITE_MOE, SPARSE, SPARSE_WEIGHTS


def _shared(native: Any) -> Values:
    return {"shared_expert_intermediate_size": native.shared_intermediate_size or None}


SHARED: list[Entry] = [
    Derived(("shared_intermediate_size",), _shared, lambda config: {"shared_intermediate_size": config.shared_width})
]
OURS, HALVES = f"{LAYER}.mlp.shared_experts", split_rows(lambda config: [config.shared_width] * 2)
SHARED_WEIGHTS: list[Rule] = [
    *weight(f"{LAYER}.shared_mlp.input_linear", [f"{OURS}.gate_proj", f"{OURS}.up_proj"], HALVES),
    *weight(f"{LAYER}.shared_mlp.output_linear", f"{OURS}.down_proj"),
]
CONFIG = [*GRANITE_MOE, *SHARED]

FAMILIES = (
    decoder(
        "granitemoeshared",
        "GraniteMoeShared",
        CONFIG,
        [*FRAME, *SPARSE_WEIGHTS, *SHARED_WEIGHTS],
        inert=LOSS_OUTPUT,
    ),
    decoder(
        "granitemoe_swa",
        "GraniteMoeSWA",
        [*(entry for entry in CONFIG if entry not in ROPE), *WINDOWED],
        [
            *FRAME,
            *SINKS,
            *router(f"{SPARSE}.router"),
            *packed_experts(
                f"{SPARSE}.experts.gate_up_proj", f"{SPARSE}.experts.down_proj", rename, rename, ("", ".weight")
            ),
            *SHARED_WEIGHTS,
        ],
        inert=LOSS_OUTPUT,
    ),
)

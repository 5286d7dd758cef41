"""Granite with windows: attention sinks, and by layer a window and a base of RoPE, or no position. IBM 2026."""

from __future__ import annotations

from typing import Any

from ..entries import Const, Derived, Entry, Values
from ..errors import UnsupportedField
from .common import ATTENTION_BIAS, LLAMA_CONFIG, LLAMA_WEIGHTS, MLP_BIAS, ROPE, SINKS, windows
from .decoders import decoder
from .granite import MULTIPLIERS

_ROPE = ROPE[0]


def _layers(native: Any) -> Values:
    """A base of 0 means that the layer does not rotate; the others' is one for each type of layer."""
    by_type: dict[str, float] = {}
    for kind, theta in zip(native.layer_types, native.layer_rope_theta, strict=True):
        if theta and by_type.setdefault(kind, theta) != theta:
            raise UnsupportedField(
                f"layer_rope_theta={native.layer_rope_theta}: layers of one type have to have one base here, or none."
            )
    shared = _ROPE.to_ours(native)["rope_parameters"]
    ropes = {kind: {**shared, "rope_theta": theta} for kind, theta in by_type.items()}
    # One base for all is said as one.
    same = len(set(by_type.values())) <= 1
    return {
        **windows(native),
        "nope_layers": [i for i, theta in enumerate(native.layer_rope_theta) if not theta],
        "rope_parameters": next(iter(ropes.values()), shared) if same else ropes,
    }


def _layers_to_theirs(config: Any) -> Values:
    by_type = config.rope_by_layer_type
    first: Values = next((parameters for parameters in by_type.values() if parameters), {})
    still = set(config.nope_layers or ())
    return {
        "layer_types": config.layer_types,
        "sliding_window": config.sliding_window,
        "rope_parameters": first,
        "rope_theta": first.get("rope_theta"),
        "layer_rope_theta": [
            0 if i in still else (by_type.get(kind) or first).get("rope_theta")
            for i, kind in enumerate(config.layer_types)
        ],
    }


WINDOWED: list[Entry] = [
    Const("attention_sinks", True),
    Derived(("layer_types", "sliding_window", "layer_rope_theta", *_ROPE.theirs), _layers, _layers_to_theirs),
]
_LLAMA = [entry for entry in LLAMA_CONFIG if entry not in ROPE]

FAMILY = decoder(
    "granite_swa",
    "GraniteSWA",
    [*_LLAMA, *ATTENTION_BIAS, *MLP_BIAS, *MULTIPLIERS, *WINDOWED],
    [*LLAMA_WEIGHTS, *SINKS],
)

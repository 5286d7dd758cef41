"""What a config may say before anything is built from it.

A few characters of JSON can ask for more layers, labels or digits than any machine holds. A checkpoint's tensors are
there, and no honest config counts more than they can hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

# Names of fields that count layers, heads, experts, labels and the like: none is more than the tensors, or than rows of
# one of them. Positions, and what generation counts, are no part of a model.
COUNT = re.compile(r"(num|n)_(?!.*(positions|ctx|beam|return_sequences))\w+|(encoder|decoder)_(layers|attention_heads)")
# A count up to this costs nothing, whatever the tensors are.
HARMLESS = 64
DEEPEST = 50
LARGEST = 2**63 - 1


def check_config(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """
    Args:
        path: what the config is of, for messages.
        config: of a model, as read from JSON.
        shapes: of the tensors that are there.

    Raises:
        CheckpointError: naming the field that is of a type that no config has there, is no number, or counts more than
            the tensors can hold.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: 'architectures' in its config is {short(names)}, not a list of class names.")
    for field, kind in {"model_type": str, "quantization_config": dict}.items():
        if not isinstance(config.get(field), kind | None):
            raise CheckpointError(f"{path}: {field!r} in its config is {short(config[field])}, not a {kind.__name__}.")
    origin = config.get("converted_from")
    if origin is not None and not (
        isinstance(origin, dict) and isinstance(origin.get("family"), str) and isinstance(origin.get("config"), dict)
    ):
        raise CheckpointError(f"{path}: 'converted_from' in its config is {short(origin)}, with no family and config.")
    for field in ("dtype", "torch_dtype"):
        check_dtype(path, field, config.get(field))
    longest = max((size for shape in shapes.values() for size in shape), default=0)
    most = max(len(shapes), longest, HARMLESS)
    for where, value in numbers(config, path):
        if (isinstance(value, int) and abs(value) > LARGEST) or not math.isfinite(value):
            raise CheckpointError(
                f"{path}: {where!r} in its config is {short(value)}, which no model can be made with."
            )
        if COUNT.fullmatch(where.rpartition(".")[2]) and value > most:
            raise CheckpointError(
                f"{path}: {where!r} in its config is {short(value)}, but there are {len(shapes)} tensors, of at most "
                f"{longest} rows or columns. Config and weights are not of one model."
            )


def check_dtype(path: Path, field: str, value: object) -> None:
    import torch

    known = isinstance(value, str) and getattr(torch, value.removeprefix("torch."), None)
    floats = isinstance(known, torch.dtype) and known.is_floating_point
    if value not in (None, "auto") and not floats:
        raise CheckpointError(
            f"{path}: {field!r} in its config is {short(value)}, which is no floating-point dtype. Write the one that "
            "the weights have, or remove it."
        )


def numbers(config: Mapping[str, Any], path: Path) -> Iterator[tuple[str, int | float]]:
    """Every number of a config, with the names of the fields that lead to it.

    Raises:
        CheckpointError: it is nested too deep.
    """
    left: list[tuple[str, Any, int]] = [("", config, 0)]
    while left:
        where, value, depth = left.pop()
        if depth > DEEPEST:
            raise CheckpointError(f"{path}: {short(where)!s} in its config is nested deeper than {DEEPEST} levels.")
        if isinstance(value, Mapping):
            left += [(f"{where}.{name}" if where else str(name), part, depth + 1) for name, part in value.items()]
        elif isinstance(value, list):
            left += [(where, part, depth + 1) for part in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield where, value


def short(value: object) -> str:
    """A value as a message shows it."""
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > LARGEST else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"

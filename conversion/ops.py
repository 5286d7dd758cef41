"""Operations that only move numbers. Each has an exact inverse, so that bytes survive a round trip.

Legend: `H` query heads, `K` key/value heads, `D` channels of a head, `…` the rest of a weight or nothing of a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .rules import Op, Rule

if TYPE_CHECKING:
    from torch import Tensor

Sizes = Callable[[Any], Sequence[int]]


def chain(*ops: Op) -> Op:
    """Apply operations one after the other, and their inverses in the opposite order."""

    def to_ours(tensors: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        for op in ops:
            tensors = op.to_ours(tensors, config)
        return tensors

    def to_theirs(tensors: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        for op in reversed(ops):
            tensors = op.to_theirs(tensors, config)
        return tensors

    return Op(" + ".join(op.name for op in ops), to_ours, to_theirs)


def split_rows(sizes: Sizes) -> Op:
    """One tensor of theirs holds several of ours, stacked along the rows."""
    return Op(
        "split rows",
        to_ours=lambda tensors, config: tensors[0].split(list(sizes(config))),
        to_theirs=lambda tensors, config: [_torch().cat(list(tensors))],
    )


def _torch() -> Any:
    import torch

    return torch


def _qkv_rows(config: Any) -> list[int]:
    keys = config.num_key_value_heads * config.head_dim
    return [config.num_attention_heads * config.head_dim, keys, keys]


def _split_heads(tensors: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
    (fused,) = tensors
    grouped = fused.unflatten(0, (config.num_key_value_heads, -1, config.head_dim))  # (K, H/K + 2, D, …)
    return [part.flatten(0, 2) for part in (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])]


def _join_heads(tensors: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
    parts = [part.unflatten(0, (config.num_key_value_heads, -1, config.head_dim)) for part in tensors]
    return [_torch().cat(parts, dim=1).flatten(0, 2)]


rename = Op("rename", to_ours=lambda tensors, config: tensors, to_theirs=lambda tensors, config: tensors)
# A bias has one axis and stays as it is.
transpose = Op("transpose", to_ours=lambda t, config: [t[0].t()], to_theirs=lambda t, config: [t[0].t()])
qkv_rows = split_rows(_qkv_rows)  # q | k | v
halves = split_rows(lambda config: [config.intermediate_size] * 2)  # gate | up
# Key/value head by key/value head: the queries that it serves, then its key, then its value.
qkv_heads = Op("split heads", _split_heads, _join_heads)
# A vector that is stored as a row, (1, N).
row = Op("row", to_ours=lambda t, config: [t[0][0]], to_theirs=lambda t, config: [t[0][None]])
# One tensor of ours for several of theirs.
stack = Op(
    "stack",
    to_ours=lambda tensors, config: [_torch().stack(list(tensors))],
    to_theirs=lambda tensors, config: tensors[0].unbind(0),
)


def flip(op: Op) -> Op:
    """The inverse of an operation: what it does towards their tensors, it now does towards ours."""
    return Op(f"{op.name}, back", op.to_theirs, op.to_ours)


def _join_experts(tensors: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
    half = len(tensors) // 2
    # An expert's two halves side by side, so that one copy makes the whole.
    pairs = [part for pair in zip(tensors[:half], tensors[half:], strict=True) for part in pair]
    return [_torch().stack(pairs).unflatten(0, (half, 2)).flatten(1, 2)]


def _split_experts(tensors: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
    return [expert for half in tensors[0].chunk(2, dim=1) for expert in half.unbind(0)]


# Experts, `E` of them with inner width `I`. All gates, then all ups, each (I, …), into one (E, 2 I, …), gates first.
join_experts = Op("join experts", _join_experts, _split_experts)
# Rows (E, 2 I, …) in which gate and up alternate, into gates first.
alternating_rows = Op(
    "alternating rows",
    to_ours=lambda tensors, config: [tensors[0].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)],
    to_theirs=lambda tensors, config: [tensors[0].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)],
)
transpose_experts = Op("transpose experts", lambda tensors, config: [tensors[0].mT], lambda t, config: [t[0].mT])


def weight(theirs: str | Sequence[str], ours: str | Sequence[str] | None = None, op: Op = rename) -> list[Rule]:
    """The rule for `.weight` of modules; None: ours have the same names."""
    return [_rule(theirs, ours, op, ".weight")]


def both(theirs: str | Sequence[str], ours: str | Sequence[str] | None = None, op: Op = rename) -> list[Rule]:
    """The rules for `.weight` and `.bias` of modules; each applies where our module has it. None: the same names."""
    return [_rule(theirs, ours, op, suffix) for suffix in (".weight", ".bias")]


def only(when: Callable[[Any], bool], rules: Sequence[Rule]) -> list[Rule]:
    """The rules of one variant of a family; conditions that they have already hold as well."""

    def also(own: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return lambda config: when(config) and own(config)

    return [replace(rule, when=also(rule.when)) for rule in rules]


def _rule(theirs: str | Sequence[str], ours: str | Sequence[str] | None, op: Op, suffix: str) -> Rule:
    def names(modules: str | Sequence[str]) -> tuple[str, ...]:
        return tuple(name + suffix for name in ([modules] if isinstance(modules, str) else modules))

    return Rule(names(theirs), names(theirs if ours is None else ours), op)

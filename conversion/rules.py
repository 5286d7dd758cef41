"""What a family is made of: data that relate config fields by entries and tensor names by rules.

A rule relates names through an operation that only moves numbers, so that a round trip gives back the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .entries import Entry, Values

if TYPE_CHECKING:
    from torch import Tensor

    from hf_llmarch.model.configuration_llmarch import LlmArchConfig

Shape = tuple[int, ...]

Side = Literal["ours", "theirs"]

Move = Callable[[Sequence["Tensor"], "LlmArchConfig"], Sequence["Tensor"]]


@dataclass(frozen=True)
class Op:
    """Moves numbers from their tensors to ours and back; both functions also run on meta tensors, to prove shapes."""

    name: str
    to_ours: Move
    to_theirs: Move


@dataclass(frozen=True)
class Rule:
    """`theirs` become `ours` through `op`.

    Names are templates: `{i}` counts layers, `{s}` those of an encoder-decoder's encoder, `{e}` experts, `{h}` query
    heads, `{k}` key/value heads. A variable on both sides makes one step for each of its values; a variable on one side
    only gathers its values into one step (experts that are packed into one tensor).
    `when` says for which of our configs the rule applies, where variants of a family make a tensor of ours differently.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    op: Op
    when: Callable[[LlmArchConfig], bool] = lambda config: True


@dataclass(frozen=True)
class Drop:
    """A tensor that may be on disk and is not needed, and why that is safe.

    `keep`: it is of use to others, so it is kept aside and goes back on export.
    """

    theirs: str
    reason: str
    keep: bool = False


@dataclass(frozen=True)
class Family:
    """All that is known about the checkpoints of one `model_type`.

    Attributes:
        config: how its fields relate to ours, see `relation.Entry`.
        weights: how its tensors relate to ours. A rule applies where our model has the tensors it makes.
        drops: tensors of old checkpoints that carry no information.
        spellings: ways in which checkpoints on disk begin their names otherwise than the rules, as {rules': disk's};
            or end them otherwise, where a key begins with a dot.
        architectures: our class to the name of theirs. A checkpoint that names no class is read as the one that its
            tensors fit best.
        also: further classes of theirs that one of ours stands for, as {theirs: ours}.
        encoder: of a family of encoder-decoders, their class of the encoder alone; ours is the base model for it, too.
        variants: by class of ours, switches that only the tensors on disk tell, in the order in which they are tried.
        copies: tensors that may be on disk again under other names, as {rules': the others}.
        aliases: config keys of old releases, as {old: today's}.
        inert: config keys that transformers' code reads and that do not change what the family's models compute; those
            that it never reads are found by `reading.keys_read`.
        native: what reads their config.json, where transformers has no class for it, or one that knows fewer names.
        container: turns an exported folder into the family's own kind of file.
        layers_ahead: config key that counts layers beyond the last, which predict tokens further ahead; drops number
            them with `{m}`.
    """

    name: str
    config: Sequence[Entry]
    weights: Sequence[Rule]
    drops: Sequence[Drop] = ()
    spellings: Sequence[Mapping[str, str]] = ({},)
    architectures: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    encoder: str | None = None
    variants: Mapping[str, Sequence[Values]] = field(default_factory=dict)
    copies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    inert: Collection[str] = ()
    layers_ahead: str | None = None
    native: Callable[..., Any] | None = None
    container: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Step:
    """One application of a rule: full names on both sides."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    op: Op

    def run(self, read: Callable[[str], Tensor], config: LlmArchConfig, to: Side) -> Iterator[tuple[str, Tensor]]:
        source, target, move = {
            "ours": (self.theirs, self.ours, self.op.to_ours),
            "theirs": (self.ours, self.theirs, self.op.to_theirs),
        }[to]
        tensors = move([read(name) for name in source], config)
        yield from zip(target, (tensor.contiguous() for tensor in tensors), strict=True)

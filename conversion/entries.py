"""How one field of a family's config relates to ours: the rows of which a family's `config` is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hf_llmarch.model.configuration_llmarch import LlmArchConfig

Values = dict[str, Any]


class Entry(Protocol):
    """One relation between config fields. `theirs` names the fields of theirs that it accounts for."""

    @property
    def theirs(self) -> tuple[str, ...]: ...
    def to_ours(self, native: PreTrainedConfig) -> Values: ...
    def to_theirs(self, config: LlmArchConfig) -> Values: ...


class Field:
    """A value that keeps its meaning under another name. One field of theirs may set several fields of ours."""

    def __init__(self, theirs: str, *ours: str) -> None:
        self.name, self.ours = theirs, ours or (theirs,)
        self.theirs = (theirs,)

    def to_ours(self, native: PreTrainedConfig) -> Values:
        return dict.fromkeys(self.ours, getattr(native, self.name, None))

    def to_theirs(self, config: LlmArchConfig) -> Values:
        return {self.name: getattr(config, self.ours[0])}


class Const:
    """A value that all models of the family have, and that their config.json does not state."""

    theirs: tuple[str, ...] = ()

    def __init__(self, ours: str, value: Any) -> None:
        self.ours, self.value = ours, value

    def to_ours(self, native: PreTrainedConfig) -> Values:
        return {self.ours: self.value}

    def to_theirs(self, config: LlmArchConfig) -> Values:
        return {}


@dataclass(frozen=True)
class Derived:
    """Fields whose values are computed, or depend on each other, by a function for each direction."""

    theirs: tuple[str, ...]
    to_ours: Callable[[Any], Values]
    to_theirs: Callable[[Any], Values]

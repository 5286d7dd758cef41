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
    """A value that keeps its meaning and changes its name; several names of ours where one of theirs rules them all."""

    def __init__(self, theirs: str, *ours: str) -> None:
        self.name, self.ours = theirs, ours or (theirs,)
        self.theirs = (theirs,)

    def to_ours(self, native: PreTrainedConfig) -> Values:
        return dict.fromkeys(self.ours, getattr(native, self.name, None))

    def to_theirs(self, config: LlmArchConfig) -> Values:
        return {self.name: getattr(config, self.ours[0])}


class Const:
    """What the family always does, and never says."""

    theirs: tuple[str, ...] = ()

    def __init__(self, ours: str, value: Any) -> None:
        self.ours, self.value = ours, value

    def to_ours(self, native: PreTrainedConfig) -> Values:
        return {self.ours: self.value}

    def to_theirs(self, config: LlmArchConfig) -> Values:
        return {}


@dataclass(frozen=True)
class Derived:
    """For the few fields that need arithmetic or depend on each other."""

    theirs: tuple[str, ...]
    to_ours: Callable[[Any], Values]
    to_theirs: Callable[[Any], Values]

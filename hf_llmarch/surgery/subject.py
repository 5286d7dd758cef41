"""What an operation works on: a config, and tensors that are made when they are read.

An operation is a pure function from a `Subject` to a `Change`. It says with `Move`s which tensors become which others;
nothing is read or computed until somebody asks for a tensor of the result. So a chain of operations on a folder needs
the memory of a few tensors, and the same functions serve a model in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from hf_llmarch.conversion.errors import ConversionError, some
from hf_llmarch.conversion.plans import skeleton_of
from hf_llmarch.conversion.sources.base import TensorInfo
from hf_llmarch.model import modeling_llmarch
from hf_llmarch.model.configuration_llmarch import LlmArchConfig
from hf_llmarch.model.modeling_llmarch import LlmArchPreTrainedModel

# A tensor of a layer, or of a table that belongs to one: what stands before the index, the index, what comes after.
OF_LAYER = re.compile(r"^(.*\b(?:layers|relative_attention_bias)\.)(\d+)(\..*)$")


class SurgeryError(ConversionError):
    """An operation that cannot be done on this model; the message names the field or the tensor that forbids it."""


@dataclass(frozen=True)
class Move:
    """Tensors that are read together, those that they become, and how.

    `how` is also called with tensors on the meta device, which have a shape and no numbers: the shapes of the result
    are known before the first tensor is read.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    how: Callable[..., Sequence[Tensor]]


def each(name: str, how: Callable[[Tensor], Tensor], *, to: str | None = None) -> Move:
    """One tensor that becomes one, under its own name unless another is given."""
    return Move((name,), (to or name,), lambda tensor: [how(tensor)])


def drop(name: str) -> Move:
    """A tensor that the result does not have."""
    return Move((name,), (), lambda tensor: [])


def new(name: str, make: Callable[[], Tensor]) -> Move:
    """A tensor that the result has besides."""
    return Move((), (name,), lambda: [make()])


class Weights(Mapping[str, Tensor]):
    """Tensors by name: shapes and dtypes at once, numbers when they are read.

    Attributes:
        infos: name -> shape and dtype.
        origins: name -> the tensors, of the model that the chain began with, which it is made of.
    """

    def __init__(
        self,
        infos: Mapping[str, TensorInfo],
        read: Callable[[str], Tensor],
        origins: Mapping[str, frozenset[str]] | None = None,
    ):
        self.infos, self.read = dict(infos), read
        self.origins = {name: frozenset((name,)) for name in infos} if origins is None else dict(origins)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.infos:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def __contains__(self, name: object) -> bool:
        return name in self.infos

    def moved(self, moves: Iterable[Move]) -> Weights:
        """The tensors after these moves; those that no move reads stay as they are.

        Raises:
            SurgeryError: two moves make one tensor, or one reads what is not there.
        """
        listed = list(moves)
        reading: dict[str, list[Move]] = {}
        for move in listed:
            for name in move.sources or ("",):
                reading.setdefault(name, []).append(move)
        absent = [name for name in reading if name and name not in self.infos]
        if absent:
            raise SurgeryError(f"The model has no {some(absent)}.")
        infos: dict[str, TensorInfo] = {}
        made_by: dict[str, Move] = {}
        origins: dict[str, frozenset[str]] = {}

        def place(move: Move) -> None:
            if any(made_by.get(name) is move for name in move.targets):
                return
            headers = [
                torch.empty(self.infos[name].shape, dtype=self.infos[name].dtype, device="meta")
                for name in move.sources
            ]
            for name, made in zip(move.targets, move.how(*headers), strict=True):
                if name in infos:
                    raise SurgeryError(f"Two moves make {name}.")
                infos[name], made_by[name] = TensorInfo(tuple(made.shape), made.dtype), move
                origins[name] = frozenset().union(*(self.origins[source] for source in move.sources))

        for name, info in self.infos.items():
            for move in reading.get(name, ()):
                place(move)
            if name not in reading:
                infos[name], origins[name] = info, self.origins[name]
        for move in reading.get("", ()):
            place(move)

        # What the last move has made and nobody has read yet.
        waiting: dict[str, Tensor] = {}

        def read(name: str) -> Tensor:
            if name not in made_by:
                return self.read(name)
            if name not in waiting:
                move = made_by[name]
                waiting.clear()
                waiting.update(zip(move.targets, move.how(*map(self.read, move.sources)), strict=True))
            return waiting.pop(name)

        return Weights(infos, read, origins)


@dataclass(frozen=True)
class Subject:
    """A model as an operation sees it.

    Attributes:
        config: of the model.
        weights: its tensors, under the names of a saved model; what is tied to another is not among them.
        kind: its class.
        sample: tokens `(batch, length)` for what has to be measured.
        folder: where it was saved; None for a model in memory.
    """

    config: LlmArchConfig
    weights: Weights
    kind: type[LlmArchPreTrainedModel]
    sample: Tensor
    folder: Path | None = None

    @property
    def root(self) -> str:
        """What the names of the base model's tensors begin with."""
        return "" if self.kind is modeling_llmarch.LlmArchModel else f"{self.kind.base_model_prefix}."

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensors; a few may be kept in fp32 beside them."""
        return next((info.dtype for info in self.weights.infos.values() if info.dtype != torch.float32), torch.float32)

    @property
    def has_head(self) -> bool:
        """Whether there is an output head over the vocabulary."""
        return self.kind in (modeling_llmarch.LlmArchForCausalLM, modeling_llmarch.LlmArchForMaskedLM)

    def blocks(self) -> list[tuple[str, LlmArchConfig]]:
        """What the names of each block's tensors begin with, and its layer's config."""
        count = self.config.layer_groups or self.config.num_hidden_layers
        return [(f"{self.root}layers.{i}.", self.config.layer(i)) for i in range(count)]

    def have(self, prefix: str, *names: str) -> list[str]:
        """Those of the tensors that there are, by their whole names: a bias need not be there."""
        return [prefix + name for name in names if prefix + name in self.weights]

    def changed(self, moves: Iterable[Move] = (), **switches: Any) -> Subject:
        """After these moves, with these switches.

        Raises:
            SurgeryError: a layer has a switch of its own that would have to change, or a rule of the config forbids it.
        """
        config = self.config
        own = config._heterogeneity_spec.per_layer_attributes if config.is_heterogeneous else ()
        for name in switches:
            refuse(name in own, f"per_layer_config sets {name} layer by layer: take it out there first.")
        try:
            changed = LlmArchConfig.from_dict({**config.to_dict(), **switches})
        except StrictDataclassError as error:
            raise SurgeryError(f"The result cannot be: {error.__cause__ or error}") from error
        # What `from_dict` leaves out, because it belongs to a process and not to a model.
        changed._attn_implementation_internal = config._attn_implementation_internal
        changed._experts_implementation_internal = config._experts_implementation_internal
        return replace(self, config=changed, weights=self.weights.moved(moves))

    def check(self) -> None:
        """
        Raises:
            SurgeryError: the tensors are not those that the config describes.
        """
        expected = skeleton_of(self.config, self.kind.__name__).shapes
        found = {name: info.shape for name, info in self.weights.infos.items()}
        odd = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
        if odd:
            raise SurgeryError(
                f"These are not the tensors that the config describes: {some(odd)} (missing, unknown, or of another "
                "shape). An adapter must be merged and a quantised model dequantised first."
            )

    def build(self) -> LlmArchPreTrainedModel:
        """The model itself, in memory and in evaluation mode."""
        implementation = self.config._attn_implementation_internal
        chosen: dict[str, Any] = {} if implementation is None else {"attn_implementation": implementation}
        return self.kind.from_pretrained(
            None,
            config=self.config,
            state_dict={name: self.weights[name] for name in self.weights},
            dtype=self.dtype,
            **chosen,
        )


@dataclass(frozen=True)
class Change:
    """What an operation has made of a subject.

    Attributes:
        subject: the result.
        exact: whether it computes what the model computed before, up to rounding.
        why: why it does, or what it approximates.
        retrain: what has to be trained before the change is of use.
        chosen: options that were found by measuring, for the record: with them the operation need not measure again.
        tokens: where the vocabulary has changed, the old id of each new one that has one: `[(old, new)]`.
    """

    subject: Subject
    exact: bool
    why: str
    retrain: str = "nothing"
    chosen: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[tuple[int, int]] | None = None


def only_decoders_and_encoders(subject: Subject) -> None:
    """
    Raises:
        SurgeryError: for an encoder-decoder, of which one config describes two stacks.
    """
    if subject.config.topology == "encoder-decoder":
        raise SurgeryError("topology='encoder-decoder': operations change one stack, and this model has two.")


def refuse(condition: bool, message: str) -> None:
    """
    Raises:
        SurgeryError: with the message, where the condition holds.
    """
    if condition:
        raise SurgeryError(message)


def fp32(how: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of tensors, computed in fp32 at least and rounded to the first one's dtype."""

    def rounded(*tensors: Tensor) -> Tensor:
        dtype = tensors[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        return how(*(tensor.to(wide) for tensor in tensors)).to(dtype)

    return rounded

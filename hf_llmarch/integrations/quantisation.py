"""How much of a quantised model really is quantised, whichever tool did it."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import hf_llmarch
from hf_llmarch.model.configuration_llmarch import LlmArchConfig
from hf_llmarch.model.linear import Linear

if TYPE_CHECKING:
    from hf_llmarch.conversion.sources.base import Checkpoint

PACKED_EXPERT = re.compile(r"\.experts\.\w+$")


@dataclass(frozen=True)
class QuantisedShare:
    """How a model's parameters are stored.

    Attributes:
        parameters: of the model, those that are shared counted once.
        quantised: how many of them are stored as something other than floating-point numbers.
        bytes: of everything that is stored, scales included.
        whole: parameters that are not quantised, by the place of their tensor, the most first:
            `{"model.embed_tokens": 28311552, "model.layers.*.mlp.experts.gate_up_proj": …}`.
        packed_experts: those of them that are in packed experts.
    """

    parameters: int
    quantised: int
    bytes: int
    whole: Mapping[str, int]
    packed_experts: int

    @property
    def share(self) -> float:
        """Of all parameters, from 0 to 1."""
        return self.quantised / self.parameters

    @property
    def bits(self) -> float:
        """Stored bits a parameter."""
        return 8 * self.bytes / self.parameters

    @property
    def advice(self) -> str | None:
        """What to do about experts that no quantiser has reached; None where there are none."""
        if not self.packed_experts:
            return None
        return (
            f"{self.packed_experts / self.parameters:.1%} of the parameters are packed experts, which quantisers of "
            "nn.Linear do not reach: turn them into such layers first, by "
            "hf_llmarch.surgery.convert_experts_layout(source, destination, 'linear'); torchao's FqnToConfig can also "
            "name them."
        )

    @property
    def facts(self) -> dict[str, str]:
        """In words, by topic."""
        largest = [f"{place} {count:,}" for place, count in self.whole.items()]
        return {
            "quantised": f"{self.share:.1%} of {self.parameters:,} parameters",
            "size": f"{self.bytes / 1e6:,.1f} MB, {self.bits:.1f} bits a parameter",
            "left whole": ", ".join(largest[:5]) + (f" and {len(largest) - 5} more" if len(largest) > 5 else ""),
        } | ({"advice": self.advice} if self.advice else {})

    def __str__(self) -> str:
        return "; ".join(f"{topic}: {words}" for topic, words in self.facts.items())


def quantised_share(model: PreTrainedModel | str | Path, *, revision: str | None = None) -> QuantisedShare:
    """What of a model is quantised, and what it takes.

    Args:
        model: a model in memory, quantised by any tool; or a folder or Hub id of one, of which only headers are read.
        revision: branch, tag or commit of a Hub repository.

    Raises:
        CheckpointError: there is no such folder, or it is damaged.
        ValueError: the model holds adapters or only a part of the tensors, or the folder is not one of ours.
    """
    if isinstance(model, PreTrainedModel):
        if any(".base_layer." in name for name, _ in model.named_parameters()):
            raise ValueError("The model holds adapters: measure it before they are put on, or after unload().")
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ValueError("The model is spread over processes: measure it in one, or measure its folder.")
        return measure(type(model), model.config, dict(stored(model)))
    from hf_llmarch.conversion.sources import open_checkpoint

    return share_on_disk(open_checkpoint(model, revision=revision))


def introduce_to_hqq() -> None:
    """Let HQQ's own library (`AutoHQQHFModel`) find the linear layers of our models, in this process: it goes by exact
    types. Models that transformers quantises itself need no such call.

    Raises:
        ImportError: hqq is not installed.
    """
    from hqq.models.base import _QUANT_LAYERS

    if Linear not in _QUANT_LAYERS:
        _QUANT_LAYERS.append(Linear)


def share_on_disk(checkpoint: Checkpoint) -> QuantisedShare:
    """`quantised_share` of an open folder."""
    names = [name for name in checkpoint.config.get("architectures") or () if hasattr(hf_llmarch, name)]
    if not names:
        raise ValueError(
            f"{checkpoint.source} is no llmarch model, its config.json names {checkpoint.config.get('architectures')}."
        )
    tensors = {
        name: (info.shape if info.dtype.is_floating_point and info.dtype.itemsize > 1 else None, info.nbytes)
        for name, info in checkpoint.tensors.items()
    }
    return measure(getattr(hf_llmarch, names[0]), LlmArchConfig.from_dict(checkpoint.config), tensors)


def measure(
    model_class: type[PreTrainedModel], config: Any, tensors: Mapping[str, tuple[tuple[int, ...] | None, int]]
) -> QuantisedShare:
    """The parameters of a whole model beside the stored tensors, name -> (shape where it is plain numbers, bytes)."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        whole_model = model_class(config)
    names: dict[int, list[str]] = {}
    for name, parameter in whole_model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shapes = {aliases[0]: (whole_model.get_parameter(aliases[0]).shape, aliases) for aliases in names.values()}
    whole: Counter[str] = Counter()
    packed = 0
    for name, (shape, aliases) in shapes.items():
        if any(tensors.get(alias, (None, 0))[0] == tuple(shape) for alias in aliases):
            whole[re.sub(r"\.\d+(?=\.)", ".*", name).removesuffix(".weight")] += prod(shape)
            packed += prod(shape) if PACKED_EXPERT.search(name) else 0
    parameters = sum(prod(shape) for shape, _ in shapes.values())
    return QuantisedShare(
        parameters=parameters,
        quantised=parameters - whole.total(),
        bytes=sum(size for _, size in tensors.values()),
        whole=dict(whole.most_common()),
        packed_experts=packed,
    )


def stored(model: nn.Module) -> Iterator[tuple[str, tuple[tuple[int, ...] | None, int]]]:
    """Name, shape (None unless plain floating-point numbers) and bytes of what a model would save; no memory twice."""
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            parts = list(plain_tensors(tensor))
            size = sum(part.nbytes for part in parts if part.data_ptr() not in seen)
            seen.update(part.data_ptr() for part in parts)
            number = len(parts) == 1 and parts[0] is tensor and tensor.is_floating_point() and tensor.itemsize > 1
            yield name, (tuple(tensor.shape) if number else None, size)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, or the plain ones that a subclass of a quantiser is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor

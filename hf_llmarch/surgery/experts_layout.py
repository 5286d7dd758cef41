"""Surgery: the same model with another architecture."""

from __future__ import annotations

import copy
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from hf_llmarch.conversion.destination import staged, write_json, write_tensors
from hf_llmarch.conversion.engine import SMALL_FILES
from hf_llmarch.conversion.errors import ConversionError, some
from hf_llmarch.conversion.rules import Shape
from hf_llmarch.conversion.sources import open_checkpoint
from hf_llmarch.conversion.sources.base import TensorInfo
from hf_llmarch.conversion.sources.files import CONFIG
from hf_llmarch.model.compat import code_files
from hf_llmarch.model.configuration_llmarch import ExpertsLayout, LlmArchConfig
from hf_llmarch.model.experts import EXPERT_LAYOUTS, SparseFeedForward
from hf_llmarch.model.modeling_llmarch import LlmArchPreTrainedModel

Model = TypeVar("Model", bound=LlmArchPreTrainedModel)

# A packed tensor `(E, rows, …)` of all experts, and the tensors of one expert's Linears that its rows are, in order.
PACKED: Mapping[str, tuple[str, ...]] = {
    "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "gate_up_proj_bias": ("gate_proj.bias", "up_proj.bias"),
    "up_proj": ("up_proj.weight",),
    "up_proj_bias": ("up_proj.bias",),
    "down_proj": ("down_proj.weight",),
    "down_proj_bias": ("down_proj.bias",),
}
# The packed tensors that there are not: for experts without a gate, and with one.
WITHOUT = {False: ("gate_up_proj", "gate_up_proj_bias"), True: ("up_proj", "up_proj_bias")}
EXPERTS = ".experts."


def keep(tensors: Sequence[Tensor], pieces: int) -> Sequence[Tensor]:
    return tensors


def unpack(tensors: Sequence[Tensor], pieces: int) -> Sequence[Tensor]:
    """`(E, rows, …)` -> the pieces of expert 0, then those of expert 1, and so on."""
    return [piece.clone() for expert in tensors[0] for piece in expert.chunk(pieces)]


def pack(tensors: Sequence[Tensor], pieces: int) -> Sequence[Tensor]:
    """The way back."""
    return [torch.cat(list(tensors)).unflatten(0, (len(tensors) // pieces, -1))]


@dataclass(frozen=True)
class Move:
    """Tensors that are read together, those that they become, and how: numbers are moved, never changed."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    how: Callable[[Sequence[Tensor], int], Sequence[Tensor]] = keep
    pieces: int = 1

    def run(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from zip(self.targets, self.how([read(name) for name in self.sources], self.pieces), strict=True)


def to_linear(shapes: Mapping[str, Shape]) -> Iterator[Move]:
    for name, shape in shapes.items():
        prefix, _, part = name.rpartition(EXPERTS)
        if not prefix or part not in PACKED:
            yield Move((name,), (name,))
            continue
        targets = tuple(f"{prefix}{EXPERTS}{e}.{piece}" for e in range(shape[0]) for piece in PACKED[part])
        yield Move((name,), targets, unpack, len(PACKED[part]))


def to_packed(shapes: Mapping[str, Shape]) -> Iterator[Move]:
    # Name -> where the experts are, which one it is of, and what of it: "model.layers.0.mlp", "3", "up_proj.weight".
    places = {name: (name.rpartition(EXPERTS)[0], *name.rpartition(EXPERTS)[2].partition(".")[::2]) for name in shapes}
    experts = Counter(prefix for prefix, _ in {(prefix, e) for prefix, e, _ in places.values()})
    gated = {prefix for prefix, _, part in places.values() if part == "gate_proj.weight"}
    done: set[str] = set()
    for name, (prefix, _, part) in places.items():
        absent = WITHOUT[prefix in gated]
        packed = next((p for p, parts in PACKED.items() if prefix and part in parts and p not in absent), None)
        if packed is None:
            yield Move((name,), (name,))
        elif name not in done:
            parts = PACKED[packed]
            sources = tuple(f"{prefix}{EXPERTS}{e}.{piece}" for e in range(experts[prefix]) for piece in parts)
            done.update(sources)
            yield Move(sources, (f"{prefix}{EXPERTS}{packed}",), pack, len(parts))


LAYOUTS: Mapping[str, Callable[[Mapping[str, Shape]], Iterator[Move]]] = {"linear": to_linear, "packed": to_packed}


def moves(shapes: Mapping[str, Shape], layout: ExpertsLayout, experts: Collection[int]) -> list[Move]:
    """How tensors become those of the other layout, each used once.

    Args:
        shapes: of all tensors, by name.
        experts: the numbers of experts that a layer can have.

    Raises:
        ConversionError: naming tensors of experts that are not there, or that have no counterpart.
    """
    found = list(LAYOUTS[layout](shapes))
    used = Counter(name for move in found for name in move.sources)
    odd = [name for name in {**used, **shapes} if used[name] != 1 or name not in shapes]
    for move in found:
        together = max(len(move.sources), len(move.targets)) // move.pieces
        if EXPERTS in move.sources[0] and (move.how is keep or together not in experts):
            odd.append(move.sources[0])
    if odd:
        raise ConversionError(
            f"These are not all the tensors of {' or '.join(map(str, experts))} experts that are not yet {layout}: "
            f"{some(odd)}. An adapter must be merged and a quantised model dequantised first."
        )
    return found


def new_config(config: LlmArchConfig, layout: ExpertsLayout) -> LlmArchConfig:
    """The config with another layout.

    Raises:
        ValueError: there are no experts; a layer or a stack has a layout of its own; or another rule of the config.
    """
    if config.num_experts is None:
        raise ValueError("The model has no experts, so they have no layout: its config's num_experts is None.")
    by_layer = config._heterogeneity_spec.per_layer_attributes if config.is_heterogeneous else ()
    for name, own in {"per_layer_config": by_layer, "source_stack": config.source_stack or ()}.items():
        if "experts_layout" in own:
            raise ValueError(f"{name} sets an experts_layout of its own: take it out there first.")
    changed = copy.deepcopy(config)
    changed.experts_layout = layout
    changed.validate_switches()
    return changed


def expert_counts(config: LlmArchConfig) -> set[int]:
    """The numbers of experts that a layer of the model can have."""
    counts = {config.num_experts, (config.source_stack or {}).get("num_experts")}
    return {count for count in counts if count is not None}


def with_experts_layout(model: Model, layout: ExpertsLayout) -> Model:
    """The same model with its experts as packed 3-D weights (fast), or as plain Linears (for PEFT and quantisers).

    Numbers are moved, not changed: there and back gives the same bytes. dtype, device, mode and frozen parameters stay.

    Args:
        model: one of ours with experts; it is left as it is.
        layout: `packed` or `linear`.

    Returns:
        A new model, which shares no memory with the old one.

    Raises:
        ValueError: the model has no experts, or a layer sets a layout of its own.
        ConversionError: its experts are not plain parameters, such as those of a quantised model or one with adapters.
    """
    config = new_config(model.config, layout)
    if layout == model.config.experts_layout:
        return copy.deepcopy(model)
    sparse = {name: part for name, part in model.named_modules() if isinstance(part, SparseFeedForward)}
    # Every part that refers to the old config gets the new one, and the experts are not copied to be thrown away.
    memo: dict[int, object] = {id(model.config): config}
    memo |= {id(part.experts): nn.Identity() for part in sparse.values()}
    changed = copy.deepcopy(model, memo)
    stacks = {name: part for name, part in changed.named_modules() if isinstance(part, LlmArchPreTrainedModel)}
    for name, part in sparse.items():
        stack = stacks[max((stack for stack in stacks if name.startswith(stack)), key=len)]
        stack.config.restate(experts_layout=layout)  # an encoder-decoder's stacks have configs of their own
        index = next(int(piece) for piece in name.split(".") if piece.isdigit())
        changed.get_submodule(name).experts = moved_experts(part.experts, stack.config, stack.config.layer(index))
    return changed


def moved_experts(experts: nn.Module, config: LlmArchConfig, layer: LlmArchConfig) -> nn.Module:
    """Experts in the layer's layout, holding copies of the numbers of those given."""
    before = {f"layer{EXPERTS}{name}": value for name, value in experts.state_dict(keep_vars=True).items()}
    shapes = {name: tuple(value.shape) for name, value in before.items()}
    with torch.device("meta"):
        after = EXPERT_LAYOUTS[layer.experts_layout](config, layer)
    state: dict[str, Tensor] = {}
    frozen: set[str] = set()
    for move in moves(shapes, layer.experts_layout, {cast(int, layer.num_experts)}):
        for name, result in move.run(lambda name: before[name].detach()):
            state[name.rpartition(EXPERTS)[2]] = result
        if not any(before[name].requires_grad for name in move.sources):
            frozen.update(name.rpartition(EXPERTS)[2] for name in move.targets)
    try:
        after.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ConversionError(f"The experts are not those that the config describes: {error}") from error
    for name, parameter in after.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return after.train(experts.training)


def convert_experts_layout(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    layout: ExpertsLayout,
    *,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> Path:
    """The same for a saved folder, with the memory of one output file; no model is built.

    Args:
        source: a local folder or Hub id of a saved model of ours, with any head.
        destination: a folder that is empty or not there yet; it appears when it is complete.
        layout: `packed` or `linear`.
        max_shard_size: largest weight file, in bytes or like `5GB`.
        overwrite: replace a destination that holds a model.

    Returns:
        The destination.

    Raises:
        ConversionError: the source is no llmarch model with experts, or its tensors are not those of its config; or one
            of its subclasses, for a damaged source or a destination that cannot be written. Nothing is written then.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.config.get("model_type") != LlmArchConfig.model_type:
        raise ConversionError(f"{source} is no llmarch model but {checkpoint.config.get('model_type')!r}.")
    config = LlmArchConfig.from_dict(checkpoint.config)
    try:
        new_config(config, layout)
    except ValueError as error:
        raise ConversionError(f"{source}: {error}") from error
    plan = [Move((name,), (name,)) for name in checkpoint.names]
    if layout != config.experts_layout:
        plan = moves(checkpoint.shapes, layout, expert_counts(config))
    headers = {n: torch.empty(info.shape, dtype=info.dtype, device="meta") for n, info in checkpoint.tensors.items()}
    written = {n: TensorInfo(tuple(t.shape), t.dtype) for move in plan for n, t in move.run(headers.__getitem__)}
    tensors = (named for move in plan for named in move.run(checkpoint.read))
    target = Path(destination).expanduser()
    size = checkpoint.total_bytes + checkpoint.companion_bytes + SMALL_FILES
    with staged(target, size=size, overwrite=overwrite, source=checkpoint) as folder:
        checkpoint.write_companions(folder)
        write_tensors(folder, tensors, written, max_shard_size)
        write_json(folder / CONFIG, {**checkpoint.config, "experts_layout": layout})
        if any(checkpoint.path.glob("*.py")):  # a folder that brings its own code
            for file in code_files():
                shutil.copyfile(file, folder / file.name)
    return target

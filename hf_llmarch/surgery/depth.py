"""Depth: layers that are added without being heard yet, and layers that are taken out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from .operation import operation
from .subject import OF_LAYER, Change, Move, Subject, refuse

# The last projection of each branch, of a dense and of a sparse feed-forward, packed or not.
LAST = re.compile(r"^\.(self_attn\.o_proj|mlp\.(.*\.)?down_proj)[._]?\w*$")
POST_NORM = re.compile(r"^\.(attn|mlp)_norm\.post\.(weight|bias)$")


@operation
def duplicate_layers(subject: Subject, layers: Sequence[int] | None = None, count: int | None = None) -> Change:
    """A silent copy behind each of these layers: exact (LLaMA Pro, arXiv 2401.02415 section 3.1).

    A pre-norm block is x + f(x), and with the last projection of each branch at zero it is x. Where a norm stands
    behind the branch (`sandwich`, `branch`) its gain, and bias, are set to zero instead: a norm of zeros would have
    gradients of the size of 1 / sqrt(norm_eps).

    Args:
        layers: indices of those that get a copy behind them.
        count: so many copies in even distances, the last one behind the last layer; give one of the two.

    Raises:
        SurgeryError: for `norm_placement='post'`, where a norm acts on the residual stream itself, so that no block is
            the identity; for layers that share blocks or differ; for a scale that follows the layer's index.
    """
    config = subject.config
    depth = config.num_hidden_layers
    chosen = spread(depth, count) if layers is None and count is not None else list(layers or ())
    refuse(not chosen or (layers is None) == (count is None), "Give layers or count: which layers get a copy.")
    refuse_uneven(config, chosen)
    refuse(
        config.norm_placement == "post",
        "norm_placement='post' norms the residual stream in every block, so no block can be silent.",
    )
    refuse(
        config.attention_scale_by_layer,
        "attention_scale_by_layer=True: the layers behind a copy would be scaled for other indices.",
    )
    refuse(
        not config.first_attention_norm and 0 in chosen,
        "first_attention_norm=False: layer 0 lacks a norm that its copy would need. Leave it out.",
    )
    order = [i for i in range(depth) for _ in range(1 + chosen.count(i))]
    silent = {place for place in range(1, len(order)) if order[place] == order[place - 1]}
    result = reordered(subject, order, silent)
    why = "A copy adds zero to the residual stream."
    return Change(result, True, why, "the copies", chosen={"layers": chosen, "count": None})


def spread(depth: int, count: int) -> list[int]:
    """`count` layers in even distances, the last one included."""
    return [-(-depth * (i + 1) // count) - 1 for i in range(count)]


def refuse_uneven(config: LlmArchConfig, layers: Sequence[int]) -> None:
    refuse(config.layer_groups is not None, "layer_groups: the layers share their blocks, of which none can be added.")
    refuse(config.is_heterogeneous, "per_layer_config counts layers by index: take it out before layers move.")
    odd = [i for i in layers if not 0 <= i < config.num_hidden_layers]
    refuse(bool(odd), f"layers {odd} are not among the {config.num_hidden_layers} layers, 0 to n - 1.")


def reordered(subject: Subject, order: Sequence[int], silent: set[int]) -> Subject:
    """With the old layers `order`, of which those at the places `silent` add nothing."""
    config = subject.config
    moves = []
    for name in subject.weights:
        match = OF_LAYER.match(name)
        if match is None:
            continue
        head, index, tail = match.groups()
        places = [place for place, old in enumerate(order) if old == int(index)]
        how = partial(copies, tail=tail, quiet=[place in silent for place in places], config=config)
        moves.append(Move((name,), tuple(f"{head}{place}{tail}" for place in places), how))
    return subject.changed(moves, **by_layer(config, order))


def by_layer(config: LlmArchConfig, order: Sequence[int]) -> dict[str, Any]:
    """The switches that have an entry a layer, and those that need one of a kind."""
    kinds = [config.layer_types[i] for i in order]
    switches: dict[str, Any] = {"num_hidden_layers": len(order), "layer_types": kinds}
    if config.mlp_layer_types is not None:
        switches["mlp_layer_types"] = [config.mlp_layer_types[i] for i in order]
    if config.nope_layers is not None:
        switches["nope_layers"] = [place for place, old in enumerate(order) if old in config.nope_layers]
    if "sliding_attention" not in kinds:
        switches["sliding_window"] = None
    if "chunked_attention" not in kinds:
        switches["attention_chunk_size"] = None
    return switches


def copies(tensor: Tensor, tail: str, quiet: Sequence[bool], config: LlmArchConfig) -> list[Tensor]:
    return [silenced(tensor, tail, config) if silent else tensor.clone() for silent in quiet]


def silenced(tensor: Tensor, tail: str, config: LlmArchConfig) -> Tensor:
    """A layer's tensor as a layer that adds nothing has it."""
    if config.norm_placement in ("sandwich", "branch"):
        if not POST_NORM.match(tail):
            return tensor.clone()
        return torch.full_like(tensor, -config.norm_offset if tail.endswith("weight") else 0.0)
    return torch.zeros_like(tensor) if LAST.match(tail) else tensor.clone()


@operation
def drop_layers(subject: Subject, layers: Sequence[int] | None = None, count: int | None = None) -> Change:
    """Fewer layers: those named are taken out, or the `count` with the least influence on the sample.

    A block's influence is one minus the mean cosine between what enters and what leaves it (ShortGPT, arXiv 2403.03853
    equation 1).

    Raises:
        SurgeryError: for layers that share blocks or differ, and when none would be left.
    """
    config = subject.config
    refuse((layers is None) == (count is None), "Give layers or count: which layers are taken out.")
    if layers is None:
        influence = torch.tensor(block_influence(subject))
        refuse(not 0 < (count or 0) < len(influence), f"count={count}: at least one of {len(influence)} layers stays.")
        layers = sorted(influence.topk(count or 0, largest=False).indices.tolist())
    refuse_uneven(config, layers)
    order = [i for i in range(config.num_hidden_layers) if i not in layers]
    refuse(not order, "At least one layer has to stay.")
    refuse(not config.first_attention_norm and 0 in layers, "first_attention_norm=False: layer 0 has to stay.")
    result = reordered(subject, order, set())
    why = f"Layers {list(layers)} are gone."
    return Change(result, False, why, "all weights, for a short while", chosen={"layers": list(layers), "count": None})


@torch.no_grad()
def block_influence(subject: Subject) -> list[float]:
    """Each block's influence on the sample, between 0 (it changes no direction) and 2."""
    model = subject.build()
    found: list[float] = []

    def see(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        found.append(1.0 - F.cosine_similarity(args[0].double(), out.double(), dim=-1).mean().item())

    for prefix, _ in subject.blocks():
        model.get_submodule(prefix.removesuffix(".")).register_forward_hook(see, with_kwargs=True)
    model(subject.sample, use_cache=False)
    return found

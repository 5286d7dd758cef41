"""Mixtures of experts: out of a dense model, with fewer experts, and back into a dense one.

Shapes: `E` experts, `K` of them a token, `I` inner width of a feed-forward, `C` model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from .experts_layout import LAYOUTS
from .operation import operation
from .subject import Change, Move, Subject, drop, each, fp32, new, refuse
from .width import sparse

# A feed-forward's tensors, and the packed ones of several of them.
PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "gate_proj.bias", "up_proj.bias", "down_proj.bias")
EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(.*)$")


@operation
def experts_layout(subject: Subject, layout: Literal["packed", "linear"]) -> Change:
    """Experts as packed 3-D weights, which are fast, or as plain Linears, which PEFT and quantisers know: the numbers
    are moved and not changed."""
    refuse(subject.config.num_experts is None, "The model has no experts, so they have no layout: num_experts is None.")
    return Change(in_layout(subject, layout), True, "Numbers are moved, never changed.")


def in_layout(subject: Subject, layout: Literal["packed", "linear"]) -> Subject:
    if subject.config.experts_layout == layout:
        return subject
    shapes = {name: info.shape for name, info in subject.weights.infos.items()}
    moves = [
        Move(m.sources, m.targets, lambda *tensors, m=m: m.how(tensors, m.pieces)) for m in LAYOUTS[layout](shapes)
    ]
    return subject.changed([m for m in moves if m.sources != m.targets], experts_layout=layout)


def with_linear_experts(function: Callable[..., Change]) -> Callable[..., Change]:
    """Do it with one feed-forward an expert, and give the experts back in the layout that they had."""

    def run(subject: Subject, **options: Any) -> Change:
        layout = subject.config.experts_layout
        change = function(in_layout(subject, "linear"), **options)
        result = change.subject
        return Change(
            in_layout(result, layout) if result.config.num_experts is not None else result,
            change.exact,
            change.why,
            change.retrain,
            change.chosen,
        )

    return run


# -- dense to sparse ---------------------------------------------------------------------------------------------------


@operation
def upcycle(
    subject: Subject,
    num_experts: int,
    num_experts_per_tok: int,
    layers: Sequence[int] | None = None,
    seed: int = 0,
) -> Change:
    """A mixture of experts whose experts are copies of the dense feed-forward: exact before the first step of training
    (sparse upcycling, arXiv 2212.05055 section 3.1, with the weights of the picked experts renormalised).

    The weights of the K picked experts sum to one and the experts are equal, so their sum is the feed-forward. The
    router is drawn anew with `initializer_range`.

    Args:
        num_experts, num_experts_per_tok: of the new mixture.
        layers: those that become sparse; None: all.
        seed: of the router.

    Raises:
        SurgeryError: the model has experts already, or a learned `swish_beta`.
    """
    config = subject.config
    chosen = dense_layers(subject, layers)
    refuse(config.swish_beta == "learned", "swish_beta='learned': experts share one beta, and copies have one each.")
    moves: list[Move] = []
    for i in chosen:
        prefix = f"{subject.root}layers.{i}.mlp."
        for name in subject.have(prefix, *PARTS):
            tail = name.removeprefix(prefix)
            targets = tuple(f"{prefix}experts.{e}.{tail}" for e in range(num_experts))
            moves.append(Move((name,), targets, lambda t: [t.clone() for _ in range(num_experts)]))
        moves.append(new(f"{prefix}gate.weight", partial(drawn_router, subject, num_experts, seed + i)))
    switches = {
        **{"num_experts": num_experts, "num_experts_per_tok": num_experts_per_tok, "norm_topk_prob": True},
        **{"moe_intermediate_size": config.intermediate_size, "mlp_layer_types": layer_kinds(config, chosen)},
    }
    result = in_layout(subject.changed(moves, experts_layout="linear", **switches), "packed")
    why = "The weights of a token's experts sum to one, and all experts are the old feed-forward."
    return Change(result, True, why, "the router and the experts, which are alike")


def dense_layers(subject: Subject, layers: Sequence[int] | None) -> list[int]:
    config = subject.config
    refuse(config.num_experts is not None, f"num_experts={config.num_experts}: the model has experts already.")
    refuse(config.is_heterogeneous, "per_layer_config: experts need the layers alike.")
    blocks = len(subject.blocks())
    chosen = list(range(blocks)) if layers is None else sorted(set(layers))
    odd = [i for i in chosen if not 0 <= i < blocks]
    refuse(bool(odd) or not chosen, f"layers={layers} are not among the {blocks} layers.")
    refuse(
        config.layer_groups is not None,
        "layer_groups: the layers share their blocks; experts need blocks of their own.",
    )
    return chosen


def layer_kinds(config: LlmArchConfig, sparse_layers: Sequence[int]) -> list[str]:
    return ["sparse" if i in sparse_layers else "dense" for i in range(config.num_hidden_layers)]


def drawn_router(subject: Subject, experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, subject.config.hidden_size, generator=generator) * subject.config.initializer_range
    return weight.to(subject.dtype)


@operation
def split_ffn(
    subject: Subject,
    num_experts: int,
    num_shared_experts: int = 0,
    num_experts_per_tok: int | None = None,
    layers: Sequence[int] | None = None,
) -> Change:
    """A fine-grained mixture whose experts are the slices of the dense feed-forward: exact while every token passes all
    of them (the segmentation of DeepSeekMoE, arXiv 2401.06066 section 3.1, applied to a trained feed-forward as in
    LLaMA-MoE, arXiv 2406.16554 section 3.1).

    A feed-forward is the sum of its slices along the inner width, because the activation acts channel by channel. The
    first slices are the shared expert. With a router of zeros each of the E others has the weight 1 / E after the
    softmax, which `routed_scaling_factor` E turns into 1. The output bias goes into the shared expert, else in equal
    parts into the routed ones.

    Args:
        num_experts, num_shared_experts: slices that are routed, and that every token passes.
        num_experts_per_tok: None: all of them, which is exact. Fewer are a start for training; weights then sum to E
            all the same.
        layers: those that become sparse; None: all.

    Raises:
        SurgeryError: the inner width cannot be cut into so many slices, or the model has experts already.
    """
    config = subject.config
    chosen = dense_layers(subject, layers)
    slices = num_experts + num_shared_experts
    refuse(
        config.intermediate_size % slices != 0,
        f"intermediate_size={config.intermediate_size} cannot be cut into {slices} equal slices.",
    )
    refuse(config.swish_beta == "learned", "swish_beta='learned': slices would each have a beta of their own.")
    width = config.intermediate_size // slices
    sizes = [num_shared_experts * width, *[width] * num_experts]
    moves: list[Move] = []
    for i in chosen:
        prefix = f"{subject.root}layers.{i}.mlp."
        homes = [f"{prefix}shared_experts.", *(f"{prefix}experts.{e}." for e in range(num_experts))]
        for name in subject.have(prefix, *PARTS):
            tail = name.removeprefix(prefix)
            axis = 1 if tail == "down_proj.weight" else 0
            how = partial(slices_of_bias, shared=bool(num_shared_experts), experts=num_experts)
            if tail != "down_proj.bias":
                how = partial(slices_of, sizes=sizes, axis=axis)
            kept = homes if num_shared_experts else homes[1:]
            moves.append(Move((name,), tuple(home + tail for home in kept), how))
        moves.append(
            new(f"{prefix}gate.weight", lambda: torch.zeros(num_experts, config.hidden_size, dtype=subject.dtype))
        )
    picks = num_experts if num_experts_per_tok is None else num_experts_per_tok
    switches = {
        **{"num_experts": num_experts, "num_experts_per_tok": picks, "num_shared_experts": num_shared_experts},
        **{"moe_intermediate_size": width, "routed_scaling_factor": float(num_experts), "norm_topk_prob": True},
        **{"router_score": "softmax", "mlp_layer_types": layer_kinds(config, chosen)},
    }
    result = in_layout(subject.changed(moves, experts_layout="linear", **switches), "packed")
    if picks == num_experts:
        why = "All slices of the feed-forward are summed with weight one."
        return Change(result, True, why, "the router, before fewer slices than all are picked")
    why = f"{picks} of {num_experts} slices are summed; the router of zeros does not know yet which."
    return Change(result, False, why, "the router, then all weights")


def slices_of(tensor: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
    return [part.clone() for part in tensor.split([size for size in sizes if size], axis)]


def slices_of_bias(tensor: Tensor, shared: bool, experts: int) -> list[Tensor]:
    if shared:
        return [tensor, *(torch.zeros_like(tensor) for _ in range(experts))]
    return [fp32(lambda t: t / experts)(tensor) for _ in range(experts)]


# -- fewer experts -----------------------------------------------------------------------------------------------------


def sparse_layers(subject: Subject) -> list[int]:
    config = subject.config
    refuse(config.num_experts is None, "The model has no experts: num_experts is None.")
    refuse(
        config.router_type != "top_k",
        f"router_type={config.router_type!r}: experts are picked by a rule that fewer of them change for the others.",
    )
    return [i for i in range(len(subject.blocks())) if sparse(config, i)]


@operation
def prune_experts(subject: Subject, num_experts: int, experts: Sequence[Sequence[int]] | None = None) -> Change:
    """Fewer experts: those that the sample uses least are dropped, in each layer, with their rows of the router
    (arXiv 2404.05089 section 3 compares this with costlier choices).

    Args:
        num_experts: how many stay in each layer.
        experts: those that stay, a list a sparse layer; None: the most loaded ones on the sample.

    Raises:
        SurgeryError: for groups of experts, whose members would no longer be of one number.
    """
    return prune_linear(subject, num_experts=num_experts, experts=experts)


@with_linear_experts
def prune_linear(subject: Subject, num_experts: int, experts: Sequence[Sequence[int]] | None) -> Change:
    config, layers = subject.config, sparse_layers(subject)
    old = config.num_experts or 0
    refuse(not 0 < num_experts <= old, f"num_experts={old} cannot be pruned to {num_experts}.")
    refuse((config.n_group or 1) > 1, f"n_group={config.n_group}: groups have to keep one number of experts.")
    if experts is None:
        experts = [sorted(torch.tensor(load).topk(num_experts).indices.tolist()) for load in expert_loads(subject)]
    refuse(
        [len(set(kept)) for kept in experts] != [num_experts] * len(layers)
        or any(not 0 <= e < old for k in experts for e in k),
        f"experts={experts}: {len(layers)} lists are needed, each of {num_experts} of the {old} experts.",
    )
    moves = []
    for i, kept in zip(layers, experts, strict=True):
        moves += regrouped(subject, i, [[e] for e in kept], sorted_mean)
    result = subject.changed(
        moves, num_experts=num_experts, num_experts_per_tok=min(config.num_experts_per_tok, num_experts)
    )
    why = "The experts that the sample uses least are gone, and tokens that picked them pick others."
    chosen = {"experts": [list(kept) for kept in experts]}
    return Change(result, num_experts == old, why, "the router and the experts, for a short while", chosen)


def sorted_mean(tensors: Sequence[Tensor]) -> Tensor:
    return fp32(lambda *t: torch.stack(t).mean(0))(*tensors) if len(tensors) > 1 else tensors[0].clone()


def expert_loads(subject: Subject) -> list[tuple[int, ...]]:
    """How often each expert of each sparse layer is picked on the sample."""
    from hf_llmarch.study.balance import expert_load

    return [load.counts for load in expert_load(subject.build(), input_ids=subject.sample)]


def regrouped(
    subject: Subject, layer: int, groups: Sequence[Sequence[int]], join: Callable[[Sequence[Tensor]], Tensor]
) -> list[Move]:
    """The moves that make one expert of each group of old ones, and one row of the router."""
    prefix = f"{subject.root}layers.{layer}.mlp."
    tails: dict[str, list[str]] = {}
    for name in subject.weights:
        match = EXPERT.match(name)
        if match and match[1] == f"{prefix}experts":
            tails.setdefault(match[3], []).append(name)
    moves = []
    for tail, names in tails.items():
        targets = tuple(f"{prefix}experts.{e}.{tail}" for e in range(len(groups)))
        for target, group in zip(targets, groups, strict=True):
            sources = tuple(f"{prefix}experts.{e}.{tail}" for e in group)
            moves.append(Move(sources, (target,), lambda *tensors: [join(tensors)]))
        used = {e for group in groups for e in group}
        moves += [drop(name) for name in names if int(EXPERT.match(name)[2]) not in used]  # type: ignore[index]
    for name in subject.have(prefix, "gate.weight", "gate.bias", "gate.e_score_correction_bias"):
        moves.append(each(name, partial(rows_of, groups=groups, join=join)))
    return moves


def rows_of(tensor: Tensor, groups: Sequence[Sequence[int]], join: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    return torch.stack([join([tensor[e] for e in group]) for group in groups])


@operation
def merge_experts(
    subject: Subject, num_experts: int, groups: Sequence[Sequence[Sequence[int]]] | None = None
) -> Change:
    """Fewer experts: similar ones are replaced by their mean, in each layer.

    Experts whose rows of the router point the same way serve the same tokens: the most loaded experts of the sample
    begin a group each, and every other one joins the group of the closest row (the grouping of MC-SMoE, arXiv
    2310.01334 section 3.1; its mean is weighed by load, this one is even, and experts are not permuted first).

    Args:
        num_experts: how many there are afterwards.
        groups: of each sparse layer, the old experts of each new one; None: found as above.

    Raises:
        SurgeryError: for groups of experts that the router picks among (`n_group`).
    """
    return merge_linear(subject, num_experts=num_experts, groups=groups)


@with_linear_experts
def merge_linear(subject: Subject, num_experts: int, groups: Sequence[Sequence[Sequence[int]]] | None) -> Change:
    config, layers = subject.config, sparse_layers(subject)
    old = config.num_experts or 0
    refuse(not 0 < num_experts <= old, f"num_experts={old} cannot be merged into {num_experts}.")
    refuse((config.n_group or 1) > 1, f"n_group={config.n_group}: groups have to keep one number of experts.")
    if groups is None:
        loads = expert_loads(subject)
        rows = [subject.weights[f"{subject.root}layers.{i}.mlp.gate.weight"] for i in layers]
        groups = [alike(row, load, num_experts) for row, load in zip(rows, loads, strict=True)]
    refuse(
        any(sorted(e for g in layer for e in g) != list(range(old)) or len(layer) != num_experts for layer in groups)
        or len(groups) != len(layers),
        f"groups={groups}: in each of {len(layers)} layers, {num_experts} groups have to hold {old} experts once.",
    )
    moves = [m for i, layer in zip(layers, groups, strict=True) for m in regrouped(subject, i, layer, sorted_mean)]
    result = subject.changed(
        moves, num_experts=num_experts, num_experts_per_tok=min(config.num_experts_per_tok, num_experts)
    )
    chosen = {"groups": [[list(group) for group in layer] for layer in groups]}
    why = "An expert is the mean of those it replaces."
    return Change(result, num_experts == old, why, "the router and the experts", chosen)


def alike(rows: Tensor, load: Sequence[int], count: int) -> list[list[int]]:
    """Groups of experts by the direction of their rows, begun by the `count` most loaded ones."""
    rows = torch.nn.functional.normalize(rows.double(), dim=-1)
    leaders = torch.tensor(load).topk(count).indices
    joins = (rows @ rows[leaders].T).argmax(-1)
    joins[leaders] = torch.arange(count)
    return [(joins == g).nonzero()[:, 0].tolist() for g in range(count)]


# -- sparse to dense ---------------------------------------------------------------------------------------------------


@operation
def to_dense(subject: Subject) -> Change:
    """One feed-forward in place of the experts: exact with one expert of constant weight; else their mean.

    With one expert a renormalised weight, or a softmax over one logit, is 1. The routed part is multiplied with
    `routed_scaling_factor`, and what every token passes besides stands beside it in the same feed-forward: two
    feed-forwards side by side are one whose inner width is the sum.

    Several experts are averaged, as if every token went to all of them with equal weights that sum to one.

    Raises:
        SurgeryError: for a gate on the shared expert, which depends on the token; for dense layers of another width
            than the new ones.
    """
    return dense_linear(subject)


@with_linear_experts
def dense_linear(subject: Subject) -> Change:
    config, layers = subject.config, sparse_layers(subject)
    experts = config.num_experts or 0
    refuse(config.shared_expert_gate, "shared_expert_gate=True weighs the shared expert by the token.")
    refuse(config.is_heterogeneous, "per_layer_config: the feed-forwards differ, and dense ones have one width.")
    width = (config.moe_intermediate_size or config.intermediate_size) + config.shared_width
    dense_remain = len(layers) < len(subject.blocks())
    refuse(
        dense_remain and width != config.intermediate_size,
        f"The dense layers have intermediate_size={config.intermediate_size}, the sparse ones would have {width}.",
    )
    constant = config.norm_topk_prob or config.router_score == "softmax"
    exact = experts == 1 and constant and config.capacity_factor is None and config.expert_capacity is None
    scale = config.routed_scaling_factor
    moves: list[Move] = []
    for i in layers:
        prefix = f"{subject.root}layers.{i}.mlp."
        for tail in PARTS:
            routed = subject.have(prefix, *(f"experts.{e}.{tail}" for e in range(experts)))
            if not routed:
                continue
            shared = subject.have(prefix, f"shared_experts.{tail}")
            how = partial(side_by_side, experts=experts, scale=scale, tail=tail)
            moves.append(Move((*routed, *shared), (f"{prefix}{tail}",), how))
        moves += [drop(n) for n in subject.have(prefix, "gate.weight", "gate.bias", "gate.e_score_correction_bias")]
    result = subject.changed(moves, intermediate_size=width, **without_experts())
    if exact:
        return Change(result, True, "The only expert has the weight one.")
    return Change(result, False, f"The feed-forward is the mean of {experts} experts.", "all weights")


def side_by_side(*tensors: Tensor, experts: int, scale: float, tail: str) -> list[Tensor]:
    """The mean of the experts, its output times `scale`, and the shared expert beside it."""
    routed = sorted_mean(tensors[:experts])
    if tail.startswith("down_proj") and scale != 1.0:
        routed = fp32(lambda t: t * scale)(routed)
    shared = tensors[experts:]
    if not shared:
        return [routed]
    if tail == "down_proj.bias":
        return [fp32(lambda a, b: a + b)(routed, shared[0])]
    return [torch.cat((routed, shared[0]), 1 if tail == "down_proj.weight" else 0)]


def without_experts() -> dict[str, Any]:
    """The switches of experts as a dense model has them."""
    from dataclasses import fields

    from hf_llmarch.model.configuration_llmarch import ExpertSwitches

    return {f.name: f.default for f in fields(ExpertSwitches)}

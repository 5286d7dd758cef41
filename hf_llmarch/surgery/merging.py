"""Several models of one config as one: their weights are joined tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from peft.utils.merge_utils import dare_linear, dare_ties, task_arithmetic, ties
from torch import Tensor

from hf_llmarch.model.modeling_llmarch import LlmArchPreTrainedModel

from .operation import of_folder, of_model, operation
from .subject import Change, Move, Subject, Weights, fp32, refuse

Method = Literal["linear", "slerp", "task_arithmetic", "ties", "dare_linear", "dare_ties"]
Source = str | os.PathLike[str] | LlmArchPreTrainedModel


def linear(base: Tensor, others: Sequence[Tensor], weights: Tensor, density: float) -> Tensor:
    """The weighted mean of all models."""
    share = torch.cat((1 - weights.sum(0, keepdim=True), weights)).to(base)
    return torch.einsum("n,n...->...", share, torch.stack([base, *others]))


def slerp(base: Tensor, others: Sequence[Tensor], weights: Tensor, density: float) -> Tensor:
    """The point on the arc between two tensors, taken as vectors (Shoemake 1985, section 3.3)."""
    (other,), t = others, weights[0].to(base)
    cosine = (base * other).sum() / (base.norm() * other.norm()).clamp(min=torch.finfo(base.dtype).tiny)
    angle = torch.arccos(cosine.clamp(-1, 1))
    straight = (1 - t) * base + t * other
    arc = (torch.sin((1 - t) * angle) * base + torch.sin(t * angle) * other) / torch.sin(angle)
    # Along one line there is no arc.
    return torch.where(torch.sin(angle).abs() < 1e-6, straight, arc)


def by_tasks(join: Callable[..., Tensor], *, dense: bool = False) -> Callable[..., Tensor]:
    """PEFT's functions join what each model has learned on top of the base."""

    def run(base: Tensor, others: Sequence[Tensor], weights: Tensor, density: float) -> Tensor:
        kept = {} if dense else {"density": density}
        return base + join([other - base for other in others], weights.to(base), **kept)

    return run


METHODS: Mapping[Method, Callable[[Tensor, Sequence[Tensor], Tensor, float], Tensor]] = {
    "linear": linear,
    "slerp": slerp,
    "task_arithmetic": by_tasks(task_arithmetic, dense=True),
    "ties": by_tasks(ties),
    "dare_linear": by_tasks(dare_linear),
    "dare_ties": by_tasks(dare_ties),
}


@operation
def merge(
    subject: Subject,
    others: Sequence[Source],
    method: Method = "linear",
    weights: Sequence[float] | None = None,
    density: float = 0.5,
    seed: int = 0,
) -> Change:
    """This model joined with others of its config.

    `linear`: (1 - sum of w) base + sum of w others, a model soup (arXiv 2203.05482). `slerp`: on the arc between two.
    The others add up what each model has learned on top of this one, as PEFT's functions do: `task_arithmetic` all of
    it (arXiv 2212.04089 section 2), `ties` the largest part, by the sign of the majority (arXiv 2306.01708 section 4),
    `dare_linear` and `dare_ties` a random part, enlarged (arXiv 2311.03099 section 3).

    Args:
        others: models, folders or Hub ids.
        weights: of the others; None: equal parts, this model included, for `linear`, 1/2 for `slerp`, and 1 else.
        density: the part of what was learned that `ties` and `dare_*` keep.
        seed: of the random part.

    Raises:
        SurgeryError: another model has another config, or other tensors; a method or number that does not fit.
    """
    refuse(method not in METHODS, f"method={method!r} is not one of {', '.join(METHODS)}.")
    refuse(not others, "others: at least one model is needed.")
    refuse(method == "slerp" and len(others) != 1, f"method='slerp' joins two models, and others has {len(others)}.")
    refuse(not 0 < density <= 1, f"density={density} must be above 0, and at most 1.")
    opened = [of_model(o) if isinstance(o, LlmArchPreTrainedModel) else of_folder(o)[1] for o in others]
    names = [
        o.config._name_or_path or "in memory" if isinstance(o, LlmArchPreTrainedModel) else os.fspath(o) for o in others
    ]
    for name, other in zip(names, opened, strict=True):
        refuse_other(subject, name, other)
    usual = {"linear": 1 / (len(others) + 1), "slerp": 0.5}.get(method, 1.0)
    shares = torch.tensor([usual] * len(others) if weights is None else list(weights), dtype=torch.float64)
    refuse(len(shares) != len(others), f"weights={weights}: one is needed for each of {len(others)} models.")

    infos = dict(subject.weights.infos)
    for i, other in enumerate(opened):
        infos |= {f"{name}@{i}": info for name, info in other.weights.infos.items()}

    def read(name: str) -> Tensor:
        own, at, index = name.rpartition("@")
        return opened[int(index)].weights[own] if at else subject.weights[name]

    def join(base: Tensor, *tensors: Tensor) -> list[Tensor]:
        if not base.is_floating_point():
            return [base]
        with torch.random.fork_rng(devices=[], enabled=not base.is_meta):
            torch.manual_seed(seed)
            return [fp32(lambda b, *o: METHODS[method](b, o, shares, density))(base, *tensors)]

    moves = [Move((n, *(f"{n}@{i}" for i in range(len(opened)))), (n,), join) for n in subject.weights.infos]
    origins = {name: subject.weights.origins.get(name, frozenset((name,))) for name in infos}
    merged = Weights(infos, read, origins).moved(moves)
    result = Subject(subject.config, merged, subject.kind, subject.sample, subject.folder).changed()
    chosen: dict[str, Any] = {"others": names}
    return Change(
        result, False, f"Weights of {len(others) + 1} models, joined by {method}.", "nothing, or a short while", chosen
    )


INERT = ("converted_from", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id")


def refuse_other(subject: Subject, name: str, other: Subject) -> None:
    """
    Raises:
        SurgeryError: naming the fields, or tensors, in which two models differ.
    """
    pairs = {
        f.name: (getattr(subject.config, f.name), getattr(other.config, f.name))
        for f in subject.config.switches()
        if f.name not in INERT
    }
    apart = [f"{field}={theirs!r} (here {mine!r})" for field, (mine, theirs) in pairs.items() if mine != theirs]
    refuse(bool(apart), f"{name} has another config: {', '.join(apart)}.")
    ours, theirs = subject.weights.infos, other.weights.infos
    odd = [n for n in {**ours, **theirs} if n not in ours or n not in theirs or ours[n].shape != theirs[n].shape]
    refuse(bool(odd), f"{name} has other tensors: {', '.join(odd[:5])}.")

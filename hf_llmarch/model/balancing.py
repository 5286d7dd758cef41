"""How the load of experts is kept even: losses on the router's logits, and a selection bias that no loss trains.

Shapes: `B` rows of a batch, `T` tokens a row, `N` = B T tokens, `E` experts, `K` experts a token, `L` sparse layers.
"""

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class BalancedRouter(Protocol):
    """What balancing reads of a router, see `routing.Router`."""

    experts: int
    update_rate: float
    weight: nn.Parameter
    e_score_correction_bias: torch.Tensor | None
    load: torch.Tensor | None

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor: ...


# -- losses ----------------------------------------------------------------------------------------------------------


def balance_loss(
    routers: Sequence[BalancedRouter], logits: tuple[torch.Tensor, ...], real: torch.Tensor, scope: str
) -> torch.Tensor:
    """The load-balancing loss of each row, `(B,)`, arXiv 2101.03961 equations 4 to 6.

    It is E times the sum over experts of f P, where f is the share of the tokens that picked an expert (these shares
    sum to K) and P is the expert's mean probability.

    Args:
        routers: of each sparse layer.
        logits: `(N, E)` for each sparse layer.
        real: `(B, T)`, True where a token is not padding.
        scope: what f and P are means over. "sequence": each row by itself, so that the loss does not depend on how a
            batch is split; "batch": the whole batch, as in Switch Transformers; "model": the batch and all layers
            together, as in Mixtral.
    """
    batch = real.shape[0]
    picks, probabilities = [], []
    for router, layer in zip(routers, logits, strict=True):
        _, indices = router.choose(layer)
        weight = real.to(layer.device)[..., None].float()
        picked = F.one_hot(indices, router.experts).sum(dim=-2).float()
        picks.append((picked.view(batch, -1, router.experts) * weight).sum(1))  # (B, E)
        probabilities.append((router.probabilities(layer).view(batch, -1, router.experts) * weight).sum(1))
    f, p = torch.stack(picks), torch.stack(probabilities)  # (L, B, E)
    count = real.sum(-1).to(f.device).float().clamp(min=1)[:, None]  # (B, 1)
    experts = routers[0].experts
    if scope == "sequence":
        return experts * ((f / count) * (p / count)).sum(-1).mean(0)
    total = real.sum().to(f.device).float().clamp(min=1)
    if scope == "batch":
        return (experts * ((f.sum(1) / total) * (p.sum(1) / total)).sum(-1).mean()).expand(batch)
    layers = total * len(logits)
    return (experts * ((f.sum((0, 1)) / layers) * (p.sum((0, 1)) / layers)).sum()).expand(batch)


def z_loss(logits: tuple[torch.Tensor, ...], real: torch.Tensor) -> torch.Tensor:
    """The mean squared log-sum-exp of the router's logits in each row, `(B,)`, averaged over layers.

    arXiv 2202.08906, equation 5. The arguments are those of `balance_loss`.
    """
    weight = real.float()
    rows = [layer.float().logsumexp(-1).square().view_as(weight) * weight.to(layer.device) for layer in logits]
    return torch.stack([row.sum(-1) / weight.sum(-1).clamp(min=1) for row in rows]).mean(0)


# -- the selection bias ----------------------------------------------------------------------------------------------

# Routers that have counted a load since the last optimiser step.
_WAITING: "weakref.WeakSet[Any]" = weakref.WeakSet()


def update_after_next_step(router: BalancedRouter) -> None:
    """Have the router's selection bias updated once its optimiser has taken its next step."""
    _watch_optimizers()
    _WAITING.add(router)


@torch.no_grad()
def _update_selection_bias(router: BalancedRouter) -> None:
    """Raise the bias of experts below the mean load of all processes, lower it above; arXiv 2408.15664 algorithm 1."""
    bias, load = cast(torch.Tensor, router.e_score_correction_bias), cast(torch.Tensor, router.load)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(load)
    # The sign of (mean - load), computed in whole numbers.
    bias += router.update_rate * torch.sign(load.sum() - router.experts * load)
    router.load = None


def _update_after_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Update the bias of each waiting router whose weight the optimiser owns.

    An optimiser that owns copies of the weights (fp32 masters), or not this weight (a frozen router), updates no bias.
    """
    waiting = {id(router.weight): router for router in _WAITING}
    # In the optimiser's order, which is the same in all processes: all_reduce pairs its calls by their order.
    for group in optimizer.param_groups if waiting else ():
        for parameter in group["params"]:
            router = waiting.get(id(parameter))
            if router is not None:
                _update_selection_bias(router)
                _WAITING.discard(router)


@cache
def _watch_optimizers() -> None:
    """Hook into every optimiser, so that Trainer, accelerate and a training loop of one's own behave alike."""
    register_optimizer_step_post_hook(_update_after_optimizer_step)

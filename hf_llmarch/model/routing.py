"""Which tokens go to which experts: routers, and what happens where an expert is full.

Shapes: `B` rows of a batch, `T` tokens a row, `N` = B T tokens, `E` experts, `K` experts a token, `C` width.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .balancing import update_after_next_step
from .buffers import Fp32Buffers
from .configuration_llmarch import LlmArchConfig, Overflow, RouterGroupScore, RouterScore, RouterType
from .declarations import Facts, Feature
from .linear import linear

# Logits `(N, E)`, weights `(N, K)` and the indices `(N, K)` of the picked experts.
Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# Functions with names rather than lambdas, so that a router can be pickled.
def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(dim=-1)


def _best_two(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(2, dim=-1).values.sum(dim=-1)


def _best_one(scores: torch.Tensor) -> torch.Tensor:
    return scores.amax(dim=-1)


# Scores `(N, E)` of logits `(N, E)`.
SCORES: dict[RouterScore, Callable[[torch.Tensor], torch.Tensor]] = {"softmax": _softmax, "sigmoid": torch.sigmoid}

# A group's score `(N, groups)`, given the scores `(N, groups, members)` of its experts.
GROUP_SCORES: dict[RouterGroupScore, Callable[[torch.Tensor], torch.Tensor]] = {"max": _best_one, "top2": _best_two}


# -- routers ---------------------------------------------------------------------------------------------------------


class Router(Fp32Buffers):
    """Each token picks the K experts that score it highest, arXiv 1701.06538.

    With groups, a token can pick experts of its `topk_group` best groups only (DeepSeek-V2, arXiv 2405.04434 section
    2.2.2). With a selection bias, experts are picked by score plus bias and weighted by the score alone (arXiv
    2408.15664).
    """

    facts = Facts()
    # Who picks: each token its experts, or each expert tokens of the whole row, later ones included.
    pickers: Literal["tokens", "experts"] = "tokens"
    e_score_correction_bias: torch.Tensor | None

    def __init__(self, layer: LlmArchConfig):
        super().__init__()
        self.experts, self.picks = cast(int, layer.num_experts), layer.num_experts_per_tok
        self.score, self.group_score = SCORES[layer.router_score], GROUP_SCORES[layer.router_group_score]
        self.groups, self.kept_groups = layer.n_group, layer.topk_group
        self.normalise, self.scale = layer.norm_topk_prob, layer.routed_scaling_factor
        self.jitter, self.in_fp32 = layer.router_jitter_noise, layer.router_in_fp32
        self.update_rate = layer.router_bias_update_rate
        self.weight = nn.Parameter(torch.empty(self.experts, layer.hidden_size))
        self.bias = nn.Parameter(torch.empty(self.experts)) if layer.router_bias else None
        bias = torch.zeros(self.experts, dtype=torch.float32) if layer.router_selection_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        # How often each expert was picked since the last optimiser step. This is not a buffer because
        # DistributedDataParallel would overwrite each process's count by that of the first process.
        self.load: torch.Tensor | None = None

    def init_weights(self, std: float) -> None:
        init.normal_(self.weight, mean=0.0, std=std)
        for zero in (self.bias, self.e_score_correction_bias):
            if zero is not None:
                init.zeros_(zero)

    def disturbed(self, x: torch.Tensor) -> torch.Tensor:
        """The router's input, in training with multiplicative noise."""
        if not (self.jitter and self.training):
            return x
        return x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`(N, C)` -> `(N, E)`."""
        x = self.disturbed(x)
        if not self.in_fp32:
            return linear(x, self.weight, self.bias)
        with torch.autocast(x.device.type, enabled=False):
            return linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores `(N, E)`, scaled to sum to one; those of a sigmoid do not by themselves."""
        scores = self.score(logits.float())
        return scores / scores.sum(dim=-1, keepdim=True)

    def ranking(self, scores: torch.Tensor) -> torch.Tensor:
        """The numbers `(N, E)` by which experts are picked: score plus bias, and -inf outside the groups kept."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.groups is None:
            return scores
        by_group = scores.unflatten(-1, (self.groups, -1))  # (N, groups, members)
        kept = self.group_score(by_group).topk(cast(int, self.kept_groups), dim=-1, sorted=False).indices
        keep = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, kept, True)
        return by_group.masked_fill(~keep[..., None], float("-inf")).flatten(-2)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores `(N, E)` and the picked experts `(N, K)`, best first."""
        scores = self.score(logits.float())
        return scores, self.ranking(scores).topk(self.picks, dim=-1).indices

    def weigh(self, scores: torch.Tensor, indices: torch.Tensor, sharing: torch.Tensor | None = None) -> torch.Tensor:
        """The weights `(N, K)` of the picked experts.

        Args:
            scores: `(N, E)`.
            indices: `(N, K)`.
            sharing: `(N, K)`, True for the picks among which the whole weight is shared out. None: for all.
        """
        weights = scores.gather(-1, indices)
        if sharing is not None:
            weights = weights * sharing
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights if self.scale == 1.0 else weights * self.scale

    def forward(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Routing:
        """Route the tokens `x (N, C)`; `real`, of N elements in any shape, is True where a token is not padding."""
        logits = self.logits(x)
        scores, indices = self.choose(logits)
        # Counted here rather than by the caller: under expert parallelism the caller sees its own experts' numbers.
        if self.training and torch.is_grad_enabled():
            self.count(indices, real)
        return logits, self.weigh(scores, indices), indices

    @torch.no_grad()
    def count(self, indices: torch.Tensor, real: torch.Tensor | None) -> None:
        """Add the picks `(N, K)` of real tokens to the load that the next optimiser step balances."""
        if self.update_rate:
            picked = indices if real is None else indices[real.flatten()]
            counts = picked.flatten().bincount(minlength=self.experts)
            self.load = counts if self.load is None else self.load + counts
            update_after_next_step(self)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, picks={self.picks}"


class SparseMixerRouter(Router):
    """SparseMixer, arXiv 2409.12136 (Phi-3.5-MoE).

    It picks one expert after another, and weighs each by a softmax over the experts that are left and within a relative
    distance of the best. The paper samples in training and estimates a third-order gradient; here experts are picked
    as in inference and the gradient is that of the softmax.
    """

    facts = Facts()

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, weights, picks = logits.float(), [], []
        for _ in range(self.picks):
            best, index = left.max(dim=-1, keepdim=True)
            far = (best - logits) / logits.abs().clamp(min=best) > 2 * self.jitter
            weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(-1, index))
            picks.append(index)
            left = left.scatter(-1, index, float("-inf"))
        indices = torch.cat(picks, dim=-1)
        scores = torch.zeros_like(left).scatter(-1, indices, torch.cat(weights, dim=-1))
        return scores, indices

    def disturbed(self, x: torch.Tensor) -> torch.Tensor:
        # `router_jitter_noise` is not noise here: twice its value is the relative distance in `choose`.
        return x


class ExpertChoiceRouter(Router):
    """Experts pick tokens, arXiv 2202.09368. `ExpertChoiceFeedForward` makes the pick, over a whole row."""

    facts = Facts(asks=(Feature.WHOLE_ROWS,))
    pickers = "experts"

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.score(logits.float())
        return scores, scores.argsort(dim=-1, descending=True)[..., : self.picks]


ROUTERS: dict[RouterType, type[Router]] = {
    "top_k": Router,
    "sparsemixer": SparseMixerRouter,
    "expert_choice": ExpertChoiceRouter,
}


# -- capacity --------------------------------------------------------------------------------------------------------


def slots(real: torch.Tensor, experts: int, picks: int, factor: float) -> torch.Tensor:
    """How many tokens of each row an expert takes, `(B,)`: ceil(real tokens x K / E x factor).

    Rows are counted by themselves and without padding, so that a result never depends on the rest of the batch.

    Args:
        real: `(B, T)`, True where a token is not padding.
    """
    exact = Fraction(str(factor)) * picks / experts  # a rounded product could fall on the wrong side of a whole number
    return -(real.sum(-1) * -exact.numerator // exact.denominator)


def _fixed_slots(real: torch.Tensor, capacity: int) -> torch.Tensor:
    """The same number for each row, `(B,)`, as Switch Transformers state it."""
    return torch.full(real.shape[:1], capacity, device=real.device)


def capacity(layer: LlmArchConfig) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A function from the real tokens `(B, T)` to the number of tokens `(B,)` that an expert takes of each row.

    None where the config sets no bound.
    """
    if layer.expert_capacity is not None:
        return partial(_fixed_slots, capacity=layer.expert_capacity)
    if layer.capacity_factor is None:
        return None
    experts, picks = cast(int, layer.num_experts), layer.num_experts_per_tok
    return partial(slots, experts=experts, picks=picks, factor=layer.capacity_factor)


# The experts `(B, T, K)` that tokens end up at, which of these picks are kept, and which share the token's weight (None
# stands for all).
Placement = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _drop_overflow(ranking: torch.Tensor, indices: torch.Tensor, room: torch.Tensor, real: torch.Tensor) -> Placement:
    """Keep a pick where its expert has room; first picks go before second ones, then earlier tokens before later.

    A pick that is dropped still takes its share of the token's weight.

    Args:
        ranking: `(B, T, E)`.
        indices: `(B, T, K)`.
        room: `(B,)`, the tokens of a row that an expert takes.
        real: `(B, T)`, True where a token is not padding.
    """
    batch, length, picks = indices.shape
    chosen = F.one_hot(indices, ranking.shape[-1]) * real[..., None, None]  # (B, T, K, E)
    in_turn = chosen.transpose(1, 2).flatten(1, 2).cumsum(1)  # (B, K * T, E): taken so far, this one included
    place = (in_turn.view(batch, picks, length, -1).transpose(1, 2) * chosen).sum(-1)  # (B, T, K)
    return indices, (place > 0) & (place <= room[:, None, None]), None


def _next_best(ranking: torch.Tensor, indices: torch.Tensor, room: torch.Tensor, real: torch.Tensor) -> Placement:
    """Send a token whose expert is full to the best one that has room. Arguments: see `_drop_overflow`."""
    batch, length, picks = indices.shape
    order = ranking.argsort(dim=-1, descending=True, stable=True)  # (B, T, E)
    taken = torch.zeros(batch, ranking.shape[-1], device=ranking.device)
    filled = torch.zeros(batch, length, dtype=torch.long, device=ranking.device)
    ended, kept = indices.clone(), torch.zeros_like(indices, dtype=torch.bool)
    reachable = ranking.isfinite()
    for rank in range(ranking.shape[-1]):
        expert = order[..., rank]  # (B, T)
        asks = real & (filled < picks) & reachable.gather(-1, expert[..., None])[..., 0]
        asked = F.one_hot(expert, ranking.shape[-1]) * asks[..., None]  # (B, T, E)
        place = taken.gather(1, expert) + (asked.cumsum(1) * asked).sum(-1)
        gets = asks & (place <= room[:, None])
        slot = filled.clamp(max=picks - 1)[..., None]
        ended = torch.where(gets[..., None], ended.scatter(-1, slot, expert[..., None]), ended)
        kept = torch.where(gets[..., None], kept.scatter(-1, slot, True), kept)
        filled = filled + gets
        taken = taken + (asked * gets[..., None]).sum(1)
    return ended, kept, kept


OVERFLOWS: dict[Overflow, Callable[..., Placement]] = {"drop": _drop_overflow, "next_best": _next_best}

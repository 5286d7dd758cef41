"""Mixture of experts: which tokens go to which experts, and the experts themselves.

Shapes: `B` rows of a batch, `T` tokens a row, `N` = B T tokens, `E` experts, `K` experts a token, `C` width, `I` inner
width of an expert. A router returns logits `(N, E)`, weights `(N, K)` and expert indices `(N, K)`.
"""

import weakref
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from math import ceil
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import initialization as init

from .buffers import Fp32Buffers
from .compat import AMX, EXPERTS
from .configuration_llmarch import LlmArchConfig, RouterGroupScore, RouterScore, RouterType
from .declarations import Facts, Feature
from .feedforward import FEED_FORWARDS, activation, gate
from .linear import PRODUCTS, VECTOR_PRODUCTS, Linear, fastest, linear

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(dim=-1)


def best_two(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(2, dim=-1).values.sum(dim=-1)


def best_one(scores: torch.Tensor) -> torch.Tensor:
    return scores.amax(dim=-1)


# Functions with names, so that a router can be pickled.
SCORES: dict[RouterScore, Callable[[torch.Tensor], torch.Tensor]] = {"softmax": softmax, "sigmoid": torch.sigmoid}

# A group's score, of the scores `(N, groups, members)` of its experts.
GROUP_SCORES: dict[RouterGroupScore, Callable[[torch.Tensor], torch.Tensor]] = {"max": best_one, "top2": best_two}


class Router(Fp32Buffers):
    """Tokens pick experts: the K best of their scores, arXiv 1701.06538.

    With groups, only the experts of a token's `topk_group` best groups can be picked (DeepSeek-V2, arXiv 2405.04434
    section 2.2.2). With a selection bias, the pick is by score plus bias and the weight is the score alone (arXiv
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
        # How often each expert was picked since the last optimiser step. No buffer: DistributedDataParallel would
        # overwrite every process's count by the first one's.
        self.load: torch.Tensor | None = None

    def init_weights(self, std: float) -> None:
        init.normal_(self.weight, mean=0.0, std=std)
        for zero in (self.bias, self.e_score_correction_bias):
            if zero is not None:
                init.zeros_(zero)

    def disturbed(self, x: torch.Tensor) -> torch.Tensor:
        """The router's input with relative noise, in training."""
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
        """Scores as shares of one, `(N, E)`; those of a sigmoid do not sum to it."""
        scores = self.score(logits.float())
        return scores / scores.sum(dim=-1, keepdim=True)

    def ranking(self, scores: torch.Tensor) -> torch.Tensor:
        """What experts are picked by, `(N, E)`: the scores, with the bias, and -inf outside the groups kept."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.groups is None:
            return scores
        by_group = scores.unflatten(-1, (self.groups, -1))  # (N, groups, members)
        kept = self.group_score(by_group).topk(cast(int, self.kept_groups), dim=-1, sorted=False).indices
        keep = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(1, kept, True)
        return by_group.masked_fill(~keep[..., None], float("-inf")).flatten(-2)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores `(N, E)` and the picked experts `(N, K)`, best first."""
        scores = self.score(logits.float())
        return scores, self.ranking(scores).topk(self.picks, dim=-1).indices

    def weigh(self, scores: torch.Tensor, indices: torch.Tensor, sharing: torch.Tensor | None = None) -> torch.Tensor:
        """The weights `(N, K)` of the picked experts; of those that share in them alone, where that is given."""
        weights = scores.gather(-1, indices)
        if sharing is not None:
            weights = weights * sharing
        if self.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights if self.scale == 1.0 else weights * self.scale

    def forward(self, x: torch.Tensor, real: torch.Tensor | None = None) -> Routing:
        """Tokens `(N, C)`, of which those that are not `real` (N elements in any shape) are no load.

        Counted here and not by the caller, who under expert parallelism gets one process's own numbers of experts.
        """
        logits = self.logits(x)
        scores, indices = self.choose(logits)
        if self.training and torch.is_grad_enabled():
            self.count(indices, real)
        return logits, self.weigh(scores, indices), indices

    @torch.no_grad()
    def count(self, indices: torch.Tensor, real: torch.Tensor | None) -> None:
        """Add the picks `(N, K)` of real tokens to the load, which the next optimiser step balances."""
        if self.update_rate:
            picked = indices if real is None else indices[real.flatten()]
            counts = picked.flatten().bincount(minlength=self.experts)
            self.load = counts if self.load is None else self.load + counts
            watch_optimizers()
            BALANCED.add(self)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, picks={self.picks}"


class SparseMixerRouter(Router):
    """SparseMixer, arXiv 2409.12136 (Phi-3.5-MoE): one expert after another, each weighed against those within a
    relative distance of the best. Its sampling and third-order gradient are for training; here gradients are the
    softmax's own."""

    facts = Facts()

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, weights, indices = logits.float(), [], []
        for _ in range(self.picks):
            best, index = left.max(dim=-1, keepdim=True)
            far = (best - logits) / logits.abs().clamp(min=best) > 2 * self.jitter
            weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(-1, index))
            indices.append(index)
            left = left.scatter(-1, index, float("-inf"))
        self_index = torch.cat(indices, dim=-1)
        scores = torch.zeros_like(left).scatter(-1, self_index, torch.cat(weights, dim=-1))
        return scores, self_index

    def disturbed(self, x: torch.Tensor) -> torch.Tensor:
        return x  # the noise's width is a distance here


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
    """Tokens that an expert takes of a row, `(B,)`: ceil(real tokens x K / E x factor).

    Of the row, not of the batch, and of real tokens, not of padding: so that batch-mates never change a result.
    """
    exact = Fraction(str(factor)) * picks / experts  # a rounded product could fall on the wrong side of a whole number
    return -(real.sum(-1) * -exact.numerator // exact.denominator)


def fixed_slots(real: torch.Tensor, capacity: int) -> torch.Tensor:
    """The same number for each row, `(B,)`, as Switch states it."""
    return torch.full(real.shape[:1], capacity, device=real.device)


def capacity(layer: LlmArchConfig) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What gives the room `(B,)` of an expert in each row, given its real tokens `(B, T)`; None: there is no bound."""
    if layer.expert_capacity is not None:
        return partial(fixed_slots, capacity=layer.expert_capacity)
    if layer.capacity_factor is None:
        return None
    experts, picks = cast(int, layer.num_experts), layer.num_experts_per_tok
    return partial(slots, experts=experts, picks=picks, factor=layer.capacity_factor)


Placement = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def drop_overflow(ranking: torch.Tensor, indices: torch.Tensor, room: torch.Tensor, real: torch.Tensor) -> Placement:
    """Keep a pick where its expert has room; first picks go before second ones, then earlier tokens before later.

    Args: `ranking (B, T, E)`, `indices (B, T, K)`, `room (B,)`, `real (B, T)` True for tokens that are not padding.

    Returns: the indices as they are, which of them are kept, `(B, T, K)`, and None: what is dropped keeps its share of
        the weights.
    """
    batch, length, picks = indices.shape
    chosen = F.one_hot(indices, ranking.shape[-1]) * real[..., None, None]  # (B, T, K, E)
    in_turn = chosen.transpose(1, 2).flatten(1, 2).cumsum(1)  # (B, K * T, E): taken so far, this one included
    place = (in_turn.view(batch, picks, length, -1).transpose(1, 2) * chosen).sum(-1)  # (B, T, K)
    return indices, (place > 0) & (place <= room[:, None, None]), None


def next_best(ranking: torch.Tensor, indices: torch.Tensor, room: torch.Tensor, real: torch.Tensor) -> Placement:
    """A token whose expert is full goes to the best one that has room. Arguments as `drop_overflow`.

    Returns: the experts each token ended at, and which of its K places it filled; twice, as these share its weights.
    """
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


OVERFLOWS = {"drop": drop_overflow, "next_best": next_best}


# -- experts ---------------------------------------------------------------------------------------------------------


def always(indices: torch.Tensor, experts: int) -> bool:
    return True


def evenly_busy(indices: torch.Tensor, experts: int) -> bool:
    """Whether nearly all experts have tokens, and nearly none has more than twice its share."""
    share = indices.numel() / experts
    if share < 2:
        return False
    picks = indices.flatten().bincount(minlength=experts)[:experts]
    return bool(((picks == 0) | (picks > 2 * share)).sum() <= experts / 8)


# What is faster than the host's grouped product on this processor, without gradients and for more than one token: by
# dtype, a method of `PackedExperts`, and whether it is for these picks of that many experts (`benchmarks/moe.py`).
FASTER: dict[torch.dtype, tuple[str, Callable[[torch.Tensor, int], bool]]] = {}
if torch.float32 in PRODUCTS:
    FASTER[torch.float32] = ("segments", always)
if AMX:
    FASTER[torch.bfloat16] = ("batches", evenly_busy)

# Experts in one batched product: enough to make it worthwhile, and few, so that a busy one lengthens it for few.
BATCH = 16


class PackedExperts(nn.Module):
    """All experts in 3-D weights, `gate_up_proj (E, 2 I, C)` (or `up_proj (E, I, C)`) and `down_proj (E, C, I)`: the
    layout of the host's experts implementations, which `set_experts_implementation` chooses from."""

    def __init__(self, config: LlmArchConfig, layer: LlmArchConfig):
        super().__init__()
        # Attributes as the host's implementations read them. The whole model's config: the choice is made there.
        self.config = config
        self.num_experts, self.hidden_dim = cast(int, layer.num_experts), layer.hidden_size
        self.intermediate_dim = layer.moe_intermediate_size or layer.intermediate_size
        self.has_gate, self.has_bias = layer.ffn_type == "glu", layer.ffn_bias
        self.is_transposed, self.is_concatenated = False, True
        self.has_post_expert_norm = self._is_expert_parallel = False
        self.act_fn, self.gate = activation(layer), gate(layer)
        self.up_name = "gate_up_proj" if self.has_gate else "up_proj"
        self.weight_names = (self.up_name, f"{self.up_name}_bias", "down_proj", "down_proj_bias")
        inner = self.intermediate_dim * (2 if self.has_gate else 1)
        self.register_parameter(self.up_name, nn.Parameter(torch.empty(self.num_experts, inner, self.hidden_dim)))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        if self.has_bias:
            self.register_parameter(f"{self.up_name}_bias", nn.Parameter(torch.empty(self.num_experts, inner)))
            self.down_proj_bias = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim))

    def init_weights(self, std: float) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            init.zeros_(parameter) if name.endswith("_bias") else init.normal_(parameter, mean=0.0, std=std)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The name that the host's implementations call."""
        return self.gate(self.act_fn, *gate_up.chunk(2, dim=-1))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Tokens `(N, C)` with their experts and weights `(N, K)` -> `(N, C)`."""
        chosen = self.config._experts_implementation
        own = self.instead_of_grouping(hidden_states, top_k_index) if chosen == "grouped_mm" else None
        implementation = own or EXPERTS.get_interface(chosen, PackedExperts.segments)
        # Weights in the tokens' dtype, as most of the host's routers give them: a product of mixed dtypes is slow.
        return implementation(self, hidden_states, top_k_index, top_k_weights.to(hidden_states.dtype))

    def instead_of_grouping(self, x: torch.Tensor, indices: torch.Tensor) -> Callable[..., torch.Tensor] | None:
        """What runs in place of the host's grouped product, its default: where that cannot, or is not the fastest.

        Its kernel wants rows of whole 16 bytes; compiled, in other dtypes than bf16, it is a loop that does not.
        """
        compiling = torch.compiler.is_compiling()
        if x.device.type == "cpu" and not (compiling or torch.is_grad_enabled()):
            if len(x) == 1:
                return PackedExperts.token
            method, applies = FASTER.get(x.dtype, (None, always))
            if method is not None and applies(indices, self.num_experts):
                return cast(Callable[..., torch.Tensor], getattr(PackedExperts, method))
        aligned = not any(width * x.element_size() % 16 for width in (self.hidden_dim, self.intermediate_dim))
        if compiling:
            # Not a loop: it asks for the sizes of segments, which a compiler does not know.
            return None if aligned or x.dtype != torch.bfloat16 else EXPERTS["batched_mm"]
        return None if aligned else PackedExperts.segments

    def segments(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """One expert after another, each on its tokens."""
        weights = [self.by_expert(name) for name in self.weight_names]

        def run(expert: int, x: torch.Tensor) -> torch.Tensor:
            return self.one(x, *(w[expert] for w in weights))

        return by_segments(run, self.num_experts, hidden_states, top_k_index, top_k_weights)

    def token(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The same for one token, where there is nothing to bring together: decoding is made of these."""
        up, up_bias, down, down_bias = (self.by_expert(name) for name in self.weight_names)
        product = fastest(hidden_states, up, VECTOR_PRODUCTS)

        def run(experts: list[int], x: torch.Tensor) -> torch.Tensor:
            inner = self.inner(torch.stack([product(x[0], up[e], up_bias[e]) for e in experts]))
            return torch.stack([product(x, down[e], down_bias[e]) for e, x in zip(experts, inner, strict=True)])

        return one_token(run, self.num_experts, hidden_states, top_k_index, top_k_weights)

    def batches(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Several experts at once: all on up to twice their mean number of tokens, then those that have more on the
        rest."""
        weights: list[Any] = [getattr(self, name, None) for name in self.weight_names]
        tokens, shares = tokens_by_expert(top_k_index, top_k_weights, self.num_experts)
        nobody = len(hidden_states)
        result = hidden_states.new_zeros(nobody + 1, self.hidden_dim)  # the last row takes what fills up the others
        for start in range(0, self.num_experts, BATCH):
            some = slice(start, min(start + BATCH, self.num_experts))
            longest = 2 * ceil(sum(map(len, tokens[some])) / (some.stop - some.start))
            rows = pad_sequence([t[:longest] for t in tokens[some]], batch_first=True, padding_value=nobody)
            share = pad_sequence([s[:longest] for s in shares[some]], batch_first=True)
            x = hidden_states[rows.clamp(max=nobody - 1)]  # (experts, rows, C)
            out = self.left(x, *(None if w is None else w[some] for w in weights)) * share
            result.index_add_(0, rows.flatten(), out.flatten(0, 1))
            for e in range(some.start, some.stop):
                if len(tokens[e]) > longest:
                    x = hidden_states[tokens[e][longest:]]
                    out = self.one(x, *(None if w is None else w[e] for w in weights)) * shares[e][longest:]
                    result.index_add_(0, tokens[e][longest:], out)
        return result[:nobody]

    def left(self, x: torch.Tensor, *weights: Any) -> torch.Tensor:
        """One expert on its tokens `(n, C)`, or several, `(experts, n, C)`, with their weights as left factors.

        oneDNN brings the right factor into another layout, and of the two that is to be the smaller.
        """
        up, up_bias, down, down_bias = weights
        inner = torch.matmul(up, x.mT).mT
        inner = self.inner(inner if up_bias is None else inner + up_bias.unsqueeze(-2))
        out = torch.matmul(down, inner.mT).mT
        return out if down_bias is None else out + down_bias.unsqueeze(-2)

    def one(self, x: torch.Tensor, *weights: Any) -> torch.Tensor:
        """One expert on its tokens `(n, C)`; the weights are in the order of `weight_names`."""
        up, up_bias, down, down_bias = weights
        return linear(self.inner(linear(x, up, up_bias)), down, down_bias)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply_gate(x) if self.has_gate else self.act_fn(x)

    def by_expert(self, name: str) -> Any:
        """A parameter of all experts, to be indexed by expert.

        Unbound once where a gradient is due: indexing it costs a full zero gradient for every expert.
        """
        weights = getattr(self, name, None)
        if weights is None:
            return [None] * self.num_experts
        return weights.unbind(0) if torch.is_grad_enabled() else weights

    def extra_repr(self) -> str:
        return f"{self.num_experts}, {self.hidden_dim} -> {self.intermediate_dim}, bias={self.has_bias}"


class LinearExperts(nn.ModuleList):
    """A feed-forward of plain `nn.Linear` an expert, which PEFT and quantisers address one by one."""

    def __init__(self, config: LlmArchConfig, layer: LlmArchConfig):
        width = layer.moe_intermediate_size or layer.intermediate_size
        feed_forward = FEED_FORWARDS[layer.ffn_type]
        super().__init__(feed_forward(layer, width, drops=False) for _ in range(cast(int, layer.num_experts)))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        picks = (len(self), hidden_states, top_k_index, top_k_weights)
        if len(hidden_states) == 1 and not torch.is_grad_enabled():
            return one_token(lambda experts, x: torch.cat([self[e](x) for e in experts]), *picks)
        # Gradients of zeros rather than none: processes that train together wait for each other's of every parameter.
        every = self.training and torch.is_grad_enabled()
        return by_segments(lambda expert, x: self[expert](x), *picks, every)


def tokens_by_expert(
    indices: torch.Tensor, weights: torch.Tensor, experts: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The picks `(N, K)` the other way around: each expert's tokens `(n,)` and the weights `(n, 1)` it has for them.

    An index of `experts` is nobody's: expert parallelism sends it for tokens that live elsewhere.
    """
    flat = indices.flatten()
    order = flat.argsort(stable=True)
    sizes = flat.bincount(minlength=experts + 1).tolist()
    tokens, shares = order // indices.shape[-1], weights.flatten()[order, None]
    return tokens.split(sizes)[:experts], shares.split(sizes)[:experts]


def by_segments(
    run: Callable[[int, torch.Tensor], torch.Tensor],
    experts: int,
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    every: bool = False,
) -> torch.Tensor:
    """Sum over each token's experts of weight x expert(token): `(N, C)`, `(N, K)` -> `(N, C)`; `run` is one expert on
    its tokens `(n, C)`. With `every`, experts without a token run on none."""
    tokens, shares = tokens_by_expert(indices, weights, experts)
    # A gradient is gathered once. Without one, what an expert works on is gathered when it does, and stays in cache.
    gathered = x[torch.cat(tokens)].split([len(rows) for rows in tokens]) if torch.is_grad_enabled() else None
    result = torch.zeros_like(x)
    for e, rows in enumerate(tokens):
        if len(rows) or every:
            out = run(e, x.index_select(0, rows) if gathered is None else gathered[e]) * shares[e]
            result.index_add_(0, rows, out.to(x.dtype))
    return result


def one_token(
    run: Callable[[list[int], torch.Tensor], torch.Tensor],
    experts: int,
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The same for one token `(1, C)`; `run` is some experts on it, `(K, C)`."""
    picks = indices[0].tolist()
    here = [k for k, e in enumerate(picks) if e < experts]
    if not here:
        return torch.zeros_like(x)
    if len(here) < len(picks):
        picks, weights = [picks[k] for k in here], weights[:, here]
    out = run(picks, x)
    return torch.mm(weights.to(out.dtype), out).to(x.dtype)


EXPERT_LAYOUTS: dict[str, type[nn.Module]] = {"packed": PackedExperts, "linear": LinearExperts}


class SparseFeedForward(nn.Module):
    """A router, its experts, and what every token passes besides."""

    def __init__(self, config: LlmArchConfig, layer: LlmArchConfig):
        super().__init__()
        self.gate = ROUTERS[layer.router_type](layer)
        self.experts = EXPERT_LAYOUTS[layer.experts_layout](config, layer)
        self.capacity, self.overflow = capacity(layer), OVERFLOWS[layer.overflow]
        self.capacity_factor = layer.capacity_factor
        width = layer.shared_width
        self.shared_experts = FEED_FORWARDS[layer.ffn_type](layer, width) if width else None
        self.shared_expert_gate = Linear(layer.hidden_size, 1, bias=False) if layer.shared_expert_gate else None

    def forward(self, x: torch.Tensor, real_tokens: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """`(B, T, C)` -> `(B, T, C)`; `real_tokens (B, T)` is True where a token is not padding."""
        out = self.routed(x, real_tokens)
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
        return out + shared

    def routed(self, x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Each token goes to the experts it picks."""
        tokens = x.flatten(0, -2)
        logits, weights, indices = self.gate(tokens, real)
        if self.capacity is not None:
            weights, indices = self.within_capacity(x, logits, indices, self.capacity, real)
        return self.experts(tokens, indices, weights).view_as(x)

    def within_capacity(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        indices: torch.Tensor,
        capacity: Callable[[torch.Tensor], torch.Tensor],
        real: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights `(N, K)`, 0 for what found no room, and the experts."""
        batch, length, _ = x.shape
        real = torch.ones(batch, length, dtype=torch.bool, device=x.device) if real is None else real
        room = capacity(real)
        scores = self.gate.score(logits.float())
        ranking = self.gate.ranking(scores).view(batch, length, -1)
        ended, kept, sharing = self.overflow(ranking, indices.view(batch, length, -1), room, real)
        indices = ended.flatten(0, 1)
        weights = self.gate.weigh(scores, indices, None if sharing is None else sharing.flatten(0, 1))
        return weights * kept.flatten(0, 1), indices


class ExpertChoiceFeedForward(SparseFeedForward):
    """Experts pick tokens, arXiv 2202.09368."""

    def routed(self, x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Each expert takes the tokens of a row that score it highest, as many as an even load (times the factor)."""
        batch, length, _ = x.shape
        real = torch.ones(batch, length, dtype=torch.bool, device=x.device) if real is None else real
        logits, _, _ = self.gate(x.flatten(0, 1))
        scores = self.gate.score(logits.float()).view(batch, length, -1).masked_fill(~real[..., None], -1.0)
        room = slots(real, self.gate.experts, self.gate.picks, self.capacity_factor or 1.0)  # (B,)
        weights, tokens = scores.transpose(1, 2).sort(dim=-1, descending=True, stable=True)  # (B, E, T)
        taken = (torch.arange(length, device=x.device) < room[:, None, None]) & (weights >= 0)
        row, expert, _ = taken.nonzero(as_tuple=True)
        token = row * length + tokens[taken]
        flat = x.flatten(0, 1)
        out = self.experts(flat[token], expert[:, None], weights[taken][:, None] * self.gate.scale)
        return torch.zeros_like(flat).index_add_(0, token, out).view_as(x)


# Keyed by a router's `pickers`.
SPARSE_FEED_FORWARDS: dict[str, type[SparseFeedForward]] = {
    "tokens": SparseFeedForward,
    "experts": ExpertChoiceFeedForward,
}


# -- balance ---------------------------------------------------------------------------------------------------------


def balance_loss(
    routers: list[Router], logits: tuple[torch.Tensor, ...], real: torch.Tensor, scope: str
) -> torch.Tensor:
    """The load-balancing loss `(B,)` of each row: E x sum over experts of f P, arXiv 2101.03961 equations 4 to 6, where
    f is the share of picks an expert got (K in all) and P its mean probability.

    Args:
        logits: `(N, E)` of each sparse layer.
        real: `(B, T)`, True where a token counts.
        scope: "sequence": f and P of each row by itself, so that the loss does not depend on how a batch is split;
            "batch": of the whole batch, as Switch does; "model": of the batch and all layers together, as Mixtral does.
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
    """Mean squared log-sum-exp of the router's logits, `(B,)` a row, mean over layers; arXiv 2202.08906 equation 5."""
    weight = real.float()
    rows = [layer.float().logsumexp(-1).square().view_as(weight) * weight.to(layer.device) for layer in logits]
    return torch.stack([row.sum(-1) / weight.sum(-1).clamp(min=1) for row in rows]).mean(0)


@torch.no_grad()
def update_selection_bias(router: Router) -> None:
    """One step of balancing without a loss, arXiv 2408.15664 algorithm 1: raise the bias of experts below the mean
    load, lower it above; over all processes."""
    bias, load = cast(torch.Tensor, router.e_score_correction_bias), cast(torch.Tensor, router.load)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(load)
    bias += router.update_rate * torch.sign(load.sum() - router.experts * load)  # of mean - load, in whole numbers
    router.load = None


# Routers that train a selection bias, entered by their forward in training.
BALANCED: "weakref.WeakSet[Router]" = weakref.WeakSet()


def update_after_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Update the bias of each router whose weight the optimiser owns, once a step.

    An optimiser that holds copies of the weights (fp32 masters) or none of them (a frozen router) updates no bias.
    """
    waiting = {id(router.weight): router for router in BALANCED}
    # In the optimiser's order, which is the same on all processes: all_reduce pairs its calls by their order.
    for group in optimizer.param_groups if waiting else ():
        for parameter in group["params"]:
            router = waiting.get(id(parameter))
            if router is not None:
                update_selection_bias(router)
                BALANCED.discard(router)


@cache
def watch_optimizers() -> None:
    """Hook into every optimiser, so that it works alike under Trainer, accelerate and a plain loop."""
    register_optimizer_step_post_hook(update_after_optimizer_step)

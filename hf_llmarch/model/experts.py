"""The experts of a mixture, and the feed-forward that sends tokens through them.

Shapes: `B` rows of a batch, `T` tokens a row, `N` = B T tokens, `E` experts, `K` experts a token, `C` width, `I` inner
width of an expert.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import initialization as init

from .compat import EXPERTS
from .configuration_llmarch import ExpertsLayout, LlmArchConfig
from .feedforward import activation, dense_feed_forward, gated_activation
from .linear import Linear, linear
from .routing import OVERFLOWS, ROUTERS, capacity, slots

# -- experts ---------------------------------------------------------------------------------------------------------


class PackedExperts(nn.Module):
    """All experts in 3-D weights, `gate_up_proj (E, 2 I, C)` (or `up_proj (E, I, C)`) and `down_proj (E, C, I)`.

    This is the layout of transformers' experts implementations, among which `set_experts_implementation` chooses.
    """

    def __init__(self, config: LlmArchConfig, layer: LlmArchConfig):
        super().__init__()
        # transformers' implementations read the attributes of these names. The config is the whole model's, on which
        # `set_experts_implementation` notes its choice.
        self.config = config
        self.num_experts, self.hidden_dim = cast(int, layer.num_experts), layer.hidden_size
        self.intermediate_dim = layer.moe_intermediate_size or layer.intermediate_size
        self.has_gate, self.has_bias = layer.ffn_type == "glu", layer.ffn_bias
        self.is_transposed, self.is_concatenated = False, True
        self.has_post_expert_norm = self._is_expert_parallel = False
        self.act_fn, self.gated = activation(layer), gated_activation(layer)
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
        """The gated activation, `(n, 2 I)` -> `(n, I)`, by the name that transformers' implementations call."""
        return self.gated(self.act_fn, *gate_up.chunk(2, dim=-1))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The tokens `(N, C)` through their experts, whose indices and weights are `(N, K)`: `(N, C)`."""
        chosen = self.config._experts_implementation
        own = self.instead_of_grouping(hidden_states, top_k_index) if chosen == "grouped_mm" else None
        implementation = own or EXPERTS.get_interface(chosen, PackedExperts.segments)
        # The weights get the tokens' dtype, as most of transformers' routers give them: mixed dtypes are slow.
        return implementation(self, hidden_states, top_k_index, top_k_weights.to(hidden_states.dtype))

    def instead_of_grouping(self, x: torch.Tensor, indices: torch.Tensor) -> Callable[..., torch.Tensor] | None:
        """The function to run in place of transformers' default, the grouped product; None: the default is best.

        The kernel of the grouped product needs rows whose bytes are a multiple of 16. In compiled code it is used for
        bf16 only; in other dtypes a loop that takes rows of any size replaces it.
        """
        compiling = torch.compiler.is_compiling()
        if x.device.type == "cpu" and not (compiling or torch.is_grad_enabled()):
            faster = PackedExperts.token if len(x) == 1 else Linear.products.experts(self, x, indices)
            if faster is not None:
                return faster
        aligned = not any(width * x.element_size() % 16 for width in (self.hidden_dim, self.intermediate_dim))
        if compiling:
            # `segments` cannot be compiled, because its loop depends on the sizes of the segments.
            return None if aligned or x.dtype != torch.bfloat16 else EXPERTS["batched_mm"]
        return None if aligned else PackedExperts.segments

    def segments(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """One expert after another, each on its tokens."""
        weights = [self.by_expert(name) for name in self.weight_names]

        def run(expert: int, x: torch.Tensor) -> torch.Tensor:
            return self.one(x, *(w[expert] for w in weights))

        return _by_segments(run, self.num_experts, hidden_states, top_k_index, top_k_weights)

    def token(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As `segments`, for the one token of a decoding step, whose experts need no sorting."""
        up, up_bias, down, down_bias = (self.by_expert(name) for name in self.weight_names)

        def run(experts: list[int], x: torch.Tensor) -> torch.Tensor:
            inner = self.inner(torch.stack([linear(x[0], up[e], up_bias[e]) for e in experts]))
            return torch.stack([linear(x, down[e], down_bias[e]) for e, x in zip(experts, inner, strict=True)])

        return _one_token(run, self.num_experts, hidden_states, top_k_index, top_k_weights)

    def one(self, x: torch.Tensor, *weights: Any) -> torch.Tensor:
        """One expert on its tokens, `(n, C)` -> `(n, C)`, with its weights in the order of `weight_names`."""
        up, up_bias, down, down_bias = weights
        return linear(self.inner(linear(x, up, up_bias)), down, down_bias)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What stands between an expert's two products."""
        return self._apply_gate(x) if self.has_gate else self.act_fn(x)

    def by_expert(self, name: str) -> Any:
        """A parameter of all experts, to be indexed by expert.

        With gradients it is unbound once, because the backward of each indexing makes a zero gradient of its full size.
        """
        weights = getattr(self, name, None)
        if weights is None:
            return [None] * self.num_experts
        return weights.unbind(0) if torch.is_grad_enabled() else weights

    def extra_repr(self) -> str:
        return f"{self.num_experts}, {self.hidden_dim} -> {self.intermediate_dim}, bias={self.has_bias}"


class LinearExperts(nn.ModuleList):
    """Each expert is a feed-forward of its own, whose linear layers PEFT and quantisers address one by one."""

    def __init__(self, config: LlmArchConfig, layer: LlmArchConfig):
        width = layer.moe_intermediate_size or layer.intermediate_size
        super().__init__(dense_feed_forward(layer, width, drops=False) for _ in range(cast(int, layer.num_experts)))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        picks = (len(self), hidden_states, top_k_index, top_k_weights)
        if len(hidden_states) == 1 and not torch.is_grad_enabled():
            return _one_token(lambda experts, x: torch.cat([self[e](x) for e in experts]), *picks)
        # In training an expert without tokens gets gradients of zeros rather than none: processes that train together
        # wait for the gradient of every parameter.
        every = self.training and torch.is_grad_enabled()
        return _by_segments(lambda expert, x: self[expert](x), *picks, every)


def tokens_by_expert(
    indices: torch.Tensor, weights: torch.Tensor, experts: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The picks `(N, K)` by expert: for each of them the indices `(n,)` of its tokens and their weights `(n, 1)`.

    The index `experts` marks a pick that is not computed here: expert parallelism gives it to other processes' experts.
    """
    flat = indices.flatten()
    order = flat.argsort(stable=True)
    sizes = flat.bincount(minlength=experts + 1).tolist()
    tokens, shares = order // indices.shape[-1], weights.flatten()[order, None]
    return tokens.split(sizes)[:experts], shares.split(sizes)[:experts]


def _by_segments(
    run: Callable[[int, torch.Tensor], torch.Tensor],
    experts: int,
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    every: bool = False,
) -> torch.Tensor:
    """The sum over each token's experts of weight x expert(token), `(N, C)`.

    Args:
        run: one expert on its tokens, `(n, C)` -> `(n, C)`.
        experts: how many there are.
        x: `(N, C)`.
        indices: `(N, K)`, the experts of each token.
        weights: `(N, K)`.
        every: also run the experts that have no tokens, on an empty batch.
    """
    tokens, shares = tokens_by_expert(indices, weights, experts)
    # With gradients, all tokens are gathered at once, for one backward. Without, each expert's are gathered right
    # before it runs, so that they are still in the processor's cache.
    gathered = x[torch.cat(tokens)].split([len(rows) for rows in tokens]) if torch.is_grad_enabled() else None
    result = torch.zeros_like(x)
    for e, rows in enumerate(tokens):
        if len(rows) or every:
            out = run(e, x.index_select(0, rows) if gathered is None else gathered[e]) * shares[e]
            result.index_add_(0, rows, out.to(x.dtype))
    return result


def _one_token(
    run: Callable[[list[int], torch.Tensor], torch.Tensor],
    experts: int,
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """As `_by_segments` for one token `(1, C)`; `run` is several experts on it, `(1, C)` -> `(K, C)`."""
    picks = indices[0].tolist()
    here = [k for k, e in enumerate(picks) if e < experts]
    if not here:
        return torch.zeros_like(x)
    if len(here) < len(picks):
        picks, weights = [picks[k] for k in here], weights[:, here]
    out = run(picks, x)
    return torch.mm(weights.to(out.dtype), out).to(x.dtype)


EXPERT_LAYOUTS: dict[ExpertsLayout, type[nn.Module]] = {"packed": PackedExperts, "linear": LinearExperts}


# -- feed-forwards ---------------------------------------------------------------------------------------------------


class SparseFeedForward(nn.Module):
    """A router and its experts, and the shared experts that every token passes through as well."""

    def __init__(self, config: LlmArchConfig, layer: LlmArchConfig):
        super().__init__()
        self.gate = ROUTERS[layer.router_type](layer)
        self.experts = EXPERT_LAYOUTS[layer.experts_layout](config, layer)
        self.capacity, self.overflow = capacity(layer), OVERFLOWS[layer.overflow]
        self.capacity_factor = layer.capacity_factor
        width = layer.shared_width
        self.shared_experts = dense_feed_forward(layer, width) if width else None
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
        """The tokens `(B, T, C)` through the experts that they pick; `real` as `real_tokens` in `forward`."""
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
        """The weights `(N, K)`, 0 for picks that found no room, and the experts `(N, K)`, given the router's picks."""
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
    """Each expert picks tokens, arXiv 2202.09368."""

    def routed(self, x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Each expert takes the tokens of a row that score it highest: as many as an even load, times the factor."""
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

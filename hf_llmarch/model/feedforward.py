"""Dense feed-forward: the MLP and the gated (GLU) family."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .configuration_llmarch import FFNType, LlmArchConfig
from .embeddings import dropout
from .linear import Linear, OwnDtypeLinear


class Swish(nn.Module):
    """x * sigmoid(beta x), arXiv 1710.05941, where beta is a constant or a number learned by each layer."""

    def __init__(self, beta: float | Literal["learned"]):
        super().__init__()
        self.beta: nn.Parameter | float = nn.Parameter(torch.empty(1)) if isinstance(beta, str) else beta

    def init_weights(self, std: float) -> None:
        if isinstance(self.beta, nn.Parameter):
            init.ones_(self.beta)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


def activation(config: LlmArchConfig) -> nn.Module:
    """The activation of the feed-forwards."""
    if config.swish_beta is not None:
        return Swish(config.swish_beta)
    return ACT2FN[config.hidden_act]


def _gated(act: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return act(gate) * up


def _bounded_gated(
    act: nn.Module, gate: torch.Tensor, up: torch.Tensor, limit: float | None, offset: float
) -> torch.Tensor:
    """As in gpt-oss: the gate is at most `limit`, up is within +-`limit`, and the result act(gate) * (up + offset)."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return act(gate) * (up + offset)


def _bounds_gate(config: LlmArchConfig) -> bool:
    return config.glu_limit is not None or config.glu_up_offset != 0.0


def gated_activation(config: LlmArchConfig) -> Callable[..., torch.Tensor]:
    """How a GLU joins its two halves `(..., I)`: a function of the activation, the gate and the other half."""
    if not _bounds_gate(config):
        return _gated
    return partial(_bounded_gated, limit=config.glu_limit, offset=config.glu_up_offset)


class MLP(nn.Module):
    """down(act(up(x))).

    Args:
        width: of the inner activations. None: `intermediate_size`.
        drops: whether `ffn_dropout` acts on the inner activations, which it does not in experts.
    """

    def __init__(self, config: LlmArchConfig, width: int | None = None, drops: bool = True):
        super().__init__()
        self.width = width or config.intermediate_size
        self.up_proj = Linear(config.hidden_size, self.width, bias=config.ffn_bias)
        last = OwnDtypeLinear if "ffn_output" in (config.keep_in_fp32 or ()) else Linear
        self.down_proj = last(self.width, config.hidden_size, bias=config.ffn_bias)
        self.act_fn = activation(config)
        self.inner_dropout = dropout(config.ffn_dropout) if drops else None

    def forward(self, x: torch.Tensor, real_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """`(B, T, C)` -> `(B, T, C)`; only mixtures of experts read `real_tokens`."""
        inner = self.act_fn(self.up_proj(x))
        return self.down_proj(inner if self.inner_dropout is None else self.inner_dropout(inner))


class GLU(MLP):
    """down(act(gate(x)) * up(x)), arXiv 2002.05202."""

    def __init__(self, config: LlmArchConfig, width: int | None = None, drops: bool = True):
        super().__init__(config, width, drops)
        self.gate_proj = Linear(config.hidden_size, self.width, bias=config.ffn_bias)

    def forward(self, x: torch.Tensor, real_tokens: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner if self.inner_dropout is None else self.inner_dropout(inner))


class BoundedGLU(GLU):
    """A GLU with bounds on its two halves, or with an offset on the second (gpt-oss)."""

    def __init__(self, config: LlmArchConfig, width: int | None = None, drops: bool = True):
        super().__init__(config, width, drops)
        self.gated = gated_activation(config)

    def forward(self, x: torch.Tensor, real_tokens: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.gated(self.act_fn, self.gate_proj(x), self.up_proj(x))
        return self.down_proj(inner if self.inner_dropout is None else self.inner_dropout(inner))


# Keyed by the config's `ffn_type`, and whether it bounds the gate.
FEED_FORWARDS: dict[tuple[FFNType, bool], type[MLP]] = {
    ("mlp", False): MLP,
    ("glu", False): GLU,
    ("glu", True): BoundedGLU,
}


def dense_feed_forward(config: LlmArchConfig, width: int | None = None, drops: bool = True) -> MLP:
    """The feed-forward of a dense layer, or of one expert. The arguments are those of `MLP`."""
    return FEED_FORWARDS[config.ffn_type, _bounds_gate(config)](config, width, drops)

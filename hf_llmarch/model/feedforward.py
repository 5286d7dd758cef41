"""Dense feed-forward: the MLP and the gated (GLU) family."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .configuration_llmarch import FFNType, LlmArchConfig
from .embeddings import chain, dropout
from .linear import Linear, OwnDtypeLinear


class Swish(nn.Module):
    """x * sigmoid(beta x), arXiv 1710.05941; beta a constant, or one number learned in each layer."""

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
    return named_activation("hidden_act", config.hidden_act)


def named_activation(field: str, name: str) -> nn.Module:
    """
    Raises:
        ValueError: when transformers has no activation of that name.
    """
    if name not in ACT2FN:
        raise ValueError(f"{field}={name!r} is not one of {', '.join(sorted(ACT2FN))}.")
    return ACT2FN[name]


def plain_gate(act: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return act(gate) * up


def bounded_gate(
    act: nn.Module, gate: torch.Tensor, up: torch.Tensor, limit: float | None, offset: float
) -> torch.Tensor:
    """gpt-oss: gate at most `limit`, up within +-`limit`, and act(gate) * (up + offset)."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return act(gate) * (up + offset)


def gate(config: LlmArchConfig) -> Callable[..., torch.Tensor]:
    """How a GLU joins its two halves: a function of the activation, the gate and the other half."""
    if config.glu_limit is None and config.glu_up_offset == 0.0:
        return plain_gate
    return partial(bounded_gate, limit=config.glu_limit, offset=config.glu_up_offset)


class MLP(nn.Module):
    """down(act(up(x))). `width` overrides `intermediate_size`; an expert does not drop out inside (`drops`)."""

    def __init__(self, config: LlmArchConfig, width: int | None = None, drops: bool = True):
        super().__init__()
        self.width = width or config.intermediate_size
        self.up_proj = Linear(config.hidden_size, self.width, bias=config.ffn_bias)
        last = OwnDtypeLinear if "ffn_output" in (config.keep_in_fp32 or ()) else Linear
        self.down_proj = last(self.width, config.hidden_size, bias=config.ffn_bias)
        self.act_fn = activation(config)
        self.inner_dropout = chain(dropout(config.ffn_dropout) if drops else None)

    def forward(self, x: torch.Tensor, real_tokens: torch.Tensor | None = None) -> torch.Tensor:
        return self.down_proj(self.inner_dropout(self.act_fn(self.up_proj(x))))


class GLU(MLP):
    """down(act(gate(x)) * up(x)), arXiv 2002.05202."""

    def __init__(self, config: LlmArchConfig, width: int | None = None, drops: bool = True):
        super().__init__(config, width, drops)
        self.gate_proj = Linear(config.hidden_size, self.width, bias=config.ffn_bias)
        self.gate = gate(config)

    def forward(self, x: torch.Tensor, real_tokens: torch.Tensor | None = None) -> torch.Tensor:
        return self.down_proj(self.inner_dropout(self.gate(self.act_fn, self.gate_proj(x), self.up_proj(x))))


FEED_FORWARDS: dict[FFNType, type[MLP]] = {"mlp": MLP, "glu": GLU}

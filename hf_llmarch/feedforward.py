"""Dense feed-forward: the MLP and the gated (GLU) family."""

from typing import Any, Literal

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .configuration_llmarch import FFNType, LlmArchConfig


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
    """The activation named by the config.

    Raises:
        ValueError: when transformers has none of that name.
    """
    if config.swish_beta is not None:
        return Swish(config.swish_beta)
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act={config.hidden_act!r} is not one of {', '.join(sorted(ACT2FN))}.")
    return ACT2FN[config.hidden_act]


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, config: LlmArchConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.ffn_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.ffn_bias)
        self.act_fn = activation(config)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class GLU(MLP):
    """down(act(gate(x)) * up(x)), arXiv 2002.05202."""

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.ffn_bias)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


FEED_FORWARDS: dict[FFNType, type[nn.Module]] = {"mlp": MLP, "glu": GLU}

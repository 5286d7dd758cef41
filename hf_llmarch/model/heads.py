"""The parts of heads, which turn the last hidden states into logits.

Shapes: `B` batch, `T` tokens, `C` width.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from transformers.activations import ACT2FN

from .configuration_llmarch import ClassifierPooling, LlmArchConfig
from .embeddings import Scale, SoftCap, TensorFn, dropout, in_sequence
from .feedforward import activation
from .linear import Linear
from .norms import norm


class Pooler(nn.Module):
    """tanh(dense(first token)), `(B, T, C)` -> `(B, C)` (BERT)."""

    def __init__(self, config: LlmArchConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def carry_along(self) -> None:
        """Keep the weights for whoever reads a base model from the same file, as buffers: nothing here reads what they
        make, and DistributedDataParallel would wait for the gradients of parameters."""
        for name, weight in list(self.dense.named_parameters()):
            delattr(self.dense, name)
            self.dense.register_buffer(name, weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class HeadTransform(nn.Module):
    """norm(act(dense(x))), `(B, T, C)` -> `(B, T, width)`, where the width is that of the embedding (BERT)."""

    def __init__(self, config: LlmArchConfig):
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.dense = Linear(config.hidden_size, width, bias=config.head_bias)
        self.act_fn = ACT2FN[config.head_act] if config.head_act else activation(config)
        self.norm = norm(config, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act_fn(self.dense(x)))


class ClassifierTransform(nn.Module):
    """norm(act(dense(dropout(x)))), `(..., C)` -> `(..., C)`; dropout and norm only where the config has them."""

    def __init__(self, config: LlmArchConfig):
        super().__init__()
        self.dropout = in_sequence(dropout(config.classifier_dropout) if config.classifier_input_dropout else None)
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=config.head_bias)
        self.act_fn = ACT2FN[config.classifier_act]
        self.norm = in_sequence(norm(config) if config.classifier_norm else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act_fn(self.dense(self.dropout(x))))


def logits_transform(config: LlmArchConfig) -> TensorFn:
    """A function of the logits that scales them, and then bounds them."""
    cap = config.final_logit_softcapping
    return in_sequence(
        Scale(config.logit_scale) if config.logit_scale != 1.0 else None, SoftCap(cap) if cap is not None else None
    )


def classifier_transform(config: LlmArchConfig, wanted: bool) -> TensorFn:
    """A `ClassifierTransform`, or the identity where none is wanted."""
    return in_sequence(ClassifierTransform(config) if wanted else None)


def output_head(config: LlmArchConfig) -> Linear:
    """The head over the vocabulary. It reads the width of the embedding where a `HeadTransform` stands before it."""
    width = (config.embedding_size if config.lm_head_transform else None) or config.hidden_size
    return Linear(width, config.vocab_size, bias=config.lm_head_bias)


# -- pooling ---------------------------------------------------------------------------------------------------------

# A function of the hidden states `(B, T, C)`, the pooler's output `(B, C)` and the tokens that may be read `(B, T)`; it
# gives `(B, C)`.
Pooling = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]


def _pool_last(x: torch.Tensor, pooled: torch.Tensor | None, readable: torch.Tensor) -> torch.Tensor:
    """The last readable token, wherever the padding is."""
    index = (torch.arange(x.shape[1], device=x.device) * readable).argmax(-1)
    return x[torch.arange(x.shape[0], device=x.device), index]


def _pool_first(x: torch.Tensor, pooled: torch.Tensor | None, readable: torch.Tensor) -> torch.Tensor:
    return x[:, 0]


def _pool_mean(x: torch.Tensor, pooled: torch.Tensor | None, readable: torch.Tensor) -> torch.Tensor:
    weights = readable[..., None].to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)


def _pool_pooler(x: torch.Tensor, pooled: torch.Tensor | None, readable: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, pooled)


POOLINGS: dict[ClassifierPooling, Pooling] = {
    "last": _pool_last,
    "first": _pool_first,
    "mean": _pool_mean,
    "pooler": _pool_pooler,
    "eos": _pool_last,
}

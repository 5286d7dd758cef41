"""What stands between the last hidden state and a task's numbers."""

from collections.abc import Callable
from typing import cast

import torch
from torch import nn

from .configuration_llmarch import ClassifierPooling, LlmArchConfig
from .embeddings import Map, Scale, SoftCap, chain, dropout
from .feedforward import activation, named_activation
from .linear import Linear
from .norms import norm


class Pooler(nn.Module):
    """tanh of a dense layer on the first token, `(B, T, C)` -> `(B, C)` (BERT)."""

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
    """norm(act(dense(x))), to the width of the embedding that the head is tied to (BERT)."""

    def __init__(self, config: LlmArchConfig):
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.dense = Linear(config.hidden_size, width, bias=config.head_bias)
        self.act_fn = named_activation("head_act", config.head_act) if config.head_act else activation(config)
        self.norm = norm(config, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act_fn(self.dense(x)))


class ClassifierTransform(nn.Module):
    """norm(act(dense(x))) of the classifier's own width; dropout before it and the norm where the config has them."""

    def __init__(self, config: LlmArchConfig):
        super().__init__()
        self.dropout = chain(dropout(config.classifier_dropout) if config.classifier_input_dropout else None)
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=config.head_bias)
        self.act_fn = named_activation("classifier_act", config.classifier_act)
        self.norm = chain(norm(config) if config.classifier_norm else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act_fn(self.dense(self.dropout(x))))


def logits_transform(config: LlmArchConfig) -> Map:
    """Scale, then bound, the logits."""
    cap = config.final_logit_softcapping
    return chain(
        Scale(config.logit_scale) if config.logit_scale != 1.0 else None, SoftCap(cap) if cap is not None else None
    )


def classifier_transform(config: LlmArchConfig, wanted: bool) -> Map:
    return chain(ClassifierTransform(config) if wanted else None)


def output_head(config: LlmArchConfig) -> Linear:
    """The head over the vocabulary; as wide as the embedding where a transform goes to it."""
    width = (config.embedding_size if config.lm_head_transform else None) or config.hidden_size
    return Linear(width, config.vocab_size, bias=config.lm_head_bias)


# -- pooling: hidden states (B, T, C), the pooler's output, tokens that may be read (B, T) -> (B, C) -------------------

Pooling = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]


def pool_last(x: torch.Tensor, pooled: torch.Tensor | None, readable: torch.Tensor) -> torch.Tensor:
    """The last readable token, wherever the padding is."""
    index = (torch.arange(x.shape[1], device=x.device) * readable).argmax(-1)
    return x[torch.arange(x.shape[0], device=x.device), index]


def pool_first(x: torch.Tensor, pooled: torch.Tensor | None, readable: torch.Tensor) -> torch.Tensor:
    return x[:, 0]


def pool_mean(x: torch.Tensor, pooled: torch.Tensor | None, readable: torch.Tensor) -> torch.Tensor:
    weights = readable[..., None].to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)


def pool_pooler(x: torch.Tensor, pooled: torch.Tensor | None, readable: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, pooled)


POOLINGS: dict[ClassifierPooling, Pooling] = {
    "last": pool_last,
    "first": pool_first,
    "mean": pool_mean,
    "pooler": pool_pooler,
    "eos": pool_last,
}

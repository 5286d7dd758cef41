"""Token embeddings, and small pointwise modules for both ends of the model."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import initialization as init

from .buffers import Fp32Buffers
from .configuration_llmarch import LlmArchConfig


class ScaledEmbedding(Fp32Buffers, nn.Embedding):
    """Token embedding times a constant that is first rounded to the weight's dtype.

    In bf16 Gemma multiplies by 55.5, not by sqrt(3072) = 55.4256.
    """

    embed_scale: torch.Tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, scale: float):
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, padding_idx)
        self.scale = scale
        self.register_buffer("embed_scale", torch.tensor(scale, dtype=torch.float32), persistent=False)

    def init_weights(self, std: float) -> None:
        init.normal_(self.weight, mean=0.0, std=std)
        init.constant_(self.embed_scale, self.scale)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return nn.Embedding.forward(self, input_ids) * self.embed_scale.to(self.weight.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}"


def token_embedding(config: LlmArchConfig) -> nn.Embedding:
    """The embedding `(vocab_size, width)`; scaled only where the config asks for it."""
    # Old LLaMA configs say pad_token_id=-1 for "none", which torch would take for the last row.
    pad = config.pad_token_id
    padding_idx = pad if pad is not None and 0 <= pad < config.vocab_size else None
    width = config.embedding_size or config.hidden_size
    if config.embedding_scale == 1.0:
        return nn.Embedding(config.vocab_size, width, padding_idx)
    return ScaledEmbedding(config.vocab_size, width, padding_idx, config.embedding_scale)


class Scale(nn.Module):
    """x times a constant."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor}"


class SoftCap(nn.Module):
    """cap * tanh(x / cap): bounded, and about x near zero."""

    def __init__(self, cap: float):
        super().__init__()
        self.cap = cap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / self.cap) * self.cap

    def extra_repr(self) -> str:
        return f"{self.cap}"


class Clamp(nn.Module):
    """x bounded to [-bound, bound]."""

    def __init__(self, bound: float):
        super().__init__()
        self.bound = bound

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-self.bound, self.bound)

    def extra_repr(self) -> str:
        return f"{self.bound}"


TensorFn = Callable[[torch.Tensor], torch.Tensor]


def identity(x: torch.Tensor) -> torch.Tensor:
    """A part that the config leaves out. It is no module, because calling one costs more than a small operator."""
    return x


def in_sequence(*modules: nn.Module | None) -> TensorFn:
    """The given modules, applied one after another, without those that are None."""
    present = [module for module in modules if module is not None]
    if not present:
        return identity
    return present[0] if len(present) == 1 else nn.Sequential(*present)


def dropout(p: float) -> nn.Dropout | None:
    """Dropout, or None for a probability of 0."""
    return nn.Dropout(p) if p else None

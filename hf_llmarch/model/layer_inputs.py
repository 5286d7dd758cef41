"""What a forward hands to each layer beside the hidden states.

It travels as keyword arguments, because tools look there for tensors (FSDP casts them, accelerate and checkpoints move
or drop them) and add arguments of their own (vLLM). Tensors that may need a gradient are the exception: reentrant
checkpoints carry gradients of positional arguments only, see `block.Block`.

Shapes: `B` batch, `T` query, `S` key, `R` rotated channels of a head.
"""

from typing import TypedDict

import torch
from transformers.cache_utils import Cache
from transformers.utils import TransformersKwargs


class CacheInputs(TypedDict, total=False):
    """The keys and values so far, under its name in this release of transformers (`compat.CACHE`)."""

    cache: Cache | None
    past_key_values: Cache | None


class ScoreInputs(TransformersKwargs, total=False):
    """What goes on to the attention implementation.

    Attributes:
        use_cache: read by gradient checkpoints.
    """

    use_cache: bool | None


class AttentionInputs(CacheInputs, ScoreInputs, total=False):
    """What the attention of a layer gets.

    Attributes:
        attention_mask: `(B or 1, 1, T, S)`, or what else the attention implementation takes.
        rotation: the cosines and sines of RoPE, `(B or 1, 1, T, R)` each.
    """

    attention_mask: torch.Tensor | None
    rotation: tuple[torch.Tensor, torch.Tensor]

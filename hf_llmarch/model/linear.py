"""Linear layers, and the one place where products that are faster than torch's own can be put in.

By itself the model multiplies with `F.linear`. Importing the package installs the products that are fastest on this
machine's processor (`hf_llmarch.integrations.processors`), which a model loaded by `trust_remote_code` does without.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn


class Weights(NamedTuple):
    """What `Products.multiply` reads of a linear layer, for weights that are no layer's own.

    Attributes:
        weight: `(O, I)`.
        bias: `(O,)`.
        prepacked: see `Linear`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    prepacked: torch.Tensor | None = None


class Products:
    """How the model multiplies: by torch's own functions. A subclass may have faster ones, see `Linear.use`."""

    @staticmethod
    def multiply(layer: Any, x: torch.Tensor) -> torch.Tensor:
        """`(..., I)` -> `(..., O)`, with the weights of a `Linear` or `Weights`. This is the forward of every `Linear`,
        so it may be no slower than `F.linear`."""
        return nn.Linear.forward(layer, x)

    def experts(self, experts: nn.Module, x: torch.Tensor, indices: torch.Tensor) -> Callable[..., torch.Tensor] | None:
        """The function that is faster than a grouped product on CPU, without gradients, for more than one token.

        Args:
            experts: a `PackedExperts`.
            x: `(N, C)`.
            indices: `(N, K)`, the experts of each token.

        Returns:
            A function with the arguments of `PackedExperts.segments`, or None where the grouped product is best.
        """
        return None

    def prepacked(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which the weights of `model` do not change and are read many times."""
        return nullcontext()


class Linear(nn.Linear):
    """`nn.Linear`: the same parameters, and the same numbers up to the order of sums."""

    products: ClassVar[Products] = Products()
    # A copy of the weight in a layout that a processor reads faster, while there is one.
    prepacked: torch.Tensor | None = None

    @classmethod
    def use(cls, products: Products) -> None:
        """Have every `Linear` of this process multiply by these products from now on."""
        cls.products, cls.forward = products, products.multiply  # type: ignore[method-assign, assignment]


class OwnDtypeLinear(Linear):
    """A `Linear` whose weight may be of another dtype than its input, which becomes the output's (T5's fp32 `wo`)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` as `Linear` computes it: `(..., I)`, `(O, I)`, `(O,)` -> `(..., O)`."""
    return Linear.products.multiply(Weights(weight, bias), x)


def as_torch_linear(model: nn.Module) -> None:
    """Make every `Linear` an `nn.Linear`, for tools that replace modules of exactly this type."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.__class__ = nn.Linear  # type: ignore[assignment]

"""`nn.Linear` by the fastest of torch's own kernels.

On CPU `F.linear` is not always that. In fp32 it goes to MKL, which keeps its AVX-512 kernels to Intel's processors; on
others oneDNN, which torch carries as well, is up to twice as fast. In bf16 it brings the whole weight into another
layout first, which for the few rows of a decoding step takes longer than the product.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from .compat import AMX, MKL_IS_SLOW, ONEDNN_LINEAR, ONEDNN_PACK, free_memory, operators_are_watched

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

# Rows up to which reading the weight is what takes the time.
FEW_ROWS = 8
# Weights without functions of their own, which quantised and sharded ones bring.
PLAIN = (nn.Parameter, torch.Tensor)
# Elements of a weight up to which preparing oneDNN's call takes longer than the product.
SMALL = 2**16


def by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As F.linear."""
    if weight.numel() <= SMALL:
        return F.linear(x, weight, bias)
    return ONEDNN_LINEAR(x, weight, bias, "none", [], "")


def of_vector(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As F.linear, of `(I,)`."""
    return torch.mv(weight, x) if bias is None else torch.addmv(bias, weight, x)


def weight_first(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As F.linear; of few rows, with the weight as the left factor, which oneDNN's AMX kernels read as it lies."""
    rows = x.numel() // weight.shape[1]
    if rows == 1:
        return of_vector(x.reshape(-1), weight, bias).view(*x.shape[:-1], -1)
    if bias is None and 1 < rows <= FEW_ROWS:
        return torch.mm(weight, x.reshape(rows, -1).t()).t().contiguous().view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


# What is faster than F.linear on this machine's processor, and for vectors.
PRODUCTS: dict[torch.dtype, Product] = {}
VECTOR_PRODUCTS: dict[torch.dtype, Product] = {torch.float32: of_vector}
if MKL_IS_SLOW and ONEDNN_LINEAR is not None:
    PRODUCTS[torch.float32] = VECTOR_PRODUCTS[torch.float32] = by_onednn
if AMX:
    PRODUCTS[torch.bfloat16], VECTOR_PRODUCTS[torch.bfloat16] = weight_first, of_vector


def fastest(x: torch.Tensor, weight: torch.Tensor, products: dict[torch.dtype, Product]) -> Product:
    """What multiplies tensors like `x` with weights like `weight`: F.linear, or what does the same faster."""
    product = products.get(x.dtype)
    return F.linear if product is None or not loses_nothing(x, weight) else product


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`: `(..., I)`, `(O, I)`, `(O,)` -> `(..., O)`."""
    return fastest(x, weight, PRODUCTS)(x, weight, bias)


def loses_nothing(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether nobody looks for F.linear itself: no gradient, compiler, transform, or weight with its own functions."""
    return (
        not torch.is_grad_enabled()
        and x.is_cpu
        and weight.dtype == x.dtype
        and type(weight) in PLAIN
        and not torch.compiler.is_compiling()
        and not operators_are_watched()
    )


class Linear(nn.Linear):
    """`nn.Linear`: the same parameters, the same numbers up to the order of sums."""

    # The weight in oneDNN's layout, within `packed`.
    copy: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copy = self.copy
        if copy is not None and x.numel() <= FEW_ROWS * self.in_features and loses_nothing(x, self.weight):
            return ONEDNN_LINEAR(x, copy, self.bias, "none", [], "")
        return linear(x, self.weight, self.bias)


class OwnDtypeLinear(Linear):
    """A `Linear` whose weight may be of another dtype than its input, which becomes the output's (T5's fp32 `wo`)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


def plain(model: nn.Module) -> None:
    """Make every `Linear` an `nn.Linear` again, for tools that replace modules of exactly this type."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.__class__ = nn.Linear  # type: ignore[assignment]


def packable(module: nn.Module) -> bool:
    if not isinstance(module, Linear) or ONEDNN_PACK is None or AMX:
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.dtype == torch.bfloat16 and weight.is_cpu


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Here the `Linear` layers of a bf16 model on CPU have a second copy, in the layout that oneDNN reads fastest; with
    AMX they need none.

    It makes decoding faster and needs the memory of these weights once more: where less is free, nothing is packed. The
    weights must not change inside. `generate` does it by itself for a text that gets long; a loop of one's own may ask:

        with torch.no_grad(), packed(model):
            ...

    Packed experts stay as they are: most of them serve too few tokens of a text to be worth a copy.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear) and packable(module)]
    try:
        if sum(layer.weight.nbytes for layer in layers) <= free_memory():
            with torch.no_grad():
                for layer in layers:
                    layer.copy = ONEDNN_PACK(layer.weight, 1)
        yield
    finally:
        for layer in layers:
            layer.copy = None

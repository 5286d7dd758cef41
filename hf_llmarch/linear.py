"""`nn.Linear` by the faster of torch's own kernels.

On CPU `F.linear` goes to the BLAS that torch was built with: in fp32 on some processors half as fast as oneDNN, which
torch carries as well, and in bf16 slow for the few rows of a decoding step, where oneDNN wants a layout of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from .compat import ONEDNN_LINEAR, ONEDNN_PACK, free_memory, operators_are_watched

DTYPES = (torch.float32, torch.bfloat16)

# Rows up to which reading the weight is what takes the time.
FEW_ROWS = 8


def onednn_takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN can be called with nothing lost: no gradient, compiler, transform or quantised weight."""
    return (
        ONEDNN_LINEAR is not None
        and not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype in DTYPES
        and weight.dtype == x.dtype
        and type(weight) in (torch.Tensor, nn.Parameter)  # others, quantised or sharded, bring functions of their own
        and not torch.compiler.is_compiling()
        and not operators_are_watched()
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear`: `(..., I)`, `(O, I)`, `(O,)` -> `(..., O)`."""
    if onednn_takes(x, weight):
        return ONEDNN_LINEAR(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear`: the same parameters, the same numbers up to the order of sums."""

    # The weight in oneDNN's layout, within `packed`.
    copy: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copy = self.copy
        if copy is not None and x.numel() <= FEW_ROWS * self.in_features and onednn_takes(x, self.weight):
            return ONEDNN_LINEAR(x, copy, self.bias, "none", [], "")
        return linear(x, self.weight, self.bias)


def plain(model: nn.Module) -> None:
    """Make every `Linear` an `nn.Linear` again, for tools that replace modules of exactly this type."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


def packable(module: nn.Module) -> bool:
    if not isinstance(module, Linear) or ONEDNN_PACK is None:
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Here the `Linear` layers of a bf16 model on CPU have a second copy, in the layout that oneDNN reads fastest.

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

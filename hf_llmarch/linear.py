"""`nn.Linear` by the faster of torch's own kernels.

On CPU `F.linear` goes to the BLAS that torch was built with: in fp32 on some processors half as fast as oneDNN, which
torch carries as well, and in bf16 slow for the few rows of a decoding step, where oneDNN wants a layout of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


class Packable:
    """A module that can read its weights from a copy in oneDNN's layout, which `packed` makes."""

    packs: tuple[str, ...] = ()
    # Name of a parameter -> its copy, or one for each expert.
    copies: dict[str, Any] = {}

    def weight_for(self, x: torch.Tensor, name: str) -> Any:
        """What `linear` is to read for `x`: the copy where there is one and it is the faster, else the parameter."""
        weight = getattr(self, name)
        copy = self.copies.get(name)
        few = copy is not None and x.numel() <= FEW_ROWS * weight.shape[-1]
        return copy if few and onednn_takes(x, weight) else weight


class Linear(Packable, nn.Linear):
    """`nn.Linear`: the same parameters, the same numbers up to the order of sums."""

    packs = ("weight",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.copies:
            return linear(x, self.weight, self.bias)
        return linear(x, self.weight_for(x, "weight"), self.bias)


def plain(model: nn.Module) -> None:
    """Make every `Linear` an `nn.Linear` again, for tools that replace modules of exactly this type."""
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = nn.Linear  # type: ignore[assignment]


def packing(weight: torch.Tensor) -> Any:
    return ONEDNN_PACK(weight, 1) if weight.dim() == 2 else [ONEDNN_PACK(each, 1) for each in weight]


def packable(model: nn.Module) -> dict[int, tuple[nn.Parameter, list[tuple[Packable, str]]]]:
    """The bf16 weights on CPU, and where each is read (a tied one in several places)."""
    found: dict[int, tuple[nn.Parameter, list[tuple[Packable, str]]]] = {}
    readers: list[Any] = [module for module in model.modules() if isinstance(module, Packable)]
    for module in readers if ONEDNN_PACK is not None else ():
        for name in module.packs:
            weight = getattr(module, name)
            if type(weight) is nn.Parameter and weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
                found.setdefault(id(weight), (weight, []))[1].append((module, name))
    return found


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Here the weights of a bf16 model on CPU have a second copy, in the layout that oneDNN reads fastest.

    It makes decoding faster and needs the memory of the weights once more: where less is free, nothing is packed. The
    weights must not change inside. `generate` does it by itself for a text that gets long; a loop of one's own may ask:

        with torch.no_grad(), packed(model):
            ...
    """
    weights = packable(model)
    readers = [module for _, places in weights.values() for module, _ in places]
    try:
        if sum(weight.nbytes for weight, _ in weights.values()) <= free_memory():
            with torch.no_grad():
                for weight, places in weights.values():
                    copy = packing(weight)
                    for module, name in places:
                        module.copies = {**module.copies, name: copy}
        yield
    finally:
        for module in readers:
            module.copies = {}

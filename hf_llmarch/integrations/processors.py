"""Which products are the fastest on this machine's processor. No other module knows processors.

On CPU `F.linear` is not always the fastest of torch's own kernels:

- In fp32 it goes to MKL, which keeps its AVX-512 kernels to Intel's processors; on others oneDNN, which torch carries
  as well, is up to twice as fast.
- In bf16 oneDNN brings the whole weight into another layout first, which for the few rows of a decoding step takes
  longer than the product. Intel's AMX kernels read a weight as it lies where it is the left factor; for other
  processors a copy in that layout can be made once (`prepacked`).

Operators of torch's compiler are called here by private names. Wherever a caller could tell them from `F.linear` (with
gradients, autocast, tracers, compilers, transforms, and weights with functions of their own), `F.linear` runs.
"""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil
from operator import call
from pathlib import Path
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from hf_llmarch.model.experts import PackedExperts, tokens_by_expert
from hf_llmarch.model.linear import Linear, Products


def _description() -> str:
    """The processor's maker and abilities among other facts, as Linux tells them."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()


_PROCESSOR = _description()
_ONEDNN: Any = torch.ops.mkldnn if torch.backends.mkldnn.is_available() else None
# `(x, weight, bias, "none", [], "")`: a product by oneDNN. The weight may be in its own layout, which `(weight, rows)`
# brings it into.
ONEDNN_LINEAR: Any = getattr(_ONEDNN, "_linear_pointwise", None)
ONEDNN_PREPACK: Any = getattr(_ONEDNN, "_reorder_linear_weight", None)

# Whether oneDNN multiplies bf16 in the tiles of Intel's AMX.
AMX = _ONEDNN is not None and "amx_bf16" in _PROCESSOR
_MKL_IS_SLOW = torch.backends.mkl.is_available() and ("AuthenticAMD" in _PROCESSOR or "HygonGenuine" in _PROCESSOR)

# The dtypes of which this processor multiplies matrices faster by oneDNN's operator; and few rows, or experts that all
# have some, with the weight as the left factor.
BY_ONEDNN = {torch.float32} if _MKL_IS_SLOW and ONEDNN_LINEAR is not None else set()
WEIGHT_FIRST = {torch.bfloat16} if AMX else set()

# Rows up to which a product takes as long as it takes to read the weight.
FEW_ROWS = 8
# Elements of a weight up to which preparing oneDNN's call takes longer than the product.
SMALL = 2**16
# Experts in one batched product: enough to make it worthwhile, and few enough that one with many tokens, to whose
# length the others are padded, does not cost much.
EXPERTS_AT_ONCE = 16

# Types of weights that have no functions of their own, which quantised and sharded weights bring.
_OWN_TYPES = (nn.Parameter, torch.Tensor)
# Each is true while something relies on the call of `F.linear`: gradients, autocast, tracers, modes (which count FLOPs
# or make fake tensors), and the transforms of `torch.func`.
_WATCHERS: tuple[Callable[[], Any], ...] = (
    torch.is_grad_enabled,
    partial(torch.is_autocast_enabled, "cpu"),
    torch._C._len_torch_dispatch_stack,
    torch._C._get_tracing_state,
    torch._C._functorch.peek_interpreter_stack,
)


def multiply(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """As `Products.multiply`. A vector `(I,)` is multiplied as one.

    This is one function, and the watchers are C functions, because decoding calls it for every projection: a call in
    Python is a hundredth of a small product.
    """
    weight, bias, dtype = layer.weight, layer.bias, x.dtype
    if dtype in BY_ONEDNN:
        gains = weight.numel() > SMALL
    else:
        gains = layer.prepacked is not None or dtype in WEIGHT_FIRST or x.dim() == 1
    if (
        not gains
        or torch.compiler.is_compiling()
        or any(map(call, _WATCHERS))
        or forward_ad._current_level >= 0
        or type(weight) not in _OWN_TYPES
        or weight.dtype != dtype
        or not x.is_cpu
    ):
        return F.linear(x, weight, bias)
    rows = x.numel() // weight.shape[1]
    if layer.prepacked is not None and rows <= FEW_ROWS:
        return ONEDNN_LINEAR(x, layer.prepacked, bias, "none", [], "")
    if dtype in BY_ONEDNN:
        return ONEDNN_LINEAR(x, weight, bias, "none", [], "")
    if (x.dim() == 1 and dtype is torch.float32) or (rows == 1 and dtype in WEIGHT_FIRST):
        vector = x.reshape(-1)
        out = torch.mv(weight, vector) if bias is None else torch.addmv(bias, weight, vector)
        return out.view(*x.shape[:-1], -1)
    if bias is None and 1 < rows <= FEW_ROWS and dtype in WEIGHT_FIRST:
        return torch.mm(weight, x.reshape(rows, -1).t()).t().contiguous().view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


# -- experts ---------------------------------------------------------------------------------------------------------


def evenly_busy(indices: torch.Tensor, experts: int) -> bool:
    """Whether nearly all experts have tokens, and nearly none has more than twice its share.

    Args:
        indices: `(N, K)`, the experts of each token.
    """
    share = indices.numel() / experts
    if share < 2:
        return False
    picks = indices.flatten().bincount(minlength=experts)[:experts]
    return bool(((picks == 0) | (picks > 2 * share)).sum() <= experts / 8)


def batches(
    experts: PackedExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As `PackedExperts.segments`, several experts at once.

    First all of them run on up to twice their mean number of tokens, then those that have more on the rest.
    """
    weights: list[Any] = [getattr(experts, name, None) for name in experts.weight_names]
    tokens, shares = tokens_by_expert(top_k_index, top_k_weights, experts.num_experts)
    nobody = len(hidden_states)
    result = hidden_states.new_zeros(nobody + 1, experts.hidden_dim)  # the last row is for padding
    for start in range(0, experts.num_experts, EXPERTS_AT_ONCE):
        some = slice(start, min(start + EXPERTS_AT_ONCE, experts.num_experts))
        longest = 2 * ceil(sum(map(len, tokens[some])) / (some.stop - some.start))
        rows = pad_sequence([t[:longest] for t in tokens[some]], batch_first=True, padding_value=nobody)
        share = pad_sequence([s[:longest] for s in shares[some]], batch_first=True)
        x = hidden_states[rows.clamp(max=nobody - 1)]  # (experts, rows, C)
        out = _weights_first(experts, x, *(None if w is None else w[some] for w in weights)) * share
        result.index_add_(0, rows.flatten(), out.flatten(0, 1))
        for e in range(some.start, some.stop):
            if len(tokens[e]) > longest:
                x = hidden_states[tokens[e][longest:]]
                out = experts.one(x, *(None if w is None else w[e] for w in weights)) * shares[e][longest:]
                result.index_add_(0, tokens[e][longest:], out)
    return result[:nobody]


def _weights_first(
    experts: PackedExperts, x: torch.Tensor, up: Any, up_bias: Any, down: Any, down_bias: Any
) -> torch.Tensor:
    """Several experts on their tokens `(experts, rows, C)`, with their weights as the left factors.

    oneDNN brings the right factor into another layout, which is to be the smaller of the two.
    """
    inner = torch.matmul(up, x.mT).mT
    inner = experts.inner(inner if up_bias is None else inner + up_bias.unsqueeze(-2))
    out = torch.matmul(down, inner.mT).mT
    return out if down_bias is None else out + down_bias.unsqueeze(-2)


# -- weights in oneDNN's layout --------------------------------------------------------------------------------------


def free_memory() -> int:
    """Bytes of main memory that nothing uses; 0 where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _gains_by_prepacking(module: nn.Module) -> bool:
    if not isinstance(module, Linear) or ONEDNN_PREPACK is None or AMX:
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.dtype == torch.bfloat16 and weight.is_cpu


@contextmanager
def prepacked(model: nn.Module) -> Iterator[None]:
    """A context in which the `Linear` layers of a bf16 model on CPU have a copy of their weights in oneDNN's layout.

    It makes decoding faster, and takes the memory of these weights once more: where less is free, there are no copies;
    with AMX none are needed. The weights must not change inside. `generate` enters it by itself for a text that gets
    long; a loop of one's own may:

        with torch.no_grad(), prepacked(model):
            ...

    Packed experts have no copies, as most of them serve too few tokens of a text to be worth one.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear) and _gains_by_prepacking(module)]
    try:
        if sum(layer.weight.nbytes for layer in layers) <= free_memory():
            with torch.no_grad():
                for layer in layers:
                    layer.prepacked = ONEDNN_PREPACK(layer.weight, 1)
        yield
    finally:
        for layer in layers:
            layer.prepacked = None


class ProcessorProducts(Products):
    """The fastest products of this machine's processor, measured by `benchmarks/`."""

    multiply = staticmethod(multiply)

    def experts(self, experts: nn.Module, x: torch.Tensor, indices: torch.Tensor) -> Callable[..., torch.Tensor] | None:
        if x.dtype in BY_ONEDNN:
            return PackedExperts.segments
        if x.dtype in WEIGHT_FIRST and evenly_busy(indices, experts.num_experts):  # type: ignore[arg-type]
            return batches
        return None

    def prepacked(self, model: nn.Module) -> Any:
        return prepacked(model)


def register() -> None:
    """Let our models multiply by these. Twice does no harm."""
    Linear.use(ProcessorProducts())

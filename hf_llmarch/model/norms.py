"""Norms, and where they stand around a branch."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .configuration_llmarch import LlmArchConfig, NormPlacement, NormType
from .declarations import Facts
from .embeddings import Scale, TensorFn, dropout, identity, in_sequence


class Norm(nn.Module):
    """Gain and bias over the last dimension of `(..., *shape)`; the gain is `offset + weight`.

    A checkpoint that stores gain - 1 (Gemma) sets `offset` to 1: adding it into the weights would lose bits in bf16.

    Args:
        shape: of the weight. Two dimensions give each head its own gain; statistics are over the last one alone.
        in_fp32: apply gain and bias before the result is cast back to the input's dtype, as Gemma does; else after,
            as LLaMA does.
        narrows: cast to the weight's dtype instead, as T5 does, whose residual stream may be fp32 in an fp16 model.
    """

    def __init__(
        self, shape: tuple[int, ...], eps: float, bias: bool, offset: float, in_fp32: bool, narrows: bool = False
    ):
        super().__init__()
        self.eps, self.offset, self.in_fp32, self.narrows = eps, offset, in_fp32, narrows
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape)) if bias else None

    def init_weights(self, std: float) -> None:
        init.constant_(self.weight, 1.0 - self.offset)
        if self.bias is not None:
            init.zeros_(self.bias)

    def gain(self) -> torch.Tensor:
        return self.weight + self.offset if self.offset else self.weight

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, offset={self.offset}, bias={self.bias is not None}"


class RMSNorm(Norm):
    """x / rms(x), arXiv 1910.07467; statistics in fp32."""

    facts = Facts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype, y = self.weight.dtype if self.narrows else x.dtype, x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.in_fp32:
            y = y * (self.weight.float() + self.offset)
            return (y if self.bias is None else y + self.bias.float()).to(dtype)
        y = (self.weight + self.offset if self.offset else self.weight) * y.to(dtype)
        return y if self.bias is None else y + self.bias


class LayerNorm(Norm):
    """(x - mean) / std, arXiv 1607.06450."""

    facts = Facts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dim() == 1 and not self.in_fp32 and not self.narrows:
            return F.layer_norm(x, self.weight.shape, self.gain(), self.bias, self.eps)
        dtype = self.weight.dtype if self.narrows else x.dtype
        y = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        if self.in_fp32:
            y = y * (self.weight.float() + self.offset)
            return (y if self.bias is None else y + self.bias.float()).to(dtype)
        y = self.gain() * y.to(dtype)
        return y if self.bias is None else y + self.bias


NORMS: dict[NormType, type[Norm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}

# A branch is out(x + post(f(pre(x)))); a placement says which slots hold a norm, the others pass through.
NORM_SLOTS: dict[NormPlacement, set[str]] = {
    "pre": {"pre"},
    "post": {"out"},
    "sandwich": {"pre", "post"},
    "branch": {"post"},
}


def norm(
    config: LlmArchConfig,
    *shape: int,
    kind: NormType | None = None,
    eps: float | None = None,
    bias: bool | None = None,
) -> Norm:
    """A norm as the config says, over `hidden_size` unless a shape is given; None leaves a choice to the config."""
    return NORMS[kind or config.norm_type](
        shape or (config.hidden_size,),
        eps=config.norm_eps if eps is None else eps,
        bias=config.norm_bias if bias is None else bias,
        offset=config.norm_offset,
        in_fp32=config.norm_weight_in_fp32,
        narrows="ffn_output" in (config.keep_in_fp32 or ()),
    )


class NormSlots(nn.Module):
    """What stands around a branch f of the residual stream: x becomes out(x + residual(post(f(pre(x))))).

    `print(model)` shows which of the three places for a norm the placement fills; `residual` holds dropout and a scale.
    """

    def __init__(self, config: LlmArchConfig, slots: set[str]):
        super().__init__()
        self.pre: TensorFn = norm(config) if "pre" in slots else identity
        self.post: TensorFn = norm(config) if "post" in slots else identity
        self.out: TensorFn = norm(config) if "out" in slots else identity
        scale = Scale(config.residual_scale) if config.residual_scale != 1.0 else None
        self.residual = in_sequence(dropout(config.hidden_dropout), scale)

    def after(self, branch: torch.Tensor) -> torch.Tensor:
        """The branch's output `(B, T, C)` as it is added to the stream."""
        return self.residual(self.post(branch))

    def join(self, x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """The stream `(B, T, C)` behind the branch, given the stream before it and the branch's output."""
        return self.out(x + self.after(branch))


class BoundedSlots(NormSlots):
    """The stream behind the branch is bounded, in fp16 alone, to what fp16 holds with room for another branch."""

    limit = torch.finfo(torch.float16).max - 1000

    def join(self, x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        x = super().join(x, branch)
        return x.clamp(-self.limit, self.limit) if x.dtype == torch.float16 else x


class PreNorm(NormSlots):
    """A branch whose output is added as it is, as in most decoders, so that `join` is a plain addition."""

    join = staticmethod(torch.add)  # type: ignore[assignment]


def norm_slots(config: LlmArchConfig, slots: set[str], ends_layer: bool = False) -> NormSlots:
    """The norms around a branch, in these slots; `ends_layer` says whether it is the last of its layer."""
    if config.fp16_clamp == "branch" or (config.fp16_clamp == "layer" and ends_layer):
        return BoundedSlots(config, slots)
    ends_bare = slots <= {"pre"} and not config.hidden_dropout and config.residual_scale == 1.0
    return (PreNorm if ends_bare else NormSlots)(config, slots)

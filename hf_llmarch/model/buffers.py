"""Buffers whose numbers do not survive half precision."""

from collections.abc import Callable
from typing import Any, Self

from torch import nn


class Fp32Buffers(nn.Module):
    """A module whose own buffers stay in fp32 when `model.to(torch.bfloat16)` or `.half()` casts the rest.

    RoPE's slow frequencies, ALiBi's slopes and the small steps of a router's bias would lose the bits that matter.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self

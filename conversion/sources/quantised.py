"""Sources that are published with fewer bits and scales beside them: what a plan and a reader see is plain bf16.

Two forms have a counterpart here: 8-bit floats with one scale a block of rows and columns (DeepSeek-V3 and R1), and
4-bit floats with one power of two every 32 numbers (gpt-oss, OCP Microscaling MXFP4). Scales are multiplied in as a
tensor is read. That is arithmetic and not a move of numbers, so an export gives bf16 back, not the bits it came in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, some
from .base import Checkpoint, TensorInfo
from .bounds import short

Shape = tuple[int, ...]
# What a public tensor and its scales look like, given the shape in which its code is stored.
Shapes = Callable[[Shape], tuple[Shape, Shape]]
SETTINGS = "quantization_config"
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Coding:
    """One way of storing weights.

    Attributes:
        code, scales: what is added to a weight's name for the tensor of its codes and for that of its scales.
        dtype: of the codes; tensors of another dtype are not coded.
        shapes: of the codes -> of the weight and of its scales.
        decode: codes and scales -> the weight in bf16.
    """

    code: str
    scales: str
    dtype: torch.dtype
    shapes: Shapes
    decode: Callable[[Tensor, Tensor], Tensor]


def scaled_blocks(settings: Mapping[str, Any]) -> Coding | None:
    """8-bit floats (e4m3), 2-D, with a scale a block; the last block of rows or columns may be cut short."""
    block = settings.get("weight_block_size")
    if not block:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise CheckpointError(f"weight_block_size in {SETTINGS} is {short(block)}, not two sizes.")
    rows, columns = block

    def shapes(code: Shape) -> tuple[Shape, Shape]:
        return code, (-(-code[0] // rows), -(-code[1] // columns))

    def decode(code: Tensor, scales: Tensor) -> Tensor:
        out = torch.empty(code.shape, dtype=torch.bfloat16)
        # One row of blocks at a time: as fp32, a whole matrix would take four times its room.
        for i, factors in enumerate(scales.float()):
            part = slice(i * rows, (i + 1) * rows)
            out[part] = code[part].float() * factors.repeat_interleave(columns)[: code.shape[1]]
        return out

    return Coding("", "_scale_inv", torch.float8_e4m3fn, shapes, decode)


# The 4-bit floats: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PER_SCALE = 32


def microscaled(settings: Mapping[str, Any]) -> Coding:
    """MXFP4: experts (E, rows, groups, 16) of two numbers a byte, the lower half first, with a biased exponent a group.

    The weight is the matrix's transpose, (E, groups * 32, rows), as gpt-oss multiplies with it.
    """

    def shapes(code: Shape) -> tuple[Shape, Shape]:
        experts, rows, groups, _ = code
        return (experts, groups * PER_SCALE, rows), (experts, rows, groups)

    def decode(code: Tensor, scales: Tensor) -> Tensor:
        values = torch.tensor([*E2M1, *(-value for value in E2M1)])
        out = torch.empty(shapes(tuple(code.shape))[0], dtype=torch.bfloat16)
        for weight, halves, exponents in zip(out, code, scales.int() - 127, strict=True):
            numbers = values[torch.stack((halves & 15, halves >> 4), dim=-1).int()].flatten(-2)  # (rows, groups, 32)
            weight.copy_(torch.ldexp(numbers, exponents[..., None]).flatten(1).T)
        return out

    return Coding("_blocks", "_scales", torch.uint8, shapes, decode)


# By `quant_method` of their config.json.
CODINGS: dict[str, Callable[[Mapping[str, Any]], Coding | None]] = {"fp8": scaled_blocks, "mxfp4": microscaled}


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with plain weights, if it is coded in a known way; else the checkpoint itself.

    Raises:
        CheckpointError: naming the codes without scales, the scales without codes, scales of a wrong shape, and 8-bit
            floats of which nothing says how they are scaled.
    """
    settings = checkpoint.config.get(SETTINGS) or {}
    make = CODINGS.get(str(settings.get("quant_method")))
    coding = make(settings) if make is not None else None
    plain = checkpoint if coding is None else QuantisedCheckpoint(checkpoint, coding)
    if unscaled := [name for name, info in plain.tensors.items() if info.dtype in EIGHT_BITS]:
        raise CheckpointError(
            f"{checkpoint.path} holds 8-bit floats, and no {SETTINGS} that is known here says how they are scaled: "
            f"{some(unscaled)}. Without their scales the numbers mean nothing. Convert from the checkpoint in bf16, or "
            "from the one with its scales."
        )
    return plain


class QuantisedCheckpoint(Checkpoint):
    """Another checkpoint's tensors, with codes and scales put together."""

    made = "dequantised to bfloat16"

    def __init__(self, stored: Checkpoint, coding: Coding):
        config = {name: value for name, value in stored.config.items() if name != SETTINGS}
        self._stored, self._coding = stored, coding
        self._coded = {
            name.removesuffix(coding.code): name
            for name, info in stored.tensors.items()
            if info.dtype == coding.dtype and name.endswith(coding.code) and not name.endswith(coding.scales)
        }
        scales = {name + coding.scales: name for name in self._coded}
        missing = [self._coded[name] for scale, name in scales.items() if scale not in stored.tensors]
        orphans = [name for name in stored.tensors if name.endswith(coding.scales) and name not in scales]
        if missing or orphans:
            raise CheckpointError(
                f"{stored.path} is quantised, and numbers and scales do not pair up."
                + (f" No {coding.scales} for: {some(missing)}." if missing else "")
                + (f" Scales of nothing: {some(orphans)}." if orphans else "")
                + " A shard is missing, or a tool has dropped them; without scales the numbers mean nothing."
            )
        codes = {name: name for name in stored.tensors} | {code: name for name, code in self._coded.items()}
        tensors: dict[str, TensorInfo] = {}
        for code, name in codes.items():
            if name not in self._coded:
                if name not in scales:
                    tensors[name] = stored.tensors[name]
                continue
            shape, expected = coding.shapes(stored.tensors[code].shape)
            if (found := stored.tensors[name + coding.scales].shape) != expected:
                raise CheckpointError(
                    f"{stored.path}: {name + coding.scales} is {list(found)}, expected {list(expected)} for a weight "
                    f"stored as {list(stored.tensors[code].shape)}."
                )
            tensors[name] = TensorInfo(shape, torch.bfloat16)
        super().__init__(stored.source, stored.path, config, tensors, stored.states)

    @property
    def files(self) -> tuple[Path, ...]:
        return self._stored.files

    @property
    def model_files(self) -> tuple[Path, ...]:
        return self._stored.model_files

    def read(self, name: str) -> Tensor:
        if name not in self._coded:
            return self._stored.read(name)
        return self._coding.decode(self._stored.read(self._coded[name]), self._stored.read(name + self._coding.scales))

    @property
    def companions(self) -> tuple[str, ...]:
        return self._stored.companions

    @property
    def companion_bytes(self) -> int:
        return self._stored.companion_bytes

    def write_companions(self, directory: Path) -> None:
        self._stored.write_companions(directory)

    @property
    def native_kwargs(self) -> dict[str, Any]:
        return self._stored.native_kwargs

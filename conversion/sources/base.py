"""What every source of tensors has: a config, headers, and bytes on request."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import reduce
from math import prod
from operator import and_
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, some
from .bounds import check_config

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorInfo(NamedTuple):
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


# What tells that a file is not what it was: where it lies on the disk, its size, and when it was written to.
State = tuple[int, int, int]


def states(paths: Iterable[Path]) -> dict[Path, State]:
    """The state of each path that is a file."""
    found = {path: path.stat() for path in paths if path.is_file()}
    return {path: (of.st_ino, of.st_size, of.st_mtime_ns) for path, of in found.items()}


class Checkpoint(ABC):
    """A model on disk: its config, the headers of its tensors, and their bytes on request.

    Attributes:
        source: what the user named it.
        path: the folder or file it is read from.
        config: the foreign (or our) config.json as a dict.
        tensors: name -> shape and dtype, in the order of the files.
        made: how the numbers that `read` returns came about; empty where they are on disk, bit for bit.
        states: of the files when they were opened.
    """

    made = ""

    def __init__(
        self,
        source: str,
        path: Path,
        config: dict[str, Any],
        tensors: dict[str, TensorInfo],
        states_before: Mapping[Path, State] | None = None,
    ):
        check_config(path, config, {name: info.shape for name, info in tensors.items()})
        self.source = source
        self.path = path
        self.config = config
        self.tensors = tensors
        self.states = {**states(self.files), **(states_before or {})}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: info.dtype for name, info in self.tensors.items()}

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, as `read` returns them."""
        return sum(info.nbytes for info in self.tensors.values())

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One tensor. It may be a view of a mapped file: its pages are loaded as they are touched.

        Raises:
            CheckpointError: the bytes cannot be read.
            KeyError: there is no tensor of that name.
        """

    @property
    @abstractmethod
    def companions(self) -> tuple[str, ...]:
        """Names, relative to the folder, of the files that `write_companions` will write."""

    @abstractmethod
    def write_companions(self, directory: Path) -> None:
        """Put tokenizer, generation config, chat template and the like into `directory`."""

    @property
    def companion_bytes(self) -> int:
        """Their size in bytes, or an upper estimate of it where they are yet to be made."""
        return sum((self.path / name).stat().st_size for name in self.companions)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that is read."""
        return (self.path,)

    @property
    def model_files(self) -> tuple[Path, ...]:
        """Those of the files that hold the config, first, and the weights."""
        return self.files

    def rights(self, weights: bool) -> int:
        """The permissions, as bits of a mode, that the file of the config has, or all that the weights come from."""
        files = self.model_files if weights else self.model_files[:1]
        return reduce(and_, (os.stat(file).st_mode for file in files), 0o666)

    def check_unchanged(self) -> None:
        """
        Raises:
            CheckpointError: naming the files that are not what they were when they were opened.
        """
        now = states(self.files)
        changed = [file.name for file in {**self.states, **now} if now.get(file) != self.states.get(file)]
        if changed:
            raise CheckpointError(
                f"{self.path} changed while it was read: {some(changed)}. What was read may be of two states; run it "
                "again when nobody writes there."
            )

    @property
    def native_kwargs(self) -> dict[str, Any]:
        """Arguments with which an Auto class of transformers loads this checkpoint itself."""
        return {"pretrained_model_name_or_path": str(self.path)}

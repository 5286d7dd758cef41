"""Writing a model's folder, which appears under its real name only when it is complete.

`staged` gives a folder to fill; `write_tensors` fills it from a stream and holds one shard.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import CheckpointError, DestinationError
from .sources.base import TensorInfo
from .sources.files import CONFIG, SAFETENSORS

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_in_bytes(size: int | str) -> int:
    """`5GB` (powers of 1000), `512MiB` (of 1024) or a plain number, in bytes.

    Raises:
        DestinationError: it is none of these, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if match is None or match[2].upper() not in UNITS or not (value := int(float(match[1]) * UNITS[match[2].upper()])):
        raise DestinationError(f"{size!r} is no shard size: write a number of bytes, or one like 5GB or 512MiB.")
    return value


def split_into_shards(layout: Mapping[str, TensorInfo], limit: int) -> dict[str, list[str]]:
    """File name -> tensor names, in order, each file of at most `limit` bytes (or of the one tensor that is larger)."""
    shards: list[list[str]] = []
    size = limit
    for name, info in layout.items():
        if size + info.nbytes > limit or not shards:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += info.nbytes
    if len(shards) == 1:
        return {SAFETENSORS.single: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def write_tensors(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    layout: Mapping[str, TensorInfo],
    max_shard_size: int | str = "5GB",
    advance: Callable[[int], None] = lambda nbytes: None,
) -> tuple[str, ...]:
    """Write a stream of tensors into safetensors files, holding the tensors of one file at a time.

    Args:
        directory: an existing folder.
        tensors: (name, tensor) pairs in the order of `layout`.
        layout: name -> shape and dtype of all of them, from which the files are known before the first byte.
        max_shard_size: largest file, as bytes or like `5GB`.
        advance: called with bytes done: half of a tensor's when it is read, the other half when its file is on disk.

    Returns:
        The names of the files written, the index last where there is more than one shard.

    Raises:
        DestinationError: a file cannot be written.
        CheckpointError: the stream is not what the layout announced.
    """
    shards = split_into_shards(layout, size_in_bytes(max_shard_size))
    stream = iter(tensors)
    for file, names in shards.items():
        shard: dict[str, Tensor] = {}
        starts: set[int] = set()
        for expected in names:
            name, tensor = next(stream, (None, None))
            if name != expected or tensor is None or TensorInfo(tuple(tensor.shape), tensor.dtype) != layout[expected]:
                found = "nothing" if tensor is None else f"{name} {tuple(tensor.shape)} {tensor.dtype}"
                raise CheckpointError(f"Expected tensor {expected} {tuple(layout[expected])}, got {found}.")
            # A tied head and its embedding are one tensor, and safetensors stores no sharing.
            shard[expected] = tensor.clone() if tensor.data_ptr() in starts else tensor.contiguous()
            starts.add(tensor.data_ptr())
            advance(tensor.nbytes // 2)
        try:
            save_file(shard, directory / file, metadata={"format": "pt"})
            # The library makes files that only their owner can read; the folder's mode carries the user's umask.
            (directory / file).chmod(directory.stat().st_mode & 0o666)
            flush(directory / file)
        except (SafetensorError, OSError) as error:
            raise DestinationError(f"{directory / file} could not be written: {error}") from error
        advance(sum(layout[name].nbytes - layout[name].nbytes // 2 for name in names))
    if (extra := next(stream, None)) is not None:
        raise CheckpointError(f"Tensor {extra[0]} was not announced.")
    if len(shards) == 1:
        return tuple(shards)
    where = {name: file for file, names in shards.items() for name in names}
    total = {"total_size": sum(info.nbytes for info in layout.values())}
    write_json(directory / SAFETENSORS.index, {"metadata": total, "weight_map": dict(sorted(where.items()))})
    return (*shards, SAFETENSORS.index)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def flush(path: Path) -> None:
    """Ask the system to put the file on disk, so that a renamed folder does not turn out empty after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def staged(
    destination: str | os.PathLike[str], *, size: int, overwrite: bool = False, source: Path | None = None
) -> Iterator[Path]:
    """A folder to fill, which becomes `destination` when the block ends well and vanishes when it does not.

    It is the sibling `.{name}.incomplete`, so that the last step is a rename on one file system. A killed process can
    leave it behind; the next run removes it. What a replaced destination held is removed after the new one is in place.

    Args:
        size: bytes that will be written.
        overwrite: replace a destination that is not empty. Only a model folder (one with a config.json) is replaced.
        source: what is being read, which must not be replaced.

    Raises:
        DestinationError: it is in the way, is the source, cannot be created, or has no room.
    """
    target = Path(destination).expanduser().resolve()
    check_replaceable(target, overwrite, source)
    partial = target.with_name(f".{target.name}.incomplete")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < size:
            raise DestinationError(f"{target} needs {size} bytes, and {target.parent} has {free} bytes free.")
        partial.mkdir()
    except OSError as error:
        raise DestinationError(f"{target} cannot be created: {error}") from error
    try:
        yield partial
        replace_folder(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_replaceable(target: Path, overwrite: bool, source: Path | None) -> None:
    if source is not None and source.resolve().is_relative_to(target):
        raise DestinationError(f"{target} is, or holds, the source {source}: choose another destination.")
    if target.exists() and not target.is_dir():
        raise DestinationError(f"{target} is a file; the destination must be a folder.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise DestinationError(f"{target} is not empty. Pass overwrite=True (--overwrite) to replace it.")
    if not (target / CONFIG).is_file():
        raise DestinationError(f"{target} is not empty and no model folder (no {CONFIG}): it is not overwritten.")


def replace_folder(partial: Path, target: Path) -> None:
    """Give `partial` the name `target`, keeping what was there until the new folder stands in its place."""
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    try:
        partial.rename(target)
    except OSError as error:
        if replaced.exists():
            replaced.rename(target)
        raise DestinationError(f"{partial} could not be renamed to {target}: {error}") from error
    shutil.rmtree(replaced, ignore_errors=True)

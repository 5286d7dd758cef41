"""Writing a model's folder, which appears under its real name only when it is complete.

`staged` gives a folder to fill; `write_tensors` fills it from a stream and holds one shard.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hf_llmarch.model.compat import code_files

from .errors import CheckpointError, DestinationError, some
from .sources.base import Checkpoint, TensorInfo
from .sources.code import closure, named_in
from .sources.files import CONFIG, PICKLE, SAFETENSORS

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size_in_bytes(size: int | str) -> int:
    """`5GB` (powers of 1000), `512MiB` (of 1024) or a plain number, in bytes.

    Raises:
        DestinationError: it is none of these, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    value = float(match[1]) * UNITS.get(match[2].upper(), 0) if match else 0.0
    if not 1 <= value < float("inf"):
        raise DestinationError(f"{size!r} is no shard size: write a number of bytes, or one like 5GB or 512MiB.")
    return int(value)


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
    """Ask the system to put a file or a folder's list of names on disk, so that a power cut leaves neither empty."""
    if os.name == "nt" and path.is_dir():  # has no descriptors of folders, and needs none
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- the folder under its real name ------------------------------------------------------------------------------------

# What the working folder of a run holds: a file locked by it, the folder that it fills, and the one that changes places
# with the destination.
LOCK, NEW, OLD = "lock", "new", "old"
WEIGHTS = (".safetensors", ".bin", ".pt")
# Errors of a full or read-only disk.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
# What a model's folder is made of, as far as every one is; beside these, the files that a run writes itself.
MODEL_FILES = (
    *("config.json", "generation_config.json", "configuration_*.py", "modeling_*.py", "README.md"),
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.spm", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.*", "preprocessor_config.json", "LICEN[CS]E*", "NOTICE*", "COPYING*"),
    *("USE_POLICY.md", "kept_aside/*", "adapter/adapter_*", "additional_chat_templates/*"),
)


@contextmanager
def staged(
    destination: str | os.PathLike[str], *, size: int, overwrite: bool = False, source: Checkpoint | None = None
) -> Iterator[Path]:
    """A folder to fill, which becomes `destination` when the block ends well and vanishes when it does not.

    It lies in the sibling `.{name}.incomplete`, so that the last step is a rename on one file system: a destination
    appears whole, or not at all. A file in there is locked as long as the run lives, and a second run into the same
    destination is refused. What a killed run leaves behind is taken up by the next one, which puts a model that was
    being replaced back in its place.

    An empty destination is replaced by a rename, which fails if somebody has filled it meanwhile. A model exchanges
    names with the new folder in one step, where the system can (Linux, macOS); elsewhere it is moved aside first, and
    between the two renames there is no destination. Either way it is looked through once more after it has been moved,
    and goes back if it then holds anything that is not a model's.

    Args:
        size: bytes that will be written.
        overwrite: replace a destination that is not empty. Only a folder of a model is, that holds nothing else.
        source: what is being read. It must not lie in the destination, and must not change meanwhile. No file that is
            written can be read by more people than its files.

    Raises:
        DestinationError: it is in the way, holds the source, is being written by another run, or cannot be written.
        CheckpointError: the source has changed meanwhile.
    """
    target = Path(os.path.realpath(Path(destination).expanduser()))
    keep(() if source is None else (source.path, *source.files), target)
    check_replaceable(target, overwrite, source)
    with claimed(target) as claim:
        # Again: a killed run's model may be back, and nobody else writes there now.
        check_replaceable(target, overwrite, source)
        new = claim / NEW
        like = next((p for p in (target, claim if source is None else source.path) if p.is_dir()), claim)
        try:
            free = shutil.disk_usage(claim).free
            if free < size:
                raise DestinationError(f"{target} needs {size} bytes, and {target.parent} has {free} bytes free.")
            new.mkdir()
            # Not open to more people; whose group it is stays as the parent has it.
            new.chmod(stat.S_IMODE(new.stat().st_mode) & (like.stat().st_mode | stat.S_ISGID) | stat.S_IRWXU)
            yield new
            seal(new, source)
            if source is not None:
                source.check_unchanged()
            publish(claim, target)
        except Exception as error:
            if is_full(error) or (isinstance(error, OSError) and str(claim) in str(error.filename)):
                raise DestinationError(f"{target} could not be written: {error}") from error
            raise


def is_full(error: Exception) -> bool:
    """Whether an error says that no more can be written, in Python's way or in that of a library written in Rust."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    said = re.search(r"\(os error (\d+)\)", str(error))
    return said is not None and int(said[1]) in FULL


def keep(sources: Iterable[Path], target: Path) -> None:
    """
    Raises:
        DestinationError: what is read lies in the destination, maybe by way of a link.
    """
    for path in sources:
        if Path(os.path.realpath(path)).is_relative_to(target):
            raise DestinationError(f"{target} is, or holds, the source {path}: choose another destination.")


def check_replaceable(target: Path, overwrite: bool, source: Checkpoint | None) -> None:
    """
    Raises:
        DestinationError: something would be lost.
    """
    if target.exists() and not target.is_dir():
        raise DestinationError(f"{target} is a file; the destination must be a folder.")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise DestinationError(f"{target} is not empty. Pass overwrite=True (--overwrite) to replace it.")
    if not holds_model(target):
        raise DestinationError(
            f"{target} is not empty and no model folder (no {CONFIG} with a model_type beside weights): it is not "
            "overwritten."
        )
    carried = () if source is None else source.companions
    if others := not_of_model(target, target, carried):
        raise DestinationError(
            f"{target} holds more than a model: {some(others)}. Move this away, or choose another destination."
        )


def holds_model(folder: Path) -> bool:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    named = isinstance(config, dict) and isinstance(config.get("model_type"), str)
    return named and any(layout.is_in(folder) for layout in (SAFETENSORS, PICKLE))


def not_of_model(folder: Path, new: Path, carried: Collection[str] = ()) -> list[str]:
    """What lies in a folder and is neither part of a model nor a file that `new` has as well."""
    entries = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    entries += [path.relative_to(folder) for path in folder.rglob("*") if path.is_dir() and not any(path.iterdir())]
    patterns = (*MODEL_FILES, *(file.name for file in (*code_files(), *closure(folder, named_in(folder)))))
    own = [n for n in entries for p in patterns if fnmatchcase(str(n), p) and p.count("/") == len(n.parts) - 1]
    return [
        name.as_posix()
        for name in entries
        if name not in own and str(name) not in carried and not (new != folder and (new / name).is_file())
    ]


@contextmanager
def claimed(target: Path) -> Iterator[Path]:
    """The working folder of this run alone, removed at the end.

    Raises:
        DestinationError: another run has it, or it cannot be made.
    """
    claim = target.with_name(f".{target.name}.incomplete")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = lock(claim, target)
    except OSError as error:
        raise DestinationError(f"{target} cannot be created: {error}") from error
    try:
        recover(claim, target)
        try:
            yield claim
        finally:
            recover(claim, target)
    finally:
        unlock(claim, descriptor)


def lock(claim: Path, target: Path) -> int:
    """The descriptor of the locked file; the system unlocks it when the process ends, however that happens."""
    while True:
        claim.mkdir(exist_ok=True)
        try:
            descriptor = os.open(claim / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the run before this has just removed the folder
            continue
        try:
            try_lock(descriptor)
        except OSError as error:
            owner = os.read(descriptor, 20).decode() or "unknown"
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise DestinationError(f"{target} is being written by another run (process {owner}).") from error
        if not is_at(claim / LOCK, descriptor):  # but no longer under its name
            os.close(descriptor)
            continue
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        except OSError:
            unlock(claim, descriptor)
            raise
        return descriptor


def unlock(claim: Path, descriptor: int) -> None:
    """Leave the working folder, which goes if it is empty."""
    with suppress(OSError):
        (claim / LOCK).unlink()
        claim.rmdir()
    os.close(descriptor)


def try_lock(descriptor: int) -> None:
    """Lock an open file for this process alone.

    Raises:
        BlockingIOError: another one has it.
    """
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(*error.args) from error
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def recover(claim: Path, target: Path) -> None:
    """Clear the working folder. A model that was moved aside goes back if nothing has come in its place.

    Raises:
        DestinationError: a replaced model has something in it that is nobody's to remove.
    """
    old = claim / OLD
    if old.is_dir() and not (target.is_dir() and any(target.iterdir())):
        os.rename(old, target)
        flush(target.parent)
    if others := not_of_model(old, target):
        raise DestinationError(f"{old} is what {target} replaced, and holds {some(others)}: move this away.")
    for folder in (old, claim / NEW):
        shutil.rmtree(folder, ignore_errors=True)


def seal(folder: Path, source: Checkpoint | None) -> None:
    """Put all of a finished folder on disk. Its files are for those who may read the folder, and the source's files."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            path.chmod(mode)
        else:
            rights = 0o666 if source is None else source.rights(weights=path.suffix in WEIGHTS)
            path.chmod((path.stat().st_mode & mode & rights) | stat.S_IRUSR | stat.S_IWUSR)
        flush(path)
    flush(folder)


def publish(claim: Path, target: Path) -> None:
    """Give the finished folder the destination's name, as the last act."""
    new, old = claim / NEW, claim / OLD
    if not target.is_dir() or not any(target.iterdir()):
        if os.name == "nt" and target.is_dir():
            target.rmdir()
        try:
            os.rename(new, target)  # of a folder to another: only if that is empty
        except OSError as error:
            raise DestinationError(f"{target} was made or filled meanwhile, and is left as it is: {error}") from error
        flush(target.parent)
        return
    spare(target, new, target)
    if exchange(new, target):
        os.rename(new, old)
        try:
            spare(old, target, target)
        except DestinationError:
            exchange(old, target)
            raise
    else:
        os.rename(target, old)
        spare(old, new, target)  # if not, it goes back as after a killed run
        os.rename(new, target)
    flush(target.parent)


def spare(folder: Path, new: Path, target: Path) -> None:
    """
    Raises:
        DestinationError: a folder to be replaced has been given something meanwhile.
    """
    if others := not_of_model(folder, new):
        raise DestinationError(f"{target} was given {some(others)} meanwhile, and is left as it is.")


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; False where the system or the file system cannot."""
    library: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    paths = os.fsencode(one), os.fsencode(other)
    if hasattr(library, "renameat2"):
        here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        failed = library.renameat2(here, paths[0], here, paths[1], swap)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(*paths, 2)  # RENAME_SWAP
    else:
        return False
    code = ctypes.get_errno() if failed else 0
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    if code:
        raise OSError(code, os.strerror(code), str(other))
    return True

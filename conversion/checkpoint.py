"""Reading and writing checkpoints: names and shapes first, bytes only when asked for.

`open_checkpoint` looks at headers only, so a plan can be proven before a tensor is read. Tensors are then read one at a
time from memory-mapped files. Writing goes through `staged`, which shows a folder under its real name only when it is
complete, and `write_tensors`, which holds one shard.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import CheckpointError, DestinationError, some

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

# What a converted folder does not take over from its source, by name; everything else travels along unchanged: the
# tokenizer in whatever files it has, generation_config.json, chat templates, licence, readme.
NOT_CARRIED: Mapping[str, tuple[str, ...]] = {
    "the config, which is translated": (CONFIG,),
    "weights, of this or another framework, and their indexes": (
        *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data"),
        *("*.gguf", "*.ot", "*.npz", "*.index.json"),
    ),
    "an adapter's config, which means nothing without its weights": ("adapter_config.json",),
    "code, which belongs to the other model class": ("*.py",),
    "hidden files, which belong to git or to a download": (".*",),
}
# Folders of which the files travel too; transformers looks for named chat templates here.
CARRIED_FOLDERS = ("additional_chat_templates",)
MODULES = "modules.json"

# Downloaded only when there is nothing better (pickles), or never.
PICKLES = ("*.bin", "*.bin.index.json")
NEVER_DOWNLOADED = (
    *("*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.ot", "*.npz", "*.tflite"),
    *("original/*", "onnx/*", "consolidated*"),
)

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


class Checkpoint(ABC):
    """A model on disk: its config, the headers of its tensors, and their bytes on request.

    Attributes:
        source: what the user named it.
        path: the folder or file it is read from.
        config: the foreign (or our) config.json as a dict.
        tensors: name -> shape and dtype, in the order of the files.
        exact: what `read` returns is what is on disk, bit for bit.
    """

    exact = True

    def __init__(self, source: str, path: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]):
        self.source = source
        self.path = path
        self.config = config
        self.tensors = tensors

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
    def native_kwargs(self) -> dict[str, Any]:
        """Arguments with which an Auto class of transformers loads this checkpoint itself."""
        return {"pretrained_model_name_or_path": str(self.path)}


class SafetensorsFile:
    """One safetensors file: its header now, its tensors on request."""

    def __init__(self, path: Path):
        try:
            self._file = safe_open(path, framework="pt")
            slices = {name: self._file.get_slice(name) for name in self._file.offset_keys()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} ({path.stat().st_size} bytes) is not a complete safetensors file: {error}. It may have been "
                "cut off in a download, or be a Git LFS pointer: fetch it again."
            ) from error
        unknown = {s.get_dtype() for s in slices.values()} - set(DTYPES)
        if unknown:
            raise CheckpointError(f"{path} holds dtypes that are not known here: {', '.join(sorted(unknown))}.")
        self.tensors = {n: TensorInfo(tuple(s.get_shape()), DTYPES[s.get_dtype()]) for n, s in slices.items()}

    def read(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


class PickleFile:
    """One `torch.save` file, read without running its code, and mapped where its format allows (zip, torch >= 1.6)."""

    def __init__(self, path: Path):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # torch.load raises anything from EOFError to UnpicklingError
            raise CheckpointError(f"{path} could not be read with weights_only=True: {error}") from error
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise CheckpointError(
                f"{path} is not a flat table of tensors. If it is a training checkpoint, save its model's state_dict() "
                "on its own."
            )
        self._state: dict[str, Tensor] = state
        self.tensors = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in state.items()}

    def read(self, name: str) -> Tensor:
        return self._state[name]


@dataclass(frozen=True)
class WeightFormat:
    """Names of the one weight file, or of the index to several, and what opens such a file."""

    single: str
    index: str
    opens: Callable[[Path], SafetensorsFile | PickleFile]

    def is_in(self, folder: Path) -> bool:
        return any((folder / name).is_file() for name in (self.single, self.index))


SAFETENSORS = WeightFormat("model.safetensors", "model.safetensors.index.json", SafetensorsFile)
PICKLE = WeightFormat("pytorch_model.bin", "pytorch_model.bin.index.json", PickleFile)


class FolderCheckpoint(Checkpoint):
    """A folder as `save_pretrained` writes it: config.json beside one or several weight files."""

    def __init__(self, source: str, path: Path, *, allow_pickle: bool = False):
        config = read_json(path / CONFIG) if (path / CONFIG).is_file() else None
        if config is None:
            raise CheckpointError(f"{path} has no {CONFIG}.{_gguf_hint(path)}")
        layout = weight_format(path, allow_pickle)
        single = path / layout.single
        shards = {layout.single: layout.opens(single)} if single.is_file() else open_shards(path, layout)
        self._holder: dict[str, SafetensorsFile | PickleFile] = {}
        for file, shard in shards.items():
            twice = [name for name in shard.tensors if name in self._holder]
            if twice:
                raise CheckpointError(f"{path / file} repeats tensors that another file holds: {some(twice)}.")
            self._holder.update(dict.fromkeys(shard.tensors, shard))
        super().__init__(source, path, config, {name: s.tensors[name] for name, s in self._holder.items()})

    def read(self, name: str) -> Tensor:
        try:
            return self._holder[name].read(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: tensor {name!r} could not be read: {error}") from error

    @property
    def companions(self) -> tuple[str, ...]:
        nested = [file for folder in CARRIED_FOLDERS for file in sorted((self.path / folder).glob("*"))]
        files = [file for file in [*sorted(self.path.iterdir()), *nested] if file.is_file()]
        patterns = [pattern for group in NOT_CARRIED.values() for pattern in group]
        carried = [file for file in files if not any(fnmatch(file.name, p) for p in patterns)]
        carried += [file for folder in self.modules for file in sorted(folder.rglob("*")) if file.is_file()]
        return tuple(str(file.relative_to(self.path)) for file in carried)

    @property
    def modules(self) -> list[Path]:
        """Folders of what sentence-transformers runs behind the model, which it lists in modules.json."""
        if not (self.path / MODULES).is_file():
            return []
        listed = parse_json(self.path / MODULES)
        names = {module.get("path") for module in listed if isinstance(module, dict)}
        return [folder for folder in sorted(self.path.iterdir()) if folder.is_dir() and folder.name in names]

    def write_companions(self, directory: Path) -> None:
        for name in self.companions:
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.path / name, target)


def open_checkpoint(
    source: str | os.PathLike[str], *, revision: str | None = None, allow_pickle: bool = False
) -> Checkpoint:
    """Open a local folder, a GGUF file or a Hub repository; read no tensor.

    Args:
        source: the folder, the `.gguf` file, or a Hub id such as `owner/name`.
        revision: branch, tag or commit of a Hub repository. Config, weights, tokenizer and all other files are taken
            from the one snapshot it names.
        allow_pickle: read `pytorch_model*.bin` where there is no safetensors, with `weights_only=True`.

    Raises:
        CheckpointError: it cannot be found, or is damaged or incomplete; the message says which file and why.
    """
    path = Path(source).expanduser()
    if revision is not None and path.exists():
        raise CheckpointError(f"revision={revision!r} names a state of a Hub repository, but {source} is on this disk.")
    if path.is_dir():
        return plain(FolderCheckpoint(str(source), path, allow_pickle=allow_pickle))
    if path.is_file():
        return open_file(str(source), path)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(source)) or path.suffix == ".gguf":
        raise CheckpointError(f"There is no file or folder {source}.")
    return open_hub(str(source), revision, allow_pickle)


def open_file(source: str, path: Path) -> Checkpoint:
    if path.suffix == ".pt":
        from .nanogpt_source import NanoGptCheckpoint

        return NanoGptCheckpoint(source, path)
    if path.suffix != ".gguf":
        raise CheckpointError(
            f"{path} is a single file, and of these only .gguf and nanoGPT's .pt can be read. Name its folder instead."
        )
    try:
        from .gguf_source import GgufCheckpoint
    except ImportError as error:
        raise CheckpointError(f"Reading {path.name} needs gguf: pip install 'hf-llmarch[gguf]' ({error}).") from error
    return GgufCheckpoint(source, path)


def open_hub(repository: str, revision: str | None, allow_pickle: bool) -> Checkpoint:
    """Download one snapshot, pickles only where it holds no safetensors and they are allowed."""
    try:
        snapshot = Path(snapshot_download(repository, revision=revision, ignore_patterns=[*NEVER_DOWNLOADED, *PICKLES]))
        if allow_pickle and not SAFETENSORS.is_in(snapshot):
            # The commit, so that a branch that moves meanwhile does not mix two states of the repository.
            commit = snapshot.name if re.fullmatch("[0-9a-f]{40}", snapshot.name) else revision
            snapshot = Path(snapshot_download(repository, revision=commit, ignore_patterns=list(NEVER_DOWNLOADED)))
    except (OSError, ValueError) as error:
        why = why_not(error, repository, revision)
        raise CheckpointError(
            f"{repository!r} is no local folder or file, and could not be had from the Hub: {why}"
        ) from error
    return plain(FolderCheckpoint(repository, snapshot, allow_pickle=allow_pickle))


def why_not(error: Exception, repository: str, revision: str | None) -> str:
    """Why the Hub did not give a repository, and what to do about it."""
    page, login = f"{constants.ENDPOINT}/{repository}", "`hf auth login` lets this machine in"
    rows: tuple[tuple[type[Exception], str], ...] = (
        (GatedRepoError, f"it is gated. Accept its terms at {page}; then {login}."),
        (RepositoryNotFoundError, f"there is no such repository. Check its name; if it is private, {login}."),
        (RevisionNotFoundError, f"it has no revision {revision!r}: {page}/tree/main lists them."),
    )
    return next((why for kind, why in rows if isinstance(error, kind)), " ".join(str(error).split()))


def hub_state(path: Path) -> dict[str, str]:
    """The repository and the commit that a path in the Hub's cache belongs to, as `source` and `revision`; nothing for
    any other path."""
    match = re.search(r"(?:^|/)models--([^/]+)/snapshots/([0-9a-f]{40})(?:/|$)", path.as_posix())
    return {"source": match[1].replace("--", "/"), "revision": match[2]} if match else {}


def plain(checkpoint: Checkpoint) -> Checkpoint:
    """With the scales of a quantised source multiplied in."""
    from .quantised_source import dequantised

    return dequantised(checkpoint)


def weight_format(path: Path, allow_pickle: bool) -> WeightFormat:
    """The format of the weights in a folder.

    Raises:
        CheckpointError: there are none, or only pickles and they are not allowed.
    """
    found = [layout for layout in (SAFETENSORS, PICKLE) if layout.is_in(path)]
    if not found:
        raise CheckpointError(
            f"{path} has no weights: neither {SAFETENSORS.single} nor {SAFETENSORS.index}"
            f"{'' if allow_pickle else f' (nor {PICKLE.single}, which would need allow_pickle)'}.{_gguf_hint(path)}"
        )
    if found[0] is PICKLE and not allow_pickle:
        raise CheckpointError(
            f"{path} has its weights only as pickle ({PICKLE.single}), a format that can carry code. If you trust "
            "where it is from, pass allow_pickle=True (--allow-pickle): it is then read with weights_only=True."
        )
    return found[0]


def open_shards(path: Path, layout: WeightFormat) -> dict[str, SafetensorsFile | PickleFile]:
    """Open the files that the index names, and prove that they hold what it says."""
    index = read_json(path / layout.index)
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{path / layout.index} has no weight_map from tensor names to files.")
    files = sorted(set(where.values()))
    outside = [file for file in files if Path(file).is_absolute() or ".." in Path(file).parts]
    if outside:
        raise CheckpointError(f"{path / layout.index} names files outside its folder: {some(outside)}.")
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the {len(files)} files that {layout.index} names: {some(missing)}. "
            "Finish the download."
        )
    shards = {file: layout.opens(path / file) for file in files}
    absent = [name for name, file in where.items() if name not in shards[file].tensors]
    if absent:
        raise CheckpointError(
            f"{path / layout.index} places tensors in files that do not hold them: {some(absent)}. The index and the "
            "weight files are not of the same save: fetch them again."
        )
    return shards


def parse_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    content = parse_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__} where an object was expected.")
    return content


def _gguf_hint(path: Path) -> str:
    files = [str(file) for file in sorted(path.glob("*.gguf"))]
    return f" To read a GGUF, name the file: {some(files)}." if files else ""


# Writing

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

"""Single files of a checkpoint: weights in safetensors or pickle, their index, and JSON."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, some
from .base import DTYPES, TensorInfo

CONFIG = "config.json"

# Of PEFT.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS, ADAPTER_PICKLE = "adapter_model.safetensors", "adapter_model.bin"

GENERATION_CONFIG = "generation_config.json"


class SafetensorsFile:
    """One safetensors file: its header now, its tensors on request."""

    def __init__(self, path: Path):
        self.path = path
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
        self.path = path
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # torch.load raises anything from EOFError to UnpicklingError
            raise CheckpointError(f"{path} could not be read with weights_only=True: {error}") from error
        named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
        if not named or not all(isinstance(value, Tensor) for value in state.values()):
            raise CheckpointError(
                f"{path} is not a flat table of named tensors. If it is a training checkpoint, save its model's "
                "state_dict() on its own."
            )
        self._state: dict[str, Tensor] = state
        self.tensors = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in state.items()}

    def read(self, name: str) -> Tensor:
        return self._state[name]


WeightFile = SafetensorsFile | PickleFile


@dataclass(frozen=True)
class WeightFormat:
    """Names of the one weight file, or of the index to several, and what opens such a file."""

    single: str
    index: str
    opens: Callable[[Path], WeightFile]

    def is_in(self, folder: Path) -> bool:
        return any((folder / name).is_file() for name in (self.single, self.index))


SAFETENSORS = WeightFormat("model.safetensors", "model.safetensors.index.json", SafetensorsFile)

PICKLE = WeightFormat("pytorch_model.bin", "pytorch_model.bin.index.json", PickleFile)


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


def open_weights(path: Path, layout: WeightFormat) -> dict[str, WeightFile]:
    """Open the weights of a folder: the name of each tensor, and the file to read it from.

    Where several files hold a tensor, the index decides: a later save may have put one beside an older.

    Raises:
        CheckpointError: a file is damaged or missing, or the index does not fit the files.
    """
    if (path / layout.single).is_file():
        only = layout.opens(path / layout.single)
        return dict.fromkeys(only.tensors, only)
    where, shards = open_shards(path, layout)
    holder = {name: shards[file] for name, file in where.items()}
    for file, shard in shards.items():
        unlisted = [name for name in shard.tensors if name not in where]
        if twice := [name for name in unlisted if name in holder]:
            raise CheckpointError(
                f"{path / file} repeats tensors that another file holds, and {layout.index} names neither: "
                f"{some(twice)}. Remove the older one, or name the right one there."
            )
        holder.update(dict.fromkeys(unlisted, shard))
    # In the order of the files, which is the quickest to read.
    return {name: shard for shard in shards.values() for name in shard.tensors if holder[name] is shard}


def open_shards(path: Path, layout: WeightFormat) -> tuple[dict[str, str], dict[str, WeightFile]]:
    """Open the files that the index names, and prove that they hold what it says.

    Returns:
        The file's name of each tensor that the index names, and each file by its name.
    """
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
    return where, shards


def has_adapter(folder: Path) -> bool:
    """Whether an adapter lies in a folder; beside a model's weights, transformers opens both together."""
    weights = any((folder / name).is_file() for name in (ADAPTER_WEIGHTS, ADAPTER_PICKLE))
    return weights and (folder / ADAPTER_CONFIG).is_file()


def parse_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deep to be read as JSON.") from error
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

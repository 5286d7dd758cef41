"""Where tensors come from: folders, files and the Hub.

`open_checkpoint` looks at headers only, so a plan can be proven before a tensor is read. Tensors are then read one at a
time from memory-mapped files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import CheckpointError
from .base import Checkpoint, TensorInfo
from .files import CONFIG, GENERATION_CONFIG, SAFETENSORS, read_json
from .folder import FolderCheckpoint
from .hub import download, hub_state
from .quantised import dequantised

__all__ = [
    "CONFIG",
    "GENERATION_CONFIG",
    "SAFETENSORS",
    "Checkpoint",
    "FolderCheckpoint",
    "TensorInfo",
    "hub_state",
    "open_checkpoint",
    "read_json",
]


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
        return dequantised(FolderCheckpoint(str(source), path, allow_pickle=allow_pickle))
    if path.is_file():
        return open_file(str(source), path)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(source)) or path.suffix == ".gguf":
        raise CheckpointError(f"There is no file or folder {source}.")
    snapshot = download(str(source), revision, allow_pickle)
    return dequantised(FolderCheckpoint(str(source), snapshot, allow_pickle=allow_pickle))


def open_file(source: str, path: Path) -> Checkpoint:
    if path.suffix == ".pt":
        from .nanogpt import NanoGptCheckpoint

        return NanoGptCheckpoint(source, path)
    if path.suffix != ".gguf":
        raise CheckpointError(
            f"{path} is a single file, and of these only .gguf and nanoGPT's .pt can be read. Name its folder instead."
        )
    try:
        from .gguf import GgufCheckpoint
    except ImportError as error:
        raise CheckpointError(f"Reading {path.name} needs gguf: pip install 'hf-llmarch[gguf]' ({error}).") from error
    return GgufCheckpoint(source, path)

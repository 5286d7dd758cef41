"""nanoGPT's `ckpt.pt`: one pickle with the weights, the `model_args`, and the optimiser, which is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import PreTrainedConfig

from ..destination import write_json
from ..errors import CheckpointError
from .base import Checkpoint, TensorInfo
from .files import CONFIG, GENERATION_CONFIG
from .folder import FolderCheckpoint

FILE = "ckpt.pt"
# What torch.compile puts before every name of a model that it wraps.
COMPILED = "_orig_mod."
# GPT-2's vocabulary, and what nanoGPT rounds it up to: rows that no token stands for, left as noise by training.
TOKENS, PADDED = 50257, 50304


@strict
class NanoGptConfig(PreTrainedConfig):
    """The `model_args` of a checkpoint; transformers has no class for them."""

    model_type = "nanogpt"
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    bias: bool = True
    vocab_size: int = 50304
    dropout: float | int = 0.0


class NanoGptCheckpoint(Checkpoint):
    """A `ckpt.pt`; read with `weights_only=True`, so that nothing in it is run."""

    def __init__(self, source: str, path: Path):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # pickle and zip errors of many kinds
            raise CheckpointError(f"{path} cannot be read as a checkpoint of weights alone: {error}") from error
        if not isinstance(content, dict) or not {"model", "model_args"} <= content.keys():
            raise CheckpointError(f"{path} is no nanoGPT checkpoint: it lacks 'model' or 'model_args'.")
        self._tensors: dict[str, Tensor] = {
            name.removeprefix(COMPILED): tensor for name, tensor in content["model"].items()
        }
        config = {"model_type": "nanogpt", "architectures": ["GPT"], **content["model_args"]}
        infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self._tensors.items()}
        super().__init__(source, path, config, infos)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    @property
    def is_padded(self) -> bool:
        return self.config.get("vocab_size") == PADDED

    @property
    def companions(self) -> tuple[str, ...]:
        return (GENERATION_CONFIG,) if self.is_padded else ()

    @property
    def companion_bytes(self) -> int:
        return 0

    def write_companions(self, directory: Path) -> None:
        """Where the vocabulary is padded, a generation config under which the padding is never sampled."""
        if self.is_padded:
            write_json(directory / GENERATION_CONFIG, {"suppress_tokens": list(range(TOKENS, PADDED))})


def pack(folder: Path) -> None:
    """Turn an exported folder into the `ckpt.pt` that nanoGPT resumes and samples from."""
    checkpoint = FolderCheckpoint(str(folder), folder)
    arguments: dict[str, Any] = {
        name: value
        for name, value in checkpoint.config.items()
        if name in ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout")
    }
    state = {name: checkpoint.read(name) for name in checkpoint.names}
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    torch.save({"model": state, "model_args": arguments}, folder / FILE)
    for file in [*folder.glob("*.safetensors*"), folder / CONFIG, folder / GENERATION_CONFIG]:
        file.unlink(missing_ok=True)

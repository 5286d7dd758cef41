"""A folder as `save_pretrained` writes it, and what of it travels along with a converted model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from ..errors import CheckpointError
from .base import Checkpoint
from .files import ADAPTER_CONFIG, CONFIG, _gguf_hint, open_weights, parse_json, read_json, weight_format

# What a converted folder does not take over from its source, by name; everything else travels along unchanged: the
# tokenizer in whatever files it has, generation_config.json, chat templates, licence, readme.
NOT_CARRIED: Mapping[str, tuple[str, ...]] = {
    "the config, which is translated": (CONFIG,),
    "weights, of this or another framework, and their indexes": (
        *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data"),
        *("*.gguf", "*.ot", "*.npz", "*.index.json"),
    ),
    "an adapter's config, which means nothing without its weights": (ADAPTER_CONFIG,),
    "code, which belongs to the other model class": ("*.py",),
    "hidden files, which belong to git or to a download": (".*",),
}

# Folders of which the files travel too; transformers looks for named chat templates here.
CARRIED_FOLDERS = ("additional_chat_templates",)

MODULES = "modules.json"


def _adapter_hint(path: Path) -> str:
    """What to do with a folder that holds an adapter alone."""
    if not (path / ADAPTER_CONFIG).is_file():
        return ""
    base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path") or "the model that it was trained on"
    return f" It holds an adapter alone: convert {base}, with this folder as adapter=… (--adapter)."


class FolderCheckpoint(Checkpoint):
    """A folder as `save_pretrained` writes it: config.json beside one or several weight files."""

    def __init__(self, source: str, path: Path, *, allow_pickle: bool = False):
        config = read_json(path / CONFIG) if (path / CONFIG).is_file() else None
        if config is None:
            raise CheckpointError(f"{path} has no {CONFIG}.{_gguf_hint(path)}{_adapter_hint(path)}")
        self._holder = open_weights(path, weight_format(path, allow_pickle))
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

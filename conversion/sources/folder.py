"""A folder as `save_pretrained` writes it, and what of it travels along with a converted model."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from ..errors import CheckpointError, some
from .base import Checkpoint, states
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
    # But for what a tokenizer names: see `source_code`.
    "code, which belongs to the other model class, and is run by nobody who did not ask for it": (
        *("*.py", "*.py[cdow]", "*.so", "*.so.*", "*.dll", "*.dylib", "*.exe", "*.sh", "*.bat", "*.ps1", "*.jar"),
        *("*.pkl", "*.pickle", "*.joblib"),
    ),
    "hidden files, which belong to git or to a download": (".*",),
}

# Folders of which the files travel too; transformers looks for named chat templates here.
CARRIED_FOLDERS = ("additional_chat_templates",)

MODULES = "modules.json"
# Of what belongs to the modules, which have weights of their own, these are left behind.
NOT_RUN = (*next(patterns for why, patterns in NOT_CARRIED.items() if why.startswith("code")), ".*")


def _adapter_hint(path: Path) -> str:
    """What to do with a folder that holds an adapter alone."""
    if not (path / ADAPTER_CONFIG).is_file():
        return ""
    base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path") or "the model that it was trained on"
    return f" It holds an adapter alone: convert {base}, with this folder as adapter=… (--adapter)."


class FolderCheckpoint(Checkpoint):
    """A folder as `save_pretrained` writes it: config.json beside one or several weight files."""

    def __init__(self, source: str, path: Path, *, allow_pickle: bool = False):
        before = states(path.iterdir())
        check_inside(path, path / CONFIG)
        config = read_json(path / CONFIG) if (path / CONFIG).is_file() else None
        if config is None:
            raise CheckpointError(f"{path} has no {CONFIG}.{_gguf_hint(path)}{_adapter_hint(path)}")
        layout = weight_format(path, allow_pickle)
        self._holder = open_weights(path, layout)
        index = () if (path / layout.single).is_file() else (path / layout.index,)
        self._model_files = (path / CONFIG, *index, *dict.fromkeys(f.path for f in self._holder.values()))
        tensors = {name: s.tensors[name] for name, s in self._holder.items()}
        super().__init__(source, path, config, tensors)
        self.states |= {file: state for file, state in before.items() if file in self.states}

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((*self._model_files, *(self.path / name for name in self.companions))))

    @property
    def model_files(self) -> tuple[Path, ...]:
        return self._model_files

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
        of_modules = [file for folder in self.modules for file in sorted(folder.rglob("*")) if file.is_file()]
        carried += [file for file in of_modules if not any(fnmatch(file.name, p) for p in NOT_RUN)]
        return tuple(str(file.relative_to(self.path)) for file in carried)

    @property
    def modules(self) -> list[Path]:
        """Folders of what sentence-transformers runs behind the model, which it lists in modules.json."""
        if not (self.path / MODULES).is_file():
            return []
        check_inside(self.path, self.path / MODULES)
        listed = parse_json(self.path / MODULES)
        if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
            raise CheckpointError(f"{self.path / MODULES} is no list of objects, as sentence-transformers writes it.")
        names = [module.get("path") for module in listed]
        return [folder for folder in sorted(self.path.iterdir()) if folder.is_dir() and folder.name in names]

    def write_companions(self, directory: Path) -> None:
        for name in self.companions:
            check_inside(self.path, self.path / name)
            check_code(self.path / name)
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.path / name, target)
            # A file that was for its owner alone stays so.
            target.chmod(target.stat().st_mode & (self.path / name).stat().st_mode | stat.S_IWUSR)


def check_inside(folder: Path, file: Path) -> None:
    """
    Raises:
        CheckpointError: a file to be copied is a link that leaves the folder. Within the Hub's cache, where every file
            is a link, it may lead to the repository's blobs.
    """
    root, real = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    snapshot = re.fullmatch(r"(.*/models--[^/]+)/snapshots/[^/]+", root.as_posix())
    if not real.is_relative_to(root) and not (snapshot and real.is_relative_to(f"{snapshot[1]}/blobs")):
        raise CheckpointError(
            f"{file} leads out of its folder, to {real}: links are not followed there. Put a copy of the file in its "
            "place, if it belongs to the model, or remove it."
        )


def check_code(file: Path) -> None:
    """
    Raises:
        CheckpointError: a config to be copied would have its reader run code of another repository.
    """
    if file.suffix != ".json" or b'"auto_map"' not in (content := file.read_bytes()):
        return
    try:
        listed = list(json.loads(content).get("auto_map", {}).values())
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} has an auto_map that cannot be read: {error}") from error
    classes = [name for value in listed for name in (value if isinstance(value, list) else [value])]
    if elsewhere := [str(name) for name in classes if "--" in str(name)]:
        raise CheckpointError(
            f"{file} names code of another repository in its auto_map: {some(elsewhere)}. It is not passed on unseen: "
            "remove the auto_map, or put the code's own class in its place."
        )

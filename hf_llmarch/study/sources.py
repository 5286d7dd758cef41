"""The config of anything that has one: a preset, a config.json alone, a folder, a repository of the Hub, a GGUF file.

Of a repository only config.json and the index of its weights are downloaded, and no weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_llmarch.conversion.errors import CheckpointError
from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from . import presets

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def config_from(source: str, *, revision: str | None = None) -> LlmArchConfig:
    """The config of a source as it would be here: of a native model's through its family.

    Args:
        source: what lies on this disk comes first, then a preset's name, then a Hub id.
        revision: branch, tag or commit of a Hub repository.

    Raises:
        CheckpointError: it cannot be found, with the closest presets where its name is no path and no Hub id.
        ConversionError: another subclass, where no family can say what it is.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return config_of_folder(path)
    if path.suffix == ".json" and path.is_file():
        return config_alone(read(path))
    if not path.exists() and revision is None and source in presets.names():
        return presets.get(source)
    if path.exists() or path.suffix in (".gguf", ".pt"):
        from hf_llmarch.conversion.engine import config_of

        return config_of(source, revision=revision)
    if "/" not in source and revision is None:
        presets.row(source)  # refuses, with the names that are close
    return config_of_folder(downloaded(source, revision))


def read(path: Path) -> dict[str, Any]:
    from hf_llmarch.conversion.sources import read_json

    return read_json(path)


def config_of_folder(folder: Path) -> LlmArchConfig:
    """By its weights' names too where they are there, as these tell some heads and variants apart.

    Raises:
        CheckpointError: there is no config.json.
    """
    from hf_llmarch.conversion.engine import config_of
    from hf_llmarch.conversion.plans import plan
    from hf_llmarch.conversion.sources import SAFETENSORS

    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"There is no {CONFIG} in {folder}.")
    config = read(folder / CONFIG)
    if config.get("model_type") == LlmArchConfig.model_type:
        return config_alone(config)
    shards: Mapping[str, str] = read(folder / INDEX)["weight_map"] if (folder / INDEX).is_file() else {}
    whole = all((folder / shard).is_file() for shard in set(shards.values()))
    if SAFETENSORS.is_in(folder) and whole:
        return config_of(folder)
    # Quantised weights have names of their own, which only their reader knows.
    return plan(config, shards).config if shards and "quantization_config" not in config else config_alone(config)


def config_alone(config: dict[str, Any]) -> LlmArchConfig:
    """Ours for a config.json, with the first of a family's variants where only tensors would tell."""
    from hf_llmarch.conversion.families import family_of
    from hf_llmarch.conversion.plans import classes_for
    from hf_llmarch.conversion.relation import read_config

    if config.get("model_type") == LlmArchConfig.model_type:
        return LlmArchConfig.from_dict(config)
    family = family_of(config)
    architecture = classes_for(family, config)[0]
    return read_config(family, config, architecture, family.variants.get(architecture, ({},))[0])


def downloaded(repository: str, revision: str | None) -> Path:
    """A folder with the config.json of a repository, and with the index of its weights where it has one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    from hf_llmarch.conversion.sources.hub import why_not

    try:
        folder = Path(hf_hub_download(repository, CONFIG, revision=revision)).parent
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{repository!r} is no local folder, file or preset, and its {CONFIG} could not be had from the Hub: "
            f"{why_not(error, repository, revision)}"
        ) from error
    try:
        hf_hub_download(repository, INDEX, revision=folder.name)
    except (EntryNotFoundError, OSError, ValueError):
        return folder  # one file of weights has no index; config.json says enough
    return folder

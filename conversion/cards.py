"""Model cards: what a folder of ours is, where it comes from, how far that was proven, and how to use it.

The card is the folder's README.md, with the metadata that the Hub reads. The card of the model that it was converted
from is kept beside it, and goes back on export. A README.md that somebody wrote is never replaced.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.repocard import metadata_load

from hf_llmarch.model.configuration_llmarch import AUTO_MAP, LlmArchConfig
from hf_llmarch.model.host import SUPPORTED

from .destination import write_json
from .errors import ConversionError, DestinationError
from .preserved import FOLDER
from .reports import Certificate, Report
from .sources import open_checkpoint
from .sources.base import Checkpoint
from .sources.files import read_json

README = "README.md"
CERTIFICATE = f"{FOLDER}/certificate.json"
MARK = "<!-- Written by hf_llmarch. Without this line the file is yours, and is never replaced. -->"
# Beside this folder, in the repository as in an installed package.
TEMPLATE = Path(__file__).parents[1] / "model_cards" / "template.md"

# What of the original's metadata is true of the same weights in another class. Its evaluation results are not among
# them: they were not measured here, and stand in its own card.
TAKEN_OVER = (
    *("license", "license_name", "license_link", "language", "datasets", "tags", "pipeline_tag"),
    *("extra_gated_prompt", "extra_gated_fields", "extra_gated_heading", "extra_gated_description"),
)
# Tags that promise a file format, or a server that knows the original's class.
FORMATS = {
    *("onnx", "transformers.js", "gguf", "openvino", "coreml", "tflite", "rust", "jax", "tf", "flax", "pytorch", "mlx"),
    *("text-generation-inference", "text-embeddings-inference", "endpoints_compatible"),
}
# Our class -> what the Hub calls its task; a translator and a summariser are of one class, so it has none here.
TASKS = {
    "LlmArchModel": "feature-extraction",
    "LlmArchForCausalLM": "text-generation",
    "LlmArchForMaskedLM": "fill-mask",
    "LlmArchForSequenceClassification": "text-classification",
    "LlmArchForTokenClassification": "token-classification",
    "LlmArchForQuestionAnswering": "question-answering",
}
LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING", "USE_POLICY.md", "NOTICE")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
LONGEST_LIST = 6


def write(
    folder: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    certificate: Certificate | None = None,
    report: Report | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the card of a model of ours into its folder, as README.md. Reads headers, no tensor.

    Args:
        folder: of a converted or saved model of ours.
        base_model: the original's id on the Hub; by default what `convert` noted, where it read from the Hub.
        certificate: of `verify`; by default the one that an earlier card was written with.
        report: of `convert`: whether its numbers are the original's, and what it left out.
        overwrite: replace a README.md that was not written here.

    Returns:
        The file.

    Raises:
        ConversionError: the folder holds no model of ours.
        DestinationError: it has a README.md of another hand.
    """
    path = Path(folder).expanduser() / README
    if path.is_file() and not is_ours(path) and not overwrite:
        raise DestinationError(f"{path} was not written here: pass overwrite=True (--overwrite) to replace it.")
    card = make(path.parent, base_model=base_model, certificate=certificate, report=report)
    path.write_text(str(card), encoding="utf-8")
    if certificate is not None:
        (path.parent / FOLDER).mkdir(exist_ok=True)
        # Their names only: where they lie on somebody's disk is not for others.
        public = replace(certificate, original=Path(certificate.original).name, ours=Path(certificate.ours).name)
        write_json(path.parent / CERTIFICATE, public.to_dict())
    return path


def make(
    folder: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    certificate: Certificate | None = None,
    report: Report | None = None,
) -> ModelCard:
    """The card of a model of ours, as `write` writes it. `make(folder).push_to_hub(repo)` puts it on the Hub.

    Args, Raises: as for `write`.
    """
    checkpoint = open_checkpoint(folder)
    if checkpoint.config.get("model_type") != LlmArchConfig.model_type:
        raise ConversionError(f"{folder} holds no llmarch model but {checkpoint.config.get('model_type')!r}.")
    config = LlmArchConfig.from_dict(checkpoint.config)
    origin = config.converted_from or {}
    base_model = base_model or origin.get("source")
    if certificate is None and (checkpoint.path / CERTIFICATE).is_file():
        certificate = Certificate.from_dict(read_json(checkpoint.path / CERTIFICATE))
    data = metadata(checkpoint, config, base_model)
    name = Path(report.destination).name if report else checkpoint.path.resolve().name
    return ModelCard.from_template(
        ModelCardData(**data),
        template_path=str(TEMPLATE),
        mark=MARK,
        title=name,
        summary=summary(base_model, origin, report),
        usage=f"```python\n{usage(checkpoint, config, name)}\n```",
        supported=SUPPORTED,
        numbers=numbers(checkpoint, config),
        switches=list(changed_switches(config)),
        origin=provenance(base_model, origin, report),
        certificate=certificate and {name: cell(fact) for name, fact in certificate.facts.items()},
        verdict=certificate and ("; ".join(certificate.problems) or "It is the same model."),
        licence=licence(checkpoint.path, data, base_model),
    )


def is_ours(path: Path) -> bool:
    """Whether a README.md was written here, and by nobody since."""
    return path.is_file() and MARK in path.read_text(encoding="utf-8", errors="replace")


def set_aside(folder: Path) -> None:
    """Keep the card that came along with a source beside the one that is about to be written."""
    if (folder / README).is_file():
        (folder / FOLDER).mkdir(exist_ok=True)
        (folder / README).rename(folder / FOLDER / README)


def give_back(source: Path, folder: Path) -> None:
    """Let an export have the original's card instead of ours."""
    if is_ours(folder / README):
        (folder / README).unlink()
        if (source / FOLDER / README).is_file():
            shutil.copyfile(source / FOLDER / README, folder / README)


# -- metadata ----------------------------------------------------------------------------------------------------------


def metadata(checkpoint: Checkpoint, config: LlmArchConfig, base_model: str | None) -> dict[str, Any]:
    """What the Hub reads: the original's, in so far as it holds here, what was said here before, and what is ours."""
    original, before = (read_metadata(checkpoint.path / name) for name in (f"{FOLDER}/{README}", README))
    data = {name: original[name] for name in TAKEN_OVER if name in original}
    # Without a name for the original, what it was made from itself is what is known.
    data |= {name: original[name] for name in ("base_model", "base_model_relation") if name in original}
    if is_ours(checkpoint.path / README):
        data |= before
    tags = [tag for tag in as_list(data.get("tags")) if tag not in FORMATS]
    data |= {"library_name": "transformers", "tags": list(dict.fromkeys([*tags, config.model_type]))}
    if config.architectures and config.architectures[0] in TASKS:
        data.setdefault("pipeline_tag", TASKS[config.architectures[0]])
    if base_model is not None:
        # Of the Hub's four relations the one under which the same model in another format stands. Left out, the Hub
        # takes it for a fine-tune.
        data |= {"base_model": base_model, "base_model_relation": "quantized"}
    return data


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a card; none where there is no card, or where it cannot be read."""
    try:
        return (metadata_load(path) or {}) if path.is_file() else {}
    except (ValueError, yaml.YAMLError):
        return {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


# -- text --------------------------------------------------------------------------------------------------------------


def link(repository: str) -> str:
    return f"[{repository}](https://huggingface.co/{repository})"


def summary(base_model: str | None, origin: dict[str, Any], report: Report | None) -> str:
    text = (
        "A model of `hf_llmarch`: one class of transformers, `model_type: llmarch`, in which every architecture choice "
        "is a field of the config."
    )
    if "family" not in origin:
        return text
    text += f" Converted from {link(base_model) if base_model else 'a checkpoint'} (`{origin['family']}`)."
    if report is None:
        return text
    if report.byte_exact:
        return text + " No number was changed: `hf-llmarch export` gives the original's tensors back byte for byte."
    return text + " Its numbers were cast to another dtype, or dequantised."


def usage(checkpoint: Checkpoint, config: LlmArchConfig, name: str) -> str:
    """A few lines that load the model and run it."""
    ours = (config.architectures or ["LlmArchModel"])[0]
    auto = next(auto for auto, reference in AUTO_MAP.items() if reference.endswith(f".{ours}"))
    load = f'model = {auto}.from_pretrained("{name}", trust_remote_code=True)'
    if not any((checkpoint.path / file).is_file() for file in TOKENIZERS):
        return f"from transformers import {auto}\n\n{load}"
    generates = ours in ("LlmArchForCausalLM", "LlmArchForConditionalGeneration")
    run = "tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=40))" if generates else "model(**inputs)"
    return "\n".join(
        (
            f"from transformers import {auto}, AutoTokenizer\n",
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
            load,
            'inputs = tokenizer("Hello", return_tensors="pt")',
            f"print({run})",
        )
    )


def numbers(checkpoint: Checkpoint, config: LlmArchConfig) -> dict[str, str]:
    """The model in a few figures."""
    dtypes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        dtypes[str(info.dtype).removeprefix("torch.")] += prod(info.shape)
    heads = f"{config.num_attention_heads} ({config.attention_kind}, {config.num_key_value_heads} of keys and values)"
    experts = f", {config.num_experts} experts, {config.num_experts_per_tok} a token" if config.num_experts else ""
    return {
        "class": f"`{(config.architectures or ['LlmArchModel'])[0]}`",
        "numbers in the weights": f"{sum(dtypes.values()):,} ({', '.join(dtypes)})",
        "topology": config.topology,
        "layers": str(config.num_hidden_layers),
        "width": f"{config.hidden_size:,}, {config.intermediate_size:,} in the feed-forward{experts}",
        "heads": heads,
        "positions": f"{config.position_encoding}, up to {config.max_position_embeddings:,}",
        "vocabulary": f"{config.vocab_size:,}",
    }


def changed_switches(config: LlmArchConfig) -> Iterator[dict[str, str]]:
    """Name, value and meaning of each switch that is not what a config would have by itself."""
    values = {f.name: getattr(config, f.name) for f in LlmArchConfig.switches()}
    for f in LlmArchConfig.switches():
        value = values[f.name]
        if f.name == "converted_from" or value == f.default:
            continue
        if f.default is None and follows(values, f.name):
            continue
        yield {"name": f.name, "value": cell(f"`{shown(value)}`"), "doc": cell(LlmArchConfig.docs()[f.name])}


def follows(values: dict[str, Any], name: str) -> bool:
    """Whether a switch would have the same value if it had been left to follow from the others."""
    try:
        return getattr(LlmArchConfig(**{**values, name: None}), name) == values[name]
    except (ValueError, TypeError, StrictDataclassError):
        return False


def shown(value: Any) -> str:
    """A value in JSON, long lists by their runs or their length."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {shown(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list) and len(value) > LONGEST_LIST:
        runs = [f"{len(list(run))} x {json.dumps(one)}" for one, run in groupby(value)]
        return f"[{', '.join(runs)}]" if len(runs) <= LONGEST_LIST else f"[… {len(value)} values]"
    return json.dumps(value, ensure_ascii=False)


def provenance(base_model: str | None, origin: dict[str, Any], report: Report | None) -> dict[str, str]:
    """Where a converted model comes from. A source on somebody's disk has no place in a card."""
    if not origin:
        return {}
    rows = {
        "original": link(base_model) if base_model else None,
        "revision": origin.get("revision"),
        "family": f"`{origin['family']}`" if "family" in origin else None,
        "class": f"`{(origin['config'].get('architectures') or ['not stated'])[0]}`" if "config" in origin else None,
        "changed since": "; ".join(f"`{name}`" for step in origin.get("surgery", ()) for name in step) or None,
    }
    if report is not None:
        left_out = "; ".join(f"`{name}`: {reason}" for name, reason in report.dropped.items())
        rows |= {"tensors": f"{report.tensors:,}", "left out": left_out or "nothing"}
    return {name: cell(value) for name, value in rows.items() if value is not None}


def licence(folder: Path, data: dict[str, Any], base_model: str | None) -> str:
    """Where the licence stands. One that nobody stated is not made up."""
    files = [name for name in LICENCES if (folder / name).is_file()]
    where = [f"[{name}]({name})" for name in files]
    where += [f"[the original's card]({FOLDER}/{README})"] if (folder / FOLDER / README).is_file() else []
    where += [f"the page of {link(base_model)}"] if base_model else []
    named = data.get("license_name") or data.get("license")
    text = f"The weights are under `{named}`." if named else "The weights keep the licence of their authors."
    if where:
        text += f" See {', '.join(where)}."
    return text + " The Python files beside them are part of hf_llmarch, under Apache-2.0."


cell = partial(re.sub, r"\|", r"\\|")

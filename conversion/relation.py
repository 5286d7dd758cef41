"""The config half of the relation: their fields to ours and back, refusing what cannot be said.

Their config.json is first read by transformers' own class for its `model_type`, which knows legacy spellings and its
own defaults; entries then relate that object to our fields. On the way out the result is read in again and compared
with the model: whatever the family could not say shows up as a difference.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from .errors import ConversionError, NotExpressible, UnknownFamily, UnsupportedField

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hf_llmarch.configuration_llmarch import LlmArchConfig

    from .rules import Family

Values = dict[str, Any]


class Entry(Protocol):
    """One relation between config fields. `theirs` names the fields of theirs that it accounts for."""

    @property
    def theirs(self) -> tuple[str, ...]: ...
    def to_ours(self, native: PreTrainedConfig) -> Values: ...
    def to_theirs(self, config: LlmArchConfig) -> Values: ...


class Field:
    """A value that keeps its meaning and changes its name; several names of ours where one of theirs rules them all."""

    def __init__(self, theirs: str, *ours: str) -> None:
        self.name, self.ours = theirs, ours or (theirs,)
        self.theirs = (theirs,)

    def to_ours(self, native: PreTrainedConfig) -> Values:
        return dict.fromkeys(self.ours, getattr(native, self.name, None))

    def to_theirs(self, config: LlmArchConfig) -> Values:
        return {self.name: getattr(config, self.ours[0])}


class Const:
    """What the family always does, and never says."""

    theirs: tuple[str, ...] = ()

    def __init__(self, ours: str, value: Any) -> None:
        self.ours, self.value = ours, value

    def to_ours(self, native: PreTrainedConfig) -> Values:
        return {self.ours: self.value}

    def to_theirs(self, config: LlmArchConfig) -> Values:
        return {}


@dataclass(frozen=True)
class Derived:
    """For the few fields that need arithmetic or depend on each other."""

    theirs: tuple[str, ...]
    to_ours: Callable[[Any], Values]
    to_theirs: Callable[[Any], Values]


# Fields that say how a model is stored, served, sampled from or trained, never what it computes.
INERT = {
    *("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version", "unsloth_version"),
    *("name_or_path", "_name_or_path", "pretraining_tp", "tokenizer_class", "torchscript", "use_cache", "is_decoder"),
    *("chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
    *("output_hidden_states", "output_attentions", "return_dict", "use_return_dict", "use_bfloat16", "_commit_hash"),
    *("_attn_implementation", "_attn_implementation_internal", "attn_implementation", "gradient_checkpointing"),
    *("classifier_dropout", "transformers.js_config", "finetuning_task", "model_max_length", "use_safetensors", "unsloth_fixed"),
}


def family_of(config: Mapping[str, Any], family: Family | str | None = None) -> Family:
    """The family itself, the one of that name, or the one of the config's `model_type`."""
    from .families import families

    if family is not None and not isinstance(family, str):
        return family
    known, name = families(), family or config.get("model_type")
    if name in known:
        return known[name]
    close = difflib.get_close_matches(str(name), known, n=1)
    raise UnknownFamily(
        f"No family for model_type {name!r}."
        + (f" Did you mean {close[0]!r}?" if close else "")
        + f" There are: {', '.join(known)}. Choose one with family=… if the architecture is the same."
    )


def native_config(family: Family, foreign: Mapping[str, Any]) -> PreTrainedConfig:
    """Their config.json, read by transformers' own class."""
    from transformers import AutoConfig

    # A deep copy: native classes complete nested dicts in place.
    values = {family.aliases.get(name, name): value for name, value in copy.deepcopy(dict(foreign)).items()}
    values.pop("model_type", None)
    try:
        return AutoConfig.for_model(family.name, **values)
    except Exception as error:
        raise ConversionError(f"transformers cannot read this config.json as {family.name!r}: {error}") from error


def read_config(family: Family, foreign: Mapping[str, Any]) -> LlmArchConfig:
    """Our config for theirs.

    Raises:
        UnsupportedField: naming every field that is off its default and that the family does not relate to ours.
    """
    from hf_llmarch.configuration_llmarch import LlmArchConfig

    native = native_config(family, foreign)
    refuse_unsupported(family, native, foreign)
    values: Values = {}
    for entry in family.config:
        values |= entry.to_ours(native)
    return LlmArchConfig(**values, dtype=native.dtype)


def refuse_unsupported(family: Family, native: PreTrainedConfig, foreign: Mapping[str, Any]) -> None:
    known = {*INERT, *family.inert, *family.aliases, *(name for entry in family.config for name in entry.theirs)}
    defaults, states = type(native)(), {f.name for f in fields(native)}
    unsupported = [name for name in states - known if getattr(native, name) != getattr(defaults, name)]
    # A key the native class did not take up; null and false say that something is absent, which it is.
    unsupported += [
        name
        for name, value in foreign.items()
        if name in vars(native) and name not in states | known and value not in (None, False)
    ]
    if unsupported:
        raise UnsupportedField(
            f"Family {family.name!r} has no counterpart for "
            + ", ".join(f"{name}={getattr(native, name)!r}" for name in sorted(unsupported))
            + ". Converting would change the model's numbers, or leave out a part of it."
        )


def write_config(family: Family, config: LlmArchConfig) -> Values:
    """Their config.json for our config. Where ours came from it, only keys whose meaning has changed are rewritten.

    Raises:
        NotExpressible: naming every switch that the family cannot say, with both values.
    """
    if config.is_heterogeneous:
        raise NotExpressible(f"Family {family.name!r} has one form of block; this model's layers differ from each other.")
    theirs = their_values(family, config)
    try:
        back = read_config(family, theirs)
    except ValueError as error:
        raise NotExpressible(f"Family {family.name!r} cannot express this model: {error}") from error
    if lost := differences(config, back):
        raise NotExpressible(
            f"Family {family.name!r} cannot express this model: "
            + "; ".join(f"{name} is {mine!r}, {family.name} would read {its!r}" for name, (mine, its) in lost.items())
            + ". Export to a family that can, or change these fields."
        )
    origin = config.converted_from or {}
    if origin.get("family") == family.name:
        original = origin["config"]
        before = their_values(family, read_config(family, original))
        changed = {name: value for name, value in theirs.items() if value != before.get(name)}
        # A stored dtype is kept true, but never added.
        changed |= {name: dtype_name(config) for name in ("dtype", "torch_dtype") if name in original and _cast(config, origin)}
        patched = {**copy.deepcopy(original), **changed}
        if not differences(config, read_config(family, patched)):
            return patched
    native = native_config(family, theirs).to_diff_dict()
    dtype = {"dtype": dtype_name(config), "torch_dtype": dtype_name(config)} if config.dtype else {}
    return {**native, "architectures": list(family.architectures.values())[:1], **theirs, **dtype}


def their_values(family: Family, config: LlmArchConfig) -> Values:
    values: Values = {"model_type": family.name}
    for entry in family.config:
        values |= entry.to_theirs(config)
    return copy.deepcopy(values)


def differences(ours: LlmArchConfig, back: LlmArchConfig) -> dict[str, tuple[Any, Any]]:
    """Switches in which two configs disagree, by meaning: values that follow from others are written out first."""
    a, b = meaning(ours), meaning(back)
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


def meaning(config: LlmArchConfig) -> Values:
    values = {f.name: getattr(config, f.name) for f in config.switches() if f.name not in ("converted_from", "use_cache")}
    return values | {
        "attention_type": config.attention_kind,
        "qk_norm_type": config.qk_norm_type or config.norm_type,
        "nope_layers": config.nope_layers or [],
        "rope_parameters": {
            kind: {name: value for name, value in parameters.items() if (name, value) != ("partial_rotary_factor", 1.0)}
            for kind, parameters in config.rope_by_layer_type.items()
        },
    }


def dtype_name(config: PreTrainedConfig) -> str:
    return str(config.dtype).removeprefix("torch.")


def _cast(config: LlmArchConfig, origin: Mapping[str, Any]) -> bool:
    stated = origin["config"].get("dtype", origin["config"].get("torch_dtype"))
    return config.dtype is not None and dtype_name(config) != str(stated).removeprefix("torch.")

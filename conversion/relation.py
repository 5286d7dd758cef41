"""The config half of the relation: their fields to ours and back, refusing what cannot be said.

Their config.json is first read by transformers' own class for its `model_type`, which knows legacy spellings and its
own defaults; entries then relate that object to our fields. On the way out the result is read in again and compared
with the model: whatever the family could not say shows up as a difference.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from .entries import Values
from .errors import ConversionError, NotExpressible, UnsupportedField
from .reading import keys_read

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hf_llmarch.model.configuration_llmarch import LlmArchConfig

    from .rules import Family


# Fields that transformers reads, and that say how a model is stored, served, sampled from or trained, never what it
# computes. Those that it does not read are found in its code.
INERT = {
    *("_attn_implementation", "_attn_implementation_internal", "_commit_hash", "_name_or_path", "attn_implementation"),
    *("chunk_size_feed_forward", "classifier_dropout", "dtype", "gradient_checkpointing", "id2label", "is_decoder"),
    *("model_type", "name_or_path", "num_labels", "output_attentions", "output_hidden_states", "pretraining_tp"),
    *("problem_type", "return_dict", "torch_dtype", "use_cache"),
}


def native_config(family: Family, foreign: Mapping[str, Any]) -> PreTrainedConfig:
    """Their config.json, read by transformers' own class."""
    from transformers import AutoConfig

    # A deep copy: native classes complete nested dicts in place.
    values = copy.deepcopy({name: value for name, value in foreign.items() if name != "model_type"})
    for old, name in family.aliases.items():
        if old in values:
            values.setdefault(name, values.pop(old))
    try:
        return family.native(**values) if family.native else AutoConfig.for_model(family.name, **values)
    except Exception as error:
        raise ConversionError(f"transformers cannot read this config.json as {family.name!r}: {error}") from error


# transformers' own fields for the classes of a task head and its kind of problem, which both sides have alike.
LABELS = ("id2label", "label2id", "problem_type")


def read_config(
    family: Family, foreign: Mapping[str, Any], architecture: str, variant: Mapping[str, Any] = MappingProxyType({})
) -> LlmArchConfig:
    """Our config for theirs.

    Args:
        architecture: our class. Entries find its counterpart in the native config's `architectures`, where they depend
            on it.
        variant: switches that the tensors tell, see `Family.variants`.

    Raises:
        UnsupportedField: naming every field that is off its default and that the family does not relate to ours.
    """
    from hf_llmarch.model.configuration_llmarch import LlmArchConfig

    native = native_config(family, foreign)
    refuse_unsupported(family, native, foreign)
    native.architectures = their_class(family, architecture, variant)
    values: Values = {"architectures": [architecture]}
    values |= {name: copy.deepcopy(getattr(native, name)) for name in LABELS}
    for entry in family.config:
        values |= entry.to_ours(native)
    return LlmArchConfig(**{**values, **variant}, dtype=native.dtype)


BASE = "LlmArchModel"


def their_class(family: Family, architecture: str, variant: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """What `architectures` says in their config.json, for a class of ours in one of its variants."""
    if family.encoder and architecture == BASE and variant.get("topology") == "encoder":
        return [family.encoder]
    return [theirs for ours, theirs in family.architectures.items() if ours == architecture]


def refuse_unsupported(family: Family, native: PreTrainedConfig, foreign: Mapping[str, Any]) -> None:
    known = {*INERT, *family.inert, *family.aliases, *(name for entry in family.config for name in entry.theirs)}
    defaults, states = type(native)(), {f.name for f in fields(native)}
    unsupported = [name for name in states - known if getattr(native, name) != getattr(defaults, name)]
    # Keys that the native class has kept without knowing them; those it understood, it has consumed.
    unsupported += [
        name
        for name, value in foreign.items()
        if name in vars(native) and name not in states | known and not says_absent(value)
    ]
    if unsupported and (read := keys_read(type(native), family.architectures.values())) is not None:
        unsupported = [name for name in unsupported if name in read]
    if unsupported:
        raise UnsupportedField(
            f"Family {family.name!r} has no counterpart for "
            + ", ".join(f"{name}={getattr(native, name)!r}" for name in sorted(unsupported))
            + ". Converting would change the model's numbers, or leave out a part of it."
        )


def says_absent(value: Any) -> bool:
    """Null, false and empty say that there is none of something; zero is a value."""
    return value is None or value is False or (not value and not isinstance(value, int | float))


def write_config(
    family: Family, config: LlmArchConfig, architecture: str, variant: Mapping[str, Any] = MappingProxyType({})
) -> Values:
    """Their config.json for our config. Where ours came from it, only keys whose meaning has changed are rewritten.

    Args:
        architecture, variant: as for `read_config`.

    Raises:
        NotExpressible: naming every switch that the family cannot say, with both values.
    """
    if config.is_heterogeneous:
        raise NotExpressible(f"Family {family.name!r} has one form of block; the layers of this model differ.")

    def read(foreign: Mapping[str, Any]) -> LlmArchConfig:
        return read_config(family, foreign, architecture, variant)

    theirs = their_values(family, config)
    try:
        back = read(theirs)
    except (ValueError, NotImplementedError, StrictDataclassError) as error:
        raise NotExpressible(f"Family {family.name!r} cannot express this model: {error}") from error
    if lost := differences(config, back, architecture):
        raise NotExpressible(
            f"Family {family.name!r} cannot express this model: "
            + "; ".join(f"{name} is {mine!r}, {family.name} would read {its!r}" for name, (mine, its) in lost.items())
            + ". Export to a family that can, or change these fields."
        )
    dtypes = {} if config.dtype is None else dict.fromkeys(("dtype", "torch_dtype"), dtype_name(config))
    origin = config.converted_from or {}
    if origin.get("family") == family.name:
        original = origin["config"]
        before = their_values(family, read(original))
        changed = {name: value for name, value in theirs.items() if value != before.get(name)}
        # A dtype that is stated is kept true, but none is added.
        changed |= {name: dtype for name, dtype in dtypes.items() if name in original}
        if origin.get("architecture", architecture) != architecture:
            changed["architectures"] = their_class(family, architecture, variant)
        patched = {**copy.deepcopy(original), **changed}
        # Not so where an old spelling in the original overrules the new value: then all is written afresh.
        if not differences(config, read(patched), architecture):
            return patched
    native = native_config(family, theirs)
    unset = type(native)()
    stated = {n: v for n, v in theirs.items() if n not in LABELS or v != getattr(unset, n)}
    return {**native.to_diff_dict(), "architectures": their_class(family, architecture, variant), **stated, **dtypes}


def their_values(family: Family, config: LlmArchConfig) -> Values:
    values: Values = {"model_type": family.name, **{name: getattr(config, name) for name in LABELS}}
    for entry in family.config:
        values |= entry.to_theirs(config)
    return copy.deepcopy(values)


def differences(ours: LlmArchConfig, back: LlmArchConfig, architecture: str) -> dict[str, tuple[Any, Any]]:
    """Switches in which two configs of a class disagree, by meaning: values that follow from others are written out
    first, and those of other classes' heads are left out."""
    a, b = meaning(ours), meaning(back)
    readers = {f.name: f.metadata["switch"].read_by for f in ours.switches()}
    unread = {name for name, classes in readers.items() if classes and architecture not in classes}
    return {name: (a[name], b.get(name)) for name in a if name not in unread and a[name] != b.get(name)}


def meaning(config: LlmArchConfig) -> Values:
    from hf_llmarch.model.positions import attention_scale

    values = {f.name: getattr(config, f.name) for f in config.switches() if not f.metadata["switch"].inert}
    if config.position_encoding not in ("rope", "learned"):
        del values["max_position_embeddings"]  # the other encodings have no length
    values["attention_scale"] = attention_scale(config, 0)
    if config.attention_kind == "mla":
        del values["head_dim"]  # it has widths of its own
        values["latent_norm_eps"] = config.norm_eps if config.latent_norm_eps is None else config.latent_norm_eps
    if config.n_group == 1:
        values["n_group"] = values["topk_group"] = None  # a group of all experts is no group
    if config.topology == "encoder-decoder":
        # Whole, so that it does not matter what the source_stack says and what it leaves to the decoder.
        del values["source_stack"]
        values |= {f"source_stack.{name}": value for name, value in meaning(config.source_config()).items()}
    if config.num_experts is not None:
        values["moe_intermediate_size"] = config.moe_intermediate_size or config.intermediate_size
        values["num_shared_experts"] = values["shared_expert_intermediate_size"] = config.shared_width
        if "dense" not in (config.mlp_layer_types or ()):
            del values["intermediate_size"]
    return values | {
        "attention_type": config.attention_kind,
        "head_act": config.lm_head_transform and (config.head_act or config.hidden_act),
        "qk_norm_type": config.qk_norm_type or config.norm_type,
        "qk_norm_bias": config.norm_bias if config.qk_norm_bias is None else config.qk_norm_bias,
        "nope_layers": config.nope_layers or [],
        "rope_parameters": {
            kind: {name: value for name, value in parameters.items() if (name, value) != ("partial_rotary_factor", 1.0)}
            for kind, parameters in config.rope_by_layer_type.items()
        },
    }


def dtype_name(config: PreTrainedConfig) -> str:
    return str(config.dtype).removeprefix("torch.")

"""A conversion's plan: a family's rules written out for one checkpoint, and proven before a tensor is read.

`plan()` pairs the names on disk with the tensors of the model; `Plan.stream()` then carries tensors in either direction
with the memory of one step.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import Formatter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .entries import Values
from .errors import (
    CheckpointError,
    ConversionError,
    NotExpressible,
    PlanError,
    UnknownFamily,
    UnsupportedField,
    some,
)
from .families import families, family_of
from .relation import BASE, read_config, write_config
from .rules import Family, Op, Shape, Side, Step

if TYPE_CHECKING:
    from torch import Tensor

    from hf_llmarch.model.configuration_llmarch import LlmArchConfig

    from .sources.base import Checkpoint


@dataclass(frozen=True)
class Plan:
    """A proven pairing of the tensors on disk with the model's; serves both directions.

    Attributes:
        architecture: the name of our class that the tensors make.
        config: ours, with `converted_from` filled in.
        foreign_config: the family's config.json.
        steps: in the order of the family's rules.
        dropped: names on disk that are left out, and why.
        aside: those of them that are kept aside and go back on export.
        their_shapes, our_shapes: of every tensor that the steps read or write.
    """

    family: Family
    architecture: str
    config: LlmArchConfig
    foreign_config: dict[str, Any]
    steps: tuple[Step, ...]
    dropped: dict[str, str]
    their_shapes: dict[str, Shape]
    our_shapes: dict[str, Shape]
    aside: tuple[str, ...] = ()

    def stream(self, read: Callable[[str], Tensor], to: Side = "ours") -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of one side, reading those of the other by name; one step's tensors live at a time."""
        for step in self.steps:
            yield from step.run(read, self.config, to)


def plan(
    config: Mapping[str, Any], names: Iterable[str] | Mapping[str, Shape], *, family: Family | str | None = None
) -> Plan:
    """Prove that a checkpoint can be converted, from its config.json and its tensor names alone.

    Args:
        config: their config.json as a dict.
        names: of the tensors on disk; with shapes, when given as a mapping, these are proven as well.
        family: by default the one of `config["model_type"]`.

    Raises:
        UnknownFamily: for a `model_type` that is not in the table.
        UnsupportedField: for a config field that the family does not map and that is not at its default.
        PlanError: naming the tensors that are unknown, missing, or of another shape than the config says.
    """
    family = family_of(config, family)
    given = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
    draft = min(drafts(family, config, given), key=lambda draft: draft.unpaired(given))
    ours, shapes, steps, spelling = draft.config, draft.skeleton.shapes, draft.steps, draft.spelling
    last = ours.num_hidden_layers
    spans = {**ranges(ours), "m": range(last, last + (config.get(family.layers_ahead or "") or 0))}
    drops = {spell(name, spelling): drop for drop in family.drops for name in expand((drop.theirs,), spans)}
    their_shapes = prove(family, ours, steps, shapes)
    dropped = {name: drops[name].reason for name in given if name in drops and name not in their_shapes}
    unknown = [name for name in given if name not in their_shapes and name not in dropped]
    missing = [name for name in their_shapes if name not in given]
    if unknown or missing:
        refuse_wrapped(given)
        raise PlanError(
            f"The tensors on disk are not those of a {family.name!r} model with this config."
            + (f" No place for: {some(unknown)}." if unknown else "")
            + (f" Missing: {some(missing)}." if missing else "")
            + " A wrong number of layers in config.json, a missing shard, or a model with another head looks like this."
        )
    wrong = [
        f"{name} is {list(shape)}, expected {list(their_shapes[name])}"
        for name, shape in given.items()
        if shape is not None and name in their_shapes and tuple(shape) != their_shapes[name]
    ]
    if wrong:
        raise PlanError(f"Shapes on disk contradict config.json: {some(wrong)}. Check that both are of one model.")
    ours.converted_from = {
        "family": family.name,
        "architecture": draft.architecture,
        "config": copy.deepcopy(dict(config)),
        "spelling": dict(spelling),
        "tied_copies": [name for step in steps if step.op.name == TIED for name in step.theirs[1:]],
    }
    aside = tuple(name for name in dropped if drops[name].keep)
    foreign = copy.deepcopy(dict(config))
    return Plan(family, draft.architecture, ours, foreign, steps, dropped, their_shapes, shapes, aside)


# What training puts around a model -> the part of a tensor's name that tells, and how to take it off.
WRAPPERS = {
    "DataParallel or DistributedDataParallel": ("module.", "save the state_dict of `model.module`"),
    "torch.compile": ("_orig_mod.", "save the state_dict of `model._orig_mod`"),
    "PEFT": ("base_model.model.", "call `merge_and_unload` and save its result; an adapter alone goes in as --adapter"),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module.", "save a full state_dict under FSDP's own context"),
    "activation checkpointing": ("_checkpoint_wrapped_module.", "save the model without it"),
}


def refuse_wrapped(names: Collection[str]) -> None:
    """
    Raises:
        PlanError: the names are those of a model inside another module.
    """
    # Compiled, in parallel, of a model: the outermost first.
    found = {
        wrapper: advice
        for wrapper, (part, advice) in WRAPPERS.items()
        if any(name.startswith(part) or f".{part}" in name for name in names)
    }
    if found:
        first = next(name for name in names if any(part in name for part, _ in WRAPPERS.values()))
        advice = " ".join(f"Saved through {wrapper}: {advice}." for wrapper, advice in found.items())
        raise PlanError(f"The tensors on disk have the names of a wrapped model, such as {first}. {advice}")


def export_plan(config: LlmArchConfig, *, family: Family | str | None = None) -> Plan:
    """The plan that gives a model of ours back as a checkpoint of a family, from our config alone.

    Args:
        config: of our model. Where it came from that family, names and config.json come back as they were.
        family: by default the one the model was converted from.

    Raises:
        UnknownFamily: when no family is given and the model was not converted from one.
        NotExpressible: naming the fields that the family cannot say, or the class that it does not have.
        PlanError: naming tensors of our model for which the family has no rule.
    """
    origin = config.converted_from or {}
    if family is None and "family" not in origin:
        able = expressing(config)
        raise UnknownFamily(
            "This model was not converted from a family, so say which one to write with family=… (--family). "
            + (f"These can express it: {', '.join(able)}." if able else "None of those here can express it.")
        )
    family = family_of({"model_type": origin.get("family")}, family)
    architecture = our_class(family, config)
    foreign = write_config(family, config, architecture, variant_of(family, config, architecture))
    if (origin.get("family"), origin.get("architecture", architecture)) != (family.name, architecture):
        origin = {}
    skeleton = skeleton_of(config, architecture)
    steps = make_steps(family, config, skeleton, origin.get("spelling", {}), origin.get("tied_copies", ()))
    shapes = skeleton.shapes
    return Plan(family, architecture, config, foreign, steps, {}, prove(family, config, steps, shapes), shapes)


def expressing(config: LlmArchConfig) -> list[str]:
    """The families that can say all that a config of ours says."""

    def can(name: str) -> bool:
        try:
            export_plan(config, family=name)
        except ConversionError:
            return False
        return True

    return list(filter(can, families()))


def plan_of_ours(checkpoint: Checkpoint, family: Family | str | None = None) -> Plan:
    """The export plan of a folder of ours, proven against the tensors that it holds.

    Raises:
        ConversionError: it is no llmarch folder.
        CheckpointError: its tensors are not those that its config.json says.
        NotExpressible: see `export_plan`.
    """
    from hf_llmarch.model.configuration_llmarch import LlmArchConfig

    if checkpoint.config.get("model_type") != LlmArchConfig.model_type:
        raise ConversionError(
            f"{checkpoint.source} is no llmarch model but {checkpoint.config.get('model_type')!r}: `convert` it first."
        )
    plan = export_plan(LlmArchConfig.from_dict(checkpoint.config), family=family)
    odd = [n for n in {**plan.our_shapes, **checkpoint.shapes} if checkpoint.shapes.get(n) != plan.our_shapes.get(n)]
    if odd:
        raise CheckpointError(
            f"{checkpoint.path} does not hold the tensors that its config.json describes; missing, unknown "
            f"or of another shape: {some(odd)}."
        )
    return plan


def model_class(plan: Plan) -> Any:
    """Our class that a plan's tensors make."""
    from hf_llmarch.model import modeling_llmarch

    return getattr(modeling_llmarch, plan.architecture)


# -- which class, variant and spelling a checkpoint is -----------------------------------------------------------------


@dataclass(frozen=True)
class Skeleton:
    """The tensors of a model of ours.

    Attributes:
        shapes: by name, of those that our folders hold.
        tied: those that are another one's copy and not in the folders, and whose.
        spelling: how the names of rules are written: a bare base model's lack its prefix.
    """

    shapes: dict[str, Shape]
    tied: dict[str, str]
    spelling: Mapping[str, str]


@dataclass(frozen=True)
class Draft:
    """One reading of a checkpoint: as a class of ours, with names spelt in one way."""

    architecture: str
    config: LlmArchConfig
    skeleton: Skeleton
    spelling: Mapping[str, str]
    steps: tuple[Step, ...]

    def unpaired(self, given: Collection[str]) -> int:
        return len({name for step in self.steps for name in step.theirs} ^ set(given))


def drafts(family: Family, foreign: Mapping[str, Any], given: Collection[str]) -> Iterator[Draft]:
    """Every reading that the config allows.

    Raises:
        UnsupportedField: when it allows none.
    """
    refusal, found = None, False
    for architecture in classes_for(family, foreign):
        for variant in family.variants.get(architecture, ({},)):
            try:
                config = read_config(family, foreign, architecture, variant)
            except UnsupportedField as error:
                refusal = refusal or error
                continue
            found, skeleton = True, skeleton_of(config, architecture)
            for spelling in family.spellings:
                steps = make_steps(family, config, skeleton, spelling, given)
                yield Draft(architecture, config, skeleton, spelling, steps)
    if refusal and not found:
        raise refusal


def classes_for(family: Family, foreign: Mapping[str, Any]) -> list[str]:
    """Our class for the one that their config.json names; all that the family has where it names none.

    Raises:
        PlanError: for a class that has no counterpart: its tensors may bear the names of another's.
    """
    known = {**family.also, **{theirs: ours for ours, theirs in family.architectures.items()}}
    if family.encoder:
        known[family.encoder] = BASE
    names = foreign.get("architectures") or ()
    named = [known[name] for name in names if name in known]
    if names and not named and len(family.architectures) > 1:
        raise PlanError(
            f"Family {family.name!r} has no counterpart for {names[0]}; it has one for {', '.join(known)}. If the "
            'tensors are those of one of these, name it under "architectures" in config.json.'
        )
    # Where there is but one, an old name of it need not be known.
    return named[:1] or list(family.architectures) or ["LlmArchForCausalLM"]


def our_class(family: Family, config: LlmArchConfig) -> str:
    """The class that a config of ours names, or the family's first where it names none."""
    known = list(family.architectures) or ["LlmArchForCausalLM"]
    architecture = (config.architectures or known)[0]
    if architecture not in known:
        raise NotExpressible(
            f"Family {family.name!r} has no counterpart for {architecture} here; it has one for {', '.join(known)}. "
            "Save the model as one of these, or export to another family."
        )
    return architecture


def variant_of(family: Family, config: LlmArchConfig, architecture: str) -> Values:
    """The variant that our config is; the first where it is none, so that the difference is found and named."""
    variants = family.variants.get(architecture, ({},))
    fits = (v for v in variants if all(getattr(config, name) == value for name, value in v.items()))
    # The one that says most: an empty variant, which leaves all to the config, would fit every model.
    return max(fits, key=len, default=variants[0])


def skeleton_of(config: LlmArchConfig, architecture: str) -> Skeleton:
    import torch

    from hf_llmarch.model import modeling_llmarch

    if not hasattr(modeling_llmarch, architecture):
        raise ConversionError(f"hf_llmarch has no class {architecture!r}.")
    try:
        with torch.device("meta"):
            model = getattr(modeling_llmarch, architecture)(copy.deepcopy(config))
    except (RuntimeError, OverflowError, TypeError, ZeroDivisionError) as error:
        # Sizes that are each a number, and together no tensor.
        reason = str(error).partition("\n")[0]
        raise ConversionError(f"No model can be built with the sizes in this config: {reason}") from error
    tied = dict(model.all_tied_weights_keys)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}
    prefix = model.base_model_prefix
    return Skeleton(shapes, tied, {} if hasattr(model, prefix) else {f"{prefix}.": ""})


# -- steps and their proof ---------------------------------------------------------------------------------------------


def make_steps(
    family: Family,
    config: LlmArchConfig,
    skeleton: Skeleton,
    spelling: Mapping[str, str],
    on_disk: Collection[str],
) -> tuple[Step, ...]:
    """The rules written out for the tensors that our model has."""
    steps: list[Step] = []
    copies: dict[str, list[str]] = {}
    shapes, tied, spans = skeleton.shapes, skeleton.tied, ranges(config)
    for rule in filter(lambda rule: rule.when(config), family.weights):
        shared = variables(rule.theirs) & variables(rule.ours)
        outer = {name: span for name, span in spans.items() if name in shared}
        inner = {name: span for name, span in spans.items() if name not in shared}
        for values in product(*outer.values()):
            index = dict(zip(outer, values, strict=True))
            step = Step(
                tuple(spell(name, spelling) for name in expand(rule.theirs, inner, index)),
                tuple(spell(name, skeleton.spelling) for name in expand(rule.ours, inner, index)),
                rule.op,
            )
            present = [name for name in step.ours if name in shapes]
            others = [spell(name, spelling) for name in family.copies.get(rule.theirs[0], ())]
            if len(present) == len(step.ours):
                steps.append(step)
                if found := [name for name in others if name in on_disk and name not in step.theirs]:
                    copies.setdefault(step.ours[0], []).extend(found)
            elif present:
                absent = [name for name in step.ours if name not in shapes]
                raise PlanError(f"Family {family.name!r}: {some(step.theirs)} holds {absent}, which our model lacks.")
            elif step.ours[0] in tied and step.theirs[0] in on_disk:
                copies.setdefault(tied[step.ours[0]], []).append(step.theirs[0])
    return tuple(tied_step(step, copies) if step.ours[0] in copies else step for step in steps)


def tied_step(step: Step, copies: Mapping[str, Sequence[str]]) -> Step:
    theirs = (*step.theirs, *copies[step.ours[0]])
    return Step(theirs, step.ours, tied_tensor(len(theirs)))


def prove(
    family: Family, config: LlmArchConfig, steps: Sequence[Step], shapes: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Their shapes, after proving that each tensor of either side belongs to exactly one step."""
    import torch

    made = Counter(name for step in steps for name in step.ours)
    if absent := [name for name in shapes if name not in made]:
        raise PlanError(f"Family {family.name!r} has no rule that makes {some(absent)}: it cannot express this model.")
    used = Counter(name for step in steps for name in step.theirs)
    if twice := [name for counts in (made, used) for name, count in counts.items() if count > 1]:
        raise PlanError(f"Family {family.name!r} has more than one rule for {some(twice)}.")

    def on_meta(name: str) -> Tensor:
        return torch.empty(shapes[name], device="meta")

    return {name: tuple(t.shape) for step in steps for name, t in step.run(on_meta, config, "theirs")}


def ranges(config: LlmArchConfig) -> dict[str, range]:
    """What a template's variables count."""
    return {
        "i": range(config.layer_groups or config.num_hidden_layers),
        "e": range(config.num_experts or 0),
        "h": range(config.num_attention_heads),
        "k": range(config.num_key_value_heads),
        **({"s": range(config.source_config().num_hidden_layers)} if config.topology == "encoder-decoder" else {}),
    }


def variables(templates: Iterable[str]) -> set[str]:
    return {name for template in templates for _, name, _, _ in Formatter().parse(template) if name}


def expand(
    templates: Iterable[str], spans: Mapping[str, range], index: Mapping[str, int] = MappingProxyType({})
) -> Iterator[str]:
    """Write out templates: variables in `index` take their value, those in `spans` all of theirs in turn."""
    for template in templates:
        free = sorted(variables((template,)) - set(index))
        for values in product(*(spans[name] for name in free)):
            yield template.format(**index, **dict(zip(free, values, strict=True)))


def spell(name: str, spelling: Mapping[str, str]) -> str:
    """How a checkpoint writes a rule's name: the first beginning and the first end that match are exchanged."""
    for ours, theirs in spelling.items():
        if not ours.startswith(".") and name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    for ours, theirs in spelling.items():
        if ours.startswith(".") and name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name


def _same_tensor(tensors: Sequence[Tensor], config: LlmArchConfig) -> Sequence[Tensor]:
    first, *others = tensors
    if not all(first.equal(other) for other in others):
        raise CheckpointError(
            "config.json ties the output head to the embedding, but the checkpoint holds two different tensors where "
            'one should be the other\'s copy. Set "tie_word_embeddings": false in its config.json to keep both.'
        )
    return [first]


TIED = "tied"


def tied_tensor(count: int) -> Op:
    """A tied tensor that is on disk all the same, `count` times: compared on the way in, all written on the way out."""
    return Op(TIED, to_ours=_same_tensor, to_theirs=lambda tensors, config: [tensors[0]] * count)

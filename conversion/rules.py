"""One relation between a family's checkpoints and ours, stated once, proven before a tensor is read, run both ways.

A family is data (`families/*.py`): entries relate config fields, rules relate tensor names through an operation that
only moves numbers, so that a round trip gives back the same bytes. `plan()` pairs the names on disk with the tensors of
the model; `Plan.stream()` then carries tensors in either direction with the memory of one step.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from string import Formatter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from .errors import CheckpointError, PlanError, some
from .relation import Entry, family_of, read_config, write_config

if TYPE_CHECKING:
    from torch import Tensor

    from hf_llmarch.configuration_llmarch import LlmArchConfig

Shape = tuple[int, ...]
Side = Literal["ours", "theirs"]
Move = Callable[[Sequence["Tensor"], "LlmArchConfig"], Sequence["Tensor"]]


@dataclass(frozen=True)
class Op:
    """Moves numbers from their tensors to ours and back; both functions also run on meta tensors, to prove shapes."""

    name: str
    to_ours: Move
    to_theirs: Move


@dataclass(frozen=True)
class Rule:
    """`theirs` become `ours` through `op`.

    Names are templates: `{i}` counts layers, `{e}` experts, `{h}` query heads, `{k}` key/value heads. A variable on
    both sides makes one step for each of its values; a variable on one side only gathers its values into one step
    (experts that are packed into one tensor).
    `when` tells apart rules that make the same tensor of ours in different variants of a family.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    op: Op
    when: Callable[[LlmArchConfig], bool] = lambda config: True


@dataclass(frozen=True)
class Drop:
    """A tensor that may be on disk and is not needed, and why that is safe.

    `keep`: it is of use to others, so it is kept aside and goes back on export.
    """

    theirs: str
    reason: str
    keep: bool = False


@dataclass(frozen=True)
class Family:
    """All that is known about the checkpoints of one `model_type`.

    Attributes:
        config: how its fields relate to ours, see `relation.Entry`.
        weights: how its tensors relate to ours. A rule applies where our model has the tensors it makes.
        drops: tensors of old checkpoints that carry no information.
        spellings: ways in which checkpoints on disk begin their names otherwise than the rules, as {rules': disk's}.
        architectures: our class to the name of theirs, for a config.json that is written afresh.
        aliases: config keys of old releases, as {old: today's}.
        inert: config keys of this family that do not change what a causal language model computes.
        layers_ahead: config key that counts layers beyond the last, which predict tokens further ahead; drops number
            them with `{m}`.
    """

    name: str
    config: Sequence[Entry]
    weights: Sequence[Rule]
    drops: Sequence[Drop] = ()
    spellings: Sequence[Mapping[str, str]] = ({},)
    architectures: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    inert: Collection[str] = ()
    layers_ahead: str | None = None


@dataclass(frozen=True)
class Step:
    """One application of a rule: full names on both sides."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    op: Op

    def run(self, read: Callable[[str], Tensor], config: LlmArchConfig, to: Side) -> Iterator[tuple[str, Tensor]]:
        source, target, move = {
            "ours": (self.theirs, self.ours, self.op.to_ours),
            "theirs": (self.ours, self.theirs, self.op.to_theirs),
        }[to]
        tensors = move([read(name) for name in source], config)
        yield from zip(target, (tensor.contiguous() for tensor in tensors), strict=True)


@dataclass(frozen=True)
class Plan:
    """A proven pairing of the tensors on disk with the model's; serves both directions.

    Attributes:
        config: ours, with `converted_from` filled in.
        foreign_config: the family's config.json.
        steps: in the order of the family's rules.
        dropped: names on disk that are left out, and why.
        aside: those of them that are kept aside and go back on export.
        their_shapes, our_shapes: of every tensor that the steps read or write.
    """

    family: Family
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
    ours = read_config(family, config)
    given = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names)
    shapes = model_shapes(ours)

    def unpaired(spelling: Mapping[str, str]) -> int:
        steps = make_steps(family, ours, shapes, spelling, given)
        return len({name for step in steps for name in step.theirs} ^ given.keys())

    spelling = min(family.spellings, key=unpaired)
    steps = make_steps(family, ours, shapes, spelling, given)
    last = ours.num_hidden_layers
    spans = {**ranges(ours), "m": range(last, last + (config.get(family.layers_ahead or "") or 0))}
    drops = {spell(name, spelling): drop for drop in family.drops for name in expand((drop.theirs,), spans)}
    dropped = {name: drops[name].reason for name in given if name in drops}
    their_shapes = prove(family, ours, steps, shapes)
    unknown = [name for name in given if name not in their_shapes and name not in dropped]
    missing = [name for name in their_shapes if name not in given]
    if unknown or missing:
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
        "config": copy.deepcopy(dict(config)),
        "spelling": dict(spelling),
        "tied_copies": [name for step in steps if step.op is TIED for name in step.theirs[1:]],
    }
    aside = tuple(name for name in dropped if drops[name].keep)
    return Plan(family, ours, copy.deepcopy(dict(config)), steps, dropped, their_shapes, shapes, aside)


def export_plan(config: LlmArchConfig, *, family: Family | str | None = None) -> Plan:
    """The plan that gives a model of ours back as a checkpoint of a family, from our config alone.

    Args:
        config: of our model. Where it came from that family, names and config.json come back as they were.
        family: by default the one the model was converted from.

    Raises:
        UnknownFamily: when no family is given and the model was not converted from one.
        NotExpressible: naming the fields that the family cannot say.
        PlanError: naming tensors of our model for which the family has no rule.
    """
    origin = config.converted_from or {}
    family = family_of({"model_type": origin.get("family")}, family)
    foreign = write_config(family, config)
    if origin.get("family") != family.name:
        origin = {}
    shapes = model_shapes(config)
    steps = make_steps(family, config, shapes, origin.get("spelling", {}), origin.get("tied_copies", ()))
    return Plan(family, config, foreign, steps, {}, prove(family, config, steps, shapes), shapes)


def make_steps(
    family: Family,
    config: LlmArchConfig,
    shapes: Mapping[str, Shape],
    spelling: Mapping[str, str],
    on_disk: Collection[str],
) -> tuple[Step, ...]:
    """The rules written out for the tensors that our model has."""
    steps: list[Step] = []
    copies: dict[str, str] = {}
    tied = tied_tensors(config)
    for rule in filter(lambda rule: rule.when(config), family.weights):
        shared = variables(rule.theirs) & variables(rule.ours)
        outer = {name: span for name, span in ranges(config).items() if name in shared}
        inner = {name: span for name, span in ranges(config).items() if name not in shared}
        for values in product(*outer.values()):
            index = dict(zip(outer, values, strict=True))
            step = Step(
                tuple(spell(name, spelling) for name in expand(rule.theirs, inner, index)),
                tuple(expand(rule.ours, inner, index)),
                rule.op,
            )
            present = [name for name in step.ours if name in shapes]
            if len(present) == len(step.ours):
                steps.append(step)
            elif present:
                absent = [name for name in step.ours if name not in shapes]
                raise PlanError(f"Family {family.name!r}: {some(step.theirs)} holds {absent}, which our model lacks.")
            elif step.ours[0] in tied and step.theirs[0] in on_disk:
                copies[tied[step.ours[0]]] = step.theirs[0]
    return tuple(tied_step(step, copies) if step.ours[0] in copies else step for step in steps)


def tied_step(step: Step, copies: Mapping[str, str]) -> Step:
    return Step((*step.theirs, copies[step.ours[0]]), step.ours, TIED)


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


def model_shapes(config: LlmArchConfig) -> dict[str, Shape]:
    """Names and shapes of the tensors that our folders hold for this config; a tied head is not among them."""
    import torch

    from hf_llmarch.modeling_llmarch import LlmArchForCausalLM

    with torch.device("meta"):
        model = LlmArchForCausalLM(copy.deepcopy(config))
    tied = tied_tensors(config)
    return {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}


def tied_tensors(config: LlmArchConfig) -> dict[str, str]:
    """Tensors of our model that are another one's copy, and whose."""
    from hf_llmarch.modeling_llmarch import LlmArchForCausalLM

    return dict(LlmArchForCausalLM._tied_weights_keys or {}) if config.tie_word_embeddings else {}


def ranges(config: LlmArchConfig) -> dict[str, range]:
    """What a template's variables count."""
    return {
        "i": range(config.num_hidden_layers),
        "e": range(config.num_experts or 0),
        "h": range(config.num_attention_heads),
        "k": range(config.num_key_value_heads),
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
    for ours, theirs in spelling.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _same_tensor(tensors: Sequence[Tensor], config: LlmArchConfig) -> Sequence[Tensor]:
    first, *others = tensors
    if not all(first.equal(other) for other in others):
        raise CheckpointError(
            "config.json ties the output head to the embedding, but the checkpoint holds two different tensors. "
            'Set "tie_word_embeddings": false in its config.json to keep both.'
        )
    return [first]


# A tied head that is on disk all the same: read and compared on the way in, written back on the way out.
TIED = Op("tied", to_ours=_same_tensor, to_theirs=lambda tensors, config: [tensors[0], tensors[0]])

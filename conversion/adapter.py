"""LoRA adapters of PEFT along with the model that they were trained on, by the same relation, in both directions.

An adapter adds `B @ A` to a weight `(out, in)`. Operations move a weight's rows and leave its columns alone, so `B`
moves as a weight of `rank` columns does, and `A` stays as it is: a fused projection of theirs becomes several of ours
that share their `A`. The other way round they need not share it; then the fused one stacks their `A`s, and its `B` has
a block for each, which is the same sum at a higher rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, get_peft_config, get_peft_model
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .destination import write_json
from .errors import CheckpointError, NotExpressible, some
from .ops import rename
from .plans import Plan, Skeleton, make_steps, skeleton_of
from .rules import Shape, Side, Step
from .sources.bounds import short
from .sources.files import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_WEIGHTS, PickleFile, SafetensorsFile, read_json

# Where it stands beside a model. Not in its folder: transformers would load it unasked.
FOLDER = "adapter"
PREFIX = "base_model.model."
# Their tensors are prompts, which no module of the model has part in.
PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
# What an adapter of a module consists of.
PARTS = (
    *("lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"),
    *("lora_embedding_A", "lora_embedding_B"),
)
# Wider than any weight: the width by which a weight's rows are told from its columns.
NO_SIZE = 2**31 - 1

Tensors = dict[str, Tensor]

# What PEFT does to a base weight as it opens an adapter, by `init_lora_weights`. It takes out a part of low rank, which
# depends on the weight alone.
BASE_PARTS = ("pissa", "olora")
# Or it changes the weight in a way that no adapter can say. All other kinds leave the weight alone.
UNSAID = {
    "pissa_niter": "takes out a part that is drawn at random at each opening",
    "corda": "takes out a part that depends on data the adapter does not hold",
    "loftq": "quantises the weight, and so changes more than a low rank",
}


class Base(Protocol):
    """The model of an adapter: a `Checkpoint`, of which this much is needed."""

    @property
    def tensors(self) -> Collection[str]: ...
    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk.

    Attributes:
        path: its folder.
        config: adapter_config.json.
        tensors: by name, without PEFT's prefix.
    """

    path: Path
    config: dict[str, Any]
    tensors: Tensors


@dataclass(frozen=True)
class LowRank:
    """The adapter of one module.

    Attributes:
        rows: `(out, rank)`: a Linear's `B`, an embedding's `A` transposed.
        columns: `(rank, in)`: a Linear's `A`, an embedding's `B` transposed.
        alpha: PEFT multiplies their product by alpha / rank, or alpha / sqrt(rank).
        embedding: whether it is an embedding's.
        vectors: one number a row, by part: DoRA's magnitudes, a bias.
    """

    rows: Tensor
    columns: Tensor
    alpha: float
    embedding: bool
    vectors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.rows.shape[1]


def open_adapter(source: Any, *, allow_pickle: bool = False) -> Adapter:
    """Read an adapter, a local folder or a Hub id.

    Raises:
        CheckpointError: there is none, or it is damaged, or a pickle that is not allowed.
        NotExpressible: it is no LoRA and no prompt, or of a kind that is more than modules' low-rank updates.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        try:
            path = Path(snapshot_download(str(source), allow_patterns=["adapter_*"]))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{source!r} is no folder, and could not be had from the Hub: {error}") from error
    if not (path / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"{path} has no {ADAPTER_CONFIG}: it is not what PEFT's save_pretrained writes.")
    config = read_json(path / ADAPTER_CONFIG)
    kind = config.get("peft_type")
    if kind not in ("LORA", *PROMPTS):
        raise NotExpressible(
            f"{path} is an adapter of type {kind}; LORA and {', '.join(PROMPTS)} convert. Merge it into the original "
            "(merge_and_unload), and convert that."
        )
    if config.get("layer_replication"):
        raise NotExpressible(
            f"{path}: layer_replication makes another model of the layers. Merge the adapter into the original, and "
            "convert that."
        )
    check_settings(path / ADAPTER_CONFIG, config)
    file: SafetensorsFile | PickleFile
    if (path / ADAPTER_WEIGHTS).is_file():
        file = SafetensorsFile(path / ADAPTER_WEIGHTS)
    elif (path / ADAPTER_PICKLE).is_file() and allow_pickle:
        file = PickleFile(path / ADAPTER_PICKLE)
    else:
        raise CheckpointError(
            f"{path} has no {ADAPTER_WEIGHTS}. A {ADAPTER_PICKLE} is read with allow_pickle=True (--allow-pickle)."
        )
    return Adapter(path, config, {name: file.read(stored) for name, stored in trained(file.tensors).items()})


def trained(names: Collection[str]) -> dict[str, str]:
    """The tensors to read, by name without PEFT's prefix.

    Of a module that is trained in full, PEFT can save the trained copy twice and the untrained one beside it; it does
    so with embeddings that were given new tokens. The untrained one is the model's own.
    """
    found = {name.removeprefix(PREFIX): name for name in names if ".original_module." not in name}
    return {name.replace(".modules_to_save.", "."): stored for name, stored in found.items()}


def attach(model: Any, adapter: Adapter, plan: Plan, base: Base) -> None:
    """Put an adapter of a foreign model onto the model of ours, as transformers does it by itself."""
    config, tensors = translate(adapter, plan, "ours", base)
    model.load_adapter(peft_config=get_peft_config(config), adapter_state_dict=tensors)
    model.eval()


def check_settings(path: Path, config: Mapping[str, Any]) -> None:
    """
    Raises:
        CheckpointError: naming the field that is of a type that PEFT does not write, or a pattern that could take a
            regular expression longer than anybody waits.
    """
    for name, known in {"r": int, "lora_alpha": int | float}.items():
        value = config.get(name)
        if name in config and (not isinstance(value, known) or isinstance(value, bool) or not math.isfinite(value)):
            raise CheckpointError(f"{path}: {name!r} is {short(value)}, which is no number.")
    for name in ("alpha_pattern", "rank_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict) or not all(
            isinstance(value, int | float) and math.isfinite(value) for value in patterns.values()
        ):
            raise CheckpointError(f"{path}: {name!r} is {short(patterns)}, not an object of numbers.")
        for pattern in patterns:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise CheckpointError(
                    f"{path}: {name!r} has {short(pattern)}, no regular expression: {error}"
                ) from error
            if len(pattern) > 500 or re.search(r"\)\s*[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 3:
                raise CheckpointError(
                    f"{path}: {name!r} has the regular expression {short(pattern)}, which repeats a group or more than "
                    "three parts, and could run without end. Write the names of the modules instead."
                )


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors, base: str) -> None:
    """Make a folder that `PeftModel.from_pretrained` opens.

    Args:
        config, tensors: see `translate`.
        base: the model that it is for, as PEFT's config names it.
    """
    folder.mkdir(parents=True)
    write_json(folder / ADAPTER_CONFIG, {**config, "base_model_name_or_path": base, "revision": None})
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})


def translate(adapter: Adapter, plan: Plan, to: Side, base: Base) -> tuple[dict[str, Any], Tensors]:
    """The config and the tensors, under PEFT's names, of the same adapter for the other side of a plan's model.

    Args:
        base: the model that it was trained on, read where the adapter takes a part out of its weights.

    Raises:
        NotExpressible: naming the tensors that have no counterpart there.
        CheckpointError: naming the module whose adapter is of another model, or incomplete.
    """
    if adapter.config["peft_type"] in PROMPTS:
        return dict(adapter.config), dict(adapter.tensors)
    return Translation(adapter, plan, to, base).result()


class Translation:
    """One adapter on its way to the other side.

    Attributes:
        source, to: which side is which.
        steps: of the plan's model, with a step for a tied head as well: PEFT adapts it by itself.
    """

    def __init__(self, adapter: Adapter, plan: Plan, to: Side, base: Base):
        self.adapter, self.model, self.to, self.base = adapter, plan.config, to, base
        self.source: Side = "theirs" if to == "ours" else "ours"
        self.steps, self.shapes = naming(adapter, plan, self.source)
        self.maker = {name: step for step in self.steps for name in self.read(step)}

    def read(self, step: Step) -> tuple[str, ...]:
        return getattr(step, self.source)

    def written(self, step: Step) -> tuple[str, ...]:
        return getattr(step, self.to)

    def result(self) -> tuple[dict[str, Any], Tensors]:
        updates, whole = self.parse()
        if self.changes_parts(updates):
            updates = self.made_plain(updates)
        moved: dict[str, LowRank] = {}
        for step in self.steps_of(f"{module}.weight" for module in updates):
            moved |= self.move(step, updates)
        tensors = {f"{PREFIX}{n}": t for module, update in moved.items() for n, t in named(module, update).items()}
        full = self.move_whole(whole)
        for name, tensor in full.items():
            module, _, part = name.rpartition(".")
            tensors[f"{PREFIX}{module}.base_layer.{part}" if module in moved else PREFIX + name] = tensor
        return self.config(moved, full), tensors

    def changes_parts(self, updates: Mapping[str, LowRank]) -> bool:
        """Whether PEFT would take other parts out of the other side's weights than it takes out of these."""
        if initialisation(self.adapter.config) not in (*BASE_PARTS, *UNSAID):
            return False
        steps = self.steps_of(f"{module}.weight" for module, update in updates.items() if not update.embedding)
        return not all(self.keeps_parts(step) for step in steps)

    def keeps_parts(self, step: Step) -> bool:
        """Whether it takes the same part out of a step's weight on either side: rows in another order have the same
        singular vectors and the same QR, but a part of a weight has others, and what PEFT does besides depends on
        where each number stands."""
        if step.op.name == rename.name:
            return True
        alone = len(step.theirs) == len(step.ours) == 1
        kind = initialisation(self.adapter.config)
        return alone and (kind == "pissa" or (kind == "olora" and not self.is_transposed(step)))

    def made_plain(self, updates: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """The same numbers as adapters that leave the weights alone: what PEFT would take out of one is a part of
        its update, which has twice the rank then.

        Raises:
            NotExpressible: what it takes out cannot be known, or is no low rank.
        """
        config = self.adapter.config
        kind = initialisation(config)
        if kind in UNSAID:
            raise NotExpressible(
                f"{self.adapter.path} was begun with init_lora_weights={config['init_lora_weights']!r}, which "
                f"{UNSAID[kind]}; modules that are one on one side and several on the other cannot say that. Save it "
                "with path_initial_model_for_weight_conversion, which makes a plain LoRA of it, or merge it into the "
                "model (merge_and_unload), and convert that."
            )
        grown = math.sqrt(2) if config.get("use_rslora") else 2
        # Both are PEFT's usual values, which patterns depart from.
        plain = {"init_lora_weights": True, "r": 2 * config["r"], "lora_alpha": grown * config["lora_alpha"]}
        self.adapter = replace(self.adapter, config={**config, **plain})
        return {
            module: update if update.embedding else self.with_part(module, update, grown, config)
            for module, update in updates.items()
        }

    def with_part(self, module: str, update: LowRank, grown: float, config: Mapping[str, Any]) -> LowRank:
        """An update and what PEFT takes out of the module's weight, together."""
        turned = self.source == "theirs" and self.is_transposed(self.maker[f"{module}.weight"])
        rows, columns = part_taken_out(self.weight(module), update, config, turned)
        return replace(
            update,
            rows=torch.cat([update.rows.float(), -rows], dim=1),
            columns=torch.cat([update.columns.float(), columns]),
            alpha=update.alpha * grown,
        )

    def weight(self, module: str) -> Tensor:
        """A module's weight. On disk, its name may lack the beginning that it has in memory, or have one more.

        Raises:
            NotExpressible: it is a copy of another module's.
        """
        name = f"{module}.weight"
        held = [n for n in self.base.tensors if n == name or n.endswith(f".{name}") or name.endswith(f".{n}")]
        if len(held) != 1:
            raise NotExpressible(
                f"{self.adapter.path} takes a part out of {name}, which the model does not hold as a tensor of its "
                "own. Merge the adapter into the model (merge_and_unload), and convert that."
            )
        return self.base.read(held[0])

    def parse(self) -> tuple[dict[str, LowRank], Tensors]:
        """The updates by module, and the tensors that are whole: modules trained in full, and biases.

        Raises:
            NotExpressible: naming the tensors that belong to no module with a counterpart.
        """
        parts: dict[str, Tensors] = {}
        whole: Tensors = {}
        for name, tensor in self.adapter.tensors.items():
            part = next((part for part in PARTS if name.endswith(f".{part}")), None)
            if part is None:
                whole[name.replace(".base_layer.", ".")] = tensor
            else:
                parts.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
        known = [name for name in self.maker if name.endswith(".weight") and self.is_plain(self.maker[name])]
        strange = [f"{m}.{part}" for m, ps in parts.items() for part in ps if f"{m}.weight" not in known]
        strange += [name for name in whole if name not in self.maker]
        if strange:
            raise NotExpressible(
                f"These tensors of the adapter have no counterpart on the other side: {some(strange)}. They may be of "
                "another model, or of packed experts: in this case merge the adapter into its model "
                "(merge_and_unload), and convert that."
            )
        return {module: self.update(module, given) for module, given in parts.items()}, whole

    def is_plain(self, step: Step) -> bool:
        """Whether a step is of modules with a weight on both sides, as PEFT adapts them."""
        return all(name.endswith(".weight") for name in (*step.theirs, *step.ours))

    def update(self, module: str, parts: Tensors) -> LowRank:
        """
        Raises:
            CheckpointError: it is incomplete, or of a module with another shape.
        """
        embedding = "lora_embedding_A" in parts
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_B.weight", "lora_A.weight")
        if missing := [name for name in names if name not in parts]:
            raise CheckpointError(f"{self.adapter.path} has a part of the adapter of {module}, but not {missing}.")
        rows, columns = (parts[name] for name in names)
        if embedding:
            rows, columns = rows.T, columns.T
        config = self.adapter.config
        alphas: dict[str, float] = config.get("alpha_pattern") or {}
        if not rows.numel() or not columns.numel():
            raise CheckpointError(f"{self.adapter.path}: the adapter of {module} has rank 0, so it adds nothing.")
        alpha = alphas.get(get_pattern_key(list(alphas), module), config["lora_alpha"])
        step = self.maker[f"{module}.weight"]
        expected = self.shapes[f"{module}.weight"]
        if self.source == "theirs" and self.is_transposed(step):
            expected = expected[::-1]
        if (rows.shape[0], columns.shape[1]) != expected or rows.shape[1] != columns.shape[0]:
            raise CheckpointError(
                f"{self.adapter.path}: the adapter of {module} is for a weight of {[rows.shape[0], columns.shape[1]]}, "
                f"and the model's is {list(expected)}. It was trained on another model."
            )
        vectors = {part: tensor for part, tensor in parts.items() if part not in names}
        return LowRank(rows, columns, alpha, embedding, vectors)

    def steps_of(self, names: Iterable[str]) -> list[Step]:
        wanted = {id(self.maker[name]) for name in names}
        return [step for step in self.steps if id(step) in wanted]

    def is_transposed(self, step: Step) -> bool:
        """Whether theirs keeps the weight as (in, out), as GPT-2 does: seen by what happens to its rows."""
        made = self.run(step, [torch.empty(self.rows(name), NO_SIZE, device="meta") for name in step.ours], "theirs")
        return made[0].shape[-1] != NO_SIZE

    def rows(self, ours: str) -> int:
        return self.shapes[ours][0]

    def run(self, step: Step, tensors: Sequence[Tensor], to: Side) -> Sequence[Tensor]:
        return (step.op.to_ours if to == "ours" else step.op.to_theirs)(tensors, self.model)

    def move_rows(self, step: Step, rows: Sequence[Tensor]) -> list[Tensor]:
        """Rows of one side as those of the other; `(out, rank)` or, of a vector, `(out,)`."""
        turned = rows[0].dim() == 2 and self.is_transposed(step)
        given = [tensor.T for tensor in rows] if turned and self.to == "ours" else rows
        made = self.run(step, given, self.to)
        return [tensor.T for tensor in made] if turned and self.to == "theirs" else list(made)

    def move(self, step: Step, updates: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """The updates of a step's modules as those of the other side's."""
        modules = [name.removesuffix(".weight") for name in self.read(step)]
        targets = [name.removesuffix(".weight") for name in self.written(step)]
        present = [updates[module] for module in modules if module in updates]
        first, alpha = present[0], self.common_alpha(modules, updates)
        if first.embedding and (len(modules), len(targets)) == (1, 1):
            # Its magnitudes are one a column.
            return {targets[0]: replace(first, rows=self.move_rows(step, [first.rows])[0])}
        columns, starts = stacked(present)
        rank = columns.shape[0]
        rows: list[Tensor] = []
        for module in modules:
            update = updates.get(module)
            part = first.rows.new_zeros(self.height(step, module), rank)
            if update is not None:
                part[:, starts[id(update)] : starts[id(update)] + update.rank] = update.rows
            rows.append(part)
        # A higher rank alone would make PEFT's factor smaller.
        grown = rank / first.rank
        alpha *= math.sqrt(grown) if self.adapter.config.get("use_rslora") else grown
        alpha = int(alpha) if float(alpha).is_integer() else alpha
        vectors: list[dict[str, Tensor]] = [{} for _ in targets]
        for part_name in first.vectors:
            whole = [self.vector(module, updates, part_name) for module in modules]
            for made, tensor in zip(vectors, self.move_rows(step, whole), strict=True):
                made[part_name] = tensor
        made_rows = self.move_rows(step, rows)
        return {
            target: LowRank(made, columns.clone(), alpha, first.embedding, vector)
            for target, made, vector in zip(targets, made_rows, vectors, strict=True)
        }

    def height(self, step: Step, module: str) -> int:
        shape = self.shapes[f"{module}.weight"]
        return shape[-1] if self.source == "theirs" and self.is_transposed(step) else shape[0]

    def common_alpha(self, modules: Sequence[str], updates: Mapping[str, LowRank]) -> float:
        """
        Raises:
            NotExpressible: modules that are one on the other side are weighed differently.
        """
        found = {module: (updates[module].alpha, updates[module].rank) for module in modules if module in updates}
        if len(set(found.values())) > 1:
            raise NotExpressible(
                f"{some(list(found))} are one module on the other side, which has one rank and one alpha; here they "
                f"are {sorted(set(found.values()))}. Merge the adapter into the model, and convert that."
            )
        return next(iter(found.values()))[0]

    def vector(self, module: str, updates: Mapping[str, LowRank], part: str) -> Tensor:
        """
        Raises:
            NotExpressible: the module has none, and what stands for none depends on the weight.
        """
        if module not in updates:
            raise NotExpressible(
                f"{module} is not adapted, but is one with modules on the other side whose adapters have a {part}. "
                "Merge the adapter into the model, and convert that."
            )
        return updates[module].vectors[part]

    def move_whole(self, whole: Tensors) -> Tensors:
        """Tensors that are trained themselves.

        Raises:
            NotExpressible: one that is made of several was trained in part.
        """
        made: Tensors = {}
        for step in self.steps_of(whole):
            if missing := [name for name in self.read(step) if name not in whole]:
                raise NotExpressible(
                    f"The adapter holds {some([n for n in self.read(step) if n in whole])} but not {some(missing)}: on "
                    "the other side they are one tensor. Merge the adapter into the model, and convert that."
                )
            tensors = self.run(step, [whole[name] for name in self.read(step)], self.to)
            made |= zip(self.written(step), tensors, strict=True)
        return made

    def config(self, moved: Mapping[str, LowRank], whole: Collection[str]) -> dict[str, Any]:
        """adapter_config.json, in which modules are named so that PEFT finds these and no other."""
        config = self.adapter.config
        every = {name.rpartition(".")[0] for step in self.steps for name in self.written(step)}
        ranks = {module: update.rank for module, update in moved.items()}
        alphas = {module: update.alpha for module, update in moved.items()}
        trained = {name.rpartition(".")[0] for name in whole if not self.is_bias_alone(name, whole)} - set(moved)
        steps = self.steps_of(f"{module}.weight" for module in self.modules())
        return {
            **config,
            "auto_mapping": None,
            "target_modules": selectors(moved, every),
            "exclude_modules": None,
            "layers_to_transform": None,
            "layers_pattern": None,
            "modules_to_save": in_full(trained, every) or None,
            "rank_pattern": pattern(ranks, config["r"], every),
            "alpha_pattern": pattern(alphas, config["lora_alpha"], every),
            "fan_in_fan_out": self.to == "theirs" and any(map(self.is_transposed, steps)),
        }

    def is_bias_alone(self, name: str, whole: Collection[str]) -> bool:
        """Whether it is there because of the config's `bias`, and not because its module is trained."""
        module, _, part = name.rpartition(".")
        return part == "bias" and self.adapter.config.get("bias", "none") != "none" and f"{module}.weight" not in whole

    def modules(self) -> set[str]:
        """Those that are adapted, on the side that they come from."""
        found = (re.fullmatch(r"(.+)\.lora_(?:A\.weight|embedding_A)", name) for name in self.adapter.tensors)
        return {match[1] for match in found if match}


def initialisation(config: Mapping[str, Any]) -> str:
    """The kind of `init_lora_weights`, without the numbers that may follow its name."""
    return re.sub(r"_niter_\d+$", "_niter", str(config.get("init_lora_weights")).lower())


def part_taken_out(weight: Tensor, update: LowRank, config: Mapping[str, Any], turned: bool) -> tuple[Tensor, Tensor]:
    """Rows `(out, rank)` and columns `(rank, in)` of what PEFT takes out of a weight as it opens an adapter, before it
    multiplies them by the adapter's factor.

    Args:
        weight: `(out, in)`, or `(in, out)` where it is `turned`, as GPT-2's Conv1D has it.

    Raises:
        NotExpressible: PEFT cannot, or takes out something else.
    """
    out, into = weight.T.shape if turned else weight.shape
    with torch.random.fork_rng():
        layer = Conv1D(out, into) if turned else nn.Linear(into, out, bias=False)
        layer.weight.data = weight.float().clone()
        settings = {name: config[name] for name in ("init_lora_weights", "use_rslora") if name in config}
        settings |= {"r": update.rank, "lora_alpha": update.alpha, "fan_in_fan_out": turned}
        options = LoraConfig(target_modules=["0"], **settings)
        try:
            model: Any = get_peft_model(nn.Sequential(layer), options)
        except (RuntimeError, ValueError) as error:
            raise NotExpressible(f"PEFT itself cannot open this adapter: {error}") from error
    wrapped = model.base_model.model[0]
    taken = (weight.float() - wrapped.base_layer.weight.detach()) / wrapped.scaling["default"]
    rows, columns = (part["default"].weight.detach() for part in (wrapped.lora_B, wrapped.lora_A))
    if turned and taken.shape == (rows.shape[0], columns.shape[1]) and close(taken, rows @ columns):
        return columns.T, rows.T  # OLoRA does not turn the weight first
    if not close(taken.T if turned else taken, rows @ columns):
        raise NotExpressible(f"PEFT takes something of a higher rank out of a weight of {tuple(weight.shape)}.")
    return rows, columns


def close(found: Tensor, expected: Tensor) -> bool:
    """Within the rounding of sums in fp32."""
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


def naming(adapter: Adapter, plan: Plan, source: Side) -> tuple[tuple[Step, ...], dict[str, Shape]]:
    """The steps of a plan's model and the shapes of both sides, in the names that the adapter has.

    These are of a class in memory: without the prefix of the base model, where it was trained on that alone.
    """
    skeleton = skeleton_of(plan.config, plan.architecture)
    shapes = {**skeleton.shapes, **{tied: skeleton.shapes[whose] for tied, whose in skeleton.tied.items()}}
    options: list[tuple[Mapping[str, str], Mapping[str, str]]]
    options = [(theirs, {"model.": ""} if "" in theirs.values() else {}) for theirs in plan.family.spellings]
    if skeleton.spelling:  # a base model, of which theirs have no prefix either
        options = [(theirs, skeleton.spelling) for theirs, ours in sorted(options, key=lambda option: not option[1])]
    readings = []
    for theirs, ours in options:
        named_shapes = {removed(name, ours): shape for name, shape in shapes.items()}
        steps = make_steps(plan.family, plan.config, Skeleton(named_shapes, {}, ours), theirs, ())
        readings.append((steps, with_theirs(steps, named_shapes, plan)))

    def unknown(reading: tuple[tuple[Step, ...], dict[str, Shape]]) -> int:
        modules = {name.rpartition(".")[0] for step in reading[0] for name in getattr(step, source)}
        return sum(not any(name.startswith(f"{module}.") for module in modules) for name in adapter.tensors)

    return min(readings, key=unknown)


def removed(name: str, spelling: Mapping[str, str]) -> str:
    return next((name.removeprefix(prefix) for prefix in spelling if name.startswith(prefix)), name)


def with_theirs(steps: Sequence[Step], shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> dict[str, tuple[int, ...]]:
    """The shapes of both sides."""

    def on_meta(name: str) -> Tensor:
        return torch.empty(shapes[name], device="meta")

    return {**shapes, **{n: tuple(t.shape) for step in steps for n, t in step.run(on_meta, plan.config, "theirs")}}


def stacked(updates: Sequence[LowRank]) -> tuple[Tensor, dict[int, int]]:
    """The columns of all, and where each update's begin, by its id; those that all share, once."""
    first = updates[0].columns
    if all(first.equal(update.columns) for update in updates):
        return first, {id(update): 0 for update in updates}
    ends = accumulate(update.rank for update in updates)
    starts = {id(update): end - update.rank for update, end in zip(updates, ends, strict=True)}
    return torch.cat([update.columns for update in updates]), starts


def named(module: str, update: LowRank) -> Tensors:
    """As PEFT names the parts."""
    rows, columns = update.rows, update.columns
    main = (
        {"lora_embedding_A": rows.T, "lora_embedding_B": columns.T}
        if update.embedding
        else {"lora_A.weight": columns, "lora_B.weight": rows}
    )
    return {f"{module}.{part}": tensor for part, tensor in {**main, **update.vectors}.items()}


def selectors(chosen: Collection[str], every: Collection[str]) -> list[str]:
    """The shortest ends of names that all modules of `chosen` have and no other of `every`; else their names."""
    for depth in (1, 2, 3):
        ends = {".".join(name.split(".")[-depth:]) for name in chosen}
        if all(name in chosen for name in every if any(name == end or name.endswith(f".{end}") for end in ends)):
            return sorted(ends)
    return sorted(chosen)


def pattern(values: Mapping[str, Any], usual: Any, every: Collection[str]) -> dict[str, Any]:
    """PEFT's pattern for the modules whose value is not the usual one."""
    odd = {value for value in values.values() if value != usual}
    groups = {value: [module for module, its in values.items() if its == value] for value in odd}
    return {name: value for value, group in groups.items() for name in selectors(group, every)}


def in_full(trained: Collection[str], every: Collection[str]) -> list[str]:
    """Names of modules trained in full: the outermost that hold no other."""
    tops = {name.split(".")[0] for name in trained}
    whole = {top for top in tops if all(name in trained for name in every if name.split(".")[0] == top)}
    return sorted(whole | {name for name in trained if name.split(".")[0] not in whole})

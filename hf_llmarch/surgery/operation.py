"""The table of operations, and how one is run: on a model in memory, on a folder, alone or in a chain."""

from __future__ import annotations

import difflib
import inspect
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import update_wrapper
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
import yaml
from torch import Tensor

from hf_llmarch.conversion.adapter import FOLDER as ADAPTER
from hf_llmarch.conversion.destination import staged, write_json, write_tensors
from hf_llmarch.conversion.engine import SMALL_FILES
from hf_llmarch.conversion.errors import ConversionError
from hf_llmarch.conversion.sources import open_checkpoint
from hf_llmarch.conversion.sources.base import TensorInfo
from hf_llmarch.model import modeling_llmarch
from hf_llmarch.model.compat import code_files
from hf_llmarch.model.configuration_llmarch import LlmArchConfig
from hf_llmarch.model.modeling_llmarch import LlmArchPreTrainedModel

from .receipt import Receipt, Step, compare, cost_of
from .subject import Change, Subject, SurgeryError, Weights, only_decoders_and_encoders
from .tokenizer import trim_tokenizer

Model = TypeVar("Model", bound=LlmArchPreTrainedModel)
Options = ParamSpec("Options")
# A chain: the name of each operation, with its options.
Recipe = Sequence[Mapping[str, Mapping[str, Any] | None]]

RECIPE = "surgery.yaml"
RECEIPT = "surgery.json"
SAMPLE_SHAPE = (2, 64)


class Operation(Generic[Options]):
    """A pure function from a subject to a change, which is called with a model in memory."""

    def __init__(self, function: Callable[Concatenate[Subject, Options], Change]):
        self.function = function
        self.name = function.__name__
        update_wrapper(self, function)

    def __call__(self, model: Model, *args: Options.args, **options: Options.kwargs) -> tuple[Model, Receipt]:
        """A new model, which shares no memory with the old one, and the receipt of the change.

        Raises:
            SurgeryError: this model cannot be changed so; the message names what forbids it.
        """
        given = inspect.signature(self.function).bind(None, *args, **options).arguments
        return operate(model, [{self.name: dict(list(given.items())[1:])}])


OPERATIONS: dict[str, Operation[Any]] = {}


def operation(function: Callable[Concatenate[Subject, Options], Change]) -> Operation[Options]:
    """Enter a function into the table, under its own name."""
    made = Operation(function)
    OPERATIONS[made.name] = made
    return made


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """A recipe from a YAML file: a list with one operation an entry, `name: {option: value}`.

    Raises:
        SurgeryError: the file holds something else.
    """
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise SurgeryError(f"{path} is no YAML: {error}") from error
    if not isinstance(found, list) or not all(isinstance(step, dict) and len(step) == 1 for step in found):
        raise SurgeryError(f"{path} is no recipe: a list is needed with one operation an entry, `name: {{option: 1}}`.")
    return found


def lookup(recipe: Recipe) -> list[tuple[Operation[Any], dict[str, Any]]]:
    """The operations of a recipe with their options.

    Raises:
        SurgeryError: there is no operation, or option, of that name; an option is missing.
    """
    steps = []
    for name, options in ((name, options) for step in recipe for name, options in step.items()):
        if name not in OPERATIONS:
            close = difflib.get_close_matches(name, OPERATIONS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(OPERATIONS))}."
            raise SurgeryError(f"There is no operation {name!r}: {hint}")
        found = OPERATIONS[name]
        try:
            inspect.signature(found.function).bind(None, **(options or {}))
        except TypeError as error:
            known = list(inspect.signature(found.function).parameters)[1:]
            raise SurgeryError(f"{name}: {error}; its options are {', '.join(known) or 'none'}.") from error
        steps.append((found, dict(options or {})))
    return steps


def run(subject: Subject, recipe: Recipe) -> tuple[Subject, list[Step], list[tuple[int, int]] | None]:
    """The subject after all operations of a recipe, what each did, and which old token each new one is (None: the
    vocabulary is as it was). No tensor is read, unless an operation measures."""
    only_decoders_and_encoders(subject)
    subject.check()
    steps: list[Step] = []
    tokens: list[tuple[int, int]] | None = None
    for found, options in lookup(recipe):
        change = found.function(subject, **options)
        change.subject.check()
        steps.append(Step(found.name, {**options, **change.chosen}, change.exact, change.why, change.retrain))
        if change.tokens is not None:
            now = dict(change.tokens)
            before = tokens if tokens is not None else [(old, old) for old in range(subject.config.vocab_size)]
            tokens = [(first, now[middle]) for first, middle in before if middle in now]
            renamed = torch.zeros(subject.config.vocab_size, dtype=torch.long)
            renamed[list(now)] = torch.tensor(list(now.values()))
            change = replace(change, subject=replace(change.subject, sample=renamed[subject.sample]))
        subject = change.subject
    return recorded(subject, steps), steps, tokens


def recorded(subject: Subject, steps: Sequence[Step]) -> Subject:
    """With the recipe in `converted_from`, beside what a conversion wrote there."""
    origin = dict(subject.config.converted_from or {})
    origin["surgery"] = [*origin.get("surgery", ()), *({step.operation: step.options} for step in steps)]
    return subject.changed(converted_from=origin)


def sample_tokens(config: LlmArchConfig) -> Tensor:
    """The built-in sample: uniformly drawn token ids `(2, 64)`, the same ones each time."""
    length = min(SAMPLE_SHAPE[1], config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (SAMPLE_SHAPE[0], length), generator=generator)


# What quality is measured on where nobody gives a text.
TEXT = """\
The river rises in the hills to the north, where rain falls on most days of the year. For the first twenty miles
it is narrow and fast; then the valley opens, and small towns stand on both banks. Each of them has a bridge, a market
on Saturdays, and a story about the flood of 1907, when the water reached the second floor of the mill. "We moved the
books first," an old woman told me, "and the piano last, because nobody in the house could play it." Two engineers came
in the spring to measure the current. They found that the river carries about 40 cubic metres of water each second in
March, but fewer than 6 in August, and they wrote a report of ninety pages which asked for a dam. The council read it,
thanked them, and built a school instead. If you walk along the path today, you pass the school after the third bridge;
behind it the fields begin, with wheat and beans in alternate years, and at the end of the last field the river meets
the sea.
"""
LONGEST_SAMPLE = 512


def text_tokens(folder: Path, text: str, config: LlmArchConfig) -> Tensor | None:
    """A text's tokens `(batch, length)`, by the tokenizer of a model's folder; None: it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError):
        return None
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    length = min(len(ids), LONGEST_SAMPLE, config.max_position_embeddings)
    rows = max(1, len(ids) // max(length, 1))
    return ids[: rows * length].view(rows, length) if length and int(ids.max()) < config.vocab_size else None


def operate(model: Model, recipe: Recipe, *, sample: Tensor | None = None) -> tuple[Model, Receipt]:
    """Change a model in memory by a chain of operations, and measure what the change did.

    Args:
        model: one of ours; it is left as it is.
        recipe: the operations, `[{name: options}, …]`.
        sample: tokens `(batch, length)`, both for what is chosen by measuring and for the comparison. None: drawn at
            random, which says much about exactness and little about quality: give text for that.

    Returns:
        A new model of the same class, dtype, device and mode, and the receipt.

    Raises:
        SurgeryError: an operation cannot be done on this model; the message names what forbids it.
    """
    if not isinstance(model, LlmArchPreTrainedModel):
        raise SurgeryError(f"{type(model).__name__} is no model of ours; an adapter must be merged first.")
    tokens = sample_tokens(model.config) if sample is None else sample
    subject = replace(of_model(model), sample=tokens)
    after, steps, vocabulary = run(subject, recipe)
    changed: Any = after.build()
    changed.to(model.device)
    changed.train(model.training)
    parameters = dict(model.named_parameters())
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    for name, parameter in changed.named_parameters():
        origins = after.weights.origins.get(name, frozenset())
        parameter.requires_grad_(not (origins and origins <= frozen))
    if model.can_generate():
        changed.generation_config = type(model.generation_config).from_dict(
            {**model.generation_config.to_dict(), **changed_tokens(changed.config, model.config)}
        )
    difference = compare(model, changed, tokens, vocabulary)
    origin = "given" if sample is not None else "drawn at random"
    return changed, Receipt(tuple(steps), cost_of(subject), cost_of(after), difference, origin)


def changed_tokens(after: LlmArchConfig, before: LlmArchConfig) -> dict[str, Any]:
    """The tokens of which the id has changed, for a generation config."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def of_model(model: LlmArchPreTrainedModel) -> Subject:
    """A model in memory as operations see it; tensors are copied when they are read."""
    tied = set(model.all_tied_weights_keys)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    config = Subject(model.config, Weights({}, state.__getitem__), type(model), torch.empty(0)).changed().config
    config.dtype = model.dtype
    return Subject(config, Weights(infos, lambda n: state[n].detach().cpu().clone()), type(model), torch.empty(0))


def of_folder(source: str | os.PathLike[str]) -> tuple[Any, Subject]:
    """A saved model as operations see it, and the checkpoint that it is read from.

    Raises:
        ConversionError: it is no llmarch model.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.config.get("model_type") != LlmArchConfig.model_type:
        raise ConversionError(
            f"{source} is no llmarch model but {checkpoint.config.get('model_type')!r}: `convert` it first."
        )
    config = LlmArchConfig.from_dict(checkpoint.config)
    name = (config.architectures or ["LlmArchForCausalLM"])[0]
    kind = getattr(modeling_llmarch, name, None)
    if kind is None:
        raise ConversionError(f"{source}: hf_llmarch has no class {name!r}.")
    weights = Weights(checkpoint.tensors, checkpoint.read)
    return checkpoint, Subject(config, weights, kind, sample_tokens(config), checkpoint.path)


def operate_on_folder(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: Recipe,
    *,
    text: str | None = None,
    measure: bool = False,
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
) -> Receipt:
    """The same for a saved folder, with the memory of one output file: no model is built unless something is measured.

    The recipe, with what was chosen by measuring, is written into the destination's `surgery.yaml`, its receipt into
    `surgery.json`, and both into the model card.

    Args:
        source: a local folder or Hub id of a saved model of ours.
        destination: a folder that is empty or not there yet; it appears when it is complete.
        recipe: as for `operate`.
        text: what is measured on, by the folder's tokenizer; None: a built-in text. Without a tokenizer tokens are
            drawn at random.
        measure: compare the logits before and after; both models are then loaded.
        max_shard_size: largest weight file, in bytes or like `5GB`.
        overwrite: replace a destination that holds a model.

    Raises:
        ConversionError: a SurgeryError, or one for a source that is damaged or a destination that cannot be written.
            Nothing is written then.
    """
    from hf_llmarch.conversion import cards

    checkpoint, subject = of_folder(source)
    if (checkpoint.path / ADAPTER).is_dir():
        raise SurgeryError(
            f"{source} holds an adapter in {ADAPTER}/, which would not follow the change: merge it, or move it away."
        )
    tokens = text_tokens(checkpoint.path, TEXT if text is None else text, subject.config)
    if tokens is None and text is not None:
        raise SurgeryError(f"{source} has no tokenizer that could read the text.")
    if tokens is not None:
        subject = replace(subject, sample=tokens)
    after, steps, vocabulary = run(subject, recipe)
    target = Path(destination).expanduser()
    layout = after.weights.infos
    size = sum(info.nbytes for info in layout.values()) + checkpoint.companion_bytes + SMALL_FILES
    difference = compare(subject.build(), after.build(), subject.sample, vocabulary) if measure else None
    origin = "drawn at random" if tokens is None else "of the text given" if text is not None else "of a built-in text"
    receipt = Receipt(tuple(steps), cost_of(subject), cost_of(after), difference, origin)
    with staged(target, size=size, overwrite=overwrite, source=checkpoint.path) as folder:
        checkpoint.write_companions(folder)
        if vocabulary is not None and len(vocabulary) < subject.config.vocab_size:
            trim_tokenizer(folder, vocabulary)
        write_tensors(folder, ((name, after.weights[name]) for name in layout), layout, max_shard_size)
        if any(checkpoint.path.glob("*.py")):  # a folder that brings its own code
            for file in code_files():
                shutil.copyfile(file, folder / file.name)
        after.config.architectures = [after.kind.__name__]
        after.config.save_pretrained(folder)
        written = [{step.operation: step.options} for step in steps]
        (folder / RECIPE).write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
        write_json(folder / RECEIPT, receipt.to_dict())
        if cards.is_ours(folder / cards.README):
            cards.write(folder)
    return receipt

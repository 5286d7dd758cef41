"""Convert, export, load: a plan that is proven first, then a stream of tensors from one folder into another."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_llmarch.model import modeling_llmarch
from hf_llmarch.model.compat import code_files
from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from .destination import keep, staged, write_json, write_tensors
from .errors import CheckpointError, ConversionError, DifferentModel, some
from .plans import Plan, model_class, plan_of_ours
from .plans import plan as make_plan
from .preserved import kept, to_keep, true_config
from .reports import Report
from .rules import Side
from .sources import open_checkpoint
from .sources.base import Checkpoint, TensorInfo
from .sources.files import CONFIG, GENERATION_CONFIG, has_adapter, read_json
from .sources.hub import hub_state

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from .rules import Family

Source = str | os.PathLike[str]
# True: a bar on stderr. False: silence. A function: called with bytes done and bytes in all.
Progress = bool | Callable[[int, int], None]
# What our config.json holds as well.
GENERATION_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
# Room for config.json, code and the index beside what is counted byte by byte.
SMALL_FILES = 2**20


def convert(
    source: Source,
    destination: Source,
    *,
    family: Family | str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    revision: str | None = None,
    adapter: Source | None = None,
    resume: bool = True,
    verify: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: Progress = True,
) -> Report:
    """Convert a public checkpoint into a folder that transformers' Auto classes open as `llmarch`.

    The class follows from the source's `architectures`, and a task head comes along with its labels. The folder also
    holds the source's tokenizer, generation config, chat template, licence and the like, the code with which it loads
    under `trust_remote_code=True` where this package is not installed, and a model card; the source's is kept aside.

    Args:
        source: a local folder, a `.gguf` file, or a Hub id.
        adapter: a LoRA adapter of the source, as PEFT saves it: a folder or a Hub id. It goes into the destination's
            folder `adapter`, for `PeftModel.from_pretrained(model, destination, subfolder="adapter")`. By default the
            one that lies beside the source's weights, if one does.
        destination: a folder that is empty or not there yet. It appears when it is complete, never half-written.
        family: how to read the source; by default its `model_type` says.
        dtype: cast floating-point tensors to it. The result is then no longer byte-exact, and the report says so.
        max_shard_size: largest weight file, in bytes or like `5GB`.
        revision: branch, tag or commit on the Hub, for the config, the weights and every other file alike.
        resume: reserved. Today it has no effect: an interrupted conversion leaves nothing that is taken up again, and
            the next call starts from the beginning.
        verify: compare the result with transformers' own class before it is put in place, see `verify`. The destination
            is made whatever the comparison says, so look at `report.certificate.ok`; but one that is there already is
            not replaced by a model that should be the same and is not.
        overwrite: replace a destination that holds a model and nothing else, when the new one is complete.
        allow_pickle: read `pytorch_model*.bin` where there is no safetensors.
        progress: a bar on stderr, nothing, or a function of (bytes done, bytes in all).

    Raises:
        DifferentModel: the comparison found a difference, and the destination exists.
        ConversionError: another of its subclasses, saying what was wrong, where, and what to do; nothing is written
            then, and what was there stays.
    """
    from . import cards, source_code

    started = time.perf_counter()
    cast = resolve_dtype(dtype)
    checkpoint = open_foreign(source, revision, allow_pickle)
    plan = make_plan(checkpoint.config, checkpoint.shapes, family=family)
    adapter = the_adapter(checkpoint, adapter)
    config = plan.config
    config.dtype = cast or config.dtype or usual_dtype(checkpoint)
    config.converted_from = {**(config.converted_from or {}), **hub_state(checkpoint.path)}
    write_adapter = beside(destination, adapter, plan, "ours", checkpoint, allow_pickle)

    def finish(folder: Path, report: Report) -> Report:
        write_adapter(folder)
        cards.set_aside(folder)
        source_code.carry(checkpoint.path, folder)
        for file in code_files():
            shutil.copyfile(file, folder / file.name)
        config.save_pretrained(folder)
        generation = generation_config(checkpoint)
        if generation is not None and not (folder / GENERATION_CONFIG).is_file():
            write_json(folder / GENERATION_CONFIG, generation.to_diff_dict())
        cards.write(folder, report=report)
        if not verify:
            return report
        from .certificate import verify as certify

        found = certify(checkpoint.path, folder, allow_pickle=allow_pickle, progress=progress is True)
        certificate = replace(found, ours=report.destination)
        if not certificate.ok and report.byte_exact and Path(report.destination).is_dir():
            raise DifferentModel(
                f"{source} is not what it was converted into, so {destination} is left as it was: "
                f"{'; '.join(certificate.problems)}. Convert it into an empty folder to see where they differ."
            )
        cards.write(folder, report=report, certificate=certificate)
        return replace(report, certificate=certificate)

    return carry(
        checkpoint,
        plan,
        "ours",
        destination,
        finish,
        started=started,
        cast=cast,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        progress=progress,
    )


def export(
    source: Source,
    destination: Source,
    *,
    family: Family | str | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    revision: str | None = None,
    adapter: Source | None = None,
    overwrite: bool = False,
    progress: Progress = True,
) -> Report:
    """Give an `llmarch` folder back as a checkpoint of a family, for every tool that reads that family.

    A converted model that was not changed comes back with the tensors byte for byte and the config.json word for word.

    Args:
        source: a local folder or Hub id of a saved model of ours.
        family: what to write; by default the family that the model was converted from.
        adapter: a LoRA adapter of the model, a folder (the one of a conversion is `source/adapter`) or a Hub id.
        destination, dtype, max_shard_size, revision, overwrite, progress: as for `convert`.

    Raises:
        NotExpressible: the family cannot say what the model's config says; the message names the fields.
        ConversionError: another subclass, as for `convert`.
    """
    from . import cards, source_code

    started = time.perf_counter()
    cast = resolve_dtype(dtype)
    checkpoint = open_checkpoint(source, revision=revision)
    plan = plan_of_ours(checkpoint, family)
    foreign = dict(true_config(plan, kept(checkpoint, plan)))
    if cast is not None:
        names = [name for name in ("dtype", "torch_dtype") if name in foreign] or ["dtype"]
        foreign.update(dict.fromkeys(names, str(cast).removeprefix("torch.")))

    write_adapter = beside(destination, adapter, plan, "theirs", checkpoint)

    def finish(folder: Path, report: Report) -> Report:
        cards.give_back(checkpoint.path, folder)
        write_json(folder / CONFIG, foreign)
        source_code.give_back(checkpoint.path, folder)
        write_adapter(folder)
        if plan.family.container is not None:
            plan.family.container(folder)
        return report

    return carry(
        checkpoint,
        plan,
        "theirs",
        destination,
        finish,
        started=started,
        cast=cast,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        progress=progress,
    )


def the_adapter(checkpoint: Checkpoint, given: Source | None) -> Source | None:
    """The adapter that was named, or the one beside a model's weights.

    Raises:
        ConversionError: there are both.
    """
    if not has_adapter(checkpoint.path):
        return given
    if given is not None:
        raise ConversionError(
            f"{checkpoint.path} holds an adapter beside its weights, and {given} is another: one model takes one. Move "
            "the adapter files that you do not want out of the folder."
        )
    return checkpoint.path


def beside(
    destination: Source, adapter: Source | None, plan: Plan, to: Side, base: Checkpoint, allow_pickle: bool = False
) -> Callable[[Path], None]:
    """What puts the adapter into a model's folder that will be called `destination`; it is translated at once, so that
    a refusal comes before anything is written."""
    if adapter is None:
        return lambda folder: None
    from . import adapter as adapters

    opened = adapters.open_adapter(adapter, allow_pickle=allow_pickle)
    keep((opened.path,), Path(os.path.realpath(Path(destination).expanduser())))
    config, tensors = adapters.translate(opened, plan, to, base)
    model = str(Path(destination).expanduser())
    return lambda folder: adapters.write(folder / adapters.FOLDER, config, tensors, model)


def load(
    source: Source,
    *,
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    family: Family | str | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    **kwargs: Any,
) -> Any:
    """A model of ours straight from a foreign checkpoint. Nothing is written.

    Args:
        source, family, revision, allow_pickle: as for `convert`.
        dtype: of the model; None: as the source's config.json says, or as its tensors are stored.
        device_map: as for `from_pretrained`.
        kwargs: as for `from_pretrained`: those that name fields of the config replace what the source says, such as
            `num_hidden_layers=2` for the first two layers alone.

    Returns:
        The `LlmArchModel`, `LlmArchForCausalLM`, … that the source's class is here, in evaluation mode and with the
        source's generation config.
    """
    checkpoint = open_foreign(source, revision, allow_pickle)
    plan = make_plan(checkpoint.config, checkpoint.shapes, family=family)
    dtype = resolve_dtype(dtype) or plan.config.dtype or usual_dtype(checkpoint)
    config, kwargs = LlmArchConfig.from_dict(plan.config.to_dict(), return_unused_kwargs=True, **kwargs)
    config.dtype = dtype
    model = model_class(plan).from_pretrained(
        None,
        config=config,
        state_dict=dict(plan.stream(checkpoint.read)),
        dtype=dtype,
        device_map=device_map,
        **kwargs,
    )
    if (adapter := the_adapter(checkpoint, None)) is not None:
        from . import adapter as adapters

        adapters.attach(model, adapters.open_adapter(adapter, allow_pickle=allow_pickle), plan, checkpoint)
    generation = generation_config(checkpoint)
    if model.can_generate() and generation is not None:
        model.generation_config = generation
    return model


def generation_config(checkpoint: Checkpoint) -> GenerationConfig | None:
    """What a checkpoint says of generation: in a file of its own, or among the fields of an old config.json. None:
    nothing."""
    from transformers import GenerationConfig

    file = checkpoint.path / GENERATION_CONFIG
    if file.is_file():
        read_json(file)  # transformers takes what it cannot read for what is not there
        try:
            return GenerationConfig.from_pretrained(checkpoint.path)
        except (TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: transformers cannot read it: {error}") from error
    usual = {**GenerationConfig._get_default_generation_params(), **dict.fromkeys(GENERATION_TOKENS)}
    said = {name: value for name, value in checkpoint.config.items() if name in usual and value != usual[name]}
    if not said.keys() - {"use_cache", *GENERATION_TOKENS}:
        return None
    try:
        return GenerationConfig(**said)
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.path}: {some(said)} in its config cannot be read: {error}") from error


def open_foreign(source: Source, revision: str | None, allow_pickle: bool) -> Checkpoint:
    checkpoint = open_checkpoint(source, revision=revision, allow_pickle=allow_pickle)
    if checkpoint.config.get("model_type") == LlmArchConfig.model_type:
        raise ConversionError(f"{source} is an llmarch model already: open it with from_pretrained, or `export` it.")
    return checkpoint


def config_of(source: Source, *, revision: str | None = None, allow_pickle: bool = False) -> LlmArchConfig:
    """The config of a folder of ours, or the one that a foreign checkpoint would have here. Reads no tensor."""
    checkpoint = open_checkpoint(source, revision=revision, allow_pickle=allow_pickle)
    if checkpoint.config.get("model_type") == LlmArchConfig.model_type:
        return LlmArchConfig.from_dict(checkpoint.config)
    return make_plan(checkpoint.config, checkpoint.shapes).config


def carry(
    checkpoint: Checkpoint,
    plan: Plan,
    to: Side,
    destination: Source,
    finish: Callable[[Path, Report], Report],
    *,
    started: float,
    cast: torch.dtype | None,
    max_shard_size: int | str,
    overwrite: bool,
    progress: Progress,
) -> Report:
    """Run a plan from a checkpoint into a new folder.

    Args:
        finish: puts all but the tensors and the source's companions into the folder, given the report so far.
    """
    target = Path(destination).expanduser()
    layout = written_layout(plan, checkpoint.dtypes, to, cast)
    changed = layout != written_layout(plan, checkpoint.dtypes, to, None)
    aside = to_keep(checkpoint, plan) if to == "ours" else kept(checkpoint, plan)
    beside, among = (aside.tensors, {}) if to == "ours" else ({}, aside.tensors)
    layout |= among
    size = sum(info.nbytes for info in [*layout.values(), *beside.values()])
    room = size + checkpoint.companion_bytes + SMALL_FILES
    moved = chain(plan.stream(checkpoint.read, to=to), aside.stream() if among else ())
    tensors = ((name, cast_to(layout[name].dtype, name, tensor)) for name, tensor in moved)
    with staged(target, size=room, overwrite=overwrite, source=checkpoint) as folder:
        checkpoint.write_companions(folder)
        with meter(progress, f"{plan.family.name} -> {target.name}", size) as advance:
            write_tensors(folder, tensors, layout, max_shard_size, advance)
            if beside:
                aside.write(folder, max_shard_size, advance)
        seconds = time.perf_counter() - started
        report = Report(
            source=checkpoint.source,
            destination=str(target),
            family=plan.family.name,
            tensors=len(layout),
            bytes=size,
            seconds=seconds,
            megabytes_per_second=size / 1e6 / seconds,
            peak_rss_bytes=peak_rss_bytes(),
            byte_exact=not checkpoint.made and not changed,
            made=checkpoint.made,
            cast=str(cast).removeprefix("torch.") if changed else None,
            dropped=dict(plan.dropped),
            files=(),
        )
        report = finish(folder, report)
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return replace(report, files=tuple(files))


KEPT_IN_FP32 = modeling_llmarch.LlmArchPreTrainedModel._keep_in_fp32_modules_strict


def written_layout(
    plan: Plan, dtypes: Mapping[str, torch.dtype], to: Side, cast: torch.dtype | None
) -> dict[str, TensorInfo]:
    """Shape and dtype of every tensor that a plan will write, in its order.

    Raises:
        ConversionError: a step would put tensors of different dtypes into one, which changes some of their numbers.
    """
    layout: dict[str, TensorInfo] = {}
    shapes = plan.our_shapes if to == "ours" else plan.their_shapes
    for step in plan.steps:
        read, written = (step.theirs, step.ours) if to == "ours" else (step.ours, step.theirs)
        stored = {dtypes[name] for name in read}
        casts = cast is not None and not any(part in name for name in written for part in KEPT_IN_FP32)
        found = {cast if casts and cast is not None and dtype.is_floating_point else dtype for dtype in stored}
        if len(found) > 1:
            names = ", ".join(sorted(map(str, found)))
            raise ConversionError(f"{some(read)} go into one tensor but differ in dtype ({names}): cast with dtype=….")
        (dtype,) = found
        layout |= {name: TensorInfo(tuple(shapes[name]), dtype) for name in written}
    return layout


def cast_to(dtype: torch.dtype, name: str, tensor: Tensor) -> Tensor:
    """
    Raises:
        ConversionError: a number is too large for the dtype, and would become infinite.
    """
    if tensor.dtype == dtype or not tensor.numel():
        return tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        ends = torch.stack(tensor.aminmax())
        if not ends.isfinite().all():  # what is infinite already hides the others
            ends = torch.stack(tensor.where(tensor.isfinite(), 0).aminmax())
        if not ends.to(dtype).float().isfinite().all():
            largest = ends.abs().max().item()
            raise ConversionError(f"{name} holds {largest:.3g}, too large for {dtype}: choose one with a wider range.")
    return tensor.to(dtype)


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point torch dtype from its name, `bfloat16` or `torch.bfloat16`; None for None and for `auto`.

    Raises:
        ConversionError: there is none of that name.
    """
    if dtype in (None, "auto"):
        return None
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    # Eight bits hold a weight only with a scale beside it.
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize == 1:
        raise ConversionError(f"dtype={dtype!r} is no floating-point dtype: float32, bfloat16 and float16 are.")
    return found


def usual_dtype(checkpoint: Checkpoint) -> torch.dtype | None:
    """The floating-point dtype of most bytes."""
    counts: Counter[torch.dtype] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype.is_floating_point:
            counts[info.dtype] += info.nbytes
    return max(counts, key=counts.__getitem__, default=None)


def peak_rss_bytes() -> int | None:
    """Largest resident set of this process since it started, or None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes, but bytes on macOS


@contextmanager
def meter(progress: Progress, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes done since the last call."""
    if callable(progress):
        done = 0

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(TextColumn("{task.description}"), *columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)

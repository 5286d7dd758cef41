"""The commands that study a model without running it: `inspect`, `presets`, `new`, `plan`."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from .app import Answer, Revision, command, facts

if TYPE_CHECKING:
    from hf_llmarch.study.analysis import Analysis
    from hf_llmarch.study.balance import ExpertLoad
    from hf_llmarch.study.hardware import Hardware
    from hf_llmarch.study.planning import Fit, Optimum, OverTraining

Plot = Annotated[
    Path | None, typer.Option(help="Draw a figure into this file (.png, .svg, .pdf); needs `hf-llmarch[plot]`.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Change a switch: `num_key_value_heads=4`. Any number of times.")
]


def short(count: float) -> str:
    """A count in three digits: 671B, 12.9B, 124M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{unit}" if count < 999.5 * size else f"{count / size:,.0f}{unit}"
    return f"{count:,.0f}"


def flops(count: float) -> str:
    """FLOPs in three digits and a unit."""
    for unit, size in (("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:,.4g} {unit}FLOP"
    return f"{count:,.0f} FLOP"


def compact(count: float) -> str:
    """FLOPs or bytes in three digits, with the prefixes of units: 15.4G."""
    return short(count).replace("B", "G")


def seconds(time: float) -> str:
    """A time in a unit that suits it."""
    for unit, size in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3)):
        if time >= size:
            return f"{time / size:,.3g} {unit}"
    return f"{time * 1e6:.3g} µs"


def size_of(count: float) -> str:
    return decimal(round(count))


def columns(
    title: str | None, names: Iterable[str], rows: Iterable[Sequence[str]], left: int = 1, tight: bool = False
) -> Table:
    """A table whose first `left` columns are text and whose others are numbers; `tight`: nothing is wrapped."""
    padding = (0, 0) if tight else (0, 1, 0, 0)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=padding)
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold", no_wrap=tight)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def ranges(rows: Iterable[tuple[int, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Rows by layer index, those that say the same as one: `0-4, 6-10`."""
    runs: dict[tuple[str, ...], list[list[int]]] = {}
    for index, values in rows:
        spans = runs.setdefault(values, [])
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return [(", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans), *values) for values, spans in runs.items()]


def switches_of(given: list[str] | None) -> dict[str, Any]:
    """`name=value` pairs, with values as JSON has them, or else as text."""
    import json

    found: dict[str, Any] = {}
    for pair in given or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {pair}: write it as name=value.")
        try:
            found[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            found[name.strip()] = value
    return found


# ---- inspect


@command
def inspect(
    source: Annotated[
        list[str],
        typer.Argument(help="A preset, a config.json, a folder, a Hub id or a GGUF file; several stand side by side."),
    ],
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of the text; default: the model's longest.")] = None,
    source_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that an encoder-decoder reads; default: as `--length`.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts at a time.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="Of weights and cache; default: the model's, else bfloat16.")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(help="adamw, adamw_8bit, momentum or sgd, for the training step.")
    ] = "adamw",
    hardware: Annotated[
        str | None, typer.Option(help="Put the model under its roofline: `h100`, … or `here` for this machine.")
    ] = None,
    changes: Set = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="Show the data on its way through the last block.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure it as well, with a model without weights.")
    ] = False,
    text: Annotated[str | None, typer.Option(help="Run this text, and show how it spreads over the experts.")] = None,
    revision: Revision = None,
    plot: Plot = None,
) -> Answer:
    """What a model is and costs, from its config alone: parameters, FLOPs, cache, memory, formulas, the layers' reach.

    Of a quantised model, how much is quantised; with a text, the load of its experts."""
    from hf_llmarch.study.analysis import analyze
    from hf_llmarch.study.presets import changed
    from hf_llmarch.study.sources import config_from

    sizes: dict[str, Any] = {"batch_size": batch, "sequence_length": length, "source_length": source_length}
    found = {
        name: analyze(
            changed(config_from(name, revision=revision), switches_of(changes)),
            **sizes,
            dtype=dtype,
            optimizer=optimizer,
        )
        for name in source
    }
    device = None if hardware is None else find_hardware(hardware)
    if plot is not None:
        from hf_llmarch.study.figures import inspected

        inspected(found, plot)
    data = {name: inspect_data(analysis, device, measure) for name, analysis in found.items()}
    if len(found) > 1:
        return Answer({"models": data}, side_by_side(found, device))
    ((name, analysis),) = found.items()
    views = inspect_views(name, analysis, data[name], device, shapes)
    views += extra_views(name, analysis, data[name], text, revision)
    return Answer(data[name], Group(*views))


def find_hardware(name: str) -> "Hardware":
    """By its name, or the machine at hand."""
    if name == "here":
        from hf_llmarch.study.measure import this_machine

        return this_machine()
    from hf_llmarch.study.hardware import find

    return find(name)


def inspect_data(analysis: "Analysis", device: "Hardware | None", measures: bool) -> dict[str, Any]:
    """Everything, for `--json`."""
    from hf_llmarch.study.analysis import receptive_field

    config, data = analysis.config, analysis.to_dict()
    reach = {"decoder": receptive_field(config, analysis.sequence_length)}
    if config.topology == "encoder-decoder":
        reach["encoder"] = receptive_field(config.source_config(), analysis.source_length)
    elif config.topology == "encoder":
        reach = {"encoder": reach["decoder"]}
    data["layers"] = [layer | asdict(reach[layer["stack"]][layer["layer"]]) for layer in data["layers"]]
    if device is not None:
        data["hardware"] = asdict(device) | {
            name: {"seconds": r.seconds, "bound": r.bound, "intensity": r.intensity, "attainable": r.attainable}
            for name, r in analysis.rooflines(device).items()
        }
    if measures:
        from hf_llmarch.study.measure import measure

        data["measured"] = asdict(
            measure(
                config,
                batch_size=analysis.batch_size,
                sequence_length=analysis.sequence_length,
                source_length=analysis.source_length or None,
                dtype=analysis.dtype,
                architecture=analysis.architecture,
            )
        )
    return data


def inspect_views(
    name: str, a: "Analysis", data: dict[str, Any], device: "Hardware | None", shapes: bool
) -> list[RenderableType]:
    """Tables of one model, for 80 columns."""
    measured = data.get("measured", {})

    def beside(what: str, shown: str) -> str:
        """What was found, and whether it is what was measured."""
        value = measured.get(what)
        if value is None:
            return shown
        return f"{shown}  (measured: {'the same' if value == getattr(a, what) else format(value, ',')})"

    active = f"{a.active_parameters:,} ({short(a.active_without_embedding)} without the embedding's table)"
    summary = {
        "parameters": beside("parameters", f"{a.parameters:,} ({short(a.parameters)})"),
        **({"active a token": active} if a.active_parameters != a.parameters else {}),
        **{part: f"{count:,} ({count / a.parameters:.1%})" for part, count in a.parts.items()},
    }
    at = f"{a.batch_size} x {a.sequence_length:,}" + (f" on {a.source_length:,}" if a.source_length else "")
    training = a.training
    costs = {
        "forward": beside("forward_flops", flops(a.forward_flops)),
        "backward": flops(a.backward_flops),
        "training step": f"{flops(a.training_flops)}, checkpointed {flops(a.checkpointed_flops)}",
        "prefill": flops(a.prefill_flops),
    }
    if a.decode_flops:
        costs |= {
            "next token": beside("decode_flops", flops(a.decode_flops)),
            "cache a token": size_of(a.kv_cache_bytes_per_token),
            "cache": beside("kv_cache_bytes", size_of(a.kv_cache_bytes)),
            "intensity": f"prefill {a.prefill_flops / a.prefill_bytes:,.0f}, decoding "
            f"{a.decode_flops / a.decode_bytes:,.2f} FLOP a byte",
        }
    costs |= {
        "serving": f"{size_of(a.serving.total)}: weights {size_of(a.serving.weights)}, "
        f"cache {size_of(a.serving.kv_cache)}",
        "training": f"{size_of(training.total)}: weights {size_of(training.weights)}, gradients "
        f"{size_of(training.gradients)}, {a.optimizer} {size_of(training.optimizer)}, activations "
        f"{size_of(training.activations)} (+ {size_of(training.scores)} where scores are kept)",
        "checkpointed": f"{size_of(training.total_checkpointed)}: activations {size_of(training.checkpointed)}",
    }
    for step, roof in a.rooflines(device).items() if device else ():
        costs[f"{step} on {roof.hardware.name}"] = f"at least {seconds(roof.seconds)}, bound by {roof.bound}"
    views: list[RenderableType] = [
        facts(f"{name} ({a.architecture})", summary),
        facts(f"At {at} tokens in {a.dtype}", costs),
        *layer_views(data),
        Group(
            "[bold]Formulas, of the last layer[/]",
            *(f"  {f.name} = {f.symbols}\n    = {f.numbers} = [bold]{f.value:,}[/]" for f in a.formulas),
        ),
    ]
    if shapes:
        steps = [
            (s.name.partition(f"layers.{s.layer}.")[2] or s.name, str(s.shape), flops(s.flops)) for s in a.shapes()
        ]
        views.append(columns("The data in the last block", ("step", "shape", "products"), steps, left=2))
    return views


def positions(layer: dict[str, Any]) -> str:
    """A layer's position encoding, shortly: `rope yarn 10000`."""
    said: str = layer["positions"]
    return said.replace("default, ", "").replace("theta ", "").replace(",", "").replace("(", "").replace(")", "")


def layer_views(data: dict[str, Any]) -> list[RenderableType]:
    """A table for each stack."""
    views: list[RenderableType] = []
    for stack in dict.fromkeys(layer["stack"] for layer in data["layers"]):
        layers = [layer for layer in data["layers"] if layer["stack"] == stack]
        rows = [
            (
                layer["layer"],
                (
                    f"{layer['kind'].removesuffix('_attention')}, {positions(layer)}",
                    f"{layer['attention']} {layer['heads']}/{layer['key_value_heads']}x{layer['head_width']}",
                    f"{layer['feed_forward']} {layer['width']}",
                    f"{layer['direct']:,}",
                    short(layer["parameters"]),
                    size_of(layer["cache_bytes"]),
                ),
            )
            for layer in layers
        ]
        names = ("layer", "attention", "heads", "feed-forward", "reads", "params", "cache")
        views.append(columns(f"Layers of the {stack}", names, ranges(rows), left=4))
        reach = [layer["reach"] for layer in layers]
        if len(set(reach)) > 1:
            views.append(
                f"  {reach[0]:,} tokens reach the last one's state at the first layer, {reach[-1]:,} at the last."
            )
    return views


def side_by_side(found: "dict[str, Analysis]", device: "Hardware | None") -> RenderableType:
    """A row a model."""
    names = ("model", "params", "active", "L", "width", "heads", "ffn", "vocab", "KV B/t", "next")
    rows = []
    for name, a in found.items():
        c, last = a.config, a.layers[-1]
        roof = a.rooflines(device).get("decode") if device else None
        rows.append(
            (
                name.rstrip("/").rpartition("/")[2],
                short(a.parameters),
                short(a.active_parameters),
                str(c.num_hidden_layers),
                str(c.hidden_size),
                f"{c.num_attention_heads}/{'mla' if c.attention_kind == 'mla' else c.num_key_value_heads}",
                f"{c.num_experts}x{last.width}" if last.feed_forward == "sparse" else str(last.width),
                short(c.vocab_size),
                compact(a.kv_cache_bytes_per_token),
                seconds(roof.seconds) if roof else compact(a.decode_flops),
            )
        )
    next_token = f"at least, for a token on {device.name}" if device else "FLOPs of a token"
    note = f"L: layers; KV B/t: bytes of cache a token; next: {next_token}, at each model's --length."
    return Group(columns(None, names, rows, tight=True), note)


def extra_views(
    source: str, analysis: "Analysis", data: dict[str, Any], text: str | None, revision: str | None
) -> list[RenderableType]:
    """What takes the weights: the load of experts, and what is quantised."""
    views: list[RenderableType] = []
    if text is not None:
        loads = expert_loads(source, text, revision)
        views.append(facts("Experts", {load.name: str(load).partition(": ")[2] for load in loads}))
        data["experts"] = [{**asdict(load), "entropy": load.entropy, "busiest": load.busiest} for load in loads]
    if getattr(analysis.config, "quantization_config", None):
        from hf_llmarch.integrations.quantisation import quantised_share

        share = quantised_share(source, revision=revision)
        views.append(facts("Quantised", share.facts))
        data["quantised"] = {**asdict(share), "share": share.share, "bits": share.bits, "advice": share.advice}
    return views


def expert_loads(source: str, text: str, revision: str | None) -> "list[ExpertLoad]":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_llmarch.study.balance import expert_load

    tokens = AutoTokenizer.from_pretrained(source, revision=revision)(text, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(source, revision=revision)
    return expert_load(model, input_ids=tokens.input_ids)


# ---- presets, new


@command
def presets(
    contains: Annotated[str | None, typer.Argument(help="Those whose name contains this.")] = None,
) -> Answer:
    """The models of the line by name, for `inspect`, `new` and `plan`, with their numbers."""
    from hf_llmarch.study import preset_table as known

    rows = [{"name": name, **row} for name, row in known.table().items() if (contains or "") in name]
    if not rows:
        known.row(str(contains))  # refuses, with the names that are close
    shown = [(r["name"], short(r["parameters"]), short(r["active"]), r["source"]) for r in rows]
    table = columns(None, ("preset", "params", "active", "source"), shown)
    table.columns[3].justify = "left"
    return Answer({"presets": rows}, table)


@command
def new(
    name: Annotated[str, typer.Argument(help="A preset; `hf-llmarch presets` lists them.")],
    destination: Annotated[Path, typer.Argument(help="The folder to make.")],
    changes: Set = None,
    parameters: Annotated[str | None, typer.Option(help="The preset's style at another size, like `150M`.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the weights; default: the preset's, else float32.")] = None,
    seed: Annotated[int, typer.Option(help="Of the fresh weights.")] = 0,
    config_only: Annotated[bool, typer.Option("--config-only", help="Write config.json and no weights.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a destination that holds a model.")] = False,
) -> Answer:
    """Write a fresh model in the architecture of a preset, for training from scratch."""
    from hf_llmarch.conversion.destination import staged
    from hf_llmarch.study import presets as known
    from hf_llmarch.study.analysis import analyze

    switches = switches_of(changes)
    config = known.scaled(name, parameters, **switches) if parameters else known.get(name, **switches)
    found = analyze(config, sequence_length=1, dtype=dtype or config.dtype or "float32")
    config.dtype = found.dtype
    size = 0 if config_only else round(found.serving.weights)
    with staged(destination, size=size, overwrite=overwrite) as folder:
        if config_only:
            config.save_pretrained(folder)
        else:
            fresh_model(config, found.architecture, seed).save_pretrained(folder)
    data = {
        "destination": str(destination),
        "preset": name,
        "architecture": found.architecture,
        "parameters": found.parameters,
        "dtype": found.dtype,
        "weights": not config_only,
    }
    shown = {**data, "parameters": f"{found.parameters:,}", "weights": "none" if config_only else decimal(size)}
    return Answer(data, facts(str(destination), {key: str(value) for key, value in shown.items()}))


def fresh_model(config: Any, architecture: str, seed: int) -> Any:
    import torch

    from hf_llmarch.model import modeling_llmarch

    dtype = getattr(torch, config.dtype, torch.int8)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"dtype={config.dtype}: fresh weights are float32, bfloat16, float16 or float64.")
    torch.manual_seed(seed)
    config.dtype = dtype
    return getattr(modeling_llmarch, architecture)(config).to(dtype)


# ---- plan


@command
def plan(
    model: Annotated[
        str | None, typer.Argument(help="A preset, folder or Hub id, to see how far past the optimum it is trained.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of its training, like `15T`.")] = None,
    served: Annotated[str | None, typer.Option(help="Tokens that it will serve, like `10T`.")] = None,
    compute: Annotated[float | None, typer.Option(help="A budget of training, in FLOPs, like `5.76e23`.")] = None,
    style: Annotated[str | None, typer.Option(help="Find the largest model in a preset's style within bounds.")] = None,
    parameters: Annotated[str | None, typer.Option(help="Bound on parameters, like `1B`.")] = None,
    memory: Annotated[str | None, typer.Option(help="Bound on serving's memory, like `24GB`.")] = None,
    training_memory: Annotated[str | None, typer.Option(help="Bound on a checkpointed step's memory.")] = None,
    cache: Annotated[str | None, typer.Option(help="Bound on the cache's memory.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens of a text, for memory and cache.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts at a time.")] = 1,
    runs: Annotated[Path | None, typer.Option(help="Fit a law to these runs: .csv or .json of N, D, loss.")] = None,
    plot: Plot = None,
) -> Answer:
    """How large a model for how much text: Chinchilla's laws, over-training, a size for a budget, a fit of own runs."""
    from hf_llmarch.conversion.destination import size_in_bytes
    from hf_llmarch.study import planning
    from hf_llmarch.study.presets import number

    if (tokens or served) and model is None:
        raise typer.BadParameter("--tokens and --served are of a model: name one.")
    bounds = {"parameters": number(parameters) if parameters else None, "compute": compute if style else None}
    for name, bound in (("memory", memory), ("training_memory", training_memory), ("cache", cache)):
        bounds[name] = size_in_bytes(bound) if bound else None
    if any(bounds.values()) and style is None:
        raise typer.BadParameter("bounds are of a style: name a preset with --style.")
    data: dict[str, Any] = {"laws": {name: asdict(law) for name, law in planning.LAWS.items()}}
    views: list[RenderableType] = []
    points: dict[str, tuple[float, float]] = {}
    fitted: Fit | None = None
    if runs is not None:
        fitted = planning.fit(planning.read_runs(runs))
        data["fit"] = asdict(fitted)
        views.append(fit_view(fitted))
    if style is not None:
        config, found = planning.largest(style, planning.Budget(**bounds), batch_size=batch, sequence_length=length)
        used = planning.Budget(**bounds).uses(found)
        data["largest"] = {
            "style": style,
            "config": config.to_diff_dict(),
            "parameters": found.parameters,
            "uses": used,
        }
        units = {"parameters": short, "compute": flops}
        shown = {n: " of ".join(map(units.get(n, size_of), pair)) for n, pair in used.items() if n != "parameters"}
        sizes = f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads"
        views.append(
            facts(
                f"The largest {style} within bounds", {"parameters": f"{found.parameters:,}", "shape": sizes, **shown}
            )
        )
    if model is not None:
        over, view = over_trained(model, tokens, served)
        data["over_training"] = asdict(over)
        views.append(view)
        points[model] = (over.parameters, over.tokens)
    if compute is not None and style is None:
        optima = {"D = 20 N": planning.twenty_tokens(compute=compute)}
        optima |= {name: law.optimum(compute) for name, law in planning.LAWS.items()}
        if fitted is not None:
            optima["your runs"] = fitted.law.optimum(compute)
        data["optima"] = {name: asdict(optimum) for name, optimum in optima.items()}
        views.append(optima_view(f"The best use of {flops(compute)}", optima))
    if not views:
        rows = planning.textbook()
        data["table"] = [asdict(row) for row in rows]
        views.append(optima_view("Twenty tokens a parameter", {short(row.parameters): row for row in rows}))
        points = {short(row.parameters): (row.parameters, row.tokens) for row in rows}
    if plot is not None:
        from hf_llmarch.study.figures import planned

        planned(plot, points=points, fitted=fitted)
    return Answer(data, Group(*views))


def optima_view(title: str, optima: "dict[str, Optimum]") -> Table:
    from hf_llmarch.study.planning import LAWS

    rows = [
        (
            name,
            short(o.parameters),
            short(o.tokens),
            flops(o.compute),
            *(f"{law.loss(o.parameters, o.tokens):.3f}" for law in LAWS.values()),
        )
        for name, o in optima.items()
    ]
    return columns(title, ("", "params", "tokens", "compute", *(f"loss, {name}" for name in LAWS)), rows)


def over_trained(model: str, tokens: str | None, served: str | None) -> "tuple[OverTraining, RenderableType]":
    """How far past its optimum a model is trained, what that costs and what it saves."""
    from hf_llmarch.study import planning
    from hf_llmarch.study.analysis import analyze
    from hf_llmarch.study.presets import number
    from hf_llmarch.study.sources import config_from

    found = analyze(config_from(model), sequence_length=1)
    # What a token passes: that is what training and serving cost.
    count = found.active_parameters
    trained = number(tokens) if tokens else planning.twenty_tokens(parameters=count).tokens
    over = planning.over_training(count, trained, served=number(served) if served else None)
    rows = {
        "parameters": f"{short(count)} active of {short(found.parameters)}",
        "training": f"{short(trained)} tokens, {flops(over.compute)}, {over.times:,.3g} times the 20 a parameter",
        "loss": f"{over.loss:.3f} nats a token, by Besiroglu et al.'s constants",
        "same loss, least compute": f"{short(over.optimum.parameters)} on {short(over.optimum.tokens)} tokens, "
        f"{flops(over.optimum.compute)}",
        "more in training": f"{flops(over.extra_compute)} ({over.compute / over.optimum.compute:.3g} times)",
        "less in serving": f"{flops(over.saved_a_token)} a token",
        "has paid after": f"{short(over.break_even)} tokens served",
    }
    if over.saved is not None:
        rows[f"over {short(over.served or 0)} tokens"] = (
            f"{'saves' if over.saved >= 0 else 'still costs'} {flops(abs(over.saved))}"
        )
    return over, facts(model, rows)


def fit_view(fitted: "Fit") -> Table:
    rows = [
        (name, f"{getattr(fitted.law, name):.4g}", f"{low:.4g} to {high:.4g}")
        for name, (low, high) in fitted.intervals.items()
    ]
    title = f"E + A / N^alpha + B / D^beta, of {len(fitted.runs)} runs, off by {fitted.residual:.2%}"
    return columns(title, ("constant", "value", "95 % of resampled fits"), rows)

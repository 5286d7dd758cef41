"""The commands: `hf-llmarch`, the same as `python -m hf_llmarch`.

A command is a function that returns an `Answer`: what `--json` prints, what a person reads, and the exit code. The
decorator adds `--json` and `--debug` and turns exceptions into one line and an exit code (`Exit`). Everything heavy is
imported inside the functions, so that `--help` does not wait for it.
"""

import contextlib
import errno
import json as json_format
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from hf_llmarch.conversion.certificate import Certificate
    from hf_llmarch.conversion.engine import Report


class Exit(IntEnum):
    """What the exit code of a command says. Scripts rely on these numbers: add, never change."""

    OK = 0
    DIFFERENT = 1
    USAGE = 2
    INPUT = 3
    NOT_EXPRESSIBLE = 4
    DESTINATION = 5
    INTERNAL = 70
    INTERRUPTED = 130


EXIT_MEANING = {
    Exit.OK: "done, and nothing differs",
    Exit.DIFFERENT: "a verification found a difference",
    Exit.USAGE: "wrong usage of the command line",
    Exit.INPUT: "the source cannot be used (not found, damaged, an unknown family, tensor or field)",
    Exit.NOT_EXPRESSIBLE: "the family that was asked for cannot express this model",
    Exit.DESTINATION: "the destination cannot be used (not empty, not writable, no space left)",
    Exit.INTERNAL: "a defect in hf_llmarch (--debug shows where)",
    Exit.INTERRUPTED: "interrupted from the keyboard",
}


@dataclass(frozen=True)
class Answer:
    """What a command found: `data` for `--json`, `view` for a terminal."""

    data: dict[str, Any]
    view: RenderableType
    code: Exit = Exit.OK


app = typer.Typer(
    name="hf-llmarch",
    help="Every architecture switch of the Transformer line in one Hugging Face model class.",
    epilog="Exit codes: " + "; ".join(f"{code.value} {meaning}" for code, meaning in EXIT_MEANING.items()),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
COMMON = (
    Parameter(
        "json",
        Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else to stdout.")],
    ),
    Parameter(
        "debug",
        Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
    ),
)


# How configs, the Hub client and a missing extra refuse, besides the conversion's own errors, which are ValueErrors.
REFUSALS = (ValueError, OSError, ImportError)


def command(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Register a command under the function's name."""

    def run(*, json: bool, debug: bool, **options: Any) -> None:
        try:
            # Libraries print here and there; stdout belongs to the answer.
            with contextlib.redirect_stdout(sys.stderr):
                answer = function(**options)
        except (typer.BadParameter, typer.Exit):
            raise
        except Exception as error:
            raise typer.Exit(report(error, json=json, debug=debug)) from error
        if json:
            print_json(answer.data)
        else:
            Console().print(answer.view)
        raise typer.Exit(answer.code)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in signature(function).parameters.values()]
    whole = Signature([*parameters, *COMMON])
    # typer reads the options from the signature, and their types from the annotations.
    vars(run).update(__signature__=whole)
    run.__annotations__ = {p.name: p.annotation for p in whole.parameters.values()}
    run.__doc__ = getdoc(function)
    app.command(function.__name__)(run)
    return function


def report(error: Exception, *, json: bool, debug: bool) -> Exit:
    """Tell what went wrong in one line on stderr, with `json` as an object on stdout as well. Returns the exit code."""
    code = exit_code(error)
    if json:
        print_json({"error": type(error).__name__, "message": str(error), "exit_code": code.value})
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    message = " ".join(str(error).split()) or type(error).__name__
    if code is Exit.INTERNAL:
        message = f"{type(error).__name__}: {message} This is a defect in hf_llmarch (--debug shows where)."
    Console(stderr=True, soft_wrap=True).print(f"[bold red]error[/] {escape(message)}", highlight=False)
    return code


def exit_code(error: Exception) -> Exit:
    """The exit code for an exception: the first row that fits."""
    from huggingface_hub.errors import StrictDataclassError

    from hf_llmarch.conversion import errors

    full = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
    rows: tuple[tuple[bool, Exit], ...] = (
        (isinstance(error, errors.NotExpressible), Exit.NOT_EXPRESSIBLE),
        (isinstance(error, errors.DestinationError), Exit.DESTINATION),
        (isinstance(error, OSError) and error.errno in full, Exit.DESTINATION),
        (isinstance(error, (*REFUSALS, StrictDataclassError)), Exit.INPUT),
    )
    return next((code for fits, code in rows if fits), Exit.INTERNAL)


def print_json(data: dict[str, Any]) -> None:
    # JSON has no NaN, which a comparison with a broken model can give: there it becomes null.
    strict = json_format.loads(json_format.dumps(data), parse_constant=lambda _: None)
    print(json_format.dumps(strict, indent=2, ensure_ascii=False))


def facts(title: str, values: dict[str, str]) -> Table:
    """A table of names and values, in the order given."""
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, escape(value))
    return table


# ---- switches


def spelling(kind: Any) -> str:
    """A field's type as a user writes its values: `mha | gqa | null` for a Literal, `int | null` for an optional."""
    if kind is NoneType:
        return "null"
    if kind is Any:
        return "any"
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) in (list, dict):
        return f"{get_origin(kind).__name__} of {spelling(get_args(kind)[-1])}"
    if get_args(kind):
        return " | ".join(map(spelling, get_args(kind)))
    return kind.__name__


def switch_rows() -> list[dict[str, Any]]:
    """One row a config field, in reading order: topic, name, type, default, needs, doc.

    `needs` is the condition without which a value other than the default is refused; None: there is none.
    """
    from hf_llmarch.model.configuration_llmarch import SWITCHES, LlmArchConfig

    fields = {field.name: field for field in LlmArchConfig.switches()}
    return [
        {
            "topic": mixin.__name__.removesuffix("Switches").lower(),
            "name": name,
            "type": spelling(fields[name].type),
            "default": fields[name].default,
            "needs": getattr(SWITCHES[name].needs, "text", None),
            "doc": LlmArchConfig.docs()[name],
        }
        # dataclasses collect their bases from the last to the first; the bases themselves stand in reading order.
        for mixin in reversed(LlmArchConfig.__bases__)
        for name in vars(mixin).get("__annotations__", {})
        if name in fields
    ]


# ---- families


def family_rows() -> list[dict[str, Any]]:
    """One row a family: name (their `model_type`), covers, architectures (their class names)."""
    from hf_llmarch.conversion import families

    known = families()
    return [
        {
            "name": name,
            "covers": " ".join((known.module(name).__doc__ or "").split()),
            "architectures": [*family.architectures.values(), *filter(None, [family.encoder])],
        }
        for name, family in known.items()
    ]


@command
def families() -> Answer:
    """The model families that can be converted, in both directions."""
    rows = family_rows()
    table = Table(box=box.SIMPLE_HEAD, caption="Each converts in and exports back, byte for byte.")
    for column in ("family", "checkpoints", "class"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row["name"], escape(row["covers"]), ", ".join(row["architectures"]))
    return Answer({"families": rows}, table)


@command
def switches(
    topic: Annotated[
        str | None, typer.Argument(help="Show one topic, or the switches whose name contains this.")
    ] = None,
) -> Answer:
    """The fields of the config: type, default, meaning, by topic."""
    every = switch_rows()
    rows = [row for row in every if topic in (None, row["topic"])]
    rows = rows or [row for row in every if str(topic) in row["name"]]
    if not rows:
        topics = ", ".join(dict.fromkeys(row["topic"] for row in every))
        raise typer.BadParameter(f"no topic or switch matches {topic!r}; the topics are {topics}.")
    tables = []
    for name in dict.fromkeys(row["topic"] for row in rows):
        table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column, width in (("switch", None), ("type", 24), ("default", None), ("meaning", None)):
            table.add_column(column, overflow="fold", width=width)
        for row in rows:
            if row["topic"] == name:
                note = f" [dim]Needs {escape(row['needs'])}.[/]" if row["needs"] else ""
                default = "null" if row["default"] is None else str(row["default"])
                table.add_row(row["name"], escape(row["type"]), escape(default), escape(row["doc"]) + note)
        tables.append(table)
    return Answer({"switches": rows}, Group(*tables))


# ---- convert, export, verify

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")]
Family = Annotated[str | None, typer.Option(help="The family's `model_type`; default: what the source says.")]
DType = Annotated[
    str | None, typer.Option(help="Cast to `float32`, `bfloat16` or `float16`; default: keep every byte.")
]
ShardSize = Annotated[str, typer.Option(help="Largest weight file, in bytes or like `5GB`.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a destination that holds a model.")]
Pickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read `pytorch_model*.bin` where there is no safetensors.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]

Adapter = Annotated[
    str | None,
    typer.Option(help="A LoRA adapter of the source, a folder or a Hub id; it goes into the destination's `adapter`."),
]


@command
def convert(
    source: Annotated[str, typer.Argument(help="A folder, a Hub id or a GGUF file.")],
    destination: Annotated[Path, typer.Argument(help="The folder to make.")],
    family: Family = None,
    dtype: DType = None,
    max_shard_size: ShardSize = "5GB",
    revision: Revision = None,
    adapter: Adapter = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the result with transformers' own class.")] = False,
    overwrite: Overwrite = False,
    allow_pickle: Pickle = False,
    quiet: Quiet = False,
) -> Answer:
    """Convert a public checkpoint into a folder that `AutoModelForCausalLM` opens."""
    from hf_llmarch.conversion import convert as run

    return written(
        run(
            source,
            destination,
            family=family,
            dtype=dtype,
            max_shard_size=max_shard_size,
            revision=revision,
            adapter=adapter,
            verify=verify,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            progress=not quiet,
        )
    )


@command
def export(
    source: Annotated[str, typer.Argument(help="A folder or Hub id of an llmarch model.")],
    destination: Annotated[Path, typer.Argument(help="The folder to make.")],
    family: Annotated[str | None, typer.Option(help="The family to write; default: the one it came from.")] = None,
    dtype: DType = None,
    max_shard_size: ShardSize = "5GB",
    revision: Revision = None,
    adapter: Adapter = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> Answer:
    """Give an llmarch model back as a checkpoint of its family, or of another one."""
    from hf_llmarch.conversion import export as run

    return written(
        run(
            source,
            destination,
            family=family,
            dtype=dtype,
            max_shard_size=max_shard_size,
            revision=revision,
            adapter=adapter,
            overwrite=overwrite,
            progress=not quiet,
        )
    )


@command
def verify(
    a: Annotated[str, typer.Argument(help="The original: a folder, a Hub id or a GGUF file.")],
    b: Annotated[str, typer.Argument(help="The converted model. The two may come in either order.")],
    new_tokens: Annotated[int, typer.Option(min=0, help="Greedy tokens to compare.")] = 32,
    allow_pickle: Pickle = False,
    quiet: Quiet = False,
) -> Answer:
    """Compare a converted model with its original: logits, greedy tokens, and the bytes of an export."""
    from hf_llmarch.conversion import verify as run

    certificate = run(a, b, new_tokens=new_tokens, allow_pickle=allow_pickle, progress=not quiet)
    return Answer(certificate.to_dict(), certificate_view(certificate), verdict(certificate))


@command
def card(
    folder: Annotated[Path, typer.Argument(help="A folder of an llmarch model.")],
    base_model: Annotated[str | None, typer.Option(help="The original's id on the Hub.")] = None,
    certificate: Annotated[Path | None, typer.Option(help="What `verify --json` printed.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a README.md that you wrote.")] = False,
) -> Answer:
    """Write the model card, README.md: metadata, architecture, source, certificate, usage, licence. `convert` does."""
    from hf_llmarch.conversion import cards
    from hf_llmarch.conversion.certificate import Certificate
    from hf_llmarch.conversion.sources.files import read_json

    proof = None if certificate is None else Certificate.from_dict(read_json(certificate))
    path = cards.write(folder, base_model=base_model, certificate=proof, overwrite=overwrite)
    data = cards.read_metadata(path)
    shown = {name: ", ".join(map(str, cards.as_list(value))) for name, value in data.items()}
    return Answer({"card": str(path), "metadata": data}, facts(str(path), shown))


def written(report: "Report") -> Answer:
    certificate = report.certificate
    views: list[RenderableType] = [report_view(report)]
    if certificate:
        views.append(certificate_view(certificate))
    return Answer(report.to_dict(), Group(*views), verdict(certificate))


def verdict(certificate: "Certificate | None") -> Exit:
    return Exit.OK if certificate is None or certificate.ok else Exit.DIFFERENT


def report_view(report: "Report") -> Table:
    peak = report.peak_rss_bytes
    return facts(
        report.destination,
        {
            "from": report.source,
            "family": report.family,
            "tensors": f"{report.tensors:,}, {decimal(report.bytes)}",
            "numbers": "unchanged" if report.byte_exact else "cast to another dtype, or dequantised",
            "left out": "; ".join(f"{name}: {reason}" for name, reason in report.dropped.items()) or "nothing",
            "time": f"{report.seconds:.1f} s, {report.megabytes_per_second:,.0f} MB/s",
            "peak memory": "unknown" if peak is None else decimal(peak),
        },
    )


def certificate_view(certificate: "Certificate") -> Group:
    c = certificate
    table = facts("Certificate", {"original": c.original, "converted": f"{c.ours} ({c.family})", **c.facts})
    lines = [f"[red]✗[/] {escape(problem)}" for problem in c.problems] or ["[green]✓[/] the same model"]
    return Group(table, *(Text.from_markup(line) for line in lines))


def main() -> None:
    """Entry point of the console script."""
    app()

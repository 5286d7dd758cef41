"""`hf-llmarch surgery` and `hf-llmarch operations`: another architecture for a trained model, with a receipt."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from .app import Answer, Overwrite, ShardSize, command, facts

if TYPE_CHECKING:
    from hf_llmarch.surgery import Receipt


@command
def surgery(
    source: Annotated[str, typer.Argument(help="A folder or Hub id of an llmarch model.")],
    destination: Annotated[Path, typer.Argument(help="The folder to make.")],
    steps: Annotated[
        list[str] | None, typer.Argument(help="Operations in order, each like `to_gqa num_key_value_heads=1`, quoted.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="A YAML list of operations, before those named.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text to measure on; default: a built-in one.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Load both models and compare their logits.")] = False,
    max_shard_size: ShardSize = "5GB",
    overwrite: Overwrite = False,
) -> Answer:
    """Change a trained model's architecture, exactly where that is possible; `operations` lists what there is."""
    from hf_llmarch.surgery import SurgeryError, operate_on_folder, read_recipe

    chain = [*(read_recipe(recipe) if recipe else ()), *map(parse, steps or ())]
    if not chain:
        raise SurgeryError("Nothing to do: name operations, or a --recipe. `hf-llmarch operations` lists them.")
    receipt = operate_on_folder(
        source,
        destination,
        chain,
        text=None if text is None else text.read_text(encoding="utf-8"),
        measure=measure or text is not None,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )
    return Answer(receipt.to_dict(), receipt_view(str(destination), receipt))


def parse(step: str) -> dict[str, dict[str, Any]]:
    """`name option=value …`, the values as in YAML.

    Raises:
        SurgeryError: for a part that is no `option=value`.
    """
    import yaml

    from hf_llmarch.surgery import SurgeryError

    name, *given = step.split()
    if odd := [part for part in given if "=" not in part]:
        raise SurgeryError(f"{step!r}: {odd[0]!r} is no option=value.")
    return {name: {key: yaml.safe_load(value) for key, _, value in (part.partition("=") for part in given)}}


def receipt_view(destination: str, receipt: "Receipt") -> RenderableType:
    table = Table(title=escape(destination), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in ("operation", "exact", "why", "to be trained"):
        table.add_column(column, overflow="fold")
    for step in receipt.steps:
        given = " ".join(f"{name}={value}" for name, value in step.options.items() if value is not None)
        table.add_row(
            escape(f"{step.operation} {given}"), "yes" if step.exact else "no", escape(step.why), step.retrain
        )
    before, after, moved = receipt.before, receipt.after, receipt.difference
    numbers = {
        "parameters": f"{before.parameters:,} -> {after.parameters:,}",
        f"cache of {before.length:,} tokens": f"{decimal(before.cache_bytes)} -> {decimal(after.cache_bytes)}",
        "operations for the last token": f"{before.flops / 1e6:,.1f} M -> {after.flops / 1e6:,.1f} M",
    }
    if moved is None:
        numbers["logits"] = "not measured"
    else:
        numbers["logits"] = f"{moved.largest:.3g} apart at most, {moved.mean:.3g} on average, of {moved.spread:.3g}"
        numbers["sample"] = f"{moved.tokens:,} tokens, {receipt.sample}"
    if moved is not None and moved.kl is not None and moved.top1 is not None:
        numbers["predictions"] = f"KL {moved.kl:.3g} nats, {moved.top1:.1%} with the same likeliest token"
    return Group(table, facts("Receipt", numbers))


@command
def operations(
    name: Annotated[
        str | None, typer.Argument(help="Show one operation with its options, algebra and sources.")
    ] = None,
) -> Answer:
    """The operations of `surgery`: what each does, and its options."""
    import inspect

    from hf_llmarch.surgery import OPERATIONS

    if name is not None and name not in OPERATIONS:
        raise typer.BadParameter(f"there is no operation {name!r}; there are {', '.join(OPERATIONS)}.")
    rows = [
        {
            "name": found.name,
            "options": {
                p.name: str(p).partition(": ")[2]
                for p in list(inspect.signature(found.function).parameters.values())[1:]
            },
            "doc": inspect.getdoc(found.function) or "",
        }
        for found in OPERATIONS.values()
        if name in (None, found.name)
    ]
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("operation", "options", "what it does"):
        table.add_column(column, overflow="fold")
    for row in rows:
        options = "\n".join(f"{option}: {kind}" for option, kind in row["options"].items())  # type: ignore[attr-defined]
        shown = str(row["doc"]) if name else str(row["doc"]).split("\n\n")[0]
        table.add_row(str(row["name"]), escape(options), escape(shown))
    return Answer({"operations": rows}, table)

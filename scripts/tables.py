"""Write the generated tables of docs/: `python scripts/tables.py`; with --check, only tell whether they are current."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from hf_llmarch.cli.app import EXIT_MEANING, family_rows, switch_rows

DOCS = Path(__file__).resolve().parent.parent / "docs"


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def switches() -> str:
    topics: dict[str, list[tuple[str, ...]]] = {}
    for row in switch_rows():
        default = "null" if row["default"] is None else str(row["default"]).lower()
        needs = f" Needs {row['needs']}." if row["needs"] else ""
        topics.setdefault(row["topic"], []).append(
            (f"`{row['name']}`", f"`{row['type']}`", f"`{default}`", row["doc"] + needs)
        )
    header = ("field", "type", "default", "meaning")
    return "\n\n".join(f"**{topic.capitalize()}**\n\n{table(header, rows)}" for topic, rows in topics.items())


def families() -> str:
    rows = [(f"`{row['name']}`", row["covers"], ", ".join(row["architectures"])) for row in family_rows()]
    return table(("`model_type`", "checkpoints", "class"), rows)


def exit_codes() -> str:
    return table(("code", "meaning"), [(str(code.value), meaning) for code, meaning in EXIT_MEANING.items()])


# The page -> the name of its table, and what makes it.
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "switches.md": ("switches", switches),
    "families.md": ("families", families),
    "commands.md": ("exit-codes", exit_codes),
}


def rewritten(page: str, text: str) -> str:
    """A page's text with its table made anew.

    Raises:
        ValueError: the markers of the table are missing.
    """
    name, make = TABLES[page]
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if not (text.count(begin) == text.count(end) == 1):
        raise ValueError(f"docs/{page} needs {begin} and {end} once each.")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"


def main() -> None:
    for page in TABLES:
        old = (DOCS / page).read_text(encoding="utf-8")
        new = rewritten(page, old)
        if "--check" not in sys.argv:
            (DOCS / page).write_text(new, encoding="utf-8")
        elif new != old:
            sys.exit(f"docs/{page}: the table is out of date. Run: python scripts/tables.py")


if __name__ == "__main__":
    main()

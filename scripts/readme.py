"""Write the README's generated tables: `python scripts/readme.py`; with --check, only tell whether they are current."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from hf_llmarch.cli.app import EXIT_MEANING, family_rows, switch_rows

README = Path(__file__).resolve().parent.parent / "README.md"


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


TABLES: dict[str, Callable[[], str]] = {"switches": switches, "families": families, "exit-codes": exit_codes}


def rewritten(text: str) -> str:
    """The README with its tables made anew.

    Raises:
        ValueError: when the markers of a table are missing.
    """
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if not (text.count(begin) == text.count(end) == 1):
            raise ValueError(f"README.md needs {begin} and {end} once each.")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    old = README.read_text(encoding="utf-8")
    new = rewritten(old)
    if "--check" in sys.argv:
        sys.exit("README.md: the tables are out of date. Run: python scripts/readme.py" if new != old else 0)
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()

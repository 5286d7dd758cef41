"""Write docs/ecosystem.md from the reports in docs/ecosystem/: `python scripts/ecosystem.py`; with --check, only tell
whether the page is current and has a row for each line that tests/ecosystem shows."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ecosystem.md"
REPORTS = ROOT / "docs" / "ecosystem"
TESTS = ROOT / "tests" / "ecosystem"

INTRODUCTION = """# In the ecosystem

Each line is a test of `tests/ecosystem` that runs the tool itself on models of ours. `make ecosystem` runs them all, in
environments of their own where tools disagree, and writes this page.

Not run, for want of a GPU: SGLang, whose packages need CUDA; DeepSpeed, beyond the reading of its config.
"""


def shown() -> Iterator[tuple[str, str]]:
    """The topic and the line of each `@pytest.mark.shows` in the tests, and of each `pytestmark`."""
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "shows":
                topic, line = (ast.literal_eval(argument) for argument in node.args[:2])
                yield topic, line


def reported() -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of all reports."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(REPORTS.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        for row in report["rows"]:
            rows[row["topic"], row["line"]] = {**row, "python": report["python"]}
    return rows


def page(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    parts = [INTRODUCTION]
    for topic in sorted({topic for topic, _ in rows}):
        lines = ["| what | with | status |", "| --- | --- | --- |"]
        for (_, line), row in sorted((key, row) for key, row in rows.items() if key[0] == topic):
            tools = ", ".join(f"{tool} {version}" for tool, version in row["tools"].items())
            lines.append(f"| {line} | {tools} | {row['status']} ({row['tests']}) |")
        parts.append(f"## {topic}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> None:
    rows = reported()
    text = page(rows)
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    problems = [f"not run: {topic}, {line}" for topic, line in sorted(set(shown()) - set(rows))]
    problems += [f"no test any more: {topic}, {line}" for topic, line in sorted(set(rows) - set(shown()))]
    if "--check" in sys.argv and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text):
        problems.append("the page is out of date")
    if problems:
        sys.exit("docs/ecosystem.md: " + "; ".join(problems) + ". Run: make ecosystem")


if __name__ == "__main__":
    main()

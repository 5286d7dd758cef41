"""Which part of the package may import which, and that no two modules import each other, function bodies included."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Room -> the rooms that its modules may import. `conversion` lies beside the package and is installed in it.
MAY_IMPORT: dict[str, set[str]] = {
    "model": {"model"},
    "conversion": {"model", "conversion"},
    "study": {"model", "conversion", "integrations", "study"},
    "surgery": {"model", "conversion", "integrations", "study", "surgery"},
    "integrations": {"model", "conversion", "integrations"},
    "cli": {"model", "conversion", "study", "surgery", "integrations", "cli"},
}


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of ours."""
    found = {}
    for folder, package in ((ROOT / "hf_llmarch", "hf_llmarch"), (ROOT / "conversion", "hf_llmarch.conversion")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


MODULES = modules()


def for_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import below a node that is run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not for_types_alone(child):
            yield from statements(child)


def imported(name: str) -> set[str]:
    """The modules of ours that a module imports."""
    path, found = MODULES[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for statement in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
        parts = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
        source = ".".join([*parts, *([statement.module] if statement.module else [])])
        # `from package import module` imports the module; any other name is one of the package's own.
        found |= {f"{source}.{a.name}" if f"{source}.{a.name}" in MODULES else source for a in statement.names}
    return (found & set(MODULES)) - {name}


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(name: str) -> None:
    own = [module for module in MODULES if room(module) == name]
    assert own
    crossings = {f"{m} -> {other}" for m in own for other in imported(m) if room(other) not in MAY_IMPORT[name]}
    # The package itself is lazy: it stands for its public names, which integrations hand on.
    assert {c for c in crossings if not c.endswith("-> hf_llmarch")} == set()
    if name == "model":
        assert crossings == set()


def test_no_circles() -> None:
    graph = {name: imported(name) - {"hf_llmarch"} for name in MODULES if name != "hf_llmarch"}
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(graph)


def test_a_circle_would_be_seen() -> None:
    """The graph has the edges that are known to be there, those in function bodies among them."""
    assert "hf_llmarch.model.modeling_llmarch" in imported("hf_llmarch.conversion.plans")
    assert "hf_llmarch.conversion.families" in imported("hf_llmarch.conversion.plans")
    assert "hf_llmarch.model.configuration_llmarch" in imported("hf_llmarch.model.modeling_llmarch")

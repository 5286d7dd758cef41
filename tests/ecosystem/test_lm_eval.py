"""lm-evaluation-harness on a converted checkpoint, and on the original: the same results."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.conversion import convert
from tests.tiny import redraw, text

EXAMPLE = Path(__file__).parents[2] / "examples" / "evaluate.py"
VOCABULARY = 99
# One of each kind of request: likelihoods of given ends, of whole texts, and generation.
TASKS: dict[str, dict[str, Any]] = {
    "ends": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{start}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "whole": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{start}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "go_on": {
        "output_type": "generate_until",
        "doc_to_text": "{{start}}",
        "doc_to_target": "{{continued}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 5, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def words(seed: int, length: int) -> str:
    return " ".join(f"w{i}" for i in text(batch=1, length=length, seed=seed)[0].tolist())


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A Llama with a tokenizer of words, its conversion, and tasks on disk that ask about the Llama's own words."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=34,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=1,
        bos_token_id=2,
    )
    native = redraw(LlamaForCausalLM(config)).eval()
    # The end is no word of the texts: the harness cuts an answer where it reads the end's own spelling.
    spelling = {f"w{i}": i for i in range(VOCABULARY) if i != 1} | {"<end>": 1}
    vocabulary = Tokenizer(WordLevel(spelling, unk_token="w0"))
    vocabulary.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, unk_token="w0", eos_token="<end>", pad_token="<end>", bos_token="w2"
    )
    native.save_pretrained(tmp_path / "native")
    tokenizer.save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "ours", progress=False)

    documents = []
    for seed in range(12):
        start = words(seed, 20)
        ids = tokenizer(start, return_tensors="pt").input_ids
        reply = native.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        # Of every second text the real continuation, so that half of the answers are right.
        continued = tokenizer.decode(reply, skip_special_tokens=True) if seed % 2 else "something else"
        documents.append(
            {
                "start": start,
                "ends": [words(100 + seed + i, 4) for i in range(3)],
                "right": seed % 3,
                "continued": continued,
            }
        )
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "tasks" / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    for name, task in TASKS.items():
        shared = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (tmp_path / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump({**shared, "test_split": "test", **task}))
    return {name: tmp_path / name for name in ("native", "ours", "tasks")}


def numbers(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task} {metric}": value
        for task, values in results.items()
        for metric, value in values.items()
        if isinstance(value, float)
    }


@pytest.mark.shows(
    "Evaluation", "lm-evaluation-harness: choices, perplexity and generation, equal to the native model's", "lm_eval"
)
def test_results_equal_those_of_the_native_model(folders: dict[str, Path]) -> None:
    found = {}
    for name in ("native", "ours"):
        harness = HFLM(pretrained=str(folders[name]), device="cpu", dtype="float32", batch_size=3)
        assert isinstance(harness.model, LlmArchForCausalLM) == (name == "ours")
        manager = TaskManager(include_path=str(folders["tasks"]), include_defaults=False)
        run = simple_evaluate(harness, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=False)
        found[name] = numbers(run["results"])
    assert found["ours"] == pytest.approx(found["native"], rel=1e-5)
    assert {metric.split(",")[0] for metric in found["ours"]} >= {
        "ends acc",
        "ends acc_norm",
        "whole word_perplexity",
        "whole bits_per_byte",
        "go_on exact_match",
    }
    assert found["ours"]["go_on exact_match,none"] == 0.5
    assert found["ours"]["whole word_perplexity,none"] > 1


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evaluate_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.shows("Evaluation", "examples/evaluate.py: a checkpoint before and after conversion", "lm_eval")
def test_the_example(folders: dict[str, Path], tmp_path: Path) -> None:
    module = example()
    tasks = module.read_tasks(folders["tasks"])
    before, after = module.compare(str(folders["native"]), tmp_path / "again", tasks, None)
    assert before.keys() == after.keys() == set(TASKS)
    for task in TASKS:
        assert after[task] == pytest.approx(before[task], rel=1e-5)
    assert "word_perplexity" in before["whole"]
    assert {task["task"] for task in module.read_tasks(EXAMPLE.with_name("tasks"))} == {"knowledge", "prose"}
    with pytest.raises(FileNotFoundError, match="no task"):
        module.read_tasks(tmp_path / "nothing")

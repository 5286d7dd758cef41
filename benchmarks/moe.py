"""Mixture of experts: time against transformers' own classes with the same weights.

    python benchmarks/moe.py --output benchmarks/results/moe.json
    python benchmarks/moe.py --tiny --repeats 2      # does it run?
    python benchmarks/moe.py --profile               # where does ours spend its time?

Models take turns, so that a machine that slows down slows all of them; a time is the median of its turns, a ratio is
native / ours: above 1, ours is faster. The weights are the same, and the logits are compared before anything is timed.
The limit is native / the products of matrices alone, one after another with the weights as they lie: what would be left
if all else, attention too, took no time. Products in batches or of packed weights can be faster than these.
"""

import argparse
import ctypes
import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_llmarch.conversion import load
from hf_llmarch.model.linear import linear

SIZES: dict[str, Any] = {
    **{"vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 2048},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
}
SHAPES: Mapping[str, dict[str, Any]] = {
    # Few wide experts, and many narrow ones.
    "mixtral": {
        **SIZES,
        **{"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024},
    },
    "fine": {
        **SIZES,
        **{"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 256},
        **{"norm_topk_prob": True, "intermediate_size": 1024},
    },
}
NEW_TOKENS = 64
TINY = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Run = Callable[[], None]


@dataclass(frozen=True)
class Measurement:
    """Medians in milliseconds of one case, by contender."""

    shape: str
    dtype: str
    case: str
    milliseconds: dict[str, float]

    def ratio(self, contender: str) -> float:
        """How many times the speed of the native class with its default experts; nan for one that did not take part."""
        return self.milliseconds["native"] / self.milliseconds.get(contender, float("nan"))


def pair(config: dict[str, Any], dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """The native model and ours, with the same weights.

    Raises:
        AssertionError: their logits differ.
    """
    torch.manual_seed(0)
    settings = dict(config)
    native = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).eval()
    with tempfile.TemporaryDirectory() as folder:
        native.save_pretrained(folder)
        ours = load(folder).eval()
    ids = torch.randint(config["vocab_size"], (2, 24))
    with torch.no_grad():
        expected, got = native(ids).logits, ours(ids).logits
    spread = (expected.max() - expected.min()).item()
    assert (got - expected).abs().max().item() <= 1e-5 * spread
    return {"native": native.to(dtype), "ours": ours.to(dtype)}


def prefill(model: PreTrainedModel, length: int) -> Run:
    """A text of `length` tokens, and the logits of its last one."""
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def run() -> None:
        model(ids, use_cache=True, logits_to_keep=1)

    model.eval()
    return run


def decode(model: PreTrainedModel, length: int) -> Run:
    """`generate()` of NEW_TOKENS tokens behind a text of `length`, all that it does included."""
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    model.eval()

    def run() -> None:
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert out.shape[1] == length + NEW_TOKENS

    return run


def training(model: PreTrainedModel, length: int) -> Run:
    """Forward, backward and AdamW on two rows."""
    ids = torch.randint(model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    model.train()

    def run() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


class Products(TorchDispatchMode):
    """Keeps the factors of every product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.factors.append((args[0], args[1].t()))
        return func(*args, **(kwargs or {}))


def products(model: PreTrainedModel, run: Run) -> Run:
    """The products of matrices of a run without gradients, attention's aside, and nothing else."""
    chosen = model.config._experts_implementation
    model.set_experts_implementation("eager")  # an operator an expert, which can be seen
    with Products() as seen:
        run()
    model.set_experts_implementation(chosen)

    @torch.no_grad()
    def replay() -> None:
        for x, weight in seen.factors:
            linear(x, weight)

    return replay


# Case -> what it runs, on how many tokens, and of how many parts a run is made, whose time is told.
CASES: Mapping[str, tuple[Callable[[PreTrainedModel, int], Run], int, int]] = {
    "prefill 512": (prefill, 512, 1),
    "decode 1": (decode, 64, NEW_TOKENS),
    "training 2 x 256": (training, 256, 1),
}


def keep_memory() -> None:
    """Have glibc keep what is freed. Giving it back and asking for it anew takes time, in a virtual machine more in one
    turn than in another."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**30)


def milliseconds(run: Run, parts: int) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3 / parts


def take_turns(runs: Mapping[str, Run], repeats: int, parts: int) -> dict[str, float]:
    """The median time of each, measured in turns after one that warms up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            spent = milliseconds(run, parts)
            if turn:
                taken[name].append(spent)
    return {name: statistics.median(values) for name, values in taken.items()}


def profile(model: PreTrainedModel, case: str, rows: int = 12) -> str:
    """The operators that take most of the time of a case themselves."""
    make, length, _ = CASES[case]
    run = make(model, length)
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    return found.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=40)


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=9, help="turns of each")
    parser.add_argument("--tiny", action="store_true", help="models of no interest, to see that it runs")
    parser.add_argument("--profile", action="store_true", help="print operators instead of ratios")
    parser.add_argument("--output", type=Path, help="write the measurements as JSON")
    options = parser.parse_args()

    keep_memory()
    found: list[Measurement] = []
    print(f"{'shape':8} {'dtype':5} {'case':17} {'native ms':>10} {'ours ms':>10} {'x native':>9} {'limit':>6}")
    for shape in options.shapes:
        for dtype in options.dtypes:
            config = {**SHAPES[shape], **(TINY if options.tiny else {})}
            for case in options.cases:
                models = pair(config, DTYPES[dtype])
                if options.profile:
                    print(f"{shape} {dtype} {case}\n{profile(models['ours'], case)}")
                else:
                    make, length, parts = CASES[case]
                    runs = {name: make(model, length) for name, model in models.items()}
                    if not models["native"].training:
                        runs["products"] = products(models["native"], runs["native"])
                    result = Measurement(shape, dtype, case, take_turns(runs, options.repeats, parts))
                    found.append(result)
                    spent = " ".join(f"{result.milliseconds[name]:10.2f}" for name in models)
                    ratio, limit = result.ratio("ours"), result.ratio("products")
                    print(f"{shape:8} {dtype:5} {case:17} {spent} {ratio:9.2f} {limit:6.2f}", flush=True)
                    del runs
                del models
                gc.collect()  # a training step leaves gradients and optimiser states behind
    if options.output is not None:
        measurements = [{**asdict(result), "ratio": round(result.ratio("ours"), 3)} for result in found]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(), "repeats": options.repeats, "measurements": measurements}
        options.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Ablate a switch: train small models from scratch that differ in one field of the config, and compare them.

    python examples/ablation.py --switch position_encoding --values rope alibi learned none
    python examples/ablation.py --switch norm_placement --values pre post sandwich --plot norms.png
    python examples/ablation.py --switch num_key_value_heads --values 4 2 1 --text book.txt --set attention_type=null

Values are written as in config.json. Every model sees the same characters in the same order and begins from the same
seed. Without a text, they learn sums such as `7+58=65`, one under the other, where a model has to look back and carry.
The plot needs matplotlib (`pip install 'hf-llmarch[plot]'`).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hf_llmarch import LlmArchConfig, LlmArchForCausalLM

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
# Of the text, what is kept for the measure.
HELD_OUT = 0.1


@dataclass(frozen=True)
class Corpus:
    """A text as numbers of its characters, `(length,)` each."""

    training: torch.Tensor
    held_out: torch.Tensor
    characters: str

    @classmethod
    def of(cls, text: str) -> Corpus:
        characters = "".join(sorted(set(text)))
        ids = torch.tensor([characters.index(c) for c in text])
        cut = int(len(ids) * (1 - HELD_OUT))
        return cls(ids[:cut], ids[cut:], characters)


@dataclass
class Run:
    """One model and how it went.

    Attributes:
        losses: nats a character on the text held out, at each of `steps`.
        speed: tokens a second in training.
    """

    value: Any
    parameters: int
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    speed: float = 0.0


def sums(lines: int = 40_000, seed: int = 0) -> str:
    """Lines such as `7+58=65`."""
    draw = random.Random(seed)
    pairs = ((draw.randrange(100), draw.randrange(100)) for _ in range(lines))
    return "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)


def batch(ids: torch.Tensor, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`(rows, length)`, pieces that begin anywhere in the text.

    Raises:
        ValueError: the text is shorter than one piece.
    """
    if len(ids) < length:
        raise ValueError(f"A part of the text has {len(ids)} characters and a piece {length}: give a longer text.")
    starts = torch.randint(len(ids) - length + 1, (rows, 1), generator=generator)
    return ids[starts + torch.arange(length)]


@torch.no_grad()
def held_out_loss(model: LlmArchForCausalLM, pieces: torch.Tensor) -> float:
    model.eval()
    loss = model(pieces, labels=pieces, use_cache=False).loss.item()
    model.train()
    return loss


def train(
    value: Any, config: LlmArchConfig, corpus: Corpus, *, steps: int, rows: int, length: int, rate: float, seed: int
) -> Run:
    """Train one model; warm-up over a tenth of the steps, then a cosine to a tenth of the rate."""
    torch.manual_seed(seed)
    model = LlmArchForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * max(0, step - warm) / max(1, steps - warm))
        ),
    )
    draws = torch.Generator().manual_seed(seed)
    measured = batch(corpus.held_out, 4 * rows, length, torch.Generator().manual_seed(seed))
    run, seconds = Run(value, model.num_parameters()), 0.0
    for step in range(steps + 1):
        if step % max(1, steps // 10) == 0 or step == steps:
            run.steps.append(step)
            run.losses.append(held_out_loss(model, measured))
        if step == steps:
            break
        pieces = batch(corpus.training, rows, length, draws)
        started = time.perf_counter()
        model(pieces, labels=pieces, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - started
        schedule.step()
    run.speed = steps * rows * length / seconds
    return run


def written(value: str) -> Any:
    """A value as config.json writes it; what is no JSON is a word."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def table(switch: str, runs: Sequence[Run]) -> Table:
    best = min(run.losses[-1] for run in runs)
    view = Table(switch, "parameters", "loss", "behind", "perplexity", "tokens/s")
    for run in runs:
        loss = run.losses[-1]
        view.add_row(
            str(run.value),
            f"{run.parameters:,}",
            f"{loss:.4f}",
            f"{loss - best:.4f}",
            f"{math.exp(loss):.3f}",
            f"{run.speed:,.0f}",
        )
    return view


def plot(switch: str, runs: Sequence[Run], path: Path) -> None:
    """Write the loss curves as an image; its suffix says which kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for run in runs:
        axes.plot(run.steps, run.losses, marker=".", label=str(run.value))
    axes.set(xlabel="optimiser step", ylabel="held-out loss, nats a character", title=switch)
    axes.legend()
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> list[Run]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switch", default="position_encoding", help="a field of the config (`hf-llmarch switches`)")
    parser.add_argument("--values", nargs="+", default=["rope", "alibi", "none"], help="what to give it, a model each")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="other fields, of every model")
    parser.add_argument("--text", type=Path, help="a text file to learn; default: sums")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=16, help="pieces of text in a batch")
    parser.add_argument("--length", type=int, default=64, help="characters in a piece")
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write the curves to this image")
    options = parser.parse_args(arguments)

    corpus = Corpus.of(options.text.read_text(encoding="utf-8") if options.text else sums())
    shared = {**BASE, "vocab_size": len(corpus.characters)}
    shared |= {name: written(value) for name, _, value in (item.partition("=") for item in options.set)}
    # All of them before the first is trained: a value that is refused is refused at once.
    configs = {value: LlmArchConfig(**{**shared, options.switch: written(value)}) for value in options.values}
    runs = []
    for value, config in configs.items():
        settings = {name: getattr(options, name) for name in ("steps", "rows", "length", "rate", "seed")}
        runs.append(train(written(value), config, corpus, **settings))
        print(f"{options.switch}={value}: loss {runs[-1].losses[0]:.3f} -> {runs[-1].losses[-1]:.3f}")
    Console().print(table(options.switch, runs))
    if options.plot is not None:
        plot(options.switch, runs, options.plot)
        print(f"written: {options.plot}")
    return runs


if __name__ == "__main__":
    main()

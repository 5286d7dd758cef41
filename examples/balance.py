"""Balancing experts from a collapsed start: with an auxiliary loss, with a bias that is not trained, and with neither.

    python examples/balance.py --plot balance.png

A tiny model begins with two of eight experts getting every token. Training alone does not spread them: an expert
that is never picked gets no gradient. What is plotted is the entropy of the load, 1 when all experts get the same.
The plot needs matplotlib (`pip install 'hf-llmarch[plot]'`).
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_llmarch import LlmArchConfig, LlmArchForCausalLM
from hf_llmarch.study.balance import LoadCounter

SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "neither": {},
    "auxiliary loss": {"router_aux_loss_coef": 0.02},
    "loss-free bias": {"router_selection_bias": True, "router_bias_update_rate": 0.01},
}
WORDS = 32


def collapsed_model(seed: int = 0, **switches: Any) -> LlmArchForCausalLM:
    """A model of two sparse layers whose tokens all go to experts 0 and 1."""
    torch.manual_seed(seed)
    config = LlmArchConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        max_position_embeddings=64,
        **switches,
    )
    model = LlmArchForCausalLM(config)
    with torch.no_grad():
        # All words share a direction, which the routers answer with the first two experts.
        direction = torch.nn.functional.normalize(torch.randn(config.hidden_size), dim=0)
        model.model.embed_tokens.weight.normal_(std=0.05).add_(direction)
        for block in model.model.layers:
            block.mlp.gate.weight.normal_(std=0.02)
            block.mlp.gate.weight[:2] += direction
    return model


def texts(steps: int, batch: int = 8, length: int = 32, seed: int = 1) -> torch.Tensor:
    """`(steps, batch, length)` of a language in which each word has four that may follow it."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.randint(WORDS, (WORDS, 4), generator=generator)
    words = [torch.randint(WORDS, (steps, batch), generator=generator)]
    for _ in range(length - 1):
        which = torch.randint(4, (steps, batch), generator=generator)
        words.append(following[words[-1], which])
    return torch.stack(words, dim=-1)


def train(model: LlmArchForCausalLM, steps: int = 200, every: int = 10) -> tuple[list[float], list[float]]:
    """Train, and give the entropy of the load (mean over layers) and the loss, over each `every` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    counter = LoadCounter(model)
    counter.attach(training_only=True)
    entropies, losses, recent = [], [], []
    model.train()
    for step, ids in enumerate(texts(steps), start=1):
        output = model(ids, labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recent.append(output.loss.item())
        if step % every == 0:
            loads = counter.take()
            entropies.append(sum(load.entropy for load in loads) / len(loads))
            losses.append(sum(recent) / len(recent))
            recent.clear()
    counter.detach()
    return entropies, losses


def plot(curves: Mapping[str, Sequence[float]], every: int, path: Path) -> None:
    """Write the curves as an image; its suffix says which kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, entropies in curves.items():
        axes.plot([every * (i + 1) for i in range(len(entropies))], entropies, label=name)
    axes.set(xlabel="optimiser step", ylabel="entropy of the load / log E", ylim=(0, 1.02))
    axes.set_title("Eight experts, from two that get everything")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two points")
    parser.add_argument("--plot", type=Path, help="write the curves to this image")
    options = parser.parse_args()
    curves: dict[str, list[float]] = {}
    for name, switches in SCHEMES.items():
        curves[name], losses = train(collapsed_model(**switches), options.steps, options.every)
        print(f"{name:>15}: entropy {curves[name][0]:.2f} -> {curves[name][-1]:.2f}, loss {losses[-1]:.2f}")
    if options.plot is not None:
        plot(curves, options.every, options.plot)
        print(f"written: {options.plot}")


if __name__ == "__main__":
    main()

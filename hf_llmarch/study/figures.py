"""Figures of what was found, legible in black and white: patterns and markers, not colours alone, tell lines apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .analysis import Analysis, analyze
from .planning import LAWS, Fit, ScalingLaw, twenty_tokens

LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--", "++", "**", "||")
INKS = ("black", "0.35", "0.55")
GREYS = ("0.25", "0.75", "0.5", "0.9", "0.35", "0.65", "0.45", "0.8", "0.6", "0.95")


def panels(count: int) -> tuple[Any, Sequence[Any]]:
    """A figure and its axes, side by side.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f"A figure needs matplotlib: pip install 'hf-llmarch[plot]' ({error}).") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(5.2 * count, 4), layout="constrained")
    return figure, [axes] if count == 1 else list(axes)


def save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def style(index: int) -> dict[str, Any]:
    return {
        "linestyle": LINES[index % 4],
        "marker": MARKERS[index % 7],
        "markersize": 4,
        "color": ("black", "0.35", "0.55")[index % 3],
    }


def inspected(found: Mapping[str, Analysis], path: Path) -> None:
    """Parameters by part, and the cache over the length, of each model."""
    caches = {name: a for name, a in found.items() if a.decode_flops}
    figure, axes = panels(2 if caches else 1)
    parts = list(dict.fromkeys(part for a in found.values() for part in a.parts))
    left = [0.0] * len(found)
    for index, part in enumerate(parts):
        shares = [100 * a.parts.get(part, 0) / a.parameters for a in found.values()]
        look = {"color": GREYS[index % 10], "hatch": HATCHES[index % 10], "edgecolor": "black", "linewidth": 0.5}
        axes[0].barh(list(found), shares, left=left, label=part, **look)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes[0].invert_yaxis()
    axes[0].set_xlabel("share of the parameters (%)")
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=8)
    for index, (name, a) in enumerate(caches.items()):
        longest = a.config.max_position_embeddings
        lengths = sorted({max(1, longest >> n) for n in range(0, 12)})
        sizes = [
            analyze(
                a.config,
                batch_size=a.batch_size,
                sequence_length=n,
                source_length=a.source_length or None,
                dtype=a.dtype,
            )
            for n in lengths
        ]
        axes[1].plot(lengths, [s.kv_cache_bytes / 1e9 for s in sizes], label=name, **style(index))
    if caches:
        axes[1].set(xscale="log", yscale="log", xlabel="tokens", ylabel="key/value cache (GB)")
        axes[1].grid(alpha=0.3)
        axes[1].legend(fontsize=8)
    save(figure, path)


def planned(path: Path, *, points: Mapping[str, tuple[float, float]], fitted: Fit | None = None) -> None:
    """Parameters and tokens over the compute, by each law; `points` are models at (parameters, tokens)."""
    figure, axes = panels(1 if fitted is None else 2)
    laws: dict[str, ScalingLaw] = {**LAWS, **({} if fitted is None else {"fitted": fitted.law})}
    budgets = [10 ** (17 + n / 4) for n in range(41)]
    for index, (name, law) in enumerate(laws.items()):
        optima = [law.optimum(c) for c in budgets]
        look = {**style(index), "markevery": 8}
        axes[0].plot(budgets, [o.parameters for o in optima], label=f"{name}", **look)
    rule = [twenty_tokens(compute=c).parameters for c in budgets]
    axes[0].plot(budgets, rule, label="20 tokens a parameter", markevery=(4, 8), **style(3))
    for index, (name, (parameters, tokens)) in enumerate(points.items()):
        axes[0].plot(
            [6 * parameters * tokens],
            [parameters],
            linestyle="",
            marker=MARKERS[(index + 4) % 7],
            color="black",
            label=name,
        )
    axes[0].set(xscale="log", yscale="log", xlabel="training compute (FLOP)", ylabel="parameters of least loss")
    axes[0].grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    if fitted is not None:
        seen = [run.loss for run in fitted.runs]
        said = [fitted.law.loss(run.parameters, run.tokens) for run in fitted.runs]
        low, high = min(*seen, *said), max(*seen, *said)
        axes[1].plot([low, high], [low, high], color="0.6", linestyle="--", label="equal")
        axes[1].plot(said, seen, linestyle="", marker="o", markersize=4, color="0.25", label="run")
        axes[1].set(xlabel="loss by the fitted law (nats a token)", ylabel="loss of the run (nats a token)")
        axes[1].grid(alpha=0.3)
        axes[1].legend(fontsize=8)
    save(figure, path)

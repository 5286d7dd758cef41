"""How large a model to train on how much text: scaling laws, over-training, a size for a budget, a fit of own runs.

Letters: `N` parameters, `D` tokens of training, `C` FLOPs of training, about 6 N D (arXiv 2001.08361 section 2.1).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from . import presets
from .analysis import Analysis, analyze

# "For compute-optimal training", arXiv 2203.15556 table 3: about twenty tokens a parameter at every size.
TOKENS_A_PARAMETER = 20
FLOPS_A_TOKEN = 6  # of training, a parameter; two of them forward
# The sizes that textbooks print.
TEXTBOOK = (1e9, 7e9, 13e9, 70e9)


@dataclass(frozen=True)
class ScalingLaw:
    """The loss of a model of N parameters after D tokens: E + A / N^alpha + B / D^beta, in nats a token.

    Attributes:
        E: of a perfect model with endless text.
        source: where the constants stand.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def optimum(self, compute: float) -> Reached:
        """The model of least loss for C = 6 N D (arXiv 2203.15556 equation 4)."""
        exponent = self.alpha + self.beta
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / exponent)
        parameters = scale * (compute / FLOPS_A_TOKEN) ** (self.beta / exponent)
        tokens = compute / FLOPS_A_TOKEN / parameters
        return Reached(parameters, tokens, compute, self.loss(parameters, tokens))

    def cheapest(self, loss: float) -> Reached:
        """The optimum that reaches a loss.

        Raises:
            ValueError: for a loss that no model reaches.
        """
        if loss <= self.E:
            raise ValueError(f"A loss of {loss:.4g} is not above E = {self.E:.4g}, which no model reaches.")
        low, high = 1e3, 1e60
        while high / low > 1 + 1e-12:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.optimum(middle).loss > loss else (low, middle)
        return self.optimum(high)


@dataclass(frozen=True)
class Optimum:
    """A model and its training."""

    parameters: float
    tokens: float
    compute: float


@dataclass(frozen=True)
class Reached(Optimum):
    """An optimum and the loss that it ends with, by a law."""

    loss: float


# Approach 3's constants as the paper prints them, which their rounding biases; and a fit of the same law to the runs as
# read off that paper's plots, carried on until it converged.
LAWS = {
    "hoffmann": ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022, arXiv 2203.15556, equation 10"),
    "besiroglu": ScalingLaw(
        1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024, arXiv 2404.10102, table 1"
    ),
}


def twenty_tokens(*, parameters: float | None = None, compute: float | None = None) -> Optimum:
    """Chinchilla's rule of thumb, D = 20 N, for a size or for a budget: N and D both go with the root of C.

    Raises:
        ValueError: unless one of the two is given.
    """
    if (parameters is None) == (compute is None):
        raise ValueError("Give either parameters or compute.")
    if parameters is None:
        parameters = math.sqrt(float(compute or 0) / (FLOPS_A_TOKEN * TOKENS_A_PARAMETER))
    tokens = TOKENS_A_PARAMETER * parameters
    return Optimum(parameters, tokens, FLOPS_A_TOKEN * parameters * tokens)


def textbook(sizes: Iterable[float] = TEXTBOOK) -> list[Optimum]:
    """The rule of thumb, size by size."""
    return [twenty_tokens(parameters=size) for size in sizes]


@dataclass(frozen=True)
class OverTraining:
    """A model trained on more text than is best for its compute, so that it is cheap to serve.

    Attributes:
        times: its tokens, in multiples of twenty a parameter.
        optimum: the model that reaches the same loss with the least compute.
        extra_compute: FLOPs of training beyond that one's.
        saved_a_token: FLOPs that serving a token saves against it, 2 N being those of a token.
        break_even: tokens served from which on it has paid.
        saved: FLOPs saved in all, over the tokens served; negative before it has paid. None: not asked.
    """

    parameters: float
    tokens: float
    compute: float
    loss: float
    times: float
    optimum: Reached
    extra_compute: float
    saved_a_token: float
    break_even: float
    served: float | None
    saved: float | None


def over_training(
    parameters: float, tokens: float, *, served: float | None = None, law: ScalingLaw = LAWS["besiroglu"]
) -> OverTraining:
    """What a model of N parameters trained on D tokens costs and saves."""
    compute, loss = FLOPS_A_TOKEN * parameters * tokens, law.loss(parameters, tokens)
    best = law.cheapest(loss)
    extra, saving = compute - best.compute, 2 * (best.parameters - parameters)
    return OverTraining(
        parameters,
        tokens,
        compute,
        loss,
        tokens / (TOKENS_A_PARAMETER * parameters),
        best,
        extra,
        saving,
        extra / saving if saving > 0 else math.inf,
        served,
        None if served is None else served * saving - extra,
    )


# -- a size for a budget -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """Bounds on a model; None: no bound.

    Attributes:
        compute: FLOPs of training on twenty tokens a parameter.
        memory: bytes of serving, weights and cache.
        training_memory: bytes of a training step, with checkpointing.
        cache: bytes of the cache at batch and length.
    """

    parameters: float | None = None
    compute: float | None = None
    memory: float | None = None
    training_memory: float | None = None
    cache: float | None = None

    def uses(self, found: Analysis) -> dict[str, tuple[float, float]]:
        """What a model uses and may use, of each bound."""
        used = {
            "parameters": found.parameters,
            "compute": twenty_tokens(parameters=found.active_parameters).compute,
            "memory": found.serving.total,
            "training_memory": found.training.total_checkpointed,
            "cache": found.kv_cache_bytes,
        }
        return {name: (used[name], bound) for name, bound in vars(self).items() if bound is not None}

    def holds(self, found: Analysis) -> bool:
        return all(used <= bound for used, bound in self.uses(found).values())


def largest(
    style: str, budget: Budget, *, batch_size: int = 1, sequence_length: int | None = None, dtype: Any = None
) -> tuple[LlmArchConfig, Analysis]:
    """The largest model in the style of a preset that keeps within a budget.

    Raises:
        ValueError: for a budget without bounds, and where no size of that style meets it.
    """
    if not any(vars(budget).values()):
        raise ValueError("The budget has no bound: give parameters, compute, memory, training_memory or cache.")

    def at(size: float) -> tuple[LlmArchConfig, Analysis] | None:
        try:
            config = presets.scaled(style, parameters=size)
        except ValueError:
            return None  # too small a size for that vocabulary
        found = analyze(config, batch_size=batch_size, sequence_length=sequence_length, dtype=dtype)
        return (config, found) if budget.holds(found) else None

    own = analyze(presets.get(style), batch_size=batch_size, sequence_length=sequence_length, dtype=dtype)
    # Where everything grew in proportion to the parameters, the tightest bound would say the size.
    size = own.parameters * min(bound / used for used, bound in budget.uses(own).values())
    size = min(size, budget.parameters or math.inf)
    best: tuple[LlmArchConfig, Analysis] | None = None
    low, high = size / 16, size * 4
    for _ in range(8):
        middle = math.sqrt(low * high)
        found = at(middle)
        if found is not None and (best is None or found[1].parameters > best[1].parameters):
            best = found
        low, high = (low, middle) if found is None else (middle, high)
    if best is None:
        raise ValueError(f"No size of {style!r} is within this budget: take another style, or a smaller vocabulary.")
    return best


# -- a fit of one's own runs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A finished training: parameters, tokens and the loss at its end."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Fit:
    """A scaling law of one's own.

    Attributes:
        intervals: by constant, the bounds between which 95 % of fits to resampled runs lie.
        residual: root mean square of ln(loss) against the law.
    """

    law: ScalingLaw
    intervals: dict[str, tuple[float, float]]
    residual: float
    runs: list[Run]


COLUMNS = {
    "parameters": ("parameters", "params", "n"),
    "tokens": ("tokens", "d"),
    "loss": ("loss", "l"),
}


def read_runs(path: Path) -> list[Run]:
    """Runs of a .csv with a header or a .json list of objects, with columns parameters (or N), tokens (or D), loss.

    Raises:
        ValueError: for a missing column or a value that is no positive number, naming the row.
    """
    text = path.read_text("utf-8")
    rows: Sequence[dict[str, Any]] = (
        json.loads(text) if path.suffix == ".json" else list(csv.DictReader(text.splitlines()))
    )
    runs = []
    for number, row in enumerate(rows, 1):
        given = {str(name).strip().lower(): value for name, value in row.items()}
        values = {}
        for field, spellings in COLUMNS.items():
            name = next((name for name in spellings if given.get(name) not in (None, "")), None)
            if name is None:
                raise ValueError(f"{path}, run {number}: no {field}; call the column one of {', '.join(spellings)}.")
            try:
                values[field] = float(given[name])
            except (TypeError, ValueError):
                values[field] = math.nan
            if not (math.isfinite(values[field]) and values[field] > 0):
                raise ValueError(f"{path}, run {number}: {name}={given[name]!r} is no positive number.")
        runs.append(Run(**values))
    return runs


NAMES = ("E", "A", "B", "alpha", "beta")


def fit(runs: Sequence[Run], *, resamples: int = 200, seed: int = 0) -> Fit:
    """Fit a law to runs as arXiv 2203.15556 section 3.3 does: the Huber loss of ln(loss), the best of a grid of starts;
    and how certain its constants are, by fits to runs drawn anew (arXiv 2404.10102 section 3).

    Raises:
        ImportError: without scipy (`hf-llmarch[study]`).
        ValueError: for fewer runs than six, or of one size or one length alone, which cannot tell five constants apart.
    """
    try:
        import numpy as np
        from scipy.optimize import least_squares
        from scipy.special import logsumexp
    except ImportError as error:
        raise ImportError(f"A fit needs scipy: pip install 'hf-llmarch[study]' ({error}).") from error
    for what, count in (
        ("sizes", {run.parameters for run in runs}),
        ("numbers of tokens", {run.tokens for run in runs}),
    ):
        if len(runs) < 6 or len(count) < 3:
            raise ValueError(
                f"{len(runs)} runs of {len(count)} different {what}: five constants need six runs, of three sizes and "
                "three numbers of tokens."
            )
    size, text, loss = (np.log([getattr(run, name) for run in runs]) for name in ("parameters", "tokens", "loss"))

    def residuals(x: Any, chosen: Any) -> Any:
        e, a, b, alpha, beta = x
        terms = np.stack([np.full(len(chosen), e), a - alpha * size[chosen], b - beta * text[chosen]])
        return logsumexp(terms, axis=0) - loss[chosen]

    def best(starts: Iterable[Sequence[float]], chosen: Any) -> Any:
        """The best fit by squares of any start, and from there by Huber's loss, which far from it has little slope."""
        settings: dict[str, Any] = {"args": (chosen,), "x_scale": "jac", "max_nfev": 2000}
        squares = min((least_squares(residuals, start, **settings) for start in starts), key=lambda found: found.cost)
        return least_squares(residuals, squares.x, loss="huber", f_scale=1e-3, **settings).x

    everything = np.arange(len(runs))
    grid = [
        (e, a, b, p, q)
        for e in (-1.0, 0.5)
        for a in (2.0, 8.0)
        for b in (2.0, 8.0)
        for p in (0.2, 0.6)
        for q in (0.2, 0.6)
    ]
    found = best(grid, everything)
    generator = np.random.default_rng(seed)
    drawn = [best([found], generator.integers(len(runs), size=len(runs))) for _ in range(resamples)]

    def constants(x: Any) -> list[float]:
        return [*map(float, np.exp(x[:3])), float(x[3]), float(x[4])]

    spread = np.percentile([constants(x) for x in drawn], [2.5, 97.5], axis=0) if drawn else np.full((2, 5), np.nan)
    law = ScalingLaw(**dict(zip(NAMES, constants(found), strict=True)), source=f"fitted to {len(runs)} runs")
    intervals = {name: (float(low), float(high)) for name, low, high in zip(NAMES, *spread, strict=True)}
    off = residuals(found, everything)
    return Fit(law, intervals, float(np.sqrt(np.mean(off**2))), list(runs))

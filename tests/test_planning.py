"""Plans of training against the papers' own figures, a search by brute force, and laws that are known."""

import json
import math
import random
from pathlib import Path

import pytest

from hf_llmarch.study import planning, presets
from hf_llmarch.study.analysis import analyze
from hf_llmarch.study.planning import LAWS, Budget, Run, ScalingLaw


def test_the_textbook_s_table() -> None:
    """1B on 20B tokens, 7B on 140B, 13B on 260B, 70B on 1.4T: arXiv 2203.15556, whose 70B took 5.76e23 FLOPs."""
    rows = planning.textbook()
    assert [(row.parameters, row.tokens) for row in rows] == [
        (1e9, 2e10),
        (7e9, 1.4e11),
        (13e9, 2.6e11),
        (70e9, 1.4e12),
    ]
    assert rows[-1].compute == pytest.approx(5.76e23, rel=0.03)
    again = planning.twenty_tokens(compute=rows[1].compute)
    assert (again.parameters, again.tokens) == (pytest.approx(7e9), pytest.approx(1.4e11))


@pytest.mark.parametrize("name", LAWS)
def test_the_optimum_is_one(name: str) -> None:
    law, compute = LAWS[name], 1e22
    best = law.optimum(compute)
    assert 6 * best.parameters * best.tokens == pytest.approx(compute)
    tried = [10 ** (7 + n / 500) for n in range(3000)]
    searched = min(tried, key=lambda size: law.loss(size, compute / 6 / size))
    assert best.parameters == pytest.approx(searched, rel=0.01)
    assert best.loss == law.loss(best.parameters, best.tokens)
    found = law.cheapest(best.loss)
    assert found.compute == pytest.approx(compute, rel=1e-6)


def test_laws_say_what_their_papers_say() -> None:
    # arXiv 2203.15556, table 2, approach 3: N goes with C^0.46, before the constants were rounded.
    grow = LAWS["hoffmann"].optimum(1e24).parameters / LAWS["hoffmann"].optimum(1e22).parameters
    assert math.log(grow, 100) == pytest.approx(0.46, abs=0.01)
    # arXiv 2404.10102: the corrected fit agrees with the other approaches, so with about twenty tokens a parameter.
    best = LAWS["besiroglu"].optimum(5.76e23)
    assert best.tokens / best.parameters == pytest.approx(20, rel=0.15)
    with pytest.raises(ValueError, match="no model reaches"):
        LAWS["besiroglu"].cheapest(1.8)


def test_llama_3_8b_is_trained_far_past_its_optimum() -> None:
    count = analyze(presets.get("llama-3-8b"), sequence_length=2).parameters
    found = planning.over_training(count, 15e12, served=1e14)
    assert found.times == pytest.approx(15e12 / (20 * 8.03e9), rel=1e-3)
    assert found.compute == pytest.approx(6 * 8.03e9 * 15e12, rel=1e-3)
    assert found.optimum.loss == pytest.approx(found.loss, abs=1e-9)
    assert found.optimum.parameters > count
    # Where it has paid, both have cost the same, training and serving together.
    mine = found.compute + 2 * count * found.break_even
    theirs = found.optimum.compute + 2 * found.optimum.parameters * found.break_even
    assert mine == pytest.approx(theirs)
    assert found.saved == pytest.approx((1e14 - found.break_even) * found.saved_a_token)


def test_the_largest_within_a_budget() -> None:
    budget = Budget(memory=1e9, cache=2e8)
    config, found = planning.largest("llama-3-8b", budget, batch_size=4, sequence_length=4096, dtype="bfloat16")
    again = analyze(config, batch_size=4, sequence_length=4096, dtype="bfloat16")
    assert again.serving.total == found.serving.total <= 1e9
    assert again.kv_cache_bytes <= 2e8
    assert again.serving.total > 0.8e9 or again.kv_cache_bytes > 1.6e8
    with pytest.raises(ValueError, match="no bound"):
        planning.largest("llama-3-8b", Budget())
    with pytest.raises(ValueError, match="No size of 'llama-3-8b'"):
        planning.largest("llama-3-8b", Budget(parameters=1e6))


def runs_of(law: ScalingLaw, noise: float) -> list[Run]:
    generator = random.Random(0)
    sizes, texts = (3e7, 1e8, 3e8, 1e9, 3e9), (1e9, 3e9, 1e10, 3e10, 1e11)
    return [Run(n, d, law.loss(n, d) * math.exp(generator.gauss(0, noise))) for n in sizes for d in texts]


def test_a_fit_finds_the_law_that_runs_follow() -> None:
    law = LAWS["besiroglu"]
    exact = planning.fit(runs_of(law, 0.0), resamples=0).law
    for name in planning.NAMES:
        assert getattr(exact, name) == pytest.approx(getattr(law, name), rel=1e-3), name
    noisy = planning.fit(runs_of(law, 0.002), resamples=60)
    assert noisy.residual == pytest.approx(0.002, rel=0.5)
    for name, (low, high) in noisy.intervals.items():
        assert low < getattr(law, name) < high, name
    assert planning.fit(runs_of(law, 0.002), resamples=60) == noisy


def test_runs_are_read_and_refused_by_name(tmp_path: Path) -> None:
    table, listed = tmp_path / "runs.csv", tmp_path / "runs.json"
    table.write_text("N,D,loss\n1e8,2e9,3.1\n2e8,2e9,3.0\n")
    listed.write_text(json.dumps([{"params": 1e8, "tokens": 2e9, "loss": 3.1}, {"N": 2e8, "D": 2e9, "L": 3.0}]))
    assert planning.read_runs(table) == planning.read_runs(listed) == [Run(1e8, 2e9, 3.1), Run(2e8, 2e9, 3.0)]
    with pytest.raises(ValueError, match="need six runs"):
        planning.fit(planning.read_runs(table))
    table.write_text("N,D,loss\n1e8,2e9,nan\n")
    with pytest.raises(ValueError, match="run 1: loss='nan' is no positive number"):
        planning.read_runs(table)
    table.write_text("N,loss\n1e8,3\n")
    with pytest.raises(ValueError, match="no tokens"):
        planning.read_runs(table)

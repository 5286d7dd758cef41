"""Routers, capacity and experts against loops over tokens in double precision, written here from the papers."""

import copy
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import nn
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.integrations import processors
from hf_llmarch.model.compat import EXPERTS
from hf_llmarch.model.configuration_llmarch import ExpertsLayout, Overflow, RouterGroupScore, RouterScore, RouterType
from hf_llmarch.model.experts import (
    EXPERT_LAYOUTS,
    SPARSE_FEED_FORWARDS,
    LinearExperts,
    PackedExperts,
    SparseFeedForward,
)
from hf_llmarch.model.linear import Linear, Products
from hf_llmarch.model.routing import GROUP_SCORES, OVERFLOWS, ROUTERS, SCORES, slots
from tiny import assert_close, differs, redraw, text, tiny_config, tiny_model

# An odd number of experts, as wide as nothing else; rows of 80 bytes, which grouped_mm can take.
SPARSE: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 20}
SIX: dict[str, Any] = {"num_experts": 6}

ROUTING: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax as it is": {"norm_topk_prob": False},
    "sigmoid": {"router_score": "sigmoid"},
    "sigmoid as it is": {"router_score": "sigmoid", "norm_topk_prob": False},
    "scaled": {"routed_scaling_factor": 2.5},
    "logit bias": {"router_bias": True},
    "one expert": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "all experts": {"num_experts_per_tok": 5, "norm_topk_prob": False},
    "selection bias": {"router_selection_bias": True},
    "groups by max": {**SIX, "n_group": 3, "topk_group": 2, "norm_topk_prob": False},
    "groups by max, bias": {**SIX, "n_group": 3, "topk_group": 1, "router_selection_bias": True},
    "groups by top2": {
        **{**SIX, "n_group": 2, "topk_group": 1, "router_group_score": "top2", "router_score": "sigmoid"},
        **{"router_selection_bias": True, "routed_scaling_factor": 2.5},
    },
}
each_routing = pytest.mark.parametrize("switches", ROUTING.values(), ids=ROUTING)


def layer(**switches: Any) -> SparseFeedForward:
    """A sparse feed-forward by itself, every number in it drawn."""
    config = tiny_config(**{**SPARSE, **switches})
    config._experts_implementation = "eager"
    module = redraw(SPARSE_FEED_FORWARDS[ROUTERS[config.router_type].pickers](config, config)).eval()
    if module.gate.e_score_correction_bias is not None:
        module.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, module.gate.experts).flip(0))
    return module


def tokens(batch: int = 2, length: int = 7, seed: int = 5) -> torch.Tensor:
    return torch.randn(batch, length, 48, generator=torch.Generator().manual_seed(seed))


# -- the loops -------------------------------------------------------------------------------------------------------


class Loop:
    """A sparse feed-forward, token by token and expert by expert, in double precision."""

    def __init__(self, module: SparseFeedForward, **switches: Any):
        self.config = tiny_config(**{**SPARSE, **switches})
        names = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.p = {name: p.detach().double().requires_grad_() for name, p in names.items()}
        self.experts, self.picks = self.config.num_experts, self.config.num_experts_per_tok

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.p["gate.weight"] @ x
        if self.config.router_bias:
            logits = logits + self.p["gate.bias"]
        if self.config.router_score == "sigmoid":
            return 1 / (1 + torch.exp(-logits))
        return torch.exp(logits) / torch.exp(logits).sum()

    def ranking(self, scores: torch.Tensor) -> dict[int, float]:
        """What the allowed experts are picked by: DeepSeek-V3's bias and groups, arXiv 2412.19437 section 2.1.2."""
        by = {e: scores[e].item() for e in range(self.experts)}
        if self.config.router_selection_bias:
            by = {e: s + self.p["gate.e_score_correction_bias"][e].item() for e, s in by.items()}
        if self.config.n_group is None:
            return by
        size = self.experts // self.config.n_group
        members = {g: list(range(g * size, (g + 1) * size)) for g in range(self.config.n_group)}
        counted = {"max": 1, "top2": 2}[self.config.router_group_score]
        worth = {g: sum(sorted((by[e] for e in m), reverse=True)[:counted]) for g, m in members.items()}
        kept = sorted(worth, key=lambda g: -worth[g])[: self.config.topk_group]
        return {e: by[e] for g in kept for e in members[g]}

    def weights(self, scores: torch.Tensor, picks: list[int]) -> dict[int, torch.Tensor]:
        total = sum(scores[e] for e in picks) if self.config.norm_topk_prob else 1.0
        return {e: scores[e] / total * self.config.routed_scaling_factor for e in picks}

    def best(self, scores: torch.Tensor) -> list[int]:
        ranking = self.ranking(scores)
        return sorted(ranking, key=lambda e: -ranking[e])[: self.picks]

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.p["experts.gate_up_proj"][e] @ x).chunk(2)
        return self.p["experts.down_proj"][e] @ (gate / (1 + torch.exp(-gate)) * up)

    def mixed(self, x: torch.Tensor, weights: dict[int, torch.Tensor]) -> torch.Tensor:
        return sum((w * self.expert(e, x) for e, w in weights.items()), torch.zeros(48, dtype=torch.float64))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, T, C)`, every token to its best experts."""
        flat = x.double().flatten(0, 1)
        scores = [self.scores(token) for token in flat]
        out = [self.mixed(token, self.weights(s, self.best(s))) for token, s in zip(flat, scores, strict=True)]
        return torch.stack(out).view(x.shape)

    def room(self, real: int) -> int:
        """Tokens an expert takes of a row, from the factor as a person writes it."""
        return math.ceil(Fraction(str(self.config.capacity_factor)) * real * self.picks / self.experts)

    def within_capacity(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.row(*row) for row in zip(x.double(), real.tolist(), strict=True)])

    def row(self, x: torch.Tensor, real: list[bool]) -> torch.Tensor:
        scores = [self.scores(token) for token in x]
        there = [t for t in range(len(x)) if real[t]]
        place = {"drop": self.dropped, "next_best": self.next_best, "expert_choice": self.expert_choice}
        kind = "expert_choice" if self.config.router_type == "expert_choice" else self.config.overflow
        weights = place[kind](scores, there)
        return torch.stack([self.mixed(token, weights.get(t, {})) for t, token in enumerate(x)])

    def dropped(self, scores: list[torch.Tensor], there: list[int]) -> dict[int, dict[int, torch.Tensor]]:
        """First picks before second ones, earlier tokens before later; what is lost keeps its share."""
        free = dict.fromkeys(range(self.experts), self.room(len(there)))
        kept: dict[int, dict[int, torch.Tensor]] = {t: {} for t in there}
        for k in range(self.picks):
            for t in there:
                e = self.best(scores[t])[k]
                if free[e] > 0:
                    free[e] -= 1
                    kept[t][e] = self.weights(scores[t], self.best(scores[t]))[e]
        return kept

    def next_best(self, scores: list[torch.Tensor], there: list[int]) -> dict[int, dict[int, torch.Tensor]]:
        """Everyone asks for their best expert, then for their second one, until they have enough."""
        free = dict.fromkeys(range(self.experts), self.room(len(there)))
        got: dict[int, list[int]] = {t: [] for t in there}
        order = {t: sorted((by := self.ranking(scores[t])), key=lambda e: -by[e]) for t in there}
        for rank in range(max(len(o) for o in order.values())):
            for t in there:
                e = order[t][rank]
                if len(got[t]) < self.picks and free[e] > 0:
                    free[e] -= 1
                    got[t].append(e)
        return {t: self.weights(scores[t], picks) for t, picks in got.items() if picks}

    def expert_choice(self, scores: list[torch.Tensor], there: list[int]) -> dict[int, dict[int, torch.Tensor]]:
        """Each expert takes the tokens that score it highest, arXiv 2202.09368; its weight is the score."""
        taken: dict[int, dict[int, torch.Tensor]] = {t: {} for t in there}
        for e in range(self.experts):
            for t in sorted(there, key=lambda t: -scores[t][e].item())[: self.room(len(there))]:
                taken[t][e] = scores[t][e] * self.config.routed_scaling_factor
        return taken


def test_tables_are_the_config_s_literals() -> None:
    for table, literal in [
        *((ROUTERS, RouterType), (SCORES, RouterScore), (GROUP_SCORES, RouterGroupScore)),
        *((OVERFLOWS, Overflow), (EXPERT_LAYOUTS, ExpertsLayout)),
    ]:
        assert set(table) == set(get_args(literal))


# -- routers ---------------------------------------------------------------------------------------------------------


@each_routing
@pytest.mark.parametrize("shape", [(2, 7), (1, 1), (5, 1)], ids=["batch", "one token", "one token a row"])
def test_router_and_experts_against_a_loop(switches: dict[str, Any], shape: tuple[int, int]) -> None:
    module, x = layer(**switches), tokens(*shape)
    assert_close(module(x), Loop(module, **switches)(x), "double")


@each_routing
def test_gradients_against_a_loop(switches: dict[str, Any]) -> None:
    module, x = layer(**switches), tokens().requires_grad_()
    loop, exact = Loop(module, **switches), x.detach().double().requires_grad_()
    seen = torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
    (module(x) * seen).sum().backward()
    (loop(exact) * seen).sum().backward()
    assert_close(x.grad, exact.grad, "gradient")
    for name, parameter in module.named_parameters():
        expected = loop.p[name].grad
        # The bias that picks is no weight: it gets no gradient, and the loop's picks are plain numbers.
        assert_close(parameter.grad, expected, "gradient")
    assert not isinstance(module.gate.e_score_correction_bias, nn.Parameter)


@each_routing
def test_all_tokens_to_one_expert(switches: dict[str, Any]) -> None:
    module, x = layer(**switches), tokens().abs()
    with torch.no_grad():
        module.gate.weight[2] = module.gate.weight.abs().max()
    _, _, indices = module.gate(x.flatten(0, 1))
    assert (indices == 2).any(-1).all()
    assert_close(module(x), Loop(module, **switches)(x), "double")


@each_routing
def test_ties(switches: dict[str, Any]) -> None:
    """Which of equal experts is picked is open; that they are the best, distinct, and weighed by score is not."""
    module, x = layer(**switches), tokens()
    with torch.no_grad():
        module.gate.weight[1:] = module.gate.weight[1]
        for bias in (module.gate.bias, module.gate.e_score_correction_bias):
            if bias is not None:
                bias.fill_(0.1)
    _, weights, indices = module.gate(x.flatten(0, 1))
    loop = Loop(module, **switches)
    out = []
    for token, w, picks in zip(x.double().flatten(0, 1), weights, indices.tolist(), strict=True):
        scores = loop.scores(token)
        best = sorted(loop.ranking(scores).values(), reverse=True)[: loop.picks]
        assert len(set(picks)) == loop.picks
        picked = scores + module.gate.e_score_correction_bias if loop.config.router_selection_bias else scores
        if loop.config.n_group is None:
            torch.testing.assert_close(picked[picks], torch.tensor(best, dtype=torch.float64), atol=1e-6, rtol=0)
        expected = loop.weights(scores, picks)
        torch.testing.assert_close(w.double(), torch.stack([expected[e] for e in picks]), atol=1e-6, rtol=0)
        out.append(loop.mixed(token, expected))
    assert_close(module(x), torch.stack(out).view(x.shape), "double")


def test_equal_scores_of_all_experts_give_equal_weights() -> None:
    module = layer()
    _, weights, indices = module.gate(torch.zeros(3, 48))
    assert torch.equal(weights, torch.full((3, 2), 0.5))
    assert all(len(set(picks)) == 2 for picks in indices.tolist())


def test_softmax_of_the_picked_logits_is_the_renormalised_softmax() -> None:
    """Softmax before top-k, then renormalised, or after top-k: one number (Mixtral says the one, gpt-oss the other)."""
    logits, weights, indices = layer().gate(tokens().flatten(0, 1))
    assert_close(weights, logits.gather(-1, indices).softmax(-1), "double")


def test_the_selection_bias_picks_and_does_not_weigh() -> None:
    module, plain = layer(router_selection_bias=True), layer()
    x = tokens().flatten(0, 1)
    module.gate.e_score_correction_bias.zero_()
    assert torch.equal(module.gate(x)[1], plain.gate(x)[1])
    module.gate.e_score_correction_bias[3] = 9.0
    logits, weights, indices = module.gate(x)
    assert (indices[:, 0] == 3).all()
    picked = logits.softmax(-1).gather(-1, indices)
    assert_close(weights, picked / picked.sum(-1, keepdim=True), "double")


@pytest.mark.parametrize("jitter", [0.01, 0.1, 0.4])
def test_sparsemixer_is_transformers_phimoe_in_evaluation(jitter: float) -> None:
    module = layer(router_type="sparsemixer", router_jitter_noise=jitter, norm_topk_prob=False)
    logits, weights, indices = module.gate(tokens(4, 16).flatten(0, 1))
    expected_weights, expected_indices = sparsemixer(logits, jitter_eps=jitter, training=False)
    assert torch.equal(indices, expected_indices)
    assert_close(weights, expected_weights, "native")


@pytest.mark.parametrize("picks", [1, 2, 3])
def test_sparsemixer_against_a_loop(picks: int) -> None:
    """arXiv 2409.12136 section 2: the best of those left, weighed against those within a relative distance of it."""
    jitter = 0.2
    switches: dict[str, Any] = {
        "router_type": "sparsemixer",
        "router_jitter_noise": jitter,
        "norm_topk_prob": False,
        "num_experts_per_tok": picks,
    }
    module, x = layer(**switches), tokens()
    loop = Loop(module, **switches)
    out = []
    for token in x.double().flatten(0, 1):
        logits = [v.item() for v in loop.p["gate.weight"] @ token]
        left, weights = set(range(loop.experts)), {}
        for _ in range(picks):
            best = max(left, key=lambda e: logits[e])
            near = [e for e in left if (logits[best] - logits[e]) / max(abs(logits[e]), logits[best]) <= 2 * jitter]
            weights[best] = torch.tensor(math.exp(logits[best]) / sum(math.exp(logits[e]) for e in near))
            left.remove(best)
        out.append(loop.mixed(token, weights))
    assert_close(module(x), torch.stack(out).view(x.shape), "double")


def test_shared_experts_with_and_without_a_gate() -> None:
    x = tokens()
    for switches in ({"num_shared_experts": 2}, {"shared_expert_intermediate_size": 14, "shared_expert_gate": True}):
        module = layer(**switches)
        p = {name: value.double() for name, value in module.shared_experts.named_parameters()}
        assert p["down_proj.weight"].shape == (48, 40 if "num_shared_experts" in switches else 14)
        gate = x.double() @ p["gate_proj.weight"].T
        shared = (gate * torch.sigmoid(gate) * (x.double() @ p["up_proj.weight"].T)) @ p["down_proj.weight"].T
        if module.shared_expert_gate is not None:
            shared = shared * torch.sigmoid(x.double() @ module.shared_expert_gate.weight.double().T)
        assert_close(module(x), Loop(module, **switches)(x) + shared, "double")


def test_jitter_acts_in_training_alone_and_on_the_router_alone() -> None:
    module, still = layer(router_jitter_noise=0.5), layer()
    x = tokens().flatten(0, 1)
    assert torch.equal(module.gate(x)[0], still.gate(x)[0])
    module.train()
    torch.manual_seed(0)
    logits, weights, indices = module.gate(x)
    assert differs(logits, still.gate(x)[0])
    torch.manual_seed(0)
    assert torch.equal(module(x[None])[0], module.experts(x, indices, weights))


# -- expert choice ---------------------------------------------------------------------------------------------------

CHOICE: dict[str, Any] = {"router_type": "expert_choice", "use_cache": False}
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]]).bool()


@pytest.mark.parametrize("switches", [{}, {"router_score": "sigmoid"}, {"routed_scaling_factor": 1.7}], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.5, 2.0, 9.0])
def test_expert_choice_against_a_loop(factor: float, switches: dict[str, Any]) -> None:
    switches = {**CHOICE, "capacity_factor": factor, **switches}
    module, x = layer(**switches), tokens(3)
    loop = Loop(module, **switches)
    assert_close(module(x, REAL), loop.within_capacity(x, REAL), "double")
    assert_close(module(x), loop.within_capacity(x, torch.ones_like(REAL)), "double")
    assert_close(module(x[:1, :1]), loop.within_capacity(x[:1, :1], torch.ones(1, 1).bool()), "double")


def test_expert_choice_without_a_factor_spreads_the_average() -> None:
    module, x = layer(**CHOICE), tokens(3)
    loop = Loop(module, **CHOICE, capacity_factor=1.0)
    assert_close(module(x), loop.within_capacity(x, torch.ones_like(REAL)), "double")


def test_expert_choice_takes_the_earlier_of_equal_tokens() -> None:
    module, x = layer(**CHOICE), tokens(1, 1).expand(1, 10, 48)
    out = module(x)[0]
    assert (out[:4] == out[0]).all()  # 10 tokens x 2 / 5 experts
    assert out[0].abs().max() > 0
    assert (out[4:] == 0).all()


def test_expert_choice_of_nothing_is_nothing() -> None:
    assert (layer(**CHOICE)(tokens(3), torch.zeros_like(REAL)) == 0).all()


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_expert_choice_cannot_generate() -> None:
    with pytest.raises((ValueError, StrictDataclassClassValidationError), match="later tokens of the row"):
        tiny_config(**SPARSE, router_type="expert_choice")
    model = tiny_model(**SPARSE, **CHOICE)
    with pytest.raises(ValueError, match="cannot generate"):
        model.generate(text()[:, :3], max_new_tokens=2)


def test_expert_choice_of_a_causal_model_warns_of_the_future(caplog: pytest.LogCaptureFixture) -> None:
    from transformers.utils import logging

    logging.get_logger("transformers").warning_once.cache_clear()
    logging.enable_propagation()
    try:
        LlmArchForCausalLM(tiny_config(**SPARSE, **CHOICE))
    finally:
        logging.disable_propagation()
    assert "later ones" in caplog.text
    model = tiny_model(**SPARSE, **CHOICE).train()
    ids = text()
    assert model(ids, labels=ids).loss.isfinite()


# -- capacity --------------------------------------------------------------------------------------------------------

TIGHT = [
    pytest.param({"capacity_factor": factor, "overflow": overflow, **switches}, id=f"{overflow}-{factor}-{name}")
    for overflow in ("drop", "next_best")
    for factor in (0.3, 1.0, 1.2, 4.0)
    for name, switches in {
        "softmax": {},
        "as it is": {"norm_topk_prob": False, "routed_scaling_factor": 1.7},
        "top 3 by bias": {"num_experts_per_tok": 3, "router_selection_bias": True, "router_score": "sigmoid"},
        "groups": {**SIX, "n_group": 3, "topk_group": 2},
    }.items()
]


@pytest.mark.parametrize("switches", TIGHT)
def test_capacity_against_a_loop(switches: dict[str, Any]) -> None:
    module, x = layer(**switches), tokens(3)
    loop = Loop(module, **switches)
    assert_close(module(x, REAL), loop.within_capacity(x, REAL), "double")
    assert_close(module(x), loop.within_capacity(x, torch.ones_like(REAL)), "double")


@pytest.mark.parametrize("overflow", get_args(Overflow))
def test_capacity_when_all_want_one_expert(overflow: str) -> None:
    switches = {"capacity_factor": 1.0, "overflow": overflow}
    module, x = layer(**switches), tokens(3).abs()
    with torch.no_grad():
        module.gate.weight[2] = module.gate.weight.abs().max()
    loop = Loop(module, **switches)
    assert_close(module(x, REAL), loop.within_capacity(x, REAL), "double")


def test_wide_capacity_changes_nothing() -> None:
    x = tokens()
    for overflow in get_args(Overflow):
        assert_close(layer(capacity_factor=5.0, overflow=overflow)(x), layer()(x), "double")


@pytest.mark.parametrize("switches", [*TIGHT[::5], pytest.param({**CHOICE, "capacity_factor": 0.7}, id="choice")])
def test_batch_mates_and_padding_never_change_a_row(switches: dict[str, Any]) -> None:
    module, x = layer(**switches), tokens(3)
    together = module(x, REAL)
    for row in range(3):
        kept = REAL[row]
        alone = module(x[row : row + 1])[0] if kept.all() else module(x[row : row + 1, kept])[0]
        assert_close(together[row, kept], alone, "padding")
        # Nor does what stands in the padding.
        noise = torch.where(REAL[..., None], x, tokens(3, seed=77) * 9)
        assert_close(module(noise, REAL)[REAL], together[REAL], "padding")


def test_what_found_no_room_gets_exactly_the_residual() -> None:
    model = tiny_model(**SPARSE, capacity_factor=0.2)
    block = model.model.layers[0]
    x = tokens(2, 12)
    fed = block.mlp(block.mlp_norm.pre(x), None)
    lost = (fed == 0).all(-1)
    # ceil(12 x 2 / 5 x 0.2) = 1 token an expert and row: at most 5 of the 12 tokens pass an expert.
    assert lost.sum(-1).min() >= 7
    assert not lost.all()
    assert torch.equal(block.mlp_norm.join(x, fed)[lost], x[lost])


def test_padding_gets_nothing_from_the_experts_of_a_bounded_layer() -> None:
    for switches in ({"capacity_factor": 4.0}, {"capacity_factor": 4.0, "overflow": "next_best"}, CHOICE):
        out = layer(**switches)(tokens(3), REAL)
        assert (out[~REAL] == 0).all()
        assert out[REAL].abs().sum(-1).min() > 0 or switches is CHOICE


@pytest.mark.parametrize("factor", ["0.1", "0.7", "1", "1.1", "1.2", "1.25", "2.0"])
def test_slots_are_exact(factor: str) -> None:
    real = torch.arange(400)[:, None] > torch.arange(400)
    for experts, picks in ((3, 1), (5, 2), (8, 2), (64, 6)):
        expected = [math.ceil(Fraction(factor) * n * picks / experts) for n in range(400)]
        assert slots(real, experts, picks, float(factor)).tolist() == expected


@pytest.mark.parametrize("overflow", get_args(Overflow))
def test_an_absolute_capacity_is_of_each_row(overflow: str) -> None:
    """As Switch states it, whatever the row's length; here what a factor gives rows of 7 tokens."""
    x = tokens(3)
    fixed = layer(expert_capacity=2, overflow=overflow)
    assert_close(fixed(x), layer(capacity_factor=0.6, overflow=overflow)(x), "double")
    module, loop = layer(expert_capacity=3, overflow=overflow), Loop(fixed, overflow=overflow, capacity_factor=1.0)
    loop.room = lambda real: 3  # type: ignore[method-assign]
    assert_close(module(x, REAL), loop.within_capacity(x, REAL), "double")


# -- experts ---------------------------------------------------------------------------------------------------------

FEED_FORWARD: dict[str, dict[str, Any]] = {
    "glu": {},
    "glu with biases": {"ffn_bias": True},
    "bounded glu": {"ffn_bias": True, "glu_limit": 0.5, "glu_up_offset": 1.0},
    "mlp": {"ffn_type": "mlp", "hidden_act": "gelu"},
    "mlp with biases": {"ffn_type": "mlp", "hidden_act": "relu", "ffn_bias": True},
}
each_feed_forward = pytest.mark.parametrize("switches", FEED_FORWARD.values(), ids=FEED_FORWARD)


def linear_twin(packed: PackedExperts, **switches: Any) -> LinearExperts:
    """The same experts as plain Linears, filled by hand."""
    config = tiny_config(**{**SPARSE, **switches})
    twin = LinearExperts(config, config)
    with torch.no_grad():
        for e, expert in enumerate(twin):
            up = getattr(packed, packed.up_name)[e]
            up_bias = getattr(packed, f"{packed.up_name}_bias")[e] if packed.has_bias else None
            halves = (expert.gate_proj, expert.up_proj) if packed.has_gate else (expert.up_proj,)
            for i, half in enumerate(halves):
                half.weight.copy_(up.chunk(len(halves))[i])
                if up_bias is not None:
                    half.bias.copy_(up_bias.chunk(len(halves))[i])
            expert.down_proj.weight.copy_(packed.down_proj[e])
            if packed.has_bias:
                expert.down_proj.bias.copy_(packed.down_proj_bias[e])
    return twin


def run(experts: nn.Module, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, and the gradients of tokens and weights."""
    x = tokens().flatten(0, 1).requires_grad_()
    weights = torch.rand(indices.shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
    out = experts(x, indices, weights)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(4))).sum().backward()
    return out.detach(), x.grad, weights.grad


def some_picks(none_for: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(14)]).clamp(max=none_for or 4)


@each_feed_forward
@pytest.mark.parametrize("width", [20, 34], ids=["aligned", "odd"])
def test_implementations_and_layouts_agree(switches: dict[str, Any], width: int) -> None:
    packed = layer(**{**switches, "moe_intermediate_size": width}).experts
    indices = some_picks(none_for=3)  # the last expert gets no token
    expected = run(packed, indices)
    gradients = {name: p.grad for name, p in packed.named_parameters()}
    assert all(g[4].abs().max() == 0 and g[:4].abs().amax() > 0 for g in gradients.values())
    for implementation in ("grouped_mm", "batched_mm"):
        other = copy.deepcopy(packed)
        other.zero_grad()
        other.config._experts_implementation = implementation
        for got, wanted in zip(run(other, indices), expected, strict=True):
            assert_close(got, wanted, "backend")
        for name, parameter in other.named_parameters():
            assert_close(parameter.grad, gradients[name], "gradient")
        with torch.no_grad():  # the way of evaluation
            x, ones = tokens().flatten(0, 1), torch.ones(14, 2)
            assert_close(other(x, indices, ones), packed(x, indices, ones), "backend")
    twin = linear_twin(packed, **{**switches, "moe_intermediate_size": width})
    for got, wanted in zip(run(twin, indices), expected, strict=True):
        assert_close(got, wanted, "backend")
    for e, expert in enumerate(twin):
        halves = [expert.up_proj] if not packed.has_gate else [expert.gate_proj, expert.up_proj]
        for kind in ("weight", "bias") if packed.has_bias else ("weight",):
            suffix = "" if kind == "weight" else "_bias"
            for linears, name in ((halves, f"{packed.up_name}{suffix}"), ([expert.down_proj], f"down_proj{suffix}")):
                if e < 4:
                    joined = torch.cat([getattr(half, kind).grad for half in linears])
                    assert_close(joined, gradients[name][e], "gradient")
                else:
                    assert all(getattr(half, kind).grad.abs().max() == 0 for half in linears)


def one_by_one(packed: PackedExperts, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Token by token and expert by expert, in double precision."""
    p = {name: parameter.detach().double() for name, parameter in packed.named_parameters()}
    rows = []
    for token, picks, shares in zip(x.double(), indices.tolist(), weights.double(), strict=True):
        row = torch.zeros(48, dtype=torch.float64)
        for e, share in zip(picks, shares, strict=True):
            if e < packed.num_experts:
                inner = p[packed.up_name][e] @ token
                if packed.has_bias:
                    inner = inner + p[f"{packed.up_name}_bias"][e]
                inner = packed._apply_gate(inner) if packed.has_gate else packed.act_fn(inner)
                out = p["down_proj"][e] @ inner
                row = row + share * (out + p["down_proj_bias"][e] if packed.has_bias else out)
        rows.append(row)
    return torch.stack(rows)


PICKS: dict[str, torch.Tensor] = {
    "spread": some_picks(),
    "none for one expert": some_picks(none_for=3),
    "all for one expert": torch.full((14, 1), 2),
    "some nobody's": torch.stack((some_picks()[:, 0], 5 - torch.arange(14) % 3), 1),
    "nobody's": torch.full((14, 2), 5),
    "one token": some_picks()[:1],
}


@each_feed_forward
@pytest.mark.parametrize("picks", PICKS)
@pytest.mark.parametrize("method", [PackedExperts.segments, processors.batches, PackedExperts.token])
@pytest.mark.parametrize("at_once", [2, 16])
def test_what_runs_in_place_of_the_grouped_product(
    switches: dict[str, Any],
    picks: str,
    method: Callable[..., torch.Tensor],
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processors, "EXPERTS_AT_ONCE", at_once)
    packed, indices = layer(**switches).experts, PICKS[picks]
    if method is PackedExperts.token:
        indices = indices[:1]
    x = tokens().flatten(0, 1)[: len(indices)]
    weights = torch.rand(indices.shape, generator=torch.Generator().manual_seed(3))
    for dtype, tolerance in ((torch.float32, "native"), (torch.bfloat16, "bf16")):
        packed, x, weights = packed.to(dtype), x.to(dtype), weights.to(dtype)
        with torch.no_grad():
            got = method(packed, x, indices, weights)
        assert got.dtype == dtype
        if picks == "nobody's":
            assert (got == 0).all()
        else:
            assert_close(got, one_by_one(packed, x, indices, weights), tolerance)


def test_experts_are_evenly_busy() -> None:
    spread = torch.arange(8).repeat(16).view(-1, 2)  # 16 tokens for each of 8
    assert processors.evenly_busy(spread, 8)
    assert processors.evenly_busy(spread.masked_fill(spread == 3, 4), 8)  # one has none and another twice as many
    assert not processors.evenly_busy(
        spread.masked_fill(spread == 3, 8).masked_fill(spread == 4, 8), 8
    )  # two have none
    assert not processors.evenly_busy(torch.zeros(64, 2, dtype=torch.long), 8)
    assert not processors.evenly_busy(spread[:7], 8)  # fewer than two each


@pytest.mark.parametrize(
    ("dtype", "processor", "picks", "expected"),
    [
        (torch.float32, "other", some_picks(), "grouped_mm"),
        (torch.float32, "amd", some_picks(), "segments"),
        (torch.bfloat16, "amx", some_picks(), "batches"),
        (torch.bfloat16, "amx", torch.full((14, 2), 2), "grouped_mm"),
        (torch.bfloat16, "amd", some_picks(), "grouped_mm"),
        (torch.bfloat16, "other", some_picks()[:1], "token"),
        (torch.float32, "not asked", some_picks(), "grouped_mm"),
    ],
)
def test_what_is_faster_on_this_processor_is_run(
    dtype: torch.dtype, processor: str, picks: torch.Tensor, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def noting(name: str, method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any) -> torch.Tensor:
            ran.append(name)
            return method(*args)

        return run

    for owner, name in ((PackedExperts, "segments"), (processors, "batches"), (PackedExperts, "token")):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    monkeypatch.setitem(EXPERTS, "grouped_mm", noting("grouped_mm", EXPERTS["grouped_mm"]))
    monkeypatch.setattr(processors, "BY_ONEDNN", {torch.float32} if processor == "amd" else set())
    monkeypatch.setattr(processors, "WEIGHT_FIRST", {torch.bfloat16} if processor == "amx" else set())
    monkeypatch.setattr(Linear, "products", Products() if processor == "not asked" else processors.ProcessorProducts())
    packed = layer(moe_intermediate_size=24).experts.to(dtype)  # rows of 48 bytes, which it takes
    packed.config._experts_implementation = "grouped_mm"
    x, weights = tokens().flatten(0, 1)[: len(picks)].to(dtype), torch.rand(picks.shape).to(dtype)
    with torch.no_grad():
        packed(x, picks, weights)
    assert ran == [expected]
    packed(x, picks, weights)  # with gradients
    assert ran[1:] == ["grouped_mm"]


@pytest.mark.parametrize("kind", ["eager", "grouped_mm", "batched_mm", "linear"])
def test_the_index_after_the_last_expert_is_nobody_s(kind: str) -> None:
    """Expert parallelism sends it, with weight 0, for tokens that live in another process."""
    experts = layer().experts
    if kind == "linear":
        experts = linear_twin(experts)
    else:
        experts.config._experts_implementation = kind
        experts._is_expert_parallel = True
    indices = some_picks()
    indices[::2, 1], indices[3] = 5, 5
    there = indices < 5
    x = tokens().flatten(0, 1)
    weights = torch.rand(14, 2, generator=torch.Generator().manual_seed(3)) * there
    given = weights.clone().requires_grad_()
    out = experts(x, indices, given)
    assert (out[3] == 0).all()
    expected = torch.zeros_like(x)
    for n in range(14):
        for k in range(2):
            if there[n, k]:
                expected[n] += weights[n, k] * experts(x[n : n + 1], indices[n : n + 1, k : k + 1], torch.ones(1, 1))[0]
    assert_close(out, expected, "backend")
    out.sum().backward()
    assert (given.grad[there] != 0).all()
    if kind in ("eager", "linear"):  # of the others, older hosts let the router hear from elsewhere
        assert (given.grad[~there] == 0).all()
    with torch.no_grad():  # the ways of evaluation, and of one token
        assert_close(experts(x, indices, weights), expected, "backend")
        for n in (0, 1, 3):
            alone = experts(x[n : n + 1], indices[n : n + 1], weights[n : n + 1])[0]
            torch.testing.assert_close(alone, expected[n], atol=1e-5, rtol=1e-5)


def test_no_token_at_all() -> None:
    for layout in get_args(ExpertsLayout):
        experts = layer(experts_layout=layout).experts
        assert experts(torch.zeros(0, 48), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)).shape == (0, 48)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_host_chooses_the_implementation(implementation: str) -> None:
    model, chosen = tiny_model(**SPARSE), tiny_model(**SPARSE)
    chosen.set_experts_implementation(implementation)
    assert chosen.model.layers[1].mlp.experts.config._experts_implementation == implementation
    assert_close(chosen(text()).logits, model(text()).logits, "backend")


def test_a_compiled_forward_is_one_graph() -> None:
    model = tiny_model(**SPARSE)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(text()).logits, model(text()).logits, "compile")


# -- precision and saving --------------------------------------------------------------------------------------------


def test_the_router_is_in_fp32_whatever_the_model_is() -> None:
    x = tokens().flatten(0, 1).bfloat16()
    exact, rounded = layer().bfloat16().gate, layer(router_in_fp32=False).bfloat16().gate
    logits = exact.logits(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, x.float() @ exact.weight.float().T)
    assert rounded.logits(x).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer().gate.logits(x.float()).dtype == torch.float32
        assert torch.equal(layer().gate.logits(x.float()), layer().gate.logits(x.float()).float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = layer(router_type="sparsemixer", norm_topk_prob=False, router_jitter_noise=0.01).gate.logits(x.float())
    assert under.dtype == torch.float32


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half()])
def test_the_selection_bias_stays_in_fp32_under_a_cast(cast: Callable[[nn.Module], nn.Module]) -> None:
    model = tiny_model(**SPARSE, router_selection_bias=True)
    fine = 1.0 + torch.arange(5) * 2.0**-20  # bf16 keeps 8 bits
    for block in model.model.layers:
        block.mlp.gate.e_score_correction_bias.copy_(fine)
    cast(model)
    for block in model.model.layers:
        assert block.mlp.gate.weight.dtype != torch.float32
        assert block.mlp.gate.e_score_correction_bias.dtype == torch.float32
        assert torch.equal(block.mlp.gate.e_score_correction_bias, fine)


def test_the_selection_bias_is_saved_and_loaded_in_fp32(tmp_path: Path) -> None:
    model = tiny_model(**SPARSE, router_selection_bias=True)
    fine = 1.0 + torch.arange(5) * 2.0**-20
    for block in model.model.layers:
        block.mlp.gate.e_score_correction_bias.copy_(fine)
    model.save_pretrained(tmp_path)
    loaded = LlmArchForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for block in loaded.model.layers:
        assert block.mlp.gate.weight.dtype == torch.bfloat16
        assert block.mlp.gate.e_score_correction_bias.dtype == torch.float32
        assert torch.equal(block.mlp.gate.e_score_correction_bias, fine)
    with torch.no_grad():
        assert loaded(text()).logits.isfinite().all()


def test_autocast_runs_and_trains() -> None:
    for layout in get_args(ExpertsLayout):
        model = tiny_model(**SPARSE, experts_layout=layout).train()
        ids = text()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert loss.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=0.02)


# -- outputs ---------------------------------------------------------------------------------------------------------


def test_router_logits_come_from_the_sparse_layers() -> None:
    model = tiny_model(**SPARSE, mlp_layer_types=["dense", "sparse", "sparse"])
    inputs: list[torch.Tensor] = []
    for block in model.model.layers[1:]:
        block.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    output = model(text(), output_router_logits=True)
    assert len(output.router_logits) == 2
    for logits, x, block in zip(output.router_logits, inputs, model.model.layers[1:], strict=True):
        assert logits.shape == (2 * 23, 5)
        assert_close(logits, x.flatten(0, 1).double() @ block.mlp.gate.weight.double().T, "double")
    assert output.aux_loss.shape == ()
    base = model.model(text(), output_router_logits=True)
    assert all(torch.equal(a, b) for a, b in zip(base.router_logits, output.router_logits, strict=True))


def test_only_sparse_models_have_outputs_of_experts() -> None:
    dense, sparse = tiny_model()(text()), tiny_model(**SPARSE)(text())
    assert not hasattr(dense, "router_logits")
    assert not hasattr(dense, "aux_loss")
    assert sparse.router_logits is None
    assert sparse.aux_loss is None


def test_dense_layers_of_a_sparse_model_are_dense() -> None:
    model = tiny_model(**SPARSE, mlp_layer_types=["dense", "sparse", "dense"])
    assert [isinstance(block.mlp, SparseFeedForward) for block in model.model.layers] == [False, True, False]
    assert model.model.layers[0].mlp.up_proj.weight.shape == (34, 48)
    assert model.model.layers[1].mlp.experts.down_proj.shape == (5, 48, 20)


def test_experts_begin_at_the_initializer_s_spread() -> None:
    model = LlmArchForCausalLM(tiny_config(**SPARSE, ffn_bias=True, router_bias=True, initializer_range=0.3))
    mlp = model.model.layers[0].mlp
    for parameter in (mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj):
        assert parameter.std().item() == pytest.approx(0.3, rel=0.15)
    for bias in (mlp.gate.bias, mlp.experts.gate_up_proj_bias, mlp.experts.down_proj_bias):
        assert (bias == 0).all()


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 6}, "at least one and at most all"),
    ({"num_experts_per_tok": 0}, "at least one and at most all"),
    ({"n_group": 2, "topk_group": 1}, "groups divide the experts evenly"),
    ({**SIX, "n_group": 3}, "groups divide the experts evenly"),
    ({**SIX, "n_group": 3, "topk_group": 4}, "groups divide the experts evenly"),
    ({**SIX, "n_group": 3, "topk_group": 1, "num_experts_per_tok": 3}, "groups divide the experts evenly"),
    ({"router_group_score": "top2"}, "needs n_group"),
    ({**SIX, "n_group": 6, "topk_group": 3, "router_group_score": "top2"}, "groups of two experts or more"),
    ({"router_bias_update_rate": 0.1}, "router_selection_bias=True"),
    ({**CHOICE, **SIX, "n_group": 2, "topk_group": 1}, "belong to router_type='top_k'"),
    ({**CHOICE, "router_selection_bias": True}, "belong to router_type='top_k'"),
    ({**CHOICE, "capacity_factor": 1.0, "overflow": "next_best"}, "belong to router_type='top_k'"),
    ({**CHOICE, "router_aux_loss_coef": 0.1}, "nothing to balance"),
    ({"router_type": "sparsemixer", "capacity_factor": 1.0}, "no capacity"),
    ({"router_type": "sparsemixer", "router_score": "sigmoid"}, "a softmax of its own"),
    ({"router_type": "sparsemixer", "router_bias": True}, "no bias"),
    ({"overflow": "next_best"}, "nothing overflows"),
    ({"shared_expert_gate": True}, "needs a shared expert"),
    ({"mlp_layer_types": ["dense"] * 3}, "need a sparse layer"),
    ({"swish_beta": "learned", "experts_layout": "linear"}, "share one learned beta"),
    ({"router_type": "hash"}, "router_type"),
    ({"per_layer_config": {1: {"num_experts": 4}}}, "num_experts"),
]


@pytest.mark.parametrize(("switches", "why"), REFUSED, ids=[str(switches) for switches, _ in REFUSED])
def test_refuses(switches: dict[str, Any], why: str) -> None:
    with pytest.raises(Exception, match=why):
        tiny_config(**{**SPARSE, **switches})


@pytest.mark.parametrize(
    "switches",
    [{"num_experts_per_tok": 3}, {"router_aux_loss_coef": 0.1}, {"mlp_layer_types": ["sparse"] * 3}, CHOICE],
    ids=str,
)
def test_refuses_switches_of_experts_without_experts(switches: dict[str, Any]) -> None:
    with pytest.raises((ValueError, StrictDataclassClassValidationError), match="without num_experts"):
        tiny_config(**switches)


@pytest.mark.parametrize(
    ("switches", "strict", "whole"),
    [
        ({}, set(), False),
        ({**SPARSE, "router_selection_bias": True}, {"e_score_correction_bias"}, False),
        ({"quantization_config": {"quant_method": "quanto"}}, set(), True),
    ],
)
def test_a_model_keeps_in_fp32_what_it_has_and_names_to_quantisers_what_they_leave_alone(
    switches: dict[str, Any], strict: set[str], whole: bool
) -> None:
    model = LlmArchForCausalLM(tiny_config(**switches))
    assert model._keep_in_fp32_modules_strict == strict
    names = ("model.layers.0.self_attn.kv_b_proj", "score")
    assert all(any(re.match(p, name) for p in model._keep_in_fp32_modules) is whole for name in names)
    assert torch.float32 not in {
        kept for part, kept in model._get_dtype_plan(torch.float16).items() if part not in strict
    }

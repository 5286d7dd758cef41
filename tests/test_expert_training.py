"""Balance: the auxiliary losses against loops, the bias that no loss trains, and a view of both."""

import gc
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.model.balancing import balance_loss, z_loss
from hf_llmarch.model.experts import SPARSE_FEED_FORWARDS, SparseFeedForward
from hf_llmarch.model.routing import ROUTERS, Router
from hf_llmarch.study.balance import ExpertLoad, ExpertLoadCallback, collapsed, expert_load
from test_experts import SPARSE
from tiny import assert_close, redraw, text, tiny_config, tiny_model

# The names of gradient checkpointing that every supported release knows.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")

LOSS_FREE: dict[str, Any] = {**SPARSE, "router_selection_bias": True, "router_bias_update_rate": 0.01}
PADDED = torch.ones(4, 12, dtype=torch.long)
PADDED[1, :5], PADDED[2, 9:], PADDED[3, 1:] = 0, 0, 0


# -- the losses against loops ----------------------------------------------------------------------------------------

ROUTING: dict[str, dict[str, Any]] = {
    "softmax": {},
    "one expert": {"num_experts_per_tok": 1},
    "sigmoid with groups and bias": {
        **{"router_score": "sigmoid", "router_selection_bias": True, "num_experts": 6},
        **{"n_group": 3, "topk_group": 2, "router_group_score": "top2"},
    },
    "sparsemixer": {"router_type": "sparsemixer", "norm_topk_prob": False, "router_jitter_noise": 0.01},
}
each_routing = pytest.mark.parametrize("switches", ROUTING.values(), ids=ROUTING)


def routers_and_logits(layers: int = 3, **switches: Any) -> tuple[list[Router], tuple[torch.Tensor, ...]]:
    config = tiny_config(**{**SPARSE, **switches})
    routers = [redraw(ROUTERS[config.router_type](config), seed=i) for i in range(layers)]
    for i, router in enumerate(routers):
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias.copy_(torch.linspace(-0.4, 0.4, router.experts).roll(i))
    generator = torch.Generator().manual_seed(2)
    logits = tuple(torch.randn(48, routers[0].experts, generator=generator).requires_grad_() for _ in routers)
    return routers, logits


def loop_shares(router: Router, logits: torch.Tensor, there: list[int]) -> tuple[list[float], list[torch.Tensor]]:
    """f and P of the tokens `there`: how often an expert is picked a token, and its mean probability."""
    f, p = [0.0] * router.experts, [torch.zeros((), dtype=torch.float64)] * router.experts
    for t in there:
        _, picks = router.choose(logits[t : t + 1])
        exact = logits[t].double()
        scores = 1 / (1 + torch.exp(-exact)) if router.score is torch.sigmoid else torch.exp(exact)
        for e in range(router.experts):
            f[e] += (e in picks[0].tolist()) / len(there)
            p[e] = p[e] + scores[e] / scores.sum() / len(there)
    return f, p


def loop_loss(router: Router, logits: torch.Tensor, there: list[int]) -> torch.Tensor:
    """E x sum of f P: arXiv 2101.03961 equation 4."""
    f, p = loop_shares(router, logits, there)
    return router.experts * sum((f[e] * p[e] for e in range(router.experts)), torch.zeros((), dtype=torch.float64))


def real_places() -> list[list[int]]:
    return [[12 * row + t for t in range(12) if PADDED[row, t]] for row in range(4)]


@each_routing
def test_balance_loss_of_each_sequence(switches: dict[str, Any]) -> None:
    routers, logits = routers_and_logits(**switches)
    loss = balance_loss(routers, logits, PADDED.bool(), "sequence")
    rows = [sum(loop_loss(r, x, there) for r, x in zip(routers, logits, strict=True)) / 3 for there in real_places()]
    expected = torch.stack(rows)
    assert_close(loss.detach(), expected.detach(), "double")
    weight = torch.tensor([0.1, 2.0, 0.7, -1.0])
    gradients = torch.autograd.grad((loss * weight).sum(), logits)
    for gradient, exact in zip(gradients, torch.autograd.grad((expected * weight).sum(), logits), strict=True):
        assert_close(gradient, exact, "gradient")
        assert (gradient.view(4, 12, -1)[PADDED == 0] == 0).all()


@each_routing
def test_balance_loss_of_the_batch(switches: dict[str, Any]) -> None:
    routers, logits = routers_and_logits(**switches)
    there = [t for row in real_places() for t in row]
    expected = sum(loop_loss(r, x, there) for r, x in zip(routers, logits, strict=True)) / 3
    loss = balance_loss(routers, logits, PADDED.bool(), "batch")
    assert loss.shape == (4,)
    torch.testing.assert_close(loss.detach().double(), expected.detach().expand(4), atol=0, rtol=1e-6)


@pytest.mark.parametrize("picks", [1, 2, 3])
def test_balance_loss_of_the_model_is_mixtral_s(picks: int) -> None:
    routers, logits = routers_and_logits(num_experts_per_tok=picks)
    for mask in (PADDED, torch.ones_like(PADDED)):
        expected = load_balancing_loss_func(logits, 5, picks, None if mask.all() else mask)
        loss = balance_loss(routers, logits, mask.bool(), "model")
        torch.testing.assert_close(loss, expected.expand(4), atol=0, rtol=1e-6)


def test_phimoe_s_balance_loss_is_of_the_plain_softmax() -> None:
    routers, logits = routers_and_logits(**ROUTING["sparsemixer"])
    expected = load_balancing_loss_func(logits, 5, 2, PADDED)
    loss = balance_loss(routers, logits, PADDED.bool(), "model")
    torch.testing.assert_close(loss, expected.expand(4), atol=0, rtol=1e-6)


def test_an_even_load_is_the_least_loss() -> None:
    (router,), _ = routers_and_logits(layers=1, num_experts_per_tok=1)
    even = torch.eye(5).repeat(2, 1) * 9
    uneven = even.clone()
    uneven[:5] = even[0]
    real = torch.ones(1, 10, dtype=torch.bool)
    assert balance_loss([router], (even,), real, "sequence").item() == pytest.approx(1.0)
    assert balance_loss([router], (uneven,), real, "sequence").item() > 1.5
    all_to_one = torch.zeros(10, 5)
    all_to_one[:, 0] = 50.0
    assert balance_loss([router], (all_to_one,), real, "sequence").item() == pytest.approx(5.0)


def test_z_loss_against_a_loop() -> None:
    _, logits = routers_and_logits()
    rows = []
    for there in real_places():
        layers = [[math.log(sum(math.exp(v) for v in x[t].tolist())) ** 2 for t in there] for x in logits]
        rows.append(sum(sum(layer) / len(layer) for layer in layers) / 3)
    assert_close(z_loss(logits, PADDED.bool()).detach(), torch.tensor(rows, dtype=torch.float64), "double")


# -- the losses in the model -----------------------------------------------------------------------------------------


def labels_of(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ids.masked_fill(mask == 0, -100)


@pytest.mark.parametrize("scope", ["sequence", "batch", "model"])
def test_auxiliary_losses_are_on_in_training_without_being_asked_for(scope: str) -> None:
    switches = {**SPARSE, "router_aux_loss_scope": scope}
    plain = tiny_model(**switches).train()
    model = tiny_model(**switches, router_aux_loss_coef=0.3, router_z_loss_coef=0.07).train()
    ids, mask = text(4, 12), PADDED
    labels = labels_of(ids, mask)
    tokens = plain(ids, mask, labels=labels)
    output = model(ids, mask, labels=labels)
    assert tokens.aux_loss is None
    balance = balance_loss(model.routers(), output.router_logits, mask.bool(), scope)
    share = (labels[:, 1:] != -100).sum(-1) / (labels[:, 1:] != -100).sum()
    expected = tokens.loss + (share * (0.3 * balance + 0.07 * z_loss(output.router_logits, mask.bool()))).sum()
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.aux_loss, balance.mean())
    # In evaluation the loss is that of the tokens, and the balance is reported on request.
    model.eval()
    torch.testing.assert_close(model(ids, mask, labels=labels).loss, tokens.loss)
    asked = model(ids, mask, labels=labels, output_router_logits=True)
    torch.testing.assert_close(asked.loss, tokens.loss)
    torch.testing.assert_close(asked.aux_loss, output.aux_loss)


def test_padding_and_batch_mates_leave_a_row_s_balance_alone() -> None:
    model = tiny_model(**SPARSE)
    ids = text(4, 12)
    padded = model(ids, PADDED, output_router_logits=True)
    rows = balance_loss(model.routers(), padded.router_logits, PADDED.bool(), "sequence")
    for row in range(4):
        alone = model(ids[row : row + 1, PADDED[row].bool()], output_router_logits=True)
        torch.testing.assert_close(rows[row], alone.aux_loss, atol=1e-5, rtol=1e-5)


def test_auxiliary_losses_reach_the_router_under_gradient_checkpointing() -> None:
    switches = {**SPARSE, "router_aux_loss_coef": 3.0, "router_z_loss_coef": 0.5}
    ids = text()
    gradients = []
    for checkpoints in (False, True):
        model = tiny_model(**switches).train()
        if checkpoints:
            checkpoint(model)
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert_close(again, plain, "gradient")
    with pytest.raises(ValueError, match="use_reentrant"):
        checkpoint(tiny_model(**switches), use_reentrant=True)


def checkpoint(model: LlmArchForCausalLM, use_reentrant: bool = False) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})


def rows_of_text() -> list[dict[str, torch.Tensor]]:
    """Eight rows with 12, 5, 9, 1 … real tokens, of which further ones carry no label."""
    ids, mask = text(8, 12), PADDED.repeat(2, 1)
    labels = labels_of(ids, mask)
    labels[4, :7], labels[6, 3:6] = -100, -100
    return [{"input_ids": i, "attention_mask": m, "labels": x} for i, m, x in zip(ids, mask, labels, strict=True)]


class Record(TrainerCallback):
    """What the optimiser is about to step with."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}


def trainer(model: nn.Module, folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    settings = {
        **{"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
        **{"logging_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True},
        **{"remove_unused_columns": False, **arguments},
    }
    rows = {"train_dataset": rows_of_text(), "eval_dataset": rows_of_text()}
    return Trainer(model, TrainingArguments(str(folder), **settings), callbacks=list(callbacks), **rows)


def test_accumulation_changes_neither_loss_nor_gradients(tmp_path: Path) -> None:
    results = []
    for batch, accumulation in ((8, 1), (2, 4), (1, 8)):
        model = tiny_model(**SPARSE, router_aux_loss_coef=0.3, router_z_loss_coef=0.1)
        record = Record()
        arguments = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        run = trainer(model, tmp_path, record, max_steps=1, **arguments)
        run.train()
        results.append((run.state.log_history[0]["loss"], record.gradients))
    (loss, gradients), *others = results
    for other_loss, other_gradients in others:
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            assert_close(other_gradients[name], gradient, "accumulation")
    without = Record()
    run = trainer(tiny_model(**SPARSE), tmp_path, without, max_steps=1, per_device_train_batch_size=8)
    run.train()
    router = "model.layers.0.mlp.gate.weight"
    assert (without.gradients[router] - gradients[router]).abs().max() > 1e-3  # the losses were on


# -- the bias that no loss trains ------------------------------------------------------------------------------------


@contextmanager
def recorded_picks(model: nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """The picks of each router in its training passes, (passes of) `(B, T, K)` a layer; recomputation left out."""
    layers = [part for part in model.modules() if isinstance(part, SparseFeedForward)]
    picks: list[list[torch.Tensor]] = [[] for _ in layers]

    def record(place: list[torch.Tensor]) -> Callable[..., None]:
        def hook(router: Router, args: Any, routing: tuple[torch.Tensor, ...]) -> None:
            if router.training and torch._C._current_graph_task_id() == -1:  # not from within a backward pass
                place.append(routing[2].detach())

        return hook

    handles = [layer.gate.register_forward_hook(record(place)) for layer, place in zip(layers, picks, strict=True)]
    yield picks
    for handle in handles:
        handle.remove()


def expected_bias(picks: list[torch.Tensor], steps: int, rate: float = 0.01) -> torch.Tensor:
    """arXiv 2408.15664 algorithm 1, over the passes of each of so many steps."""
    bias = torch.zeros(5)
    each = len(picks) // steps
    assert len(picks) == each * steps
    for step in range(steps):
        counts = [0] * 5
        for e in torch.cat(picks[step * each : (step + 1) * each]).flatten().tolist():
            counts[e] += 1
        mean = sum(counts) / 5
        bias += torch.tensor([rate * ((count < mean) - (count > mean)) for count in counts])
    return bias


def biases(model: nn.Module) -> list[torch.Tensor]:
    return [part.e_score_correction_bias for part in model.modules() if isinstance(part, Router)]


def assert_biases(model: nn.Module, picks: list[list[torch.Tensor]], steps: int) -> None:
    for bias, of_layer in zip(biases(model), picks, strict=True):
        torch.testing.assert_close(bias, expected_bias(of_layer, steps), atol=1e-7, rtol=0)
        assert bias.abs().max() > 0
    loads = [part.load for part in model.modules() if isinstance(part, Router)]
    assert all(load is None or not load.any() for load in loads)


def test_the_bias_moves_towards_the_experts_with_less() -> None:
    switches = {**LOSS_FREE, "num_experts": 4, "num_experts_per_tok": 1, "router_bias_update_rate": 0.25}
    config = tiny_config(**switches)
    config._experts_implementation = "eager"
    layer = redraw(SPARSE_FEED_FORWARDS[ROUTERS[config.router_type].pickers](config, config)).train()
    with torch.no_grad():
        layer.gate.weight.copy_(torch.eye(4, 48))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    # Tokens for experts 0, 0, 0, 1 and one of padding for expert 3: loads 3, 1, 0, 0, their mean is 1.
    x = torch.eye(4, 48)[[0, 0, 3, 0, 1]][None]
    layer(x, torch.tensor([[True, True, False, True, True]])).sum().backward()
    optimizer.step()
    assert torch.equal(layer.gate.e_score_correction_bias, torch.tensor([-0.25, 0.0, 0.25, 0.25]))
    # Without padding, and scores that differ by more than the biases: loads 3, 1, 0, 1, their mean is 1.25.
    layer(x * 9).sum().backward()
    optimizer.step()
    assert torch.equal(layer.gate.e_score_correction_bias, torch.tensor([-0.5, 0.25, 0.5, 0.5]))


def test_once_an_optimizer_step_in_a_plain_loop() -> None:
    model = tiny_model(**LOSS_FREE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with recorded_picks(model) as picks:
        for step in range(3):
            for part in range(4):
                ids = text(seed=10 * step + part)
                before = [bias.clone() for bias in biases(model)]
                model(ids, labels=ids).loss.backward()
                assert all(torch.equal(a, b) for a, b in zip(before, biases(model), strict=True))
            optimizer.step()
            optimizer.zero_grad()
            after = [bias.clone() for bias in biases(model)]
            optimizer.step()  # without a forward pass there is nothing to balance
            assert all(torch.equal(a, b) for a, b in zip(after, biases(model), strict=True))
    assert_biases(model, picks, 3)


def test_neither_evaluation_nor_other_models_and_optimizers_move_it() -> None:
    model, other = tiny_model(**LOSS_FREE), tiny_model(**LOSS_FREE).train()
    ids = text()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(ids, labels=ids).loss.backward()  # evaluation mode, with gradients
    optimizer.step()
    model.train()
    with torch.no_grad():
        model(ids)
    optimizer.step()
    other(ids, labels=ids).loss.backward()
    optimizer.step()
    torch.optim.SGD(other.lm_head.parameters(), lr=0.1).step()
    assert all((bias == 0).all() for bias in [*biases(model), *biases(other)])
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert all(bias.abs().max() > 0 for bias in biases(other))
    fixed = tiny_model(**SPARSE, router_selection_bias=True).train()  # without a rate
    fixed(ids, labels=ids).loss.backward()
    torch.optim.SGD(fixed.parameters(), lr=0.1).step()
    assert all((bias == 0).all() for bias in biases(fixed))


def test_padding_is_no_load() -> None:
    results = []
    for fill in (3, 50):
        model = tiny_model(**LOSS_FREE).train()
        ids = text(4, 12).masked_fill(PADDED == 0, fill)
        model(ids, PADDED, labels=labels_of(ids, PADDED)).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        results.append(torch.stack(biases(model)))
    assert torch.equal(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_once_with_gradient_checkpointing(use_reentrant: bool) -> None:
    model = tiny_model(**LOSS_FREE).train()
    checkpoint(model, use_reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded_picks(model) as picks:
        for step in range(3):
            for part in range(2):
                ids = text(seed=10 * step + part)
                model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_biases(model, picks, 3)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_once_under_trainer_with_accumulation(tmp_path: Path, checkpoints: bool) -> None:
    model = tiny_model(**LOSS_FREE)
    run = trainer(
        model,
        tmp_path,
        **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 3},
        **{"gradient_checkpointing": checkpoints, "eval_strategy": "steps", "eval_steps": 1, "do_eval": True},
    )
    for row in run.train_dataset:
        row["attention_mask"] = torch.ones(12, dtype=torch.long)
    with recorded_picks(model) as picks:
        run.train()
    assert all(len(of_layer) == 12 for of_layer in picks)
    assert_biases(model, picks, 3)


def test_once_under_accelerate() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = tiny_model(**LOSS_FREE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(text(24, 12), batch_size=2)
    )
    with recorded_picks(model) as picks:
        for ids in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
    assert all(len(of_layer) == 12 for of_layer in picks)
    assert_biases(model, picks, 3)


def one_of_two(rank: int, folder: str) -> None:
    """A process that trains on rows of its own; what it picked and the biases it ended with are written down."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    # In a function of its own: what it leaves behind must be gone before the group is, or tearing down may hang.
    torch.save(trained_in_parallel(rank), f"{folder}/{rank}.pt")
    gc.collect()
    torch.distributed.barrier()
    # Not by returning: a process group can wait for its own threads for ever, which wait for the interpreter's lock.
    os._exit(0)


def trained_in_parallel(rank: int) -> dict[str, Any]:
    model = tiny_model(**{**LOSS_FREE, "num_hidden_layers": 5}).train()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorded_picks(model) as picks:
        for step in range(2):
            for part in range(2):
                ids = text(2 + rank, seed=100 * rank + 10 * step + part)
                parallel(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    of_layers = [[p.flatten() for p in of_layer] for of_layer in picks]
    return {"picks": of_layers, "biases": [bias.clone() for bias in biases(model)]}


def test_two_processes_balance_what_both_have_seen(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_of_two, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for layer, bias in enumerate(first["biases"]):
        assert torch.equal(bias, second["biases"][layer])
        together = [torch.cat(both) for both in zip(first["picks"][layer], second["picks"][layer], strict=True)]
        torch.testing.assert_close(bias, expected_bias(together, 2), atol=1e-7, rtol=0)


# -- from a collapsed start ------------------------------------------------------------------------------------------


def example() -> ModuleType:
    """examples/balance.py, which draws what is tested here."""
    path = Path(__file__).parents[1] / "examples" / "balance.py"
    spec = importlib.util.spec_from_file_location("balance_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_collapsed_start_recovers_by_either_means_and_not_alone() -> None:
    balance = example()
    curves, losses = {}, {}
    for name, switches in balance.SCHEMES.items():
        curves[name], losses[name] = balance.train(balance.collapsed_model(**switches), steps=200)
        assert curves[name][0] < 0.4  # two of eight: log 2 / log 8
        assert losses[name][-1] < 0.6 * losses[name][0]
    assert max(curves.pop("neither")) < 0.65
    assert curves.keys() == {"auxiliary loss", "loss-free bias"}
    for entropies in curves.values():
        assert min(entropies[-5:]) > 0.9


# -- the view --------------------------------------------------------------------------------------------------------


def test_load_in_numbers() -> None:
    assert ExpertLoad("", (7, 7, 7)).entropy == pytest.approx(1.0)
    assert ExpertLoad("", (9, 0, 0)).entropy == 0.0
    assert ExpertLoad("", (4, 4, 0, 0)).entropy == pytest.approx(0.5)
    assert ExpertLoad("", (4, 4, 0, 0)).busiest == pytest.approx(2.0)
    assert ExpertLoad("", (1, 2, 5)).shares == (0.125, 0.25, 0.625)
    assert ExpertLoad("", (0, 0)).entropy == 0.0
    assert ExpertLoad("", (3,)).entropy == 1.0
    assert collapsed([ExpertLoad("a", (9, 0)), ExpertLoad("b", (4, 5))]) == [ExpertLoad("a", (9, 0))]
    assert "a: entropy 0.00, busiest expert 2.0x the mean, 1 of 2 never picked" in str(ExpertLoad("a", (9, 0)))


def count_hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_expert_load_counts_real_tokens_and_leaves_the_model_as_it_was() -> None:
    model = tiny_model(**LOSS_FREE, mlp_layer_types=["sparse", "dense", "sparse"]).train()
    ids = text(4, 12)
    model(ids)
    hooks = count_hooks(model)  # the host's own
    loads = expert_load(model, ids, attention_mask=PADDED)
    assert model.training
    assert count_hooks(model) == hooks
    assert [load.name for load in loads] == ["model.layers.0.mlp", "model.layers.2.mlp"]
    assert all(sum(load.counts) == 2 * PADDED.sum() for load in loads)
    logits = model.eval()(ids, PADDED, output_router_logits=True).router_logits
    for load, of_layer in zip(loads, logits, strict=True):
        picks = of_layer.topk(2).indices[PADDED.flatten().bool()].flatten().tolist()
        assert load.counts == tuple(picks.count(e) for e in range(5))
    assert all((bias == 0).all() for bias in biases(model))


def test_expert_load_refuses_what_has_none() -> None:
    with pytest.raises(ValueError, match="num_experts is None"):
        expert_load(tiny_model(), text())
    with pytest.raises(ValueError, match="the same load"):
        expert_load(tiny_model(**SPARSE, router_type="expert_choice", use_cache=False), text())


def test_the_callback_logs_and_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers.utils import logging

    model = tiny_model(**SPARSE)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[2:] = 0.0
        model.model.layers[1].mlp.gate.weight[:2] = 3 * model.model.layers[1].mlp_norm.pre.weight.sign()
    model(text())
    hooks = count_hooks(model)
    seen: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            seen.append(dict(logs))

    logging.enable_propagation()
    try:
        run = trainer(
            model,
            tmp_path,
            ExpertLoadCallback(warn_below=0.95, per_layer=True),
            Reporter(),
            **{"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.0},
        )
        run.train()
    finally:
        logging.disable_propagation()
    names = {f"expert_entropy/model.layers.{i}.mlp" for i in range(3)}
    for logs in (run.state.log_history[:3], seen[:3]):
        for line in logs:
            layers = [line[name] for name in sorted(names)]
            assert line["expert_entropy"] == pytest.approx(sum(layers) / 3)
            assert line["expert_entropy_min"] == min(layers)
            assert 1.0 <= line["expert_load_max"] <= 5.0
    assert caplog.text.count("Experts collapse in model.layers.1.mlp") == 1
    assert count_hooks(model) == hooks

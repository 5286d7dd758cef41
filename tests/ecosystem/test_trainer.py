"""transformers' trainers: the loss by hand, gradient accumulation, what the arguments turn on, and resuming."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_llmarch import LlmArchForCausalLM
from tests.tiny import (
    HEADS,
    MIXED,
    MLA,
    MOE,
    TOLERANCES,
    assert_close,
    redraw,
    text,
    tiny_config,
    tiny_model,
    tiny_stack,
)

# The names of gradient checkpointing that every supported release knows.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mixed": MIXED,
    "mla": MLA,
    "alibi": {"position_encoding": "alibi"},
    "relative_bias": {"position_encoding": "relative_bias"},
    "tied": {"tie_word_embeddings": True, "final_logit_softcapping": 1.5, "logit_scale": 0.5},
}
each_architecture = pytest.mark.parametrize("switches", ARCHITECTURES.values(), ids=ARCHITECTURES)


def partly_labelled(batch: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and labels of which each row leaves out another number, so that a mean of means is not the mean."""
    ids = text(batch=batch)
    labels = ids.clone()
    for row in range(batch):
        labels[row, : 2 * row + 1] = -100
    return ids, labels


def cross_entropy_by_hand(logits: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """-log p(next token), in double precision, of every token that has a label."""
    losses = []
    for row, targets in zip(logits.double(), labels, strict=True):
        for t, target in enumerate(targets.tolist()):
            if t > 0 and target != -100:
                losses.append((row[t - 1].logsumexp(-1) - row[t - 1, target]).item())
    return losses


@each_architecture
def test_loss_is_the_shifted_cross_entropy(switches: dict[str, Any]) -> None:
    model = tiny_model(**switches)
    ids, labels = partly_labelled()
    outputs = model(ids, labels=labels)
    losses = cross_entropy_by_hand(outputs.logits, labels)
    assert len(losses) == sum(22 - 2 * row for row in range(8))
    assert outputs.loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert model(ids, labels=labels, num_items_in_batch=1000).loss.item() == pytest.approx(sum(losses) / 1000, rel=1e-5)
    assert model(ids).loss is None


@pytest.mark.shows("Training", "gradient accumulation: losses and weights as of one batch")
@each_architecture
def test_gradients_do_not_depend_on_how_a_batch_is_split(switches: dict[str, Any]) -> None:
    ids, labels = partly_labelled()
    items = int((labels[:, 1:] != -100).sum())
    gradients = []
    for rows in (8, 2):
        model = tiny_model(**switches).train()
        for start in range(0, 8, rows):
            part = slice(start, start + rows)
            model(ids[part], labels=labels[part], num_items_in_batch=torch.tensor(items)).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, "gradient")


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, ids: torch.Tensor, labels: torch.Tensor):
        self.ids, self.labels = ids, labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def options(folder: Path, **arguments: Any) -> dict[str, Any]:
    return {
        **{"num_train_epochs": 1, "report_to": [], "save_strategy": "no", "logging_steps": 1, "use_cpu": True},
        **{"disable_tqdm": True, "lr_scheduler_type": "constant", "weight_decay": 0.0, "output_dir": str(folder)},
        **arguments,
    }


def trained(model: Any, rows: Rows, folder: Path, **arguments: Any) -> Trainer:
    trainer = Trainer(model=model, args=TrainingArguments(**options(folder, **arguments)), train_dataset=rows)
    trainer.train()
    return trainer


def logged(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.shows("Training", "gradient accumulation: losses and weights as of one batch")
def test_trainer_accumulates_as_one_batch(tmp_path: Path) -> None:
    """8 x 1 == 2 x 4, in the losses that it logs and in the parameters that come out."""
    rows = Rows(*partly_labelled(batch=16))
    models, losses = [], []
    for size, steps in ((8, 1), (2, 4)):
        model = tiny_model().train()
        # A large eps: AdamW divides by the gradient's size, and so magnifies the rounding of the smallest ones.
        exact: dict[str, Any] = {"learning_rate": 0.01, "adam_epsilon": 1e-3, "max_grad_norm": 0.0}
        trainer = trained(
            model,
            rows,
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            **exact,
        )
        models.append(model)
        losses.append(logged(trainer))
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCES["accumulation"])
    start = dict(tiny_model().named_parameters())
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert not torch.equal(one, start[name]), name
        assert_close(other, one, "accumulation")


@pytest.mark.shows("Training", "Trainer learns, saves, and what it saved loads")
@pytest.mark.parametrize("switches", [{}, MLA], ids=["gqa", "mla"])
def test_trainer_learns_a_toy_text(switches: dict[str, Any], tmp_path: Path) -> None:
    """An alphabet, over and over from a random letter: each letter tells the next one."""
    start = torch.randint(0, 26, (256, 1), generator=torch.Generator().manual_seed(0))
    ids = (start + torch.arange(16)) % 26 + 3
    torch.manual_seed(0)
    model = LlmArchForCausalLM(tiny_config(**{**switches, "norm_eps": 1e-6}))
    trainer = trained(model, Rows(ids, ids), tmp_path, per_device_train_batch_size=8, learning_rate=0.01)
    losses = logged(trainer)
    assert len(losses) == 32
    assert losses[0] == pytest.approx(math.log(99), abs=0.5)
    assert sum(losses[-4:]) / 4 < 0.5
    model.eval()
    written = model.generate(ids[:2, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(written, ids[:2, :11])


@pytest.mark.shows("Training", "Trainer learns, saves, and what it saved loads")
def test_trainer_saves_what_loads(tmp_path: Path) -> None:
    model = redraw(LlmArchForCausalLM(tiny_config(tie_word_embeddings=True)))
    trainer = trained(model, Rows(*partly_labelled()), tmp_path / "run", per_device_train_batch_size=8)
    trainer.save_model(str(tmp_path / "model"))
    again = LlmArchForCausalLM.from_pretrained(tmp_path / "model")
    assert_close(again(text()).logits, model.eval()(text()).logits, "reload")


# -- what the arguments turn on ----------------------------------------------------------------------------------------

READS: dict[str, Any] = {"topology": "encoder-decoder", "decoder_start_token_id": 1, "pad_token_id": 0}


def after_two_steps(switches: dict[str, Any], folder: Path, **arguments: Any) -> dict[str, torch.Tensor]:
    """The weights of a model that was trained for two steps of plain gradient descent."""
    model = tiny_stack(**switches)
    descent = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "per_device_train_batch_size": 4}
    trained(model, Rows(*partly_labelled()), folder, **descent, **arguments)
    return dict(model.named_parameters())


@pytest.mark.shows("Training", "gradient checkpointing, reentrant and not")
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize(
    "switches",
    [
        pytest.param(MLA, id="mla"),
        pytest.param(MIXED, id="mixed", marks=pytest.mark.slow),
        pytest.param({"position_encoding": "relative_bias"}, id="relative_bias", marks=pytest.mark.slow),
        pytest.param({**MOE, "experts_layout": "linear"}, id="experts", marks=pytest.mark.slow),
        pytest.param(READS, id="encoder-decoder", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_change_nothing(switches: dict[str, Any], reentrant: bool, tmp_path: Path) -> None:
    plain = after_two_steps(switches, tmp_path)
    kwargs = {"use_reentrant": reentrant}
    again = after_two_steps(switches, tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    start = dict(tiny_stack(**switches).named_parameters())
    for name, parameter in plain.items():
        assert not torch.equal(parameter, start[name]), name
        assert_close(again[name], parameter, "gradient")


@pytest.mark.shows("Training", "NEFTune")
@pytest.mark.parametrize(
    "switches", [{}, {"embedding_scale": 3.0, "tie_word_embeddings": True}], ids=["plain", "scaled"]
)
def test_neftune_disturbs_embeddings_in_training_alone(switches: dict[str, Any], tmp_path: Path) -> None:
    """arXiv 2310.05914: uniform noise of at most alpha / sqrt(L d) on what the embedding gives."""
    model = tiny_model(**switches)
    seen: list[tuple[bool, torch.Tensor]] = []

    def record(layer: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.append((layer.training, args[0].detach()))

    handle = model.model.layers[0].register_forward_pre_hook(record)
    rows = Rows(*partly_labelled())
    given = options(tmp_path, per_device_train_batch_size=8, learning_rate=0.0, neftune_noise_alpha=5.0)
    trainer = Trainer(model, TrainingArguments(**given), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    handle.remove()
    clean = model.model.embed_tokens(rows.ids)
    (training, disturbed), (evaluating, untouched) = seen
    assert training
    assert not evaluating
    assert torch.equal(untouched, clean)
    order = [int((disturbed[i] - clean).abs().amax((1, 2)).argmin()) for i in range(8)]
    assert sorted(order) == list(range(8))
    noise, bound = disturbed - clean[order], 5.0 / math.sqrt(23 * 48)
    assert 0.95 * bound < noise.abs().max() <= bound * 1.0001
    assert abs(noise.mean().item()) < 0.05 * bound


@pytest.mark.shows("Training", "label smoothing")
def test_label_smoothing_of_a_decoder(tmp_path: Path) -> None:
    ids, labels = partly_labelled()
    model = tiny_model()
    logits = model(ids).logits.double()
    uniform = [
        (row[t].logsumexp(-1) - row[t].mean()).item()
        for row, targets in zip(logits, labels, strict=True)
        for t in range(22)
        if targets[t + 1] != -100
    ]
    exact = cross_entropy_by_hand(logits, labels)
    assert len(uniform) == len(exact)
    expected = (0.8 * sum(exact) + 0.2 * sum(uniform)) / len(exact)
    trainer = trained(model, Rows(ids, labels), tmp_path, per_device_train_batch_size=8, label_smoothing_factor=0.2)
    assert logged(trainer)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.shows("Training", "packed texts (DataCollatorWithFlattening) train as separate ones")
@pytest.mark.parametrize(
    "switches",
    [
        *ARCHITECTURES.values(),
        {"position_encoding": "learned"},
        {"position_encoding": "sinusoidal", "sliding_window": 4},
        MOE,
    ],
    ids=[*ARCHITECTURES, "learned", "sinusoidal", "experts"],
)
def test_packed_texts(switches: dict[str, Any], tmp_path: Path) -> None:
    texts = [text(1, length, seed=length)[0] for length in (9, 4, 12, 7)]
    apart = tiny_model(**switches).train()
    # The first token of a text is nobody's label.
    items = sum(len(ids) - 1 for ids in texts)
    losses = []
    for ids in texts:
        loss = apart(ids[None], labels=ids[None], num_items_in_batch=items, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    gradients: dict[str, torch.Tensor] = {}

    class Record(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            gradients.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    model = tiny_model(**switches)
    trainer = Trainer(
        model,
        TrainingArguments(**options(tmp_path, per_device_train_batch_size=4, max_grad_norm=0.0)),
        train_dataset=[{"input_ids": ids.tolist()} for ids in texts],
        data_collator=DataCollatorWithFlattening(),
        callbacks=[Record()],
    )
    trainer.train()
    assert logged(trainer) == [pytest.approx(sum(losses), rel=1e-5)]
    for name, parameter in apart.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            assert_close(gradients[name], parameter.grad, "gradient")


# -- resuming ----------------------------------------------------------------------------------------------------------

RESUMED: dict[str, dict[str, Any]] = {
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1, "tie_word_embeddings": True},
    "mla": MLA,
    "experts": {
        **MOE,
        **{"router_selection_bias": True, "router_bias_update_rate": 0.01, "router_aux_loss_coef": 0.1},
        **{"router_jitter_noise": 0.05, "num_shared_experts": 1},
    },
    "linear experts": {**MOE, "experts_layout": "linear", "router_aux_loss_coef": 0.1},
    "encoder": {"topology": "encoder", "hidden_dropout": 0.1},
    "encoder-decoder": {**READS, "hidden_dropout": 0.1, "position_encoding": "relative_bias"},
}


@pytest.mark.shows("Training", "a run that is interrupted and resumed ends bit-equal, weights and optimiser")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "experts" else pytest.mark.slow) for case in RESUMED]
)
def test_resumed_in_the_middle(case: str, tmp_path: Path) -> None:
    rows = Rows(*partly_labelled(batch=24))
    given = {
        **{"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2},
        **{"gradient_accumulation_steps": 2, "learning_rate": 0.01, "lr_scheduler_type": "linear", "seed": 3},
    }

    def run(seed: int, folder: Path, **resume: Any) -> tuple[Any, Trainer]:
        config = tiny_config(**RESUMED[case])
        model = redraw(HEADS[config.topology](config), seed=seed)
        trainer = Trainer(model, TrainingArguments(**options(folder, **given)), train_dataset=rows)
        trainer.train(**resume)
        return model, trainer

    straight, first = run(0, tmp_path / "straight")
    resumed, second = run(1, tmp_path / "resumed", resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert second.state.global_step == first.state.global_step == 5
    assert logged(second)[-3:] == logged(first)[-3:]
    expected = straight.state_dict()
    for name, tensor in resumed.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    if case == "experts":
        # Steps of one size up or down, of which an even number could end where it began.
        biases = [tensor for name, tensor in expected.items() if name.endswith("e_score_correction_bias")]
        assert len(biases) == 3
        assert all(bias.abs().max() > 0 for bias in biases)
    optimizers = [trainer.optimizer.state_dict()["state"] for trainer in (first, second)]
    assert optimizers[0].keys() == optimizers[1].keys()
    for i, state in optimizers[0].items():
        for name, value in state.items():
            assert torch.equal(optimizers[1][i][name], value), (i, name)


@pytest.mark.shows("Training", "load_best_model_at_end")
@pytest.mark.parametrize("switches", [{"tie_word_embeddings": True}, MOE], ids=["tied", "experts"])
def test_the_best_model_comes_back(switches: dict[str, Any], tmp_path: Path) -> None:
    rows = Rows(*partly_labelled())
    given = options(
        tmp_path,
        **{"max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 0.3, "load_best_model_at_end": True},
        **{"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1},
    )
    trainer = Trainer(tiny_model(**switches), TrainingArguments(**given), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(found) == 3
    assert found[-1] > min(found)  # the last one is not the best
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(found), rel=1e-6)


@pytest.mark.shows("Training", "Seq2SeqTrainer with predict_with_generate")
@pytest.mark.parametrize("beams", [1, 2])
def test_evaluation_generates(beams: int, tmp_path: Path) -> None:
    model = tiny_stack(**READS, eos_token_id=2)
    sources, targets = text(4, 9), text(4, 6, seed=2)
    examples = [
        {"input_ids": source[: 9 - i].tolist(), "labels": target[: 6 - i].tolist()}
        for i, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]

    class Pad:
        """What the collator asks of a tokenizer."""

        padding_side = "right"

        def pad(self, features: list[dict[str, Any]], **kwargs: Any) -> dict[str, torch.Tensor]:
            rows = [torch.tensor(feature["input_ids"]) for feature in features]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return {"input_ids": padded, "attention_mask": (padded != 0).long()}

    seen: list[EvalPrediction] = []
    arguments = Seq2SeqTrainingArguments(
        **options(tmp_path, per_device_train_batch_size=4, per_device_eval_batch_size=2, learning_rate=0.01),
        **{"predict_with_generate": True, "generation_max_length": 7, "generation_num_beams": beams},
    )
    trainer = Seq2SeqTrainer(
        model,
        arguments,
        data_collator=DataCollatorForSeq2Seq(Pad(), model=model),  # makes decoder_input_ids by asking the model
        train_dataset=examples,
        eval_dataset=examples,
        compute_metrics=lambda prediction: seen.append(prediction) or {"texts": len(prediction.predictions)},
    )
    trainer.train()
    assert trainer.evaluate()["eval_texts"] == 4
    for example, said in zip(examples, seen[0].predictions, strict=True):
        alone = model.generate(torch.tensor([example["input_ids"]]), max_length=7, num_beams=beams)[0]
        assert said[said >= 0][: len(alone)].tolist() == alone.tolist()

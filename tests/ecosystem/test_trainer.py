"""The loss by hand, gradient accumulation, and a Trainer that learns."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from hf_llmarch import LlmArchForCausalLM
from tiny import MIXED, MLA, TOLERANCES, assert_close, redraw, text, tiny_config, tiny_model

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


def trained(model: Any, rows: Rows, folder: Path, **arguments: Any) -> Trainer:
    options: dict[str, Any] = {
        **{"num_train_epochs": 1, "report_to": [], "save_strategy": "no", "logging_steps": 1, "use_cpu": True},
        **{"disable_tqdm": True, "lr_scheduler_type": "constant", "weight_decay": 0.0, **arguments},
    }
    trainer = Trainer(model=model, args=TrainingArguments(output_dir=str(folder), **options), train_dataset=rows)
    trainer.train()
    return trainer


def test_trainer_accumulates_as_one_batch(tmp_path: Path) -> None:
    """8 x 1 == 2 x 4, in the losses that it logs and in the parameters that come out."""
    rows = Rows(*partly_labelled(batch=16))
    models, losses = [], []
    for size, steps in ((8, 1), (2, 4)):
        model = tiny_model().train()
        # A large eps: AdamW divides by the gradient's size, and so magnifies the rounding of the smallest ones.
        options: dict[str, Any] = {"learning_rate": 0.01, "adam_epsilon": 1e-3, "max_grad_norm": 0.0}
        trainer = trained(
            model,
            rows,
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            **options,
        )
        models.append(model)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCES["accumulation"])
    start = dict(tiny_model().named_parameters())
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert not torch.equal(one, start[name]), name
        assert_close(other, one, "accumulation")


@pytest.mark.parametrize("switches", [{}, MLA], ids=["gqa", "mla"])
def test_trainer_learns_a_toy_text(switches: dict[str, Any], tmp_path: Path) -> None:
    """An alphabet, over and over from a random letter: each letter tells the next one."""
    start = torch.randint(0, 26, (256, 1), generator=torch.Generator().manual_seed(0))
    ids = (start + torch.arange(16)) % 26 + 3
    torch.manual_seed(0)
    model = LlmArchForCausalLM(tiny_config(**{**switches, "norm_eps": 1e-6}))
    trainer = trained(model, Rows(ids, ids), tmp_path, per_device_train_batch_size=8, learning_rate=0.01)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 32
    assert losses[0] == pytest.approx(math.log(99), abs=0.5)
    assert sum(losses[-4:]) / 4 < 0.5
    model.eval()
    written = model.generate(ids[:2, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(written, ids[:2, :11])


def test_trainer_saves_what_loads(tmp_path: Path) -> None:
    model = redraw(LlmArchForCausalLM(tiny_config(tie_word_embeddings=True)))
    trainer = trained(model, Rows(*partly_labelled()), tmp_path / "run", per_device_train_batch_size=8)
    trainer.save_model(str(tmp_path / "model"))
    again = LlmArchForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(again(text()).logits, model.eval()(text()).logits)

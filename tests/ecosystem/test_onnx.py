"""ONNX graphs of our models, made by the exporter of transformers and run by ONNX Runtime."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.exporters import ExportedModel
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from tests.ecosystem.test_export import SWITCHES, models, step
from tests.tiny import TEXT_LENGTH, assert_close, text, tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
]


@models
@torch.no_grad()
@pytest.mark.shows("Export", "ONNX of a forward, batch and length dynamic, saved and run", "onnxruntime", "onnxscript")
def test_forward(switches: dict[str, Any], tmp_path: Path) -> None:
    model, ids = tiny_model(**switches), text(2, 13)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    OnnxExporter().export(model, inputs, OnnxConfig(dynamic=True)).save_pretrained(tmp_path)
    longer = text(3, TEXT_LENGTH, seed=5)
    mask = torch.ones_like(longer)
    mask[1, :7] = 0
    logits = ExportedModel.from_pretrained(tmp_path)(input_ids=longer, attention_mask=mask).logits
    assert_close(logits[mask.bool()], model(longer, attention_mask=mask).logits[mask.bool()], "compile")


@pytest.mark.parametrize("name", [name for name in SWITCHES if name != "sliding"])
@torch.no_grad()
@pytest.mark.shows("Export", "ONNX of a decoding step with a static cache", "onnxruntime", "onnxscript")
def test_step_with_a_static_cache(name: str) -> None:
    model = tiny_model(**SWITCHES[name])

    def inputs(past: int) -> dict[str, Any]:
        return step(model, StaticCache(config=model.config, max_cache_len=TEXT_LENGTH), past)

    exported = OnnxExporter().export(model, inputs(13), OnnxConfig())
    for past in (13, 17):
        logits = exported(**inputs(past)).logits
        assert_close(logits, model(text()[:, : past + 1]).logits[:, -1:], "cache")


@pytest.mark.parametrize("name", ["gqa", "sliding"])
@torch.no_grad()
@pytest.mark.shows("Export", "ONNX of a decoding step with a growing cache", "onnxruntime", "onnxscript")
def test_step_with_a_growing_cache(name: str) -> None:
    model = tiny_model(**SWITCHES[name])
    exported = OnnxExporter().export(model, step(model, DynamicCache(), 13), OnnxConfig(dynamic=True))
    for past in (9, 17):
        logits = exported(**step(model, DynamicCache(), past)).logits
        assert_close(logits, model(text()[:, : past + 1]).logits[:, -1:], "cache")

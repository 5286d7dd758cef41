"""torch.export of our models, through the exporter of transformers: what it makes computes what they compute."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

from hf_llmarch.model.compat import CACHE
from tests.tiny import MIXED, MLA, MOE, TEXT_LENGTH, assert_close, differs, text, tiny_model

SWITCHES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mla": MLA,
    "moe": MOE,
    "alibi": {"position_encoding": "alibi"},
    "sliding": MIXED,
}
models = pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`treespec.children_specs` is deprecated:FutureWarning"),
    # Where a cache is part of the program, torch says that the values of its counters are not looked at.
    pytest.mark.filterwarnings("ignore:While exporting, we found certain side effects:UserWarning"),
]


def step(model: Any, cache: Any, past: int) -> dict[str, Any]:
    """The inputs of one decoding step: the text's token after the first `past`, which the cache has read."""
    ids = text()
    model(ids[:, :past], **{CACHE: cache})
    return {"input_ids": ids[:, past : past + 1], CACHE: cache}


@models
@torch.no_grad()
@pytest.mark.shows("Export", "torch.export of a forward, batch and length dynamic")
def test_forward(switches: dict[str, Any]) -> None:
    model, ids = tiny_model(**switches), text(2, 13)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    exported = DynamoExporter().export(model, inputs, DynamoConfig(dynamic=True))
    longer = text(3, TEXT_LENGTH, seed=5)
    mask = torch.ones_like(longer)
    mask[1, :7] = 0
    logits = exported(input_ids=longer, attention_mask=mask).logits
    expected = model(longer, attention_mask=mask).logits
    assert_close(logits[mask.bool()], expected[mask.bool()], "compile")
    assert differs(logits[1, 7:], model(longer).logits[1, 7:])  # the mask is an input of the program, not a constant


@pytest.mark.parametrize("name", [name for name in SWITCHES if name != "sliding"])
@torch.no_grad()
@pytest.mark.shows("Export", "torch.export of a decoding step with a static cache")
def test_step_with_a_static_cache(name: str) -> None:
    model = tiny_model(**SWITCHES[name])

    def inputs(past: int) -> dict[str, Any]:
        return step(model, StaticCache(config=model.config, max_cache_len=TEXT_LENGTH), past)

    exported = DynamoExporter().export(model, inputs(13), DynamoConfig())
    for past in (13, 17):  # where in the text it stands is an input
        logits = exported(**inputs(past)).logits
        assert_close(logits, model(text()[:, : past + 1]).logits[:, -1:], "cache")


@models
@torch.no_grad()
@pytest.mark.slow
@pytest.mark.shows("Export", "torch.export of a decoding step with a growing cache")
def test_step_with_a_growing_cache(switches: dict[str, Any]) -> None:
    model = tiny_model(**switches)
    exported = DynamoExporter().export(model, step(model, DynamicCache(), 13), DynamoConfig(dynamic=True))
    for past in (9, 17):
        logits = exported(**step(model, DynamicCache(), past)).logits
        assert_close(logits, model(text()[:, : past + 1]).logits[:, -1:], "cache")


@torch.no_grad()
@pytest.mark.shows("Export", "torch.export refuses a windowed static cache anywhere but where it was traced")
def test_a_windowed_static_cache_is_bound_to_its_place() -> None:
    """The host counts its tokens in a Python number, which becomes part of the program's inputs."""
    model = tiny_model(**MIXED)

    def inputs(past: int) -> dict[str, Any]:
        return step(model, StaticCache(config=model.config, max_cache_len=TEXT_LENGTH), past)

    exported = DynamoExporter().export(model, inputs(13), DynamoConfig())
    assert_close(exported(**inputs(13)).logits, model(text()[:, :14]).logits[:, -1:], "cache")
    with pytest.raises(ValueError, match="cumulative_length_int"):
        exported(**inputs(17))


@pytest.mark.shows("Export", "torch.export refuses dynamic NTK, whose frequencies depend on the positions")
def test_dynamic_ntk_is_refused() -> None:
    model = tiny_model(rope_parameters={"rope_theta": 777.0, "rope_type": "dynamic", "factor": 3.0})
    with pytest.raises(torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode, match="data-dependent"):
        DynamoExporter().export(model, {"input_ids": text()}, DynamoConfig(dynamic=True))

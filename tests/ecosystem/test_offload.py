"""`device_map="auto"` with weights left on disk gives what the whole model in memory gives."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_llmarch.model.block import Block
from tests.tiny import HEADS, MIXED, MLA, MOE, redraw, text, tiny_config

READS: dict[str, Any] = {"topology": "encoder-decoder", "decoder_start_token_id": 1, "pad_token_id": 0}
CASES: dict[str, dict[str, Any]] = {
    "decoder": {"attention_bias": True, "qk_norm": "head"},
    "tied": {"tie_word_embeddings": True, "embedding_scale": 3.0, "final_logit_softcapping": 1.5},
    "windows and sinks": {**MIXED, "attention_sinks": True},
    "alibi": {"position_encoding": "alibi"},
    "latent": MLA,
    "packed experts": {**MOE, "router_selection_bias": True, "num_shared_experts": 1},
    "linear experts": {**MOE, "experts_layout": "linear"},
    "parallel block": {"parallel_block": True},
    "encoder": {"topology": "encoder", "lm_head_transform": True, "position_encoding": "learned"},
    "shared blocks": {"topology": "encoder", "num_hidden_layers": 6, "layer_groups": 3},
    "encoder-decoder with shared embeddings": {**READS, "tie_word_embeddings": True},
    "t5": {**READS, "position_encoding": "relative_bias", "share_source_embeddings": False},
}


@pytest.mark.shows("Parallel", '`device_map="auto"` with layers offloaded to disk: logits and tokens', "accelerate")
@pytest.mark.parametrize("case", CASES)
def test_offloaded_to_disk(case: str, tmp_path: Path) -> None:
    config = tiny_config(**CASES[case])
    model = redraw(HEADS[config.topology](config)).eval()
    for module in model.modules():
        if getattr(module, "e_score_correction_bias", None) is not None:
            module.e_score_correction_bias.copy_(torch.linspace(-0.4, 0.4, 5))
    model.save_pretrained(tmp_path / "model")
    # Room for the embeddings and about half of the layers.
    room = int(sum(p.numel() * p.element_size() for p in model.parameters()) * 0.6)
    spread = type(model).from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": room}, offload_folder=tmp_path / "offloaded"
    )
    places = spread.hf_device_map
    assert "disk" in places.values()
    assert "cpu" in places.values()
    assert any(p.device.type == "meta" for p in spread.parameters())
    # A block's residual joins what it reads to what its parts give: it is not cut.
    assert not [name for name in places if len(name.partition("layers.")[2].split(".")) > 1]
    ids = text()
    with torch.no_grad():
        expected = model(ids, labels=ids)
        out = spread(ids, labels=ids)
    torch.testing.assert_close(out.logits, expected.logits)
    torch.testing.assert_close(out.loss, expected.loss)
    if config.topology != "encoder":
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(spread.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_named(case: str) -> None:
    """`_no_split_modules` has the classes of a model's layers and no other: accelerate's FSDP looks for each."""
    config = tiny_config(**CASES[case])
    with torch.device("meta"):
        model = HEADS[config.topology](config)
    blocks = {type(module).__name__ for module in model.modules() if isinstance(module, Block)}
    assert model._no_split_modules == blocks

"""`generate()` in its modes: what it writes with a cache is what one forward a token without a cache would write."""

from typing import Any

import pytest
import torch
from tiny import LONGROPE, MIXED, MLA, redraw, text, tiny_config, tiny_model
from transformers import GenerationConfig, StaticCache

from hf_llmarch import LlmArchForCausalLM

pytestmark = pytest.mark.core

NEW = 14

# One of each mechanism that a cache or a mask could get wrong.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 6},
    "gqa": {},
    "mqa": {"num_key_value_heads": 1},
    "mla": MLA,
    "mla-expanded": {**MLA, "mla_cache": "expanded"},
    "mla-direct": {**MLA, "q_lora_rank": None, "rope_interleaved": True},
    "sliding": {"sliding_window": 5},
    "mixed": MIXED,
    "chunked": {"attention_chunk_size": 6},
    "mla-mixed": {**MLA, **MIXED},
    "learned": {"position_encoding": "learned", "position_offset": 2},
    "sinusoidal": {"position_encoding": "sinusoidal"},
    "alibi": {"position_encoding": "alibi"},
    "alibi-bf16": {"position_encoding": "alibi", "alibi_in_bf16": True, "alibi_bias_max": 5},
    "alibi-mixed": {"position_encoding": "alibi", **MIXED},
    "relative_bias": {"position_encoding": "relative_bias"},
    "relative_bias-mixed": {"position_encoding": "relative_bias", **MIXED},
    "none": {"position_encoding": "none"},
    "nope": {"nope_layers": [1], **MIXED},
    "sinks": {"attention_sinks": True, **MIXED},
    "softcap": {"attn_logit_softcapping": 0.1, "final_logit_softcapping": 1.5},
    "qk-norm": {"qk_norm": "head"},
    "longrope": {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 40}},
}
each_architecture = pytest.mark.parametrize("switches", ARCHITECTURES.values(), ids=ARCHITECTURES)


def build(switches: dict[str, Any], **more: Any) -> LlmArchForCausalLM:
    """Texts of a set length: there is no token that ends one. Wider than the other tests' models, so that the likeliest
    token does not hang on rounding."""
    model: LlmArchForCausalLM = redraw(LlmArchForCausalLM(tiny_config(**switches, **more)), std=0.5).eval()
    model.generation_config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return model


@torch.no_grad()
def by_hand(model: LlmArchForCausalLM, ids: torch.Tensor, new: int = NEW) -> torch.Tensor:
    """Greedy decoding with a forward over everything for each token."""
    for _ in range(new):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids


@each_architecture
@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
def test_greedy(switches: dict[str, Any], cache: str) -> None:
    if cache == "static" and "attention_chunk_size" in switches and not host_masks_chunks():
        pytest.skip("this release of transformers calls its chunked mask with an argument that it does not have")
    model, ids = build(switches), text(length=9)
    expected = by_hand(model, ids)
    assert len(set(expected[0, 9:].tolist())) > 2
    options: dict[str, Any] = {
        "none": {"use_cache": False},
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
    }[cache]
    assert torch.equal(model.generate(ids, **options), expected)

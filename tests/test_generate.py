"""`generate()` in its modes: what it writes with a cache is what one forward a token without a cache would write."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StaticCache

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.model.compat import CACHE
from tiny import LONGROPE, MIXED, MLA, redraw, text, tiny_config

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


def build(switches: dict[str, Any]) -> Any:
    """Texts of a set length: there is no token that ends one. Wider than the other tests' models, so that the likeliest
    token does not hang on rounding."""
    model: Any = redraw(LlmArchForCausalLM(tiny_config(**switches)), std=0.5).eval()
    model.generation_config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return model


@torch.no_grad()
def by_hand(model: Any, ids: torch.Tensor, new: int = NEW) -> torch.Tensor:
    """Greedy decoding with a forward over everything for each token."""
    for _ in range(new):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids


STATIC = {"cache_implementation": "static", "disable_compile": True}


@each_architecture
@pytest.mark.parametrize(
    "options",
    [{"use_cache": False}, {}, STATIC, {"prefill_chunk_size": 4}],
    ids=["none", "dynamic", "static", "prefill"],
)
def test_greedy(switches: dict[str, Any], options: dict[str, Any]) -> None:
    model, ids = build(switches), text(length=9)
    expected = by_hand(model, ids)
    assert len(set(expected[0, 9:].tolist())) > 1
    assert torch.equal(model.generate(ids, **options), expected)


def test_static_cache_with_prefill_in_pieces_and_latents() -> None:
    """The host then allocates before it sees a tensor, from the config's sizes: those of a latent cache are others."""
    for switches in (MLA, {**MLA, **MIXED}, {}, MIXED):
        model, ids = build(switches), text(length=9)
        written = model.generate(ids, prefill_chunk_size=4, **STATIC)
        assert torch.equal(written, by_hand(model, ids))


@each_architecture
def test_a_left_padded_batch_writes_what_each_text_alone_does(switches: dict[str, Any]) -> None:
    model = build(switches)
    alone = [text(batch=1, length=length, seed=length) for length in (11, 7, 4)]
    ids = torch.cat([torch.nn.functional.pad(t, (11 - t.shape[1], 0)) for t in alone])
    written = model.generate(ids, attention_mask=(ids != 0).long())
    for row, prompt in zip(written, alone, strict=True):
        assert torch.equal(row[11 - prompt.shape[1] :], by_hand(model, prompt)[0])


@torch.no_grad()
def beam_by_hand(model: Any, ids: torch.Tensor, beams: int, new: int) -> torch.Tensor:
    """Beam search over one text without an end token: the likeliest of what `beams` rows lead to, step by step."""
    rows, scores = ids, torch.zeros(1)
    for _ in range(new):
        logits = model(rows, use_cache=False).logits[:, -1]
        total = (scores[:, None] + logits.log_softmax(-1)).flatten()
        scores, best = total.topk(beams)
        rows = torch.cat((rows[best // logits.shape[-1]], (best % logits.shape[-1])[:, None]), dim=1)
    return rows


@each_architecture
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no-cache"])
def test_beam_search(switches: dict[str, Any], use_cache: bool) -> None:
    """Rows of the cache change places at each step."""
    model, ids = build(switches), text(batch=1, length=9)
    written = model.generate(ids, num_beams=3, num_return_sequences=3, max_new_tokens=8, use_cache=use_cache)
    assert torch.equal(written, beam_by_hand(model, ids, beams=3, new=8))


@each_architecture
def test_sampling_with_a_seed(switches: dict[str, Any]) -> None:
    model, ids = build(switches), text(length=9)
    written = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        written.append(model.generate(ids, do_sample=True, num_return_sequences=2, use_cache=use_cache))
    assert torch.equal(*written)
    assert len({tuple(row.tolist()) for row in written[0]}) == 4


# Of one layer that sees everything: before 5.20 the host's recording of a window's past does not survive an assistant's
# several forwards in a row.
ASSISTANT = {"num_hidden_layers": 1}


@each_architecture
def test_assisted_decoding_writes_the_same(switches: dict[str, Any]) -> None:
    """The cache is cut back to the tokens that were right."""
    model, ids = build(switches), text(batch=1, length=9)
    assistant = build(ASSISTANT)
    expected = by_hand(model, ids)
    assert torch.equal(model.generate(ids, assistant_model=assistant), expected)
    # An assistant that is always right, so that whole runs of tokens are kept.
    assert torch.equal(model.generate(ids, assistant_model=build(switches)), expected)


# A text that outgrows the original length while it is written: the keys cached so far were turned by other frequencies.
CROSSING = {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 14}}


@pytest.mark.parametrize("options", [{}, STATIC, {"num_beams": 3}], ids=["dynamic", "static", "beams"])
def test_longrope_switches_in_the_middle_of_a_text(options: dict[str, Any]) -> None:
    model, ids = build(CROSSING), text(batch=1, length=9)
    expected = beam_by_hand(model, ids, 3, NEW)[:1] if "num_beams" in options else by_hand(model, ids)
    assert not torch.equal(expected, by_hand(build({"rope_parameters": LONGROPE}), ids))
    assert torch.equal(model.generate(ids, **options), expected)


@each_architecture
def test_prompt_lookup_writes_the_same(switches: dict[str, Any]) -> None:
    model = build(switches)
    half = text(batch=1, length=6)
    ids = torch.cat((half, half, half), dim=1)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3), by_hand(model, ids))


def test_a_second_turn_continues_the_cache() -> None:
    for switches in ({}, MIXED, MLA, {"position_encoding": "alibi", **MIXED}):
        model, ids = build(switches), text(length=9)
        first = model.generate(ids, return_dict_in_generate=True)
        turn = torch.cat((first.sequences, text(length=5, seed=9)), dim=1)
        written = model.generate(turn, **{CACHE: first.past_key_values})
        assert torch.equal(written, by_hand(model, turn))


def test_stops_at_any_of_the_end_tokens() -> None:
    model, ids = build({}), text(length=9)
    free = by_hand(model, ids)
    ends = [free[0, 11].item(), free[1, 14].item()]
    model.generation_config.eos_token_id = ends
    written = model.generate(ids)
    for row, unbounded in zip(written, free, strict=True):
        length = next(i for i in range(9, 9 + NEW) if unbounded[i] in ends) + 1
        assert torch.equal(row[:length], unbounded[:length])
        assert (row[length:] == 0).all()


def test_end_tokens_of_the_config_reach_generate() -> None:
    model = LlmArchForCausalLM(tiny_config(eos_token_id=[5, 7], bos_token_id=1, pad_token_id=0))
    assert model.generation_config.eos_token_id == [5, 7]
    assert model.generation_config.bos_token_id == 1
    assert model.generation_config.pad_token_id == 0


def test_embeddings_as_a_prompt() -> None:
    model, ids = build({"embedding_scale": 6.9}), text(length=9)
    written = model.generate(inputs_embeds=model.get_input_embeddings()(ids))
    assert torch.equal(written, by_hand(model, ids)[:, 9:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "mixed", "mla", "alibi", "relative_bias", "sinks"])
def test_compiled_static_cache(name: str) -> None:
    """What `generate` does by itself with a static cache on a GPU: the step is compiled."""
    torch._dynamo.reset()
    model, ids = build(ARCHITECTURES[name]), text(length=9)
    step = torch.compile(model, fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=9 + NEW)
    token = model(ids, **{CACHE: cache}).logits[:, -1:].argmax(-1)
    written = [ids, token]
    for _ in range(NEW - 1):
        token = step(token, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        written.append(token)
    assert torch.equal(torch.cat(written, dim=1), by_hand(model, ids))

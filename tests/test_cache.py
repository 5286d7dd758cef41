"""Decoding in pieces with a cache equals one forward over the whole text, for every switch and every cache."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, StaticCache

from hf_llmarch import LlmArchConfig, LlmArchForCausalLM
from hf_llmarch.model.compat import CACHE
from tiny import (
    LONGROPE,
    MIXED,
    MLA,
    TEXT_LENGTH,
    Variant,
    assert_close,
    differs,
    redraw,
    text,
    tiny_config,
    tiny_model,
    variants,
)

pytestmark = pytest.mark.core

# Longer than a window of 5 at once, then token by token across windows and blocks, then in pieces again.
CHUNKS = (8, 1, 1, 1, 4, 1, 2, 5)
assert sum(CHUNKS) == TEXT_LENGTH

# Few enough to run every kind of output on, and one of each mechanism.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "sliding": {"sliding_window": 5},
    "mixed": MIXED,
    "chunked": {"attention_chunk_size": 6},
    "mla": MLA,
    "mla-sliding": {**MLA, "sliding_window": 5},
    "learned": {"position_encoding": "learned"},
    "sinusoidal": {"position_encoding": "sinusoidal"},
    "alibi": {"position_encoding": "alibi"},
    "alibi-mixed": {"position_encoding": "alibi", **MIXED},
    "relative_bias": {"position_encoding": "relative_bias"},
    "relative_bias-chunked": {"position_encoding": "relative_bias", "attention_chunk_size": 6},
    "none": {"position_encoding": "none"},
    "nope": {"nope_layers": [1], **MIXED},
    "sinks": {"attention_sinks": True, **MIXED},
    "softcap": {"attn_logit_softcapping": 0.1},
    "parallel": {"parallel_block": True},
}
each_architecture = pytest.mark.parametrize("switches", ARCHITECTURES.values(), ids=ARCHITECTURES)

VARIANTS = [pytest.param(variant.decoded, id=label) for label, _, variant in variants()]


def dynamic(config: LlmArchConfig, length: int) -> Any:
    return DynamicCache(config=config)


def static(config: LlmArchConfig, length: int) -> Any:
    return StaticCache(config=config, max_cache_len=length)


def untyped(config: LlmArchConfig, length: int) -> Any:
    """Layers that keep everything, sliding or not: what a caller gets who writes DynamicCache()."""
    return DynamicCache()


CACHES = {"dynamic": dynamic, "static": static, "untyped": untyped}


def decode(
    model: Any,
    ids: torch.Tensor,
    cache: Any,
    chunks: Iterable[int] = CHUNKS,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits `(batch, length, vocab_size)` of the text, read in pieces."""
    pieces, start = [], 0
    for chunk in chunks:
        end = start + chunk
        given: dict[str, Any] = {CACHE: cache}
        if attention_mask is not None:
            given["attention_mask"] = attention_mask[:, :end]
        if position_ids is not None:
            given["position_ids"] = position_ids[:, start:end]
        pieces.append(model(ids[:, start:end], **given).logits)
        start = end
    return torch.cat(pieces, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("switches", VARIANTS)
@pytest.mark.parametrize("kind", CACHES)
def test_pieces_equal_the_whole(switches: dict[str, Any], kind: str) -> None:
    model, ids = tiny_model(**switches), text()
    whole = model(ids, use_cache=False).logits
    # Longer than the text: what a static cache has not seen yet must be masked.
    assert_close(decode(model, ids, CACHES[kind](model.config, TEXT_LENGTH + 7)), whole, "cache")


def left_padded() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Texts of unequal length, and the same as one left-padded batch: ids, mask and positions."""
    # All on one side of every longrope's original length: its frequencies are those of the longest row.
    texts = [text(batch=1, length=length, seed=length) for length in (TEXT_LENGTH, 12, 7)]
    ids = torch.stack([torch.cat((torch.zeros(TEXT_LENGTH - t.shape[1], dtype=torch.long), t[0])) for t in texts])
    mask = torch.stack([torch.arange(TEXT_LENGTH) >= TEXT_LENGTH - t.shape[1] for t in texts]).long()
    return texts, ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
@pytest.mark.parametrize("switches", VARIANTS)
@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
def test_a_padded_batch_equals_each_text_alone(switches: dict[str, Any], kind: str) -> None:
    model = tiny_model(**switches)
    texts, ids, mask, positions = left_padded()
    if kind == "none":
        batched = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    else:
        batched = decode(
            model, ids, CACHES[kind](model.config, TEXT_LENGTH + 7), attention_mask=mask, position_ids=positions
        )
    for row, alone in zip(batched, texts, strict=True):
        assert_close(row[-alone.shape[1] :], model(alone, use_cache=False).logits[0], "padding")


@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
def test_chunks_of_any_size(kind: str) -> None:
    """Prefill shorter than, equal to and longer than the window; steps up to and across it."""
    model, ids = tiny_model(**MIXED, position_encoding="alibi"), text()
    whole = model(ids, use_cache=False).logits
    for chunks in ((1,) * TEXT_LENGTH, (4, 1, 18), (5, 5, 13), (6, 17), (3, 3, 3, 14), (22, 1), (2, 2, 1, 1, 17)):
        assert_close(decode(model, ids, CACHES[kind](model.config, TEXT_LENGTH), chunks), whole, "cache")


@torch.no_grad()
def test_longrope_and_dynamic_ntk_return_to_the_original_frequencies() -> None:
    """A long prompt changes the frequencies; a short one on the same model must not see that.

    Within one text they cannot agree: keys cached below the original length keep the rotation that they got, while a
    forward over the whole text rotates all keys by the frequencies of its last position. So the tests above stay on one
    side of the original length, and dynamic NTK, whose base grows with each token beyond it, below it.
    """
    for rope in (LONGROPE, {"rope_type": "dynamic", "rope_theta": 777.0, "factor": 3.0}):
        model = tiny_model(rope_parameters=dict(rope), max_position_embeddings=16)
        short, long = text(length=12), text(length=30)
        before = model(short).logits
        first_long = model(long).logits
        assert differs(first_long[:, :12], model(long[:, :12]).logits)
        assert torch.equal(model(short).logits, before)
        assert torch.equal(model(long).logits, first_long)


@torch.no_grad()
@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_frequencies_change_beyond_the_original_length_alone(rope: str) -> None:
    parameters = {
        "longrope": {**LONGROPE, "original_max_position_embeddings": 16},
        "dynamic": {"rope_type": "dynamic", "rope_theta": 777.0, "factor": 3.0},
    }[rope]
    model = tiny_model(rope_parameters=parameters, max_position_embeddings=16)
    ids = text(length=17)
    at, beyond = model(ids[:, :16]).logits, model(ids).logits
    assert differs(beyond[:, :16], at)
    assert_close(model(ids[:, :9]).logits, at[:, :9], "cache")


@torch.no_grad()
@each_architecture
@pytest.mark.parametrize("kind", CACHES)
def test_reordered_and_repeated_rows_continue_as_their_own_text(switches: dict[str, Any], kind: str) -> None:
    """What beam search does with a cache."""
    model, ids = tiny_model(**switches), text(batch=3)
    cache = CACHES[kind](model.config, TEXT_LENGTH)
    decode(model, ids, cache, (11, 1))
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    continued = torch.cat((ids[order, :12], ids[:, 12:]), dim=1)
    expected = model(continued, use_cache=False).logits[:, 12:]
    tail = decode(model, continued[:, 12:], cache, (1, 10))
    assert_close(tail, expected, "cache")


@torch.no_grad()
@each_architecture
def test_a_cropped_cache_continues_from_where_it_was_cut(switches: dict[str, Any]) -> None:
    """What assisted decoding does with a cache: forward over candidates, then take the refused ones back."""
    model, ids = tiny_model(**switches), text()
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        # A sliding layer keeps what it would drop only when told that a crop will follow.
        getattr(layer, "activate_past_recording", lambda: None)()
    whole = model(ids, use_cache=False).logits
    # Each forward is followed by a crop, of nothing where all candidates were right.
    decode(model, ids[:, :12], cache, (12,))
    cache.crop(0)
    decode(model, text(seed=7)[:, :4], cache, (4,))
    cache.crop(-4)
    assert cache.get_seq_length() == 12
    assert_close(decode(model, ids[:, 12:13], cache, (1,)), whole[:, 12:13], "cache")
    cache.crop(0)
    assert_close(decode(model, ids[:, 13:], cache, (10,)), whole[:, 13:], "cache")


def packed() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    documents = [text(batch=1, length=length, seed=length) for length in (9, 3, 11)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    return documents, torch.cat(documents, dim=1), positions


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [None, False], ids=["default", "no-cache"])
@each_architecture
def test_packed_documents_do_not_see_each_other(switches: dict[str, Any], use_cache: bool | None) -> None:
    model = tiny_model(**switches)
    documents, ids, positions = packed()
    logits = model(ids, position_ids=positions, use_cache=use_cache).logits
    for document, part in zip(documents, logits.split([d.shape[1] for d in documents], dim=1), strict=True):
        assert_close(part, model(document).logits, "padding")


def loss_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    ids = text()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@each_architecture
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(switches: dict[str, Any], reentrant: bool) -> None:
    model = tiny_model(**switches).train()
    loss, gradients = loss_and_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, recomputed = loss_and_gradients(model)
    assert torch.equal(again, loss)
    assert recomputed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_close(recomputed[name], gradient, "recompute")


@torch.no_grad()
@each_architecture
def test_hidden_states_and_attentions(switches: dict[str, Any]) -> None:
    model, ids = tiny_model(**switches), text()
    model.set_attn_implementation("eager")
    outputs = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(outputs.hidden_states) == 4
    assert len(outputs.attentions) == 3
    assert_close(model.logits(model.lm_head(outputs.hidden_states[-1])), outputs.logits, "cache")
    unseen = torch.ones(TEXT_LENGTH, TEXT_LENGTH).triu(1).bool()
    for weights in outputs.attentions:
        assert weights.shape == (2, 6, TEXT_LENGTH, TEXT_LENGTH)
        assert (weights[..., unseen] == 0).all()
        total = weights.sum(-1)
        if switches.get("attention_sinks"):
            assert (total < 1).all()
        else:
            torch.testing.assert_close(total, torch.ones_like(total))
    assert model(ids).hidden_states is None


@torch.no_grad()
@pytest.mark.parametrize(
    ("switches", "seen"),
    [
        ({"sliding_window": 5}, lambda i, j: i - 5 < j <= i),
        ({"attention_chunk_size": 6}, lambda i, j: j <= i and i // 6 == j // 6),
        ({}, lambda i, j: j <= i),
    ],
    ids=["sliding", "chunked", "full"],
)
def test_each_query_sees_the_keys_it_should(switches: dict[str, Any], seen: Any) -> None:
    model = tiny_model(**switches)
    model.set_attn_implementation("eager")
    weights = model(text(), output_attentions=True).attentions[1]
    expected = torch.tensor([[bool(seen(i, j)) for j in range(TEXT_LENGTH)] for i in range(TEXT_LENGTH)])
    assert torch.equal(weights[0, 3] > 0, expected)


@torch.no_grad()
@pytest.mark.parametrize("switches", [{}, {"embedding_scale": 6.9}], ids=["plain", "scaled"])
def test_embeddings_in_place_of_ids(switches: dict[str, Any]) -> None:
    model, ids = tiny_model(**switches), text()
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(ids).logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=embedded)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


@torch.no_grad()
def test_logits_to_keep() -> None:
    model, ids = tiny_model(final_logit_softcapping=1.5), text()
    whole = model(ids).logits
    assert_close(model(ids, logits_to_keep=1).logits, whole[:, -1:], "cache")
    assert_close(model(ids, logits_to_keep=5).logits, whole[:, -5:], "cache")
    index = torch.tensor([0, 7, 21])
    assert_close(model(ids, logits_to_keep=index).logits, whole[:, index], "cache")


@torch.no_grad()
def test_both_names_of_the_cache_and_none() -> None:
    model, ids = tiny_model(), text()
    whole = model(ids, use_cache=False)
    assert whole.past_key_values is None
    cached = model(ids[:, :20])
    cache = cached.past_key_values
    assert isinstance(cache, Cache)
    assert cache.get_seq_length() == 20
    assert_close(model(ids[:, 20:], past_key_values=cache).logits, whole.logits[:, 20:], "cache")
    cache = model(ids[:, :20]).past_key_values
    assert_close(model(ids[:, 20:], cache=cache).logits, whole.logits[:, 20:], "cache")
    assert tiny_model(use_cache=False)(ids).past_key_values is None


@torch.no_grad()
def test_masks_given_ready_made() -> None:
    """A dict with a mask a layer type, as generate() prepares for compiled caches, and a 4-D mask as it is."""
    model, ids = tiny_model(**MIXED), text()
    model.set_attn_implementation("eager")
    place = torch.arange(TEXT_LENGTH)
    causal = place[:, None] >= place
    window = causal & (place[:, None] - place < 5)
    masks = {
        kind: torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min).expand(2, 1, -1, -1)
        for kind, seen in (("full_attention", causal), ("sliding_attention", window))
    }
    assert_close(model(ids, attention_mask=masks).logits, model(ids).logits, "cache")
    full = tiny_model()
    assert_close(full(ids, attention_mask=masks["full_attention"]).logits, full(ids).logits, "cache")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [107, 90], ids=["larger", "smaller"])
def test_resized_vocabulary_survives_a_reload(tied: bool, size: int, tmp_path: Any) -> None:
    model = tiny_model(tie_word_embeddings=tied, lm_head_bias=True, embedding_scale=6.9)
    ids = text() % 88
    kept = min(size, 99)
    before = model(ids).logits[..., :kept]
    model.resize_token_embeddings(size, mean_resizing=False)
    assert model.config.vocab_size == size
    assert model.lm_head.bias.shape == (size,)
    after = model(ids).logits
    assert after.shape[-1] == size
    assert_close(after[..., :kept], before, "cache")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(again(ids).logits, after, "reload")
    loss = again(ids, labels=ids).loss
    assert loss.isfinite()


@torch.no_grad()
@each_architecture
def test_compiles_without_a_graph_break(switches: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model, ids = tiny_model(**switches), text()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, "compile")


@torch.no_grad()
@pytest.mark.slow
@each_architecture
def test_compiled_decoding(switches: dict[str, Any]) -> None:
    """The real compiler, on the steps of a static cache."""
    torch._dynamo.reset()
    model, ids = tiny_model(**switches), text()
    whole = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=TEXT_LENGTH)
    pieces = [model(ids[:, :8], **{CACHE: cache}).logits]
    step = torch.compile(model, fullgraph=True)
    pieces += [step(ids[:, i : i + 1], **{CACHE: cache}).logits for i in range(8, TEXT_LENGTH)]
    assert_close(torch.cat(pieces, dim=1), whole, "compile")


def test_dynamic_ntk_says_that_it_cannot_compile_in_one_graph() -> None:
    dynamic_ntk = tiny_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 777.0, "factor": 3.0})
    assert not dynamic_ntk._can_compile_fullgraph
    assert tiny_model()._can_compile_fullgraph


@torch.no_grad()
def test_layers_of_their_own_shape_decode_too() -> None:
    """per_layer_config: another number of heads, another placement of norms, another width in one layer."""
    config = tiny_config(
        per_layer_config={
            1: {"num_key_value_heads": 3, "norm_placement": "sandwich", "intermediate_size": 21, "ffn_type": "mlp"}
        }
    )
    model: Any = redraw(LlmArchForCausalLM(config)).eval()
    ids = text()
    whole = model(ids, use_cache=False).logits
    for make in (dynamic, static):
        assert_close(decode(model, ids, make(config, TEXT_LENGTH)), whole, "cache")


def test_no_variant_decodes_across_its_original_length() -> None:
    for _, _, variant in variants():
        rope = Variant(variant.decoded).switches.get("rope_parameters", {})
        if rope.get("rope_type") == "dynamic":
            assert variant.decoded.get("max_position_embeddings", 64) >= TEXT_LENGTH
        if rope.get("rope_type") == "longrope":
            assert not CHUNKS[0] < rope["original_max_position_embeddings"] < TEXT_LENGTH

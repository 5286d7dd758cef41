"""Multi-head latent attention: what is cached, and that folding the projections gives the numbers of expanding them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DynamicCache, StaticCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from hf_llmarch import LlmArchForCausalLM, LlmArchModel
from hf_llmarch.model.compat import CACHE
from hf_llmarch.model.latent_attention import LatentAttention
from test_cache import CACHES, CHUNKS, decode, left_padded
from tiny import MIXED, MLA, TEXT_LENGTH, YARN, assert_close, redraw, text, tiny_config, tiny_model

pytestmark = pytest.mark.core

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "plain": MLA,
    "direct-queries": {**MLA, "q_lora_rank": None},
    "interleaved": {**MLA, "rope_interleaved": True},
    "biases": {**MLA, "attention_bias": True, "attention_output_bias": True},
    "layernorm": {**MLA, "norm_type": "layernorm"},
    "mscale": {**MLA, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
    "nope": {**MLA, "nope_layers": [1]},
    "softcap": {**MLA, "attn_logit_softcapping": 0.01},
    "sinks": {**MLA, "attention_sinks": True},
    "mixed": {**MLA, **MIXED},
    "chunked": {**MLA, "attention_chunk_size": 6},
    "wide-values": {**MLA, "v_head_dim": 40},
}
each_architecture = pytest.mark.parametrize("switches", ARCHITECTURES.values(), ids=ARCHITECTURES)


@contextmanager
def always(absorbing: bool) -> Iterator[list[bool]]:
    """Every latent attention takes one path wherever it can be taken; yields which was taken, call by call."""
    taken: list[bool] = []
    free, absorbed, expand = LatentAttention.absorbs, LatentAttention.absorbed, LatentAttention.expand

    def absorbs(self: LatentAttention, queries: int, keys: int, mask: Any) -> bool:
        # Asked as if for one query of endless context, where absorbing always pays.
        return absorbing and free(self, 1, 10**9, mask) and (mask is not None or queries == 1)

    def noting(method: Any, is_absorbed: bool) -> Any:
        def note(self: LatentAttention, *args: Any, **kwargs: Any) -> Any:
            taken.append(is_absorbed)
            return method(self, *args, **kwargs)

        return note

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentAttention, "absorbs", absorbs)
        patch.setattr(LatentAttention, "absorbed", noting(absorbed, True))
        patch.setattr(LatentAttention, "expand", noting(expand, False))
        yield taken


@contextmanager
def watched() -> Iterator[list[bool]]:
    """Which path each call of a latent attention chooses by itself."""
    taken: list[bool] = []
    free = LatentAttention.absorbs

    def absorbs(self: LatentAttention, *args: Any) -> bool:
        taken.append(free(self, *args))
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatentAttention, "absorbs", absorbs)
        yield taken


# -- what is cached ---------------------------------------------------------------------------------------------------


def layer_bytes(cache: Any) -> list[int]:
    return [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bytes_of_the_cache(dtype: torch.dtype) -> None:
    model, ids = tiny_model(**MLA).to(dtype), text(batch=3)
    per_token = (20 + 8) * dtype.itemsize  # kv_lora_rank + qk_rope_head_dim
    cache: Any = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache})
    assert layer_bytes(cache) == [3 * TEXT_LENGTH * per_token] * 3
    cache = StaticCache(config=model.config, max_cache_len=40)
    model(ids, **{CACHE: cache})
    assert layer_bytes(cache) == [3 * 40 * per_token] * 3


@torch.no_grad()
def test_an_expanded_cache_holds_whole_keys_and_values() -> None:
    model, ids = tiny_model(**MLA, mla_cache="expanded"), text()
    cache: Any = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache})
    assert cache.layers[0].keys.shape == (2, 6, TEXT_LENGTH, 14 + 8)
    assert cache.layers[0].values.shape == (2, 6, TEXT_LENGTH, 12)


@torch.no_grad()
@each_architecture
@pytest.mark.parametrize("kind", CACHES)
def test_what_is_cached_changes_no_number(switches: dict[str, Any], kind: str) -> None:
    latent, expanded = tiny_model(**switches), tiny_model(**switches, mla_cache="expanded")
    ids = text()
    whole = latent(ids, use_cache=False).logits
    assert torch.equal(expanded(ids, use_cache=False).logits, whole)
    for model in (latent, expanded):
        assert_close(decode(model, ids, CACHES[kind](model.config, TEXT_LENGTH + 7)), whole, "cache")


# -- absorbed and expanded --------------------------------------------------------------------------------------------


@torch.no_grad()
@each_architecture
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", CACHES)
def test_absorbed_equals_expanded(switches: dict[str, Any], implementation: str, kind: str) -> None:
    model, ids = tiny_model(**switches), text()
    if implementation == "sdpa" and not model._supports_sdpa:
        implementation = "eager"
    model.set_attn_implementation(implementation)
    logits = {}
    for absorbing in (True, False):
        with always(absorbing) as taken:
            logits[absorbing] = decode(model, ids, CACHES[kind](model.config, TEXT_LENGTH + 7))
        # Sinks have no absorbed form, and without a mask only one query has.
        assert any(taken) == (absorbing and "attention_sinks" not in switches)
    assert_close(logits[True], logits[False], "absorbed")


@torch.no_grad()
@each_architecture
def test_absorbed_equals_expanded_with_padding(switches: dict[str, Any]) -> None:
    model = tiny_model(**switches)
    _, ids, mask, positions = left_padded()
    real = mask.bool()
    logits = {}
    for absorbing in (True, False):
        with always(absorbing):
            cache: Any = DynamicCache(config=model.config)
            logits[absorbing] = decode(model, ids, cache, CHUNKS, mask, positions)[real]
    assert_close(logits[True], logits[False], "absorbed")


@torch.no_grad()
def test_weights_of_the_absorbed_form() -> None:
    model, ids = tiny_model(**MLA), text()
    model.set_attn_implementation("eager")
    weights = {}
    for absorbing in (True, False):
        with always(absorbing):
            cache: Any = DynamicCache(config=model.config)
            model(ids[:, :20], **{CACHE: cache})
            weights[absorbing] = model(ids[:, 20:], output_attentions=True, **{CACHE: cache}).attentions
    for absorbed, expanded in zip(weights[True], weights[False], strict=True):
        assert absorbed.shape == (2, 6, 3, TEXT_LENGTH)
        assert_close(absorbed, expanded, "absorbed")


def multiplications(queries: int, keys: int, absorbed: bool) -> int:
    """Of one head of MLA's sizes above, counted product by product."""
    rank, nope, rope, value = 20, 14, 8, 12
    if absorbed:
        fold_query, fold_output = queries * nope * rank, queries * rank * value
        return fold_query + queries * keys * (rank + rope) + queries * keys * rank + fold_output
    return keys * rank * (nope + value) + queries * keys * (nope + rope) + queries * keys * value


@torch.no_grad()
@pytest.mark.parametrize("past", [1, 4, 30])
@pytest.mark.parametrize("queries", [1, 2, 7, 12, 40])
def test_the_cheaper_form_is_taken(past: int, queries: int) -> None:
    model = tiny_model(**MLA)
    model.set_attn_implementation("eager")
    ids = text(length=past + queries)
    cache: Any = DynamicCache(config=model.config)
    model(ids[:, :past], **{CACHE: cache})
    with watched() as taken:
        model(ids[:, past:], **{CACHE: cache})
    keys = past + queries
    expected = multiplications(queries, keys, absorbed=True) < multiplications(queries, keys, absorbed=False)
    assert taken == [expected] * 3


def test_training_expands_and_trains_the_projection() -> None:
    model, ids = tiny_model(**MLA).train(), text(length=2)
    with watched() as taken:
        loss = model(ids, labels=ids).loss
    assert taken == [False] * 3
    loss.backward()
    assert all(layer.self_attn.kv_b_proj.weight.grad.abs().max() > 0 for layer in model.model.layers)


@torch.no_grad()
def test_decoding_absorbs_and_prefill_expands() -> None:
    model, ids = tiny_model(**MLA), text(length=60)
    cache: Any = DynamicCache(config=model.config)
    with watched() as taken:
        model(ids[:, :59], **{CACHE: cache})
        model(ids[:, 59:], **{CACHE: cache})
    assert taken == [False] * 3 + [True] * 3


class Adapted(nn.Linear):
    """A projection whose output is not its weight's alone, as an adapter's or a quantised one's is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@torch.no_grad()
def test_a_projection_that_is_not_a_plain_one_is_not_folded() -> None:
    model, ids = tiny_model(**MLA), text()
    for layer in model.model.layers:
        adapted = Adapted(20, 6 * (14 + 12), bias=False)
        adapted.weight = layer.self_attn.kv_b_proj.weight
        layer.self_attn.kv_b_proj = adapted
    whole = model(ids, use_cache=False).logits
    with watched() as taken:
        assert_close(decode(model, ids, DynamicCache(config=model.config)), whole, "cache")
    assert not any(taken)


# -- transformers' own ------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("q_lora_rank", [22, None])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default", "rope_theta": 777.0}, {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}],
    ids=["default", "yarn"],
)
def test_equals_deepseek_v3(
    rope: dict[str, Any], bias: bool, q_lora_rank: int | None, interleaved: bool, implementation: str
) -> None:
    sizes = {**MLA, "q_lora_rank": q_lora_rank}
    theirs: dict[str, Any] = {
        **{name: value for name, value in sizes.items() if name not in ("attention_type", "head_dim")},
        **{"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 64},
        **{"rope_parameters": dict(rope), "rope_interleave": interleaved, "attention_bias": bias},
        "attn_implementation": implementation,
    }
    native_config = DeepseekV3Config(**theirs)
    native = redraw(DeepseekV3Attention(native_config, layer_idx=0), std=0.4).eval()
    config = tiny_config(
        **{**sizes, "rope_parameters": rope, "rope_interleaved": interleaved},
        # The native class gives the latents' norms an eps of their own, whatever the config says.
        **{"attention_bias": bias, "attention_output_bias": bias, "latent_norm_eps": 1e-6},
        attn_implementation=implementation,
    )
    model: Any = LlmArchModel(config).eval()
    ours = model.layers[0].self_attn
    ours.load_state_dict(native.state_dict())

    x = torch.randn(2, TEXT_LENGTH, 48, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(TEXT_LENGTH)[None]
    causal = torch.full((TEXT_LENGTH, TEXT_LENGTH), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = native(x, DeepseekV3RotaryEmbedding(native_config)(x, positions), causal)[0]
    rotation = model.embed_positions.prepare(x, positions, None)["full_attention"]["rotation"]
    assert_close(ours(x, causal, rotation=rotation)[0], expected, "native")
    with always(absorbing=True) as taken:
        assert_close(ours(x, causal, rotation=rotation)[0], expected, "absorbed")
    assert taken == [True]


def test_parity_would_see_a_wrong_layout() -> None:
    halves, neighbours = tiny_model(**MLA), tiny_model(**MLA, rope_interleaved=True)
    assert not torch.allclose(halves(text()).logits, neighbours(text()).logits, atol=1e-3)


def test_layers_of_their_own_rank() -> None:
    config = tiny_config(**MLA, per_layer_config={1: {"kv_lora_rank": 9, "q_lora_rank": 11, "v_head_dim": 17}})
    model: Any = redraw(LlmArchForCausalLM(config)).eval()
    ids = text()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for kind in CACHES.values():
            assert_close(decode(model, ids, kind(config, TEXT_LENGTH)), whole, "cache")

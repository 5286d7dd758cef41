"""Attention implementations agree, and one that would drop a switch is refused by name, wherever it is chosen."""

from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_llmarch import LlmArchConfig, LlmArchForCausalLM, LlmArchModel
from hf_llmarch.model.compat import CACHE
from tiny import (
    LONGROPE,
    MIXED,
    MLA,
    MOE,
    TEXT_LENGTH,
    assert_close,
    differs,
    redraw,
    text,
    tiny_config,
    tiny_model,
    variants,
)

VARIANTS = [pytest.param(variant.switches, id=label) for label, _, variant in variants()]

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")

# Written out from what the host's implementations do, not read from the package's table: switches that go into the
# scores, and who would drop them (sdpa raises on a soft-cap, at the first forward).
DROPPED_BY: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "attn_logit_softcapping": ({"attn_logit_softcapping": 0.1}, ("sdpa", "paged|eager", "paged|sdpa")),
    "attention_sinks": ({"attention_sinks": True}, ("sdpa", "flash_attention_2", "flex_attention", "paged|eager")),
    "position_encoding": ({"position_encoding": "alibi"}, (*FLASH, "flex_attention", "paged|eager")),
    "position_encoding-t5": ({"position_encoding": "relative_bias"}, (*FLASH, "flex_attention", "paged|eager")),
    "attention_chunk_size": ({"attention_chunk_size": 5}, (*FLASH, "paged|eager", "vllm")),
}
# What one text's tokens do to another's where both are in one row, and what vLLM does in its own way.
NOT_SERVED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "rope_parameters": (
        {"rope_parameters": {"rope_theta": 777.0, "rope_type": "dynamic", "factor": 3.0}},
        ("paged|sdpa", "vllm"),
    ),
    "rope_parameters-long": ({"rope_parameters": LONGROPE}, ("paged|sdpa", "vllm")),
    "capacity_factor": ({**MOE, "capacity_factor": 0.5}, ("paged|sdpa", "vllm")),
    "expert_capacity": ({**MOE, "expert_capacity": 3}, ("paged|sdpa", "vllm")),
    "router_type": ({**MOE, "router_type": "expert_choice", "use_cache": False}, ("paged|sdpa", "vllm")),
    "lm_head_transform": ({"lm_head_transform": True}, ("vllm",)),
    "logit_scale": ({"logit_scale": 0.3, "final_logit_softcapping": 0.5}, ("vllm", "vllm_mla")),
}
REFUSALS = [
    pytest.param(name.split("-")[0], switches, implementation, id=f"{name}-{implementation}")
    for name, (switches, implementations) in DROPPED_BY.items()
    for implementation in (*implementations, "somebody/kernel")
] + [
    pytest.param(name.split("-")[0], switches, implementation, id=f"{name}-{implementation}")
    for name, (switches, implementations) in NOT_SERVED.items()
    for implementation in implementations
]
each_refusal = pytest.mark.parametrize(("name", "switches", "implementation"), REFUSALS)


def chosen(model: Any) -> str:
    return model.config._attn_implementation


def needs_eager(switches: dict[str, Any]) -> bool:
    return "attn_logit_softcapping" in switches or "attention_sinks" in switches


@pytest.mark.parametrize("switches", VARIANTS)
def test_the_default_is_sdpa_where_it_can(switches: dict[str, Any]) -> None:
    assert chosen(tiny_model(**switches)) == ("eager" if needs_eager(switches) else "sdpa")


@torch.no_grad()
@pytest.mark.parametrize("switches", [p for p in VARIANTS if not needs_eager(cast(dict[str, Any], p.values[0]))])
def test_sdpa_equals_eager(switches: dict[str, Any]) -> None:
    model, ids = tiny_model(**switches), text()
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    logits: dict[str, list[torch.Tensor]] = {}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert chosen(model) == implementation
        padded = model(ids, attention_mask=mask).logits
        cache = DynamicCache(config=model.config)
        pieces = [model(ids[:, a:b], **{CACHE: cache}).logits for a, b in ((0, 13), (13, 14), (14, TEXT_LENGTH))]
        logits[implementation] = [model(ids).logits, padded[0], padded[1, 7:], *pieces]
    for fused, plain in zip(*logits.values(), strict=True):
        assert_close(fused, plain, "backend")


@pytest.mark.parametrize(
    "switches", [{}, MIXED, MLA, {"position_encoding": "alibi"}, {"position_encoding": "relative_bias"}]
)
def test_gradients_of_sdpa_equal_those_of_eager(switches: dict[str, Any]) -> None:
    gradients = []
    for implementation in ("sdpa", "eager"):
        model, ids = tiny_model(**switches).train(), text()
        model.set_attn_implementation(implementation)
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_close(gradient, gradients[1][name], "gradient")


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("switches", [{}, {"attn_logit_softcapping": 0.1}, {**MIXED, "num_key_value_heads": 6}, MLA])
def test_flex_attention_equals_eager(switches: dict[str, Any]) -> None:
    """On a CPU the host has its forward alone, compiled anew for each shape."""
    torch._dynamo.reset()
    model, ids = tiny_model(**switches), text()
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation("flex_attention")
    assert_close(model(ids).logits, expected, "backend")


@each_refusal
def test_refused_at_construction(name: str, switches: dict[str, Any], implementation: str) -> None:
    for model_class in (LlmArchForCausalLM, LlmArchModel):
        with pytest.raises(ValueError, match=f"{implementation!r} cannot do {name}=".replace("|", r"\|")):
            model_class(tiny_config(**switches, attn_implementation=implementation))
    with pytest.raises(ValueError, match=f"cannot do {name}="):
        AutoModelForCausalLM.from_config(tiny_config(**switches), attn_implementation=implementation)


@each_refusal
def test_refused_on_loading(name: str, switches: dict[str, Any], implementation: str, tmp_path: Any) -> None:
    tiny_model(**switches).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"cannot do {name}="):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)


@each_refusal
def test_refused_when_set_later(name: str, switches: dict[str, Any], implementation: str) -> None:
    model = tiny_model(**switches)
    before = chosen(model)
    with pytest.raises(ValueError, match=f"cannot do {name}="):
        model.set_attn_implementation(implementation)
    assert chosen(model) == before


@each_refusal
def test_refused_in_forward_when_set_behind_our_back(name: str, switches: dict[str, Any], implementation: str) -> None:
    model = tiny_model(**switches)
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=f"cannot do {name}="):
        model(text())


def test_a_refusal_says_what_would_do() -> None:
    with pytest.raises(
        ValueError, match=r"attention_sinks=True and would ignore it\. Use one of: eager, flash_attention_3"
    ):
        tiny_model(attention_sinks=True).set_attn_implementation("sdpa")


def test_a_name_that_nobody_knows_is_refused_by_transformers() -> None:
    with pytest.raises(ValueError, match=r'Specified `attn_implementation="foo"` is not supported'):
        tiny_model(attention_sinks=True).set_attn_implementation("foo")


def test_one_layer_that_demands_is_enough() -> None:
    config = tiny_config(per_layer_config={2: {"attention_sinks": True}})
    assert chosen(redraw(LlmArchForCausalLM(config))) == "eager"
    with pytest.raises(ValueError, match="cannot do attention_sinks=True"):
        LlmArchForCausalLM(config).set_attn_implementation("sdpa")


def flip(model: Any, switch: str) -> None:
    """Turn the sign of what the switch adds to the scores."""
    if switch == "sinks":
        for layer in model.model.layers:
            layer.self_attn.sinks.neg_()
    else:
        positions: Any = model.model.embed_positions
        (positions.slopes if switch == "alibi" else positions.relative_attention_bias.weight).neg_()


@torch.no_grad()
@pytest.mark.parametrize(
    ("switch", "switches", "implementation"),
    [
        ("alibi", {"position_encoding": "alibi"}, "eager"),
        ("alibi", {"position_encoding": "alibi"}, "sdpa"),
        ("t5", {"position_encoding": "relative_bias"}, "eager"),
        ("t5", {"position_encoding": "relative_bias"}, "sdpa"),
        ("sinks", {"attention_sinks": True}, "eager"),
    ],
)
def test_what_is_added_to_the_scores_is_not_dropped(switch: str, switches: dict[str, Any], implementation: str) -> None:
    model, ids = tiny_model(**switches), text()
    model.set_attn_implementation(implementation)
    before = model(ids).logits
    flip(model, switch)
    assert differs(model(ids).logits, before)
    flip(model, switch)
    assert torch.equal(model(ids).logits, before)


@torch.no_grad()
def test_softcap_bounds_the_scores_before_the_mask() -> None:
    """With a bound near zero all scores are, so that every query weighs the keys it sees alike."""
    model = tiny_model(attn_logit_softcapping=1e-6)
    weights = model(text(), output_attentions=True).attentions[0]
    i = torch.arange(TEXT_LENGTH)
    expected = (i[:, None] >= i).float() / (i[:, None] + 1)
    torch.testing.assert_close(weights[0, 0], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_sinks_take_their_share_of_the_softmax() -> None:
    """A sink of ln(n + 1) weighs as much as n + 1 keys of score zero."""
    model = tiny_model(attention_sinks=True, attention_scale=1e-9)
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(torch.log(torch.tensor(4.0)))
    weights = model(text(), output_attentions=True).attentions[0]
    seen = torch.arange(TEXT_LENGTH) + 1.0
    torch.testing.assert_close(weights[0, 0].sum(-1), seen / (seen + 4), atol=1e-5, rtol=1e-5)


def test_scale_of_the_scores() -> None:
    def scales(**switches: Any) -> list[float]:
        layers: Any = LlmArchModel(LlmArchConfig(**switches)).layers
        return [layer.self_attn.scaling for layer in layers]

    sizes: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 3, "head_dim": 10}
    assert scales(**sizes) == pytest.approx([10**-0.5] * 3)
    assert scales(**sizes, attention_scale=144**-0.5) == pytest.approx([1 / 12] * 3)
    assert scales(**sizes, attention_scale_by_layer=True) == pytest.approx([10**-0.5, 10**-0.5 / 2, 10**-0.5 / 3])
    assert scales(**sizes, attention_scale=1, attention_scale_by_layer=True) == pytest.approx([1, 1 / 2, 1 / 3])

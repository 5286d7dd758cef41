"""What surgery approximates: each operation against its formula, the receipt's figures, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from peft.utils.merge_utils import ties
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import test_encoders
from family_configs import CASES
from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.conversion import convert, export
from hf_llmarch.conversion.errors import NotExpressible
from hf_llmarch.surgery import (
    SurgeryError,
    drop_layers,
    merge,
    merge_experts,
    operate,
    operate_on_folder,
    prune_experts,
    prune_ffn,
    prune_heads,
    read_recipe,
    to_gqa,
    to_mha,
    to_mla,
    widen_ffn,
)
from surgery_models import STYLES, pieces, styled
from test_families import native_model
from tiny import MOE, YARN, redraw, text, tiny_model

Steps = list[dict[str, dict[str, Any]]]


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return model.state_dict()


# -- heads -----------------------------------------------------------------------------------------------------------


def test_a_group_is_the_mean_of_its_heads() -> None:
    original = tiny_model(num_key_value_heads=6, attention_bias=True, qk_norm="heads")
    changed, receipt = to_gqa(original, 2)
    assert not receipt.exact
    assert "5 %" in receipt.steps[0].retrain
    for name, tensor in tensors(changed).items():
        if any(part in name for part in ("k_proj", "v_proj", "k_norm")):
            old = tensors(original)[name].reshape(2, 3, -1)
            torch.testing.assert_close(tensor.reshape(2, -1), old.sum(1) / 3)
        else:
            assert torch.equal(tensor, tensors(original)[name])


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"rope_interleaved": True, "attention_bias": True},
        {"rope_parameters": {"rope_theta": 777.0, "partial_rotary_factor": 0.4}},
        {"position_encoding": "alibi"},
    ],
    ids=["halves", "neighbours and biases", "a part", "no rotation"],
)
def test_least_squares_finds_heads_that_are_one_head(switches: dict[str, Any]) -> None:
    """Keys that differ by a turn of each channel pair, and values by an invertible map, are one head: nothing is lost.
    Their mean loses much."""
    original = tiny_model(num_key_value_heads=6, **switches)
    generator = torch.Generator().manual_seed(5)
    for layer in original.model.layers:
        attention = layer.self_attn
        for h in range(6):
            first, rows = h // 3 * 30, slice(h * 10, h * 10 + 10)
            mix = torch.randn(10, 10, generator=generator)
            for part, turn in ((attention.v_proj, mix), (attention.k_proj, turned(original.config, h))):
                part.weight.data[rows] = turn @ part.weight.data[first : first + 10]
                if part.bias is not None:
                    part.bias.data[rows] = turn @ part.bias.data[first : first + 10]
    ids = text()
    best, _ = operate(original, [{"to_gqa": {"num_key_value_heads": 2, "method": "least_squares"}}], sample=ids)
    mean, _ = to_gqa(original, 2)
    expected = original(ids).logits
    spread = (expected.max() - expected.min()).item()
    assert (best(ids).logits - expected).abs().max().item() <= 1e-5 * spread
    assert (pieces(best, ids) - expected).abs().max().item() <= 1e-5 * spread
    assert (mean(ids).logits - expected).abs().max().item() > 1e-3 * spread


def turned(config: Any, head: int) -> torch.Tensor:
    """A map of a head's channels that commutes with its rotation: a turn of each rotated pair, anything on the rest."""
    if config.position_encoding != "rope":
        return torch.randn(10, 10, generator=torch.Generator().manual_seed(head))
    width = int(10 * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
    channels = torch.arange(width)
    first, second = channels.view(-1, 2).T if config.rope_interleaved else channels.view(2, -1)
    turn = torch.zeros(10, 10)
    cos, sin = math.cos(0.7 * head), math.sin(0.7 * head)
    turn[first, first], turn[first, second], turn[second, first], turn[second, second] = cos, -sin, sin, cos
    rest = 10 - width
    turn[width:, width:] = torch.randn(rest, rest, generator=torch.Generator().manual_seed(head))
    return turn


def test_pruned_heads_are_those_with_the_smallest_weights() -> None:
    original = tiny_model(attention_sinks=True)
    for i, quiet in enumerate((0, 1, 0)):
        layer = original.model.layers[i].self_attn
        layer.v_proj.weight.data[quiet * 10 : quiet * 10 + 10] *= 1e-6
    changed, receipt = prune_heads(original, 1)
    assert changed.config.num_attention_heads == 3
    assert changed.config.head_dim == 10
    # Heads whose values are next to nothing are missed by nobody.
    assert receipt.difference is not None
    assert receipt.difference.largest <= 1e-4 * receipt.difference.spread
    named, _ = prune_heads(original, 1, heads=[1])
    for i, layer in enumerate(named.model.layers):
        assert torch.equal(layer.self_attn.q_proj.weight, original.model.layers[i].self_attn.q_proj.weight[30:])
        assert torch.equal(layer.self_attn.o_proj.weight, original.model.layers[i].self_attn.o_proj.weight[:, 30:])
        assert torch.equal(layer.self_attn.sinks, original.model.layers[i].self_attn.sinks[3:])


# -- latent attention --------------------------------------------------------------------------------------------------


def test_keys_that_are_one_head_need_one_rotated_part() -> None:
    """Key heads that are turns of one another have one principal component a pair: at R = D nothing is lost."""
    original = tiny_model(rope_parameters={"rope_theta": 777.0})
    for layer in original.model.layers:
        weight = layer.self_attn.k_proj.weight.data
        weight[10:] = turned(original.config, 2) @ weight[:10]
    changed, receipt = to_mla(original, qk_rope_head_dim=10)
    assert not receipt.exact
    ids = text()
    expected = original(ids).logits
    bound = 1e-5 * (expected.max() - expected.min()).item()
    assert (changed(ids).logits - expected).abs().max().item() <= bound
    assert (pieces(changed, ids) - expected).abs().max().item() <= bound


@pytest.mark.parametrize("switches", [{}, {"rope_parameters": YARN}, {"attention_bias": True}])
def test_latents_of_a_low_rank(switches: dict[str, Any]) -> None:
    """More rank is closer, and a cache gives what the whole text gives."""
    original = tiny_model(**switches)
    ids = text()
    expected = original(ids).logits
    apart = []
    for rank in (6, 14, 26):
        changed, _ = operate(original, [{"to_mla": {"kv_lora_rank": rank, "qk_rope_head_dim": 8}}], sample=ids)
        whole = changed(ids).logits
        assert (pieces(changed, ids) - whole).abs().max() <= 1e-5 * (whole.max() - whole.min())
        apart.append((whole - expected).abs().mean().item())
    assert apart[0] > apart[1] > apart[2]


# -- depth and width ---------------------------------------------------------------------------------------------------


def test_layers_of_little_influence_are_dropped() -> None:
    original = tiny_model()
    quiet = original.model.layers[1]
    quiet.self_attn.o_proj.weight.data *= 1e-4
    quiet.mlp.down_proj.weight.data *= 1e-4
    changed, receipt = drop_layers(original, count=1)
    assert receipt.steps[0].options == {"layers": [1], "count": None}
    assert changed.config.num_hidden_layers == 2
    assert torch.equal(changed.model.layers[1].mlp.up_proj.weight, original.model.layers[2].mlp.up_proj.weight)
    # With its record the change can be made again, without measuring.
    again, _ = operate(original, [{step.operation: step.options} for step in receipt.steps])
    assert all(torch.equal(t, tensors(changed)[n]) for n, t in tensors(again).items())


@pytest.mark.parametrize("style", ["llama", "gemma2", "bert", "deepseek"])
def test_channels_that_do_nothing_are_pruned(style: str) -> None:
    """After widening by channels of zeros, pruning finds them: the function is the old one."""
    experts = style == "deepseek"
    original = styled(style)
    width = original.config.moe_intermediate_size if experts else original.config.intermediate_size
    wide, _ = widen_ffn(original, width + 5, experts)
    for name, tensor in tensors(wide).items():
        if "down_proj.weight" in name and not experts and tensor.shape[-1] == width + 5:
            tensor[:, :5] *= 2  # as before it was shared with the copies, which are silenced
            tensor[:, width:] = 0
        if name.endswith("experts.down_proj"):
            tensor[..., :5] *= 2
            tensor[..., width:] = 0
    changed, _ = prune_ffn(wide, width, experts)
    ids = text()
    expected = original(ids).logits
    assert (changed(ids).logits - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())


# -- experts -----------------------------------------------------------------------------------------------------------


def test_experts_that_nobody_picks_are_pruned() -> None:
    original = tiny_model(**MOE, router_bias=True)
    for layer in original.model.layers:
        layer.mlp.gate.bias.data[[1, 3]] = -1e4
    changed, receipt = prune_experts(original, 3)
    assert receipt.steps[0].options["experts"] == [[0, 2, 4]] * 3
    assert receipt.difference is not None
    assert receipt.difference.largest <= 1e-5 * receipt.difference.spread
    assert torch.equal(
        changed.model.layers[1].mlp.experts.down_proj, original.model.layers[1].mlp.experts.down_proj[[0, 2, 4]]
    )


def test_merged_experts_are_means() -> None:
    original = tiny_model(**MOE)
    groups = [[[0, 3], [1], [2, 4]]] * 3
    changed, _ = merge_experts(original, 3, groups)
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        old, new = (tensors(m)[f"model.layers.2.mlp.{name}"] for m in (original, changed))
        torch.testing.assert_close(new, torch.stack((old[[0, 3]].mean(0), old[1], old[[2, 4]].mean(0))))


# -- merges ------------------------------------------------------------------------------------------------------------


def slerp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Half way: the bisector of two vectors, on the arc between them."""
    a, b = a.double(), b.double()
    angle = torch.arccos(F.cosine_similarity(a.flatten(), b.flatten(), dim=0))
    return (a + b) / (2 * torch.cos(angle / 2))


MERGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda a, b: (a + b) / 2,
    "slerp": slerp,
    "task_arithmetic": lambda a, b: b,
    "ties": lambda a, b: a + ties([b - a], torch.ones(1), 0.5),
}


@pytest.mark.parametrize("method", MERGES)
def test_merges(method: Any, tmp_path: Path) -> None:
    a, b = tiny_model(), redraw(tiny_model(), seed=9)
    merged, receipt = merge(a, [b], method)
    assert receipt.steps[0].options["others"] == ["in memory"]
    for name, tensor in tensors(merged).items():
        expected = MERGES[method](tensors(a)[name], tensors(b)[name])
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=1e-4, atol=1e-6)
    a.save_pretrained(tmp_path / "a")
    b.save_pretrained(tmp_path / "b")
    steps = [{"merge": {"others": [str(tmp_path / "b")], "method": method}}]
    operate_on_folder(tmp_path / "a", tmp_path / "c", steps)
    on_disk = load_file(tmp_path / "c/model.safetensors")
    assert all(torch.allclose(t, on_disk[n], atol=1e-6) for n, t in tensors(merged).items())


def test_dare_keeps_a_random_part_and_its_mean() -> None:
    a, b = tiny_model(), redraw(tiny_model(), seed=9)
    merged, _ = merge(a, [b], "dare_linear", density=0.25, seed=3)
    again, _ = merge(a, [b], "dare_linear", density=0.25, seed=3)
    name = "model.embed_tokens.weight"
    base, learned = tensors(a)[name], tensors(b)[name] - tensors(a)[name]
    share = (tensors(merged)[name] - base) / learned
    kept = share.abs() > 1
    assert 0.2 < kept.float().mean() < 0.3
    torch.testing.assert_close(share[kept], torch.full_like(share[kept], 4.0), rtol=1e-3, atol=0)
    assert torch.equal(tensors(again)[name], tensors(merged)[name])


# -- context -----------------------------------------------------------------------------------------------------------


def test_scaled_contexts_say_the_right_lengths() -> None:
    base = {"rope_theta": 10000.0, "factor": 4.0}
    expected: dict[str, tuple[dict[str, Any], int]] = {
        "linear": ({}, 256),
        "ntk": ({}, 256),
        "dynamic": ({}, 64),
        "yarn": ({"original_max_position_embeddings": 64}, 256),
        "llama3": ({"original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256),
    }
    for kind, (keys, length) in expected.items():
        changed, _ = operate(tiny_model(), [{"extend_context": {"factor": 4, "rope_type": kind}}])
        assert changed.config.rope_parameters == {**base, "rope_type": kind, **keys}
        assert changed.config.max_position_embeddings == length
    # A window sees no further than before: its layers are not scaled.
    mixed, _ = operate(styled("gemma2"), [{"extend_context": {"factor": 4}}])
    assert mixed.config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    assert mixed.config.rope_parameters["full_attention"]["rope_type"] == "yarn"


def test_stretched_positions() -> None:
    original = styled("gpt2", max_position_embeddings=5, position_offset=2)
    changed, _ = operate(original, [{"extend_positions": {"max_position_embeddings": 9, "method": "interpolate"}}])
    old, new = (m.model.embed_positions.weight for m in (original, changed))
    torch.testing.assert_close(new[:2], old[:2])
    torch.testing.assert_close(new[2::2], old[2:])  # every second row is an old one
    torch.testing.assert_close(new[3::2], (old[2:-1] + old[3:]) / 2)


def test_windows() -> None:
    original = tiny_model(attention_sinks=True)
    changed, receipt = operate(original, [{"set_windows": {"sliding_window": 5, "full_layers": [1]}}])
    assert changed.config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    ids = text(length=5)
    assert not receipt.exact
    assert torch.allclose(changed(ids).logits, original(ids).logits, atol=1e-6)
    assert receipt.after.cache_bytes == 4 * 40 * (64 + 5 + 5)


# -- receipts ----------------------------------------------------------------------------------------------------------


def test_the_receipt_says_what_was_measured() -> None:
    original = tiny_model()
    ids = text()
    changed, receipt = operate(original, [{"to_gqa": {"num_key_value_heads": 1}}], sample=ids)
    a, b = original(ids).logits.double(), changed(ids).logits.double()
    found = receipt.difference
    assert found is not None
    assert found.largest == pytest.approx((a - b).abs().max().item(), rel=1e-5)
    assert found.mean == pytest.approx((a - b).abs().mean().item(), rel=1e-5)
    assert found.spread == pytest.approx((a.max() - a.min()).item(), rel=1e-5)
    divergence = F.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
    assert found.kl == pytest.approx(divergence.item(), rel=1e-3)
    assert found.top1 == pytest.approx((a.argmax(-1) == b.argmax(-1)).double().mean().item())
    assert found.tokens == ids.numel()
    assert receipt.before.parameters == original.num_parameters()
    assert receipt.after.parameters == changed.num_parameters()
    # By hand: two for each weight of the layers and of the head, scores and values of 64 tokens in three layers.
    weights = 48 * (60 + 20 + 20 + 60 + 3 * 34)
    assert receipt.before.flops == 2 * (3 * weights + 48 * 99) + 3 * 2 * 64 * 6 * (10 + 10)
    assert receipt.before.cache_bytes == 3 * 64 * 2 * 20 * 4


def test_the_receipt_of_experts_counts_those_that_work() -> None:
    original = tiny_model(**MOE)
    _, receipt = operate(original, [{"experts_layout": {"layout": "linear"}}])
    assert receipt.before == receipt.after
    layers = 48 * (60 + 20 + 20 + 60 + 5) + 2 * 3 * 48 * 14  # two of five experts, and the router
    assert receipt.before.flops == 2 * (3 * layers + 48 * 99) + 3 * 2 * 64 * 6 * 20


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], Steps, str]] = {
    "latent heads": (STYLES["deepseek"], [{"to_mha": {}}], "attention_type='mla'"),
    "a number that divides nothing": ({}, [{"to_gqa": {"num_key_value_heads": 4}}], "num_key_value_heads=2 cannot"),
    "least squares behind a norm": (
        {"qk_norm": "head"},
        [{"to_gqa": {"num_key_value_heads": 1, "method": "least_squares"}}],
        "qk_norm='head'",
    ),
    "slopes of heads": (
        {"position_encoding": "alibi"},
        [{"widen_heads": {"num_key_value_heads": 3}}],
        "position_encoding='alibi'",
    ),
    "norms over all heads": (
        {"qk_norm": "projection"},
        [{"widen_heads": {"num_key_value_heads": 3}}],
        "qk_norm='projection'",
    ),
    "a stream of norms": (STYLES["bert"], [{"duplicate_layers": {"layers": [1]}}], "norm_placement='post'"),
    "scales by index": (
        {"attention_scale_by_layer": True},
        [{"duplicate_layers": {"layers": [0]}}],
        "attention_scale_by_layer",
    ),
    "a layer that is not there": ({}, [{"drop_layers": {"layers": [3]}}], r"\[3\]"),
    "waves of one width": ({"position_encoding": "sinusoidal"}, [{"widen_hidden": {"factor": 2}}], "sinusoidal"),
    "a norm before latents": ({"qk_norm": "head"}, [{"to_mla": {}}], "qk_norm does not apply"),
    "latents without RoPE": ({"position_encoding": "alibi"}, [{"to_mla": {}}], "it needs rope"),
    "frequencies by length": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 777.0}},
        [{"to_mla": {}}],
        "rope_type='dynamic'",
    ),
    "experts twice": (MOE, [{"upcycle": {"num_experts": 4, "num_experts_per_tok": 2}}], "num_experts=5"),
    "uneven slices": ({}, [{"split_ffn": {"num_experts": 5}}], "intermediate_size=34"),
    "a gate on what all pass": (
        {**MOE, "num_shared_experts": 1, "shared_expert_gate": True},
        [{"to_dense": {}}],
        "shared_expert_gate",
    ),
    "groups of experts": (STYLES["deepseek"], [{"prune_experts": {"num_experts": 6}}], "n_group=3"),
    "a stream with gains": (STYLES["bert"], [{"to_rmsnorm": {}}], "norm_placement='post'"),
    "a tied embedding": (STYLES["gpt2"], [{"to_rmsnorm": {}}], "tie_word_embeddings"),
    "a bias without a place": (
        {"norm_type": "layernorm"},
        [{"fold_norms": {}}],
        "attn_norm.pre.bias cannot go into",
    ),
    "scaled twice": ({"rope_parameters": YARN}, [{"extend_context": {"factor": 2}}], "rope_type='yarn'"),
    "a key of another kind": (
        {},
        [{"extend_context": {"factor": 2, "parameters": {"low_freq_factor": 1}}}],
        "has no low_freq_factor",
    ),
    "a special token": ({"eos_token_id": 2}, [{"trim_vocabulary": {"tokens": [5, 6]}}], "eos_token_id=2"),
    "two stacks": ({"topology": "encoder-decoder", "decoder_start_token_id": 1}, [{"to_mha": {}}], "encoder-decoder"),
    "layers of their own": (
        {"per_layer_config": {1: {"num_key_value_heads": 3}}},
        [{"to_gqa": {"num_key_value_heads": 6}}],
        "per_layer_config sets num_key_value_heads",
    ),
    "an unknown name": ({}, [{"to_gqq": {}}], "did you mean to_gqa"),
    "an unknown option": ({}, [{"to_gqa": {"heads": 2}}], "num_key_value_heads, method"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    switches, steps, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        operate(styled("llama", **switches), steps)


def test_models_that_are_not_plain_are_refused(tmp_path: Path) -> None:
    adapted = tiny_model()
    adapted.model.layers[1].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[1].mlp.up_proj)
    with pytest.raises(SurgeryError, match=r"up_proj.0.weight.* adapter must be merged"):
        to_mha(adapted)
    with pytest.raises(SurgeryError, match="another config: num_hidden_layers=2"):
        merge(tiny_model(), [tiny_model(num_hidden_layers=2)])
    (tmp_path / "recipe.yaml").write_text("to_mha: {}")
    with pytest.raises(SurgeryError, match="no recipe"):
        read_recipe(tmp_path / "recipe.yaml")
    tiny_model().save_pretrained(tmp_path / "a")
    with pytest.raises(SurgeryError, match="cannot become 4"):
        operate_on_folder(tmp_path / "a", tmp_path / "b", [{"to_gqa": {"num_key_value_heads": 4}}])
    (tmp_path / "a/adapter").mkdir()
    with pytest.raises(SurgeryError, match="holds an adapter in adapter/"):
        operate_on_folder(tmp_path / "a", tmp_path / "b", [{"to_mha": {}}])
    assert not (tmp_path / "b").exists()


# -- converted models --------------------------------------------------------------------------------------------------

NATIVE: dict[str, tuple[str, Steps, dict[str, Any]]] = {
    "llama heads": ("llama", [{"to_mha": {}}], {"num_key_value_heads": 6}),
    "llama more heads": ("llama", [{"widen_heads": {"num_key_value_heads": 4}}], {"num_attention_heads": 12}),
    "llama layers": ("llama-biases-tied", [{"duplicate_layers": {"count": 2}}], {"num_hidden_layers": 5}),
    "llama width": (
        "llama",
        [{"widen_hidden": {"factor": 2}}, {"widen_ffn": {"intermediate_size": 70}}],
        {"hidden_size": 120, "head_dim": 8, "intermediate_size": 70},
    ),
    "llama untied": ("llama-biases-tied", [{"untie": {}}, {"fold_norms": {}}], {"tie_word_embeddings": False}),
    "gemma2 heads": ("gemma2", [{"to_mha": {}}], {"num_key_value_heads": 6}),
    "gemma2 layers": ("gemma2", [{"duplicate_layers": {"layers": [1]}}], {"num_hidden_layers": 4}),
    "gemma2 width": ("gemma2", [{"widen_ffn": {"intermediate_size": 50}}], {"intermediate_size": 50}),
    "bert width": ("bert", [{"widen_ffn": {"intermediate_size": 50}}], {"intermediate_size": 50}),
    "deepseek layers": ("deepseek_v3", [{"duplicate_layers": {"layers": [2]}}], {"num_hidden_layers": 4}),
    "deepseek experts": (
        "deepseek_v3",
        [{"widen_ffn": {"intermediate_size": 56, "experts": True}}],
        {"moe_intermediate_size": 56, "n_shared_experts": 1},
    ),
    "qwen3 heads": ("qwen3", [{"to_mha": {}}], {"num_key_value_heads": 6}),
}


@torch.no_grad()
@pytest.mark.parametrize("case", NATIVE)
def test_exported_to_the_native_class(case: str, tmp_path: Path) -> None:
    name, steps, says = NATIVE[case]
    family = name.split("-")[0]
    config = {
        "model_type": family,
        "torch_dtype": "float32",
        **(test_encoders.BERT if family == "bert" else CASES[name]),
    }
    if family == "bert":
        native = redraw(test_encoders.native_model({**config, "architectures": ["BertForMaskedLM"]}))
    else:
        native = redraw(native_model(config))
    native.eval().save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "ours", progress=False)
    receipt = operate_on_folder(tmp_path / "ours", tmp_path / "changed", steps)
    assert receipt.exact
    assert "changed since" in (tmp_path / "changed/README.md").read_text()
    export(tmp_path / "changed", tmp_path / "exported", progress=False)
    auto = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    back = auto.from_pretrained(tmp_path / "exported", attn_implementation="eager").eval()
    assert {key: getattr(back.config, key) for key in says} == says
    ids = text() % 70 + 5
    expected, actual = native(ids).logits, back(ids).logits
    assert (actual - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())


def test_an_export_says_what_it_cannot(tmp_path: Path) -> None:
    native = redraw(native_model({"model_type": "llama", "torch_dtype": "float32", **CASES["llama"]}))
    native.save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "ours", progress=False)
    operate_on_folder(tmp_path / "ours", tmp_path / "latent", [{"to_mla": {}}])
    with pytest.raises(NotExpressible, match="attention_type"):
        export(tmp_path / "latent", tmp_path / "exported", progress=False)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    from test_cli import run, run_json

    tiny_model().save_pretrained(tmp_path / "a")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump([{"to_mha": {}}]))
    arguments = ["--recipe", tmp_path / "recipe.yaml", "widen_ffn intermediate_size=40", "--measure"]
    code, answer = run_json("surgery", tmp_path / "a", tmp_path / "b", *arguments)
    assert code == 0
    assert answer["exact"]
    assert [step["operation"] for step in answer["steps"]] == ["to_mha", "widen_ffn"]
    assert answer["difference"]["largest"] <= 1e-5 * answer["difference"]["spread"]
    assert LlmArchForCausalLM.from_pretrained(tmp_path / "b").config.intermediate_size == 40
    assert "2 -> 3" not in run("surgery", tmp_path / "a", tmp_path / "c", "to_mha").stdout
    code, answer = run_json("surgery", tmp_path / "a", tmp_path / "d", "to_gqa num_key_value_heads=4")
    assert (code, answer["error"]) == (3, "SurgeryError")
    code, answer = run_json("operations", "to_mla")
    assert answer["operations"][0]["options"].keys() == {"kv_lora_rank", "qk_rope_head_dim"}
    assert "2502.07864" in answer["operations"][0]["doc"]
    assert len(run_json("operations")[1]["operations"]) > 30

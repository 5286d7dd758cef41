"""What surgery calls exact: the old logits, from the changed model, with a cache, after saving, and on a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.surgery import OPERATIONS, operate, operate_on_folder
from surgery_models import STYLES, assert_same_function, styled
from tiny import HEADS, MIXED, MOE, YARN, redraw, text, tiny_config, tiny_model, tiny_stack

Steps = list[dict[str, dict[str, Any]]]


def step(name: str, **options: Any) -> dict[str, dict[str, Any]]:
    return {name: options}


# Style, the operations, and what the changed config says.
EXACT: dict[str, tuple[str, Steps, dict[str, Any]]] = {
    **{
        f"{style} to_mha": (style, [step("to_mha")], {"num_key_value_heads": 6, "attention_kind": "mha"})
        for style in ("llama", "gemma2", "qwen3", "olmo2", "neox", "granite")
    },
    **{
        f"{style} widen_heads": (style, [step("widen_heads", num_key_value_heads=n)], {"num_attention_heads": h})
        for style, n, h in (("llama", 3, 9), ("gemma2", 5, 15), ("bert", 7, 7), ("qwen3", 3, 9), ("olmo2", 4, 12))
    },
    **{
        f"{style} duplicate_layers": (style, [step("duplicate_layers", layers=[0, 2])], {"num_hidden_layers": 5})
        for style in ("llama", "gemma2", "deepseek", "olmo2", "gpt2", "neox", "granite")
    },
    **{
        f"{style} widen_ffn": (style, [step("widen_ffn", intermediate_size=75)], {"intermediate_size": 75})
        for style in ("llama", "gemma2", "bert", "deepseek", "neox")
    },
    "deepseek widen_ffn experts": (
        "deepseek",
        [step("widen_ffn", intermediate_size=20, experts=True)],
        {"moe_intermediate_size": 20, "shared_width": 28},
    ),
    **{
        f"{style} widen_hidden": (style, [step("widen_hidden", factor=3)], {"hidden_size": 144, "head_dim": head})
        for style, head in (("llama", 10), ("gemma2", 10), ("bert", 10), ("deepseek", 8), ("gpt2", 10), ("granite", 10))
    },
    **{
        f"{style} upcycle": (
            style,
            [step("upcycle", num_experts=4, num_experts_per_tok=2, layers=[0, 2])],
            {"num_experts": 4, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        )
        for style in ("llama", "gemma2", "bert", "neox")
    },
    **{
        f"{style} split_ffn": (
            style,
            [step("widen_ffn", intermediate_size=40), step("split_ffn", num_experts=3, num_shared_experts=shared)],
            {"moe_intermediate_size": 40 // (3 + shared), "num_shared_experts": shared, "num_experts_per_tok": 3},
        )
        for style, shared in (("llama", 1), ("gemma2", 2), ("bert", 1), ("gpt2", 5))
    },
    "bert split_ffn without a shared expert": (
        "bert",
        [step("split_ffn", num_experts=2)],
        {"moe_intermediate_size": 17, "shared_width": 0},
    ),
    **{
        f"{style} to_mla": (style, [step("to_mla")], {"attention_kind": "mla", "qk_rope_head_dim": rotated})
        for style, rotated in (("llama", 20), ("gemma2", 20), ("granite", 20), ("neox", 8))
    },
    **{
        f"{style} {name}": (style, [step(name)], says)
        for name, says in (("fold_norms", {}), ("unfold_norms", {}))
        for style in ("llama", "gemma2", "deepseek", "gpt2", "neox", "granite")
    },
    **{
        f"{style} set_norm_offset": (style, [step("set_norm_offset", norm_offset=0.5)], {"norm_offset": 0.5})
        for style in STYLES
    },
    **{
        f"{style} set_rope_layout": (
            style,
            [step("set_rope_layout", interleaved=style != "deepseek")],
            {"rope_interleaved": style != "deepseek"},
        )
        for style in ("llama", "gemma2", "deepseek", "qwen3", "olmo2", "neox")
    },
    "granite fold_scales": (
        "granite",
        [step("fold_scales")],
        {"residual_scale": 1.0, "embedding_scale": 1.0, "logit_scale": 1.0},
    ),
    "granite fold_scales untied": ("granite", [step("untie"), step("fold_scales")], {"logit_scale": 1.0}),
    "gemma2 fold_scales": ("gemma2", [step("fold_scales")], {"embedding_scale": 1.0}),
    "neox to_rmsnorm": ("neox", [step("to_rmsnorm")], {"norm_type": "rmsnorm", "norm_bias": True}),
    "gpt2 to_rmsnorm": ("gpt2", [step("untie"), step("to_rmsnorm")], {"norm_type": "rmsnorm"}),
    **{f"{style} untie": (style, [step("untie")], {"tie_word_embeddings": False}) for style in ("gemma2", "bert")},
    "gemma2 untie, tie": ("gemma2", [step("untie"), step("tie")], {"tie_word_embeddings": True}),
    "llama extend_context": (
        "llama",
        [step("extend_context", factor=4, rope_type="dynamic")],
        {"max_position_embeddings": 64},
    ),
    "gpt2 extend_positions": ("gpt2", [step("extend_positions", max_position_embeddings=99)], {}),
    "llama set_windows": ("llama", [step("set_windows", sliding_window=64, full_layers=[1])], {"sliding_window": 64}),
    "deepseek experts_layout": (
        "deepseek",
        [step("experts_layout", layout="linear")],
        {"experts_layout": "linear"},
    ),
    "llama a chain": (
        "llama",
        [
            *(step("to_mha"), step("widen_ffn", intermediate_size=40), step("duplicate_layers", count=2)),
            *(step("widen_hidden", factor=2), step("upcycle", num_experts=3, num_experts_per_tok=2), step("to_mla")),
            *(step("fold_norms"), step("widen_ffn", intermediate_size=50, experts=True)),
        ],
        {"num_hidden_layers": 5, "hidden_size": 96, "num_experts": 3, "attention_kind": "mla"},
    ),
}


@pytest.mark.parametrize("case", EXACT)
def test_exact(case: str, tmp_path: Path) -> None:
    style, steps, says = EXACT[case]
    original = styled(style)
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    changed, receipt = operate(original, steps)
    assert receipt.exact
    assert {name: getattr(changed.config, name) for name in says} == says
    assert all(torch.equal(tensor, before[name]) for name, tensor in original.state_dict().items())
    assert_same_function(changed, original)
    changed.save_pretrained(tmp_path / "saved")
    assert_same_function(type(changed).from_pretrained(tmp_path / "saved"), original)

    # On a folder it is the same change. (Sums over mapped files may run in another order.)
    original.save_pretrained(tmp_path / "original")
    on_disk = operate_on_folder(tmp_path / "original", tmp_path / "changed", steps, max_shard_size="100KB")
    assert on_disk.exact
    assert (on_disk.before, on_disk.after) == (receipt.before, receipt.after)
    again = type(changed).from_pretrained(tmp_path / "changed")
    expected = changed.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    assert yaml.safe_load((tmp_path / "changed/surgery.yaml").read_text())[0].keys() == steps[0].keys()
    recorded = json.loads((tmp_path / "changed/config.json").read_text())["converted_from"]["surgery"]
    assert [name for entry in recorded for name in entry] == [name for entry in steps for name in entry]


def test_every_exact_operation_is_tested() -> None:
    tested = {name for _, steps, _ in EXACT.values() for entry in steps for name in entry}
    elsewhere = {
        *("to_gqa", "to_mqa", "prune_heads", "drop_layers", "prune_ffn", "prune_experts", "merge_experts", "to_dense"),
        *("grow_vocabulary", "trim_vocabulary", "merge"),
    }
    assert tested | elsewhere == set(OPERATIONS)
    assert not tested & elsewhere


# -- what some models need besides -----------------------------------------------------------------------------------

MLA_CASES: dict[str, dict[str, Any]] = {
    "neighbouring channels": {"rope_interleaved": True},
    "yarn": {"rope_parameters": YARN},
    "biases": {"attention_bias": True},
    "biases and LayerNorm": {"attention_bias": True, "norm_type": "layernorm"},
    "one head": {"num_key_value_heads": 1},
    "one head, biases": {"num_key_value_heads": 1, "attention_bias": True, "norm_offset": 1.0},
    "all heads": {"num_key_value_heads": 6},
    "a layer without positions": {"nope_layers": [1]},
    "sinks": {"attention_sinks": True},
    "scaled by layer": {"attention_scale_by_layer": True},
    "two bases": {
        **MIXED,
        "rope_parameters": {
            "full_attention": {"rope_theta": 777.0},
            "sliding_attention": {"rope_theta": 33.0, "rope_type": "linear", "factor": 2.0},
        },
    },
}


@pytest.mark.parametrize("case", MLA_CASES)
def test_latent_attention_at_full_rank(case: str) -> None:
    original = tiny_model(**MLA_CASES[case])
    changed, receipt = operate(original, [step("to_mla")])
    assert receipt.exact
    assert_same_function(changed, original)


def test_a_latent_cache_is_as_wide_as_its_rank() -> None:
    original = tiny_model(rope_parameters={"rope_theta": 777.0})
    changed, receipt = operate(original, [step("to_mla", kv_lora_rank=14, qk_rope_head_dim=10)])
    assert not receipt.exact
    # 3 layers, 64 tokens, 4 bytes; 2 heads with keys and values of 10, against a latent of 14 and a rotated key of 10.
    assert receipt.before.cache_bytes == 3 * 64 * 4 * 2 * 2 * 10
    assert receipt.after.cache_bytes == 3 * 64 * 4 * (14 + 10)
    # One component of each pair keeps its rotation, so the frequencies are those of RoPE.
    assert changed.config.rope_parameters == {"rope_type": "default", "rope_theta": 777.0}
    ids = text()
    out = changed(ids, use_cache=True)
    layer = (out.past_key_values if "past_key_values" in out else out.cache).layers[0]
    assert layer.keys.shape[-1] + layer.values.shape[-1] == 24


def test_one_expert_becomes_dense() -> None:
    switches = {**MOE, "num_experts": 1, "num_experts_per_tok": 1, "num_shared_experts": 2}
    original = tiny_model(**switches, routed_scaling_factor=2.5, router_score="sigmoid")
    changed, receipt = operate(original, [step("to_dense")])
    assert receipt.exact
    assert changed.config.num_experts is None
    assert changed.config.intermediate_size == 42
    assert_same_function(changed, original)
    # Copies of one feed-forward: their mean is what it was, though a mean of experts is called none.
    dense = tiny_model(ffn_bias=True)
    back, receipt = operate(dense, [step("upcycle", num_experts=3, num_experts_per_tok=2), step("to_dense")])
    assert not receipt.exact
    assert back.config.intermediate_size == 34
    assert_same_function(back, dense)


def test_a_bias_of_relative_positions_follows_its_head() -> None:
    original = tiny_model(position_encoding="relative_bias", attention_sinks=True)
    changed, _ = operate(original, [step("widen_heads", num_key_value_heads=3), step("duplicate_layers", layers=[1])])
    assert_same_function(changed, original)
    own = tiny_model(position_encoding="relative_bias", relative_attention_shared=False, nope_layers=[1])
    changed, _ = operate(own, [step("duplicate_layers", layers=[0])])
    assert changed.config.nope_layers == [2]
    assert_same_function(changed, own)


@pytest.mark.parametrize("style", ["llama", "gemma2", "bert", "deepseek"])
def test_a_vocabulary_that_grows_and_is_trimmed(style: str, tmp_path: Path) -> None:
    original = styled(style, eos_token_id=[7, 11], bos_token_id=9)
    grown, receipt = operate(original, [step("grow_vocabulary", multiple_of=64)])
    assert grown.config.vocab_size == 128
    assert receipt.exact
    ids = text()
    expected = original(ids).logits
    assert torch.equal(grown(ids).logits[..., :99], expected)
    embedding = original.model.embed_tokens.weight
    assert torch.allclose(grown.model.embed_tokens.weight[99:], embedding.mean(0), atol=1e-6)

    kept = sorted({*ids.flatten().tolist(), 7, 9, 11})
    trimmed, receipt = operate(original, [step("trim_vocabulary", tokens=kept)])
    assert receipt.difference is not None
    assert receipt.difference.largest <= 1e-5 * receipt.difference.spread
    new = {old: place for place, old in enumerate(kept)}
    assert trimmed.config.eos_token_id == [new[7], new[11]]
    assert trimmed.config.bos_token_id == new[9]
    renamed = ids.clone().apply_(new.__getitem__)
    spread = expected.max() - expected.min()
    assert (trimmed(renamed).logits - expected[..., kept]).abs().max() <= 1e-5 * spread
    if style != "bert":
        assert trimmed.generation_config.bos_token_id == new[9]


def test_a_new_model_keeps_its_state() -> None:
    original = tiny_model().to(torch.bfloat16).train()
    original.set_attn_implementation("eager")
    original.generation_config.max_new_tokens = 7
    for name, parameter in original.named_parameters():
        parameter.requires_grad_("k_proj" not in name)
    changed, _ = operate(original, [step("to_mha"), step("duplicate_layers", layers=[1])])
    assert changed.training
    assert changed.dtype == torch.bfloat16
    assert changed.config._attn_implementation == "eager"
    assert changed.generation_config.max_new_tokens == 7
    assert {p.requires_grad for n, p in changed.named_parameters() if "k_proj" in n} == {False}
    assert {p.requires_grad for n, p in changed.named_parameters() if "k_proj" not in n} == {True}
    storages = {p.untyped_storage().data_ptr() for p in original.parameters()}
    assert not storages & {p.untyped_storage().data_ptr() for p in changed.parameters()}


def test_a_base_model_without_a_head() -> None:
    from hf_llmarch import LlmArchModel

    original = redraw(LlmArchModel(tiny_config())).eval()
    changed, receipt = operate(original, [step("to_mha"), step("duplicate_layers", layers=[2]), step("to_mla")])
    assert receipt.difference is not None
    assert receipt.difference.kl is None
    ids = text()
    expected = original(ids).last_hidden_state
    assert (changed(ids).last_hidden_state - expected).abs().max() <= 1e-5 * (expected.max() - expected.min())


def test_copies_learn_from_the_first_step() -> None:
    """A silent layer has gradients, of the size of those around it and not of 1 / sqrt(eps)."""
    for style in ("llama", "gemma2", "olmo2"):
        changed, _ = operate(styled(style), [step("duplicate_layers", layers=[1])])
        ids = text()
        changed(ids, labels=ids).loss.backward()
        size = {name: p.grad.abs().max().item() for name, p in changed.named_parameters() if p.grad is not None}
        copy = max(value for name, value in size.items() if ".layers.2." in name)
        others = max(value for name, value in size.items() if ".layers.2." not in name)
        assert 1e-6 * others < copy < 10 * others


def test_all_heads_have_a_class() -> None:
    assert type(operate(tiny_stack(**STYLES["bert"]), [step("untie")])[0]) is HEADS["encoder"]
    assert type(operate(tiny_model(), [step("to_mha")])[0]) is LlmArchForCausalLM


def test_tensors_of_a_folder_are_those_of_the_config(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "a")
    operate_on_folder(tmp_path / "a", tmp_path / "b", [step("to_mha")])
    tensors = load_file(tmp_path / "b/model.safetensors")
    key = load_file(tmp_path / "a/model.safetensors")["model.layers.1.self_attn.k_proj.weight"]
    heads = tensors["model.layers.1.self_attn.k_proj.weight"].view(6, 10, 48)
    for h in range(6):
        assert torch.equal(heads[h], key.view(2, 10, 48)[h // 3])

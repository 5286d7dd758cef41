"""Surgery: what is claimed to be lossless is compared bit by bit, in memory and on disk."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_llmarch import LlmArchForCausalLM, LlmArchModel
from hf_llmarch.conversion.errors import ConversionError, DestinationError
from hf_llmarch.model.configuration_llmarch import ExpertsLayout
from hf_llmarch.model.experts import LinearExperts, PackedExperts
from hf_llmarch.surgery.experts_layout import LAYOUTS, PACKED, convert_experts_layout, with_experts_layout
from test_experts import SPARSE
from tiny import assert_close, redraw, text, tiny_config, tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "glu": {},
    "biases": {"ffn_bias": True, "router_bias": True, "glu_limit": 0.5},
    "mlp": {"ffn_type": "mlp", "hidden_act": "gelu", "ffn_bias": True},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1, "ffn_type": "mlp"},
    # Square experts, whose halves or transposes could be taken for one another.
    "square": {"moe_intermediate_size": 48},
    "shared and dense": {
        **{"num_shared_experts": 1, "shared_expert_gate": True, "router_selection_bias": True},
        **{"mlp_layer_types": ["dense", "sparse", "sparse"], "tie_word_embeddings": True},
    },
}
each_model = pytest.mark.parametrize("switches", MODELS.values(), ids=MODELS)


def sparse_model(**switches: Any) -> LlmArchForCausalLM:
    return tiny_model(**{**SPARSE, **switches})


def assert_same(left: nn.Module, right: nn.Module) -> None:
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


def test_every_layout_has_a_way_there() -> None:
    assert set(LAYOUTS) == set(get_args(ExpertsLayout))


@each_model
def test_there_and_back_is_bit_equal(switches: dict[str, Any]) -> None:
    packed = sparse_model(**switches)
    before = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    linear = with_experts_layout(packed, "linear")
    assert type(linear) is LlmArchForCausalLM
    assert linear.config.experts_layout == "linear"
    assert packed.config.experts_layout == "packed"
    assert isinstance(linear.model.layers[2].mlp.experts, LinearExperts)
    assert_close(linear(text()).logits, packed(text()).logits, "backend")
    # As a model that is built so holds it: every name, every shape, and every row where it belongs.
    fresh = LlmArchForCausalLM(tiny_config(**{**SPARSE, **switches, "experts_layout": "linear"}))
    assert {n: t.shape for n, t in linear.state_dict().items()} == {n: t.shape for n, t in fresh.state_dict().items()}
    experts = packed.model.layers[2].mlp.experts
    width = experts.intermediate_dim
    for e, expert in enumerate(linear.model.layers[2].mlp.experts):
        wide = getattr(experts, experts.up_name)[e]
        assert torch.equal(expert.up_proj.weight, wide[-width:])
        assert torch.equal(expert.down_proj.weight, experts.down_proj[e])
        if experts.has_gate:
            assert torch.equal(expert.gate_proj.weight, wide[:width])
    back = with_experts_layout(linear, "packed")
    assert isinstance(back.model.layers[2].mlp.experts, PackedExperts)
    assert_same(back, packed)
    assert torch.equal(back(text()).logits, packed(text()).logits)
    assert all(torch.equal(tensor, before[name]) for name, tensor in packed.state_dict().items())


def test_a_new_model_shares_no_memory_and_keeps_its_state() -> None:
    packed = sparse_model().to(torch.bfloat16).train()
    packed.set_experts_implementation("batched_mm")
    packed.generation_config.max_new_tokens = 7
    for name, parameter in packed.named_parameters():
        parameter.requires_grad_("experts" not in name)
    for layout in ("linear", "packed"):
        changed = with_experts_layout(packed, layout)  # type: ignore[arg-type]
        assert changed.training
        assert all(part.training for part in changed.modules())
        assert changed.dtype == torch.bfloat16
        assert changed.generation_config.max_new_tokens == 7
        assert changed.config._experts_implementation == "batched_mm"
        assert not any(p.requires_grad for n, p in changed.named_parameters() if ".experts." in n)
        assert all(p.requires_grad for n, p in changed.named_parameters() if ".experts." not in n)
        storages = {p.untyped_storage().data_ptr() for p in packed.parameters()}
        assert not storages & {p.untyped_storage().data_ptr() for p in changed.parameters()}
        own = [p.untyped_storage().data_ptr() for p in changed.parameters()]
        assert len(own) == len(set(own))
    back = with_experts_layout(with_experts_layout(packed, "linear"), "packed")
    back.set_experts_implementation("grouped_mm")  # reaches the experts through the new config
    assert back.model.layers[0].mlp.experts.config._experts_implementation == "grouped_mm"
    assert packed.model.layers[0].mlp.experts.config._experts_implementation == "batched_mm"


def test_the_base_model_and_layers_of_their_own_widths() -> None:
    config = tiny_config(**SPARSE, per_layer_config={1: {"moe_intermediate_size": 12, "num_experts_per_tok": 3}})
    packed = redraw(LlmArchModel(config)).eval()
    linear = with_experts_layout(packed, "linear")
    assert linear.layers[1].mlp.experts[0].up_proj.weight.shape == (12, 48)
    assert_close(linear(text()).last_hidden_state, packed(text()).last_hidden_state, "backend")
    assert_same(with_experts_layout(linear, "packed"), packed)


def test_linear_experts_train_as_packed_ones() -> None:
    packed = sparse_model().train()
    linear = with_experts_layout(packed, "linear")
    ids = text()
    for model in (packed, linear):
        model(ids, labels=ids).loss.backward()
    experts = packed.model.layers[1].mlp.experts
    for e, expert in enumerate(linear.model.layers[1].mlp.experts):
        joined = torch.cat((expert.gate_proj.weight.grad, expert.up_proj.weight.grad))
        assert_close(joined, experts.gate_up_proj.grad[e], "gradient")
        assert_close(expert.down_proj.weight.grad, experts.down_proj.grad[e], "gradient")


def test_what_has_no_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="num_experts is None"):
        with_experts_layout(tiny_model(), "linear")
    own = tiny_config(**SPARSE, per_layer_config={1: {"experts_layout": "linear"}})
    with pytest.raises(ValueError, match="per_layer_config sets an experts_layout of its own"):
        with_experts_layout(LlmArchForCausalLM(own), "linear")
    with pytest.raises(Exception, match="experts_layout"):
        with_experts_layout(sparse_model(), "stacked")  # type: ignore[arg-type]
    adapted = with_experts_layout(sparse_model(), "linear")
    expert = adapted.model.layers[1].mlp.experts[3]
    expert.up_proj = nn.Sequential(expert.up_proj, nn.Identity())
    with pytest.raises(ConversionError, match=r"experts.3.up_proj.0.weight.* adapter must be merged"):
        with_experts_layout(adapted, "packed")


# -- on disk ---------------------------------------------------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@each_model
def test_a_saved_folder_there_and_back(switches: dict[str, Any], tmp_path: Path) -> None:
    model = sparse_model(**switches)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "packed")
    (tmp_path / "packed" / "tokenizer.json").write_text("{}")
    linear = convert_experts_layout(tmp_path / "packed", tmp_path / "linear", "linear", max_shard_size="20KB")
    assert linear == tmp_path / "linear"
    assert len(list(linear.glob("*.safetensors"))) > 1
    assert (linear / "tokenizer.json").read_text() == "{}"
    loaded = LlmArchForCausalLM.from_pretrained(linear)
    assert loaded.config.experts_layout == "linear"
    assert loaded.generation_config.max_new_tokens == 7
    assert_same(loaded, with_experts_layout(model, "linear"))
    back = convert_experts_layout(linear, tmp_path / "back", "packed")
    original, again = tensors_of(tmp_path / "packed"), tensors_of(back)
    assert original.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in original.items())
    assert json.loads((back / "config.json").read_text()) == json.loads((tmp_path / "packed/config.json").read_text())
    # What is on disk are the bytes of each tensor, once.
    size = sum(file.stat().st_size for file in linear.glob("*.safetensors"))
    assert size < 1.3 * sum(tensor.nbytes for tensor in original.values())


def test_a_folder_in_bf16_with_its_code(tmp_path: Path) -> None:
    model = sparse_model(router_selection_bias=True).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "a")
    code = {file.name for file in (tmp_path / "a").glob("*.py")}
    convert_experts_layout(tmp_path / "a", tmp_path / "b", "linear")
    assert code
    assert {file.name for file in (tmp_path / "b").glob("*.py")} == code
    dtypes = {name: t.dtype for name, t in tensors_of(tmp_path / "b").items()}
    assert dtypes["model.layers.1.mlp.experts.4.down_proj.weight"] == torch.bfloat16
    assert dtypes["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32


def test_a_headless_folder(tmp_path: Path) -> None:
    model = redraw(LlmArchModel(tiny_config(**SPARSE)))
    model.save_pretrained(tmp_path / "a")
    convert_experts_layout(tmp_path / "a", tmp_path / "b", "linear")
    assert_same(LlmArchModel.from_pretrained(tmp_path / "b"), with_experts_layout(model, "linear"))


def test_the_layout_it_has_is_a_copy(tmp_path: Path) -> None:
    sparse_model().save_pretrained(tmp_path / "a")
    convert_experts_layout(tmp_path / "a", tmp_path / "b", "packed")
    assert tensors_of(tmp_path / "a").keys() == tensors_of(tmp_path / "b").keys()


def test_folders_that_are_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "dense")
    with pytest.raises(ConversionError, match="no experts"):
        convert_experts_layout(tmp_path / "dense", tmp_path / "out", "linear")
    sparse_model().save_pretrained(tmp_path / "a")
    with pytest.raises(DestinationError):
        convert_experts_layout(tmp_path / "a", tmp_path / "a", "linear")
    sparse_model(experts_layout="linear").save_pretrained(tmp_path / "linear")
    config = json.loads((tmp_path / "linear/config.json").read_text())
    (tmp_path / "linear/config.json").write_text(json.dumps({**config, "num_experts": 6}))
    with pytest.raises(ConversionError, match="of 6 experts"):
        convert_experts_layout(tmp_path / "linear", tmp_path / "out", "packed")
    (tmp_path / "linear/config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    with pytest.raises(ConversionError, match="'mixtral'"):
        convert_experts_layout(tmp_path / "linear", tmp_path / "out", "packed")
    assert not (tmp_path / "out").exists()


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = sparse_model(experts_layout="linear")
    model.save_pretrained(tmp_path / "a")
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    kept = {name: t for name, t in tensors_of(tmp_path / "a").items() if name != gone}
    save_file(kept, tmp_path / "a/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=gone):
        convert_experts_layout(tmp_path / "a", tmp_path / "b", "packed")
    assert set(PACKED) == {f"{n}{b}" for n in ("gate_up_proj", "up_proj", "down_proj") for b in ("", "_bias")}

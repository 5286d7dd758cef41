"""What research code does to `model.model.layers`: the native class with the same weights, treated alike, says what is
right."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_llmarch import LlmArchForMaskedLM
from hf_llmarch.conversion import convert
from tiny import assert_close, redraw, text, tiny_config, tiny_model

NATIVE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 34,
    "max_position_embeddings": 64,
}
GREEDY: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def keep(model: Any, layers: list[Any]) -> None:
    """These layers in this order, numbered anew, as their cache is."""
    model.model.layers = nn.ModuleList(layers)
    for i, layer in enumerate(layers):
        layer.self_attn.layer_idx = i
    model.config.num_hidden_layers = len(layers)


def slice_alone(model: Any) -> None:
    model.model.layers = model.model.layers[:4]


def slice_and_say(model: Any) -> None:
    slice_alone(model)
    model.config.num_hidden_layers = 4


def say_alone(model: Any) -> None:
    model.config.num_hidden_layers = 4


def delete(model: Any) -> None:
    layers = list(model.model.layers)
    del layers[2:4]
    keep(model, layers)


def reorder(model: Any) -> None:
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([layers[i] for i in (0, 3, 2, 1, 5, 4)])


def append_copy(model: Any) -> None:
    keep(model, [*model.model.layers, copy.deepcopy(model.model.layers[3])])


def repeat(model: Any) -> None:
    keep(model, [copy.deepcopy(model.model.layers[i]) for i in (0, 1, 2, 1, 2, 3, 4, 5)])


class Halved(nn.Module):
    """A layer in the place of another, with the arguments that its author met in transformers."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        return (hidden_states + self.layer(hidden_states, attention_mask=attention_mask, **kwargs)) / 2


class Skipped(nn.Module):
    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def wrap(model: Any) -> None:
    model.model.layers[2] = Halved(model.model.layers[2])


def skip(model: Any) -> None:
    model.model.layers[4] = Skipped()


def hand_over(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[4])
    model.model.layers[1].self_attn.layer_idx = 1


TREATMENTS = [
    slice_alone, slice_and_say, say_alone, delete, reorder, append_copy, repeat, wrap, skip, hand_over
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("pair")
    native = redraw(AutoModelForCausalLM.from_config(AutoConfig.for_model(**NATIVE))).eval()
    native.save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "ours", progress=False)
    return AutoModelForCausalLM.from_pretrained(folder / "ours").eval(), native


@torch.no_grad()
@pytest.mark.parametrize("treat", TREATMENTS)
def test_layers_may_be_cut_moved_and_replaced(treat: Callable[[Any], None], pair: tuple[Any, Any]) -> None:
    ours, native = copy.deepcopy(pair[0]), copy.deepcopy(pair[1])
    before = native(text()).logits
    for model in (ours, native):
        treat(model)
    assert not torch.equal(native(text()).logits, before)
    assert_close(ours(text()).logits, native(text()).logits, "native")
    assert torch.equal(ours.generate(text(), **GREEDY), native.generate(text(), **GREEDY))


def test_early_exit(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, native = pair
    before = ours.config.to_dict()
    assert torch.equal(ours.generate(text(1), assistant_early_exit=4, **GREEDY), native.generate(text(1), **GREEDY))
    assert ours.config.to_dict() == before


@torch.no_grad()
@pytest.mark.parametrize("treat", [slice_and_say, say_alone, delete, append_copy, repeat])
def test_what_is_left_is_saved_and_loaded(treat: Callable[[Any], None], pair: tuple[Any, Any], tmp_path: Path) -> None:
    ours = copy.deepcopy(pair[0])
    treat(ours)
    ours.save_pretrained(tmp_path)
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path)(text()).logits, ours(text()).logits, "reload")


# -- layers that differ -----------------------------------------------------------------------------------------------

MIXED = ["full_attention", "sliding_attention", "full_attention"]


@torch.no_grad()
@pytest.mark.parametrize("switches", [{"sliding_window": 5, "layer_types": MIXED}, {"nope_layers": [1]}])
def test_layers_that_differ_are_moved_with_what_the_config_says_of_them(switches: dict[str, Any]) -> None:
    model = tiny_model(**switches)
    moved = copy.deepcopy(model)
    keep(moved, [moved.model.layers[i] for i in (0, 2)])
    with pytest.raises(ValueError, match=r"layers\[1\].*set config.layer_types"):
        moved(text())
    moved.config.layer_types, moved.config.nope_layers = ["full_attention"] * 2, None
    uniform = tiny_model(num_hidden_layers=2)
    weights = {
        name.replace("layers.2", "layers.1"): w for name, w in model.state_dict().items() if "layers.1" not in name
    }
    uniform.load_state_dict(weights)
    assert_close(moved(text()).logits, uniform(text()).logits, "reload")
    assert torch.equal(moved.generate(text(), **GREEDY), uniform.generate(text(), **GREEDY))


def test_lists_follow_the_number_of_layers() -> None:
    config = tiny_config(sliding_window=5, layer_types=MIXED, nope_layers=[0, 2])
    config.num_hidden_layers = 2
    assert (config.layer_types, config.nope_layers) == (MIXED[:2], [0])
    config.validate()
    config.num_hidden_layers = 3
    assert config.to_dict() == tiny_config(sliding_window=5, layer_types=MIXED, nope_layers=[0, 2]).to_dict()
    with pytest.raises(ValueError, match="set layer_types first"):
        config.num_hidden_layers = 4
    assert config.num_hidden_layers == 3
    config.layer_types = [*MIXED, "sliding_attention"]
    config.num_hidden_layers = 4
    config.validate()


def test_a_group_of_layers_is_made_as_its_own_layers_are() -> None:
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
    experts = {"num_experts": 3, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
    config = tiny_config(
        topology="encoder", num_hidden_layers=4, layer_groups=2, layer_types=kinds, sliding_window=5, **experts
    )
    layers = LlmArchForMaskedLM(config).model.layers
    assert [layer.self_attn.sliding_window for layer in layers] == [None, 6]
    assert [hasattr(layer.mlp, "experts") for layer in layers] == [False, True]

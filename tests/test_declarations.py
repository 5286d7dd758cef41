"""Parts that are new: each takes a class and a name, and whatever cannot run it refuses it until it says what it needs.

`docs/adding.md` tells how to add a part, a backend or a family; these tests do it.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_llmarch import LlmArchConfig, LlmArchForCausalLM
from hf_llmarch.conversion.families.common import CAUSAL_LM, LLAMA_CONFIG, LLAMA_WEIGHTS
from hf_llmarch.conversion.plans import export_plan, plan
from hf_llmarch.conversion.rules import Family
from hf_llmarch.model.attention import Attention, plan_by_heads
from hf_llmarch.model.backends import AROUND, HONOURS, refuse_backend
from hf_llmarch.model.block import ATTENTIONS
from hf_llmarch.model.compat import CACHE
from hf_llmarch.model.declarations import Facts, Feature, facts
from hf_llmarch.model.norms import NORMS, Norm, RMSNorm
from hf_llmarch.model.parallel import pipeline_plan, refuse_sizes, tensor_parallel_plan
from hf_llmarch.model.positions import POSITIONS, ScoreBias
from hf_llmarch.model.routing import ROUTERS, Router
from tiny import MOE, assert_close, redraw, text, tiny_config, tiny_model

pytestmark = pytest.mark.core


class ToyNorm(Norm):
    """RMSNorm by torch's own function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.gain()


class ToyPositions(ScoreBias):
    """ALiBi by the formula of arXiv 2108.12409 for 4 heads: slopes 2^-2, 2^-4, 2^-6 and 2^-8."""

    def bias(self, distance: torch.Tensor) -> torch.Tensor:
        return torch.stack([distance * 4.0 ** -(head + 1) for head in range(4)])


class ToyAttention(Attention):
    """Attention with the other sign."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, weights = super().forward(*args, **kwargs)
        return -out, weights


class ToyRouter(Router):
    """Tokens pick by the logits with the other sign."""

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().choose(-logits)


@dataclass(frozen=True)
class Toy:
    """A new part, and the model with which one that has it agrees.

    Args:
        field: the switch that chooses the part.
        table: where the part is entered.
        switches: what else the config says.
        twin: an old value of the field, with which the model computes the same once `edit` has changed it.
        facts: what the part should declare.
    """

    field: str
    table: Any
    part: type
    twin: str
    facts: Facts
    switches: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[Any], None] = lambda model: None


def turn_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.neg_()


def turn_routers(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.neg_()


TOYS = [
    Toy("norm_type", NORMS, ToyNorm, "rmsnorm", Facts()),
    Toy(
        *("position_encoding", POSITIONS, ToyPositions, "alibi", Facts(asks=(Feature.SCORE_BIAS,))),
        {"num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    Toy("attention_type", ATTENTIONS, ToyAttention, "gqa", Facts(tensor_plan=plan_by_heads), edit=turn_attention),
    Toy("router_type", ROUTERS, ToyRouter, "top_k", Facts(), MOE, turn_routers),
]
# Those that add nothing to scores run wherever plain attention runs; a bias needs a backend that takes one.
PLACES = [*HONOURS, "paged|eager", "paged|sdpa", "vllm_mla", "sglang", "somebody/kernel"]
RUNS = {"position_encoding": {"eager", "sdpa"}}


@pytest.fixture(params=TOYS, ids=lambda toy: toy.field)
def toy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A part under the name `toy`, which in the config's source is a line of a `Literal`."""
    monkeypatch.setitem(request.param.table, "toy", request.param.part)
    monkeypatch.setitem(LlmArchConfig.__validators__, request.param.field, [])
    return request.param


def config_with(toy: Toy, value: str = "toy", **switches: Any) -> LlmArchConfig:
    return tiny_config(**{**toy.switches, toy.field: value, **switches})


def declare(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy.part, "facts", toy.facts, raising=False)


@torch.no_grad()
def test_a_new_part_runs_in_plain_operations(toy: Toy) -> None:
    model = redraw(LlmArchForCausalLM(config_with(toy))).eval()
    twin = LlmArchForCausalLM(config_with(toy, toy.twin, attn_implementation="eager")).eval()
    twin.load_state_dict(model.state_dict())
    toy.edit(twin)
    assert model.config._attn_implementation == "eager"  # chosen by itself
    ids = text()
    logits = model(ids).logits
    assert_close(logits, twin(ids).logits, "backend")
    cache = DynamicCache(config=model.config)
    pieces = [model(part, **{CACHE: cache}).logits for part in (ids[:, :9], ids[:, 9:10], ids[:, 10:])]
    assert_close(torch.cat(pieces, dim=1), logits, "backend")


@pytest.mark.parametrize("implementation", [name for name in PLACES if name != "eager"])
def test_an_undeclared_part_is_refused_by_every_other_backend(toy: Toy, implementation: str) -> None:
    said = rf"cannot do {toy.field}='toy'.*Use one of: eager\. {toy.part.__name__} needs plain operations"
    with pytest.raises(ValueError, match=said):
        LlmArchForCausalLM(config_with(toy, attn_implementation=implementation))
    with pytest.raises(ValueError, match=said):
        LlmArchForCausalLM(config_with(toy)).set_attn_implementation(implementation)


def test_an_undeclared_part_is_cut_nowhere(toy: Toy) -> None:
    config = config_with(toy)
    for option in ("tp_size", "ep_size", "pp_size"):
        with pytest.raises(ValueError, match=f"{option}=2: .*{toy.field}='toy'.*{toy.part.__name__} needs plain"):
            refuse_sizes(config, SimpleNamespace(**{option: 2}))
    refuse_sizes(config, SimpleNamespace(fsdp_size=2))
    assert not pipeline_plan(config)
    assert not [name for name in tensor_parallel_plan(config) if "self_attn" in name]
    model = LlmArchForCausalLM(config)
    assert not model.supports_context_parallel
    with pytest.raises(ValueError, match=rf"'paged\|eager' cannot do {toy.field}='toy'"):
        model.init_continuous_batching()


@torch.no_grad()
def test_a_declared_part_runs_where_its_facts_allow(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(toy, monkeypatch)
    config, twin = config_with(toy), config_with(toy, toy.twin)
    able = RUNS.get(toy.field, set(PLACES))
    for implementation in able:
        refuse_backend(config, implementation)
    for implementation in set(PLACES) - able:
        with pytest.raises(ValueError, match=f"cannot do {toy.field}='toy'"):
            refuse_backend(config, implementation)
    refuse_sizes(config, SimpleNamespace(tp_size=2, ep_size=2, pp_size=2))
    assert tensor_parallel_plan(config) == tensor_parallel_plan(twin)
    assert pipeline_plan(config) == pipeline_plan(twin) != {}
    model = redraw(LlmArchForCausalLM(config)).eval()
    assert model.config._attn_implementation == "sdpa"
    assert model.supports_context_parallel is (toy.field != "position_encoding")
    fused = model(text()).logits
    model.set_attn_implementation("eager")
    assert_close(fused, model(text()).logits, "backend")


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.field)
def test_every_part_of_ours_declares_its_facts(toy: Toy) -> None:
    assert not [part.__name__ for part in toy.table.values() if Feature.UNDECLARED in facts(part).asks]


def test_a_declaration_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NORMS, "rmsnorm", type("OtherNorm", (RMSNorm,), {}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"norm_type='rmsnorm'.*OtherNorm needs plain operations"):
        refuse_backend(tiny_config(), "sdpa")


def test_layers_cannot_have_numbers_of_heads_of_their_own_with_new_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are made once for all layers, and a new kind may count heads."""
    monkeypatch.setitem(LlmArchConfig.__validators__, "position_encoding", [])
    with pytest.raises(StrictDataclassError, match="per_layer_config overrides 'num_attention_heads'"):
        tiny_config(position_encoding="toy", per_layer_config={1: {"num_attention_heads": 4}})
    tiny_config(position_encoding="toy", nope_layers=[1])


# -- backends ---------------------------------------------------------------------------------------------------------


def double_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Softmax(q.k + bias) v in float64."""
    groups = query.shape[1] // key.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query.double() @ k.transpose(-1, -2) * scaling + kwargs.get("position_bias", 0.0)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ v).transpose(1, 2).to(query.dtype), None


@torch.no_grad()
def test_a_new_backend_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "toy", double_attention)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "toy", eager_mask)
    biased, ids = tiny_model(position_encoding="alibi"), text()
    with pytest.raises(ValueError, match="'toy' cannot do position_encoding='alibi'"):
        biased.set_attn_implementation("toy")

    monkeypatch.setitem(HONOURS, "toy", AROUND | {Feature.SCORE_BIAS})
    biased.set_attn_implementation("eager")
    expected = biased(ids).logits
    biased.set_attn_implementation("toy")
    assert_close(biased(ids).logits, expected, "backend")
    with pytest.raises(ValueError, match=r"cannot do position_encoding='alibi'.*Use one of: eager, sdpa, toy\."):
        biased.set_attn_implementation("flash_attention_2")
    with pytest.raises(ValueError, match=r"'toy' cannot do attn_logit_softcapping=0\.1"):
        tiny_model(attn_logit_softcapping=0.1).set_attn_implementation("toy")


# -- families ---------------------------------------------------------------------------------------------------------


class ToyConfig(LlamaConfig):
    model_type = "toy"


@torch.no_grad()
def test_a_new_family_is_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LLaMA under another `model_type`."""
    home: Any = import_module("hf_llmarch.conversion.families")
    file = ModuleType(f"{home.__name__}.toy", "LLaMA by another name.")
    vars(file)["FAMILY"] = Family(
        "toy",
        config=LLAMA_CONFIG,
        weights=LLAMA_WEIGHTS,
        architectures={CAUSAL_LM: "ToyForCausalLM"},
        native=ToyConfig,
        # The class is not transformers' own, so nothing tells which of its keys are read.
        inert=("architectures", "transformers_version"),
    )
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setattr(home, "NAMES", (*home.NAMES, "toy"))
    native = redraw(
        LlamaForCausalLM(
            LlamaConfig(
                **{"vocab_size": 60, "hidden_size": 48, "intermediate_size": 36, "num_hidden_layers": 2},
                **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64},
            )
        )
    ).eval()
    native.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = {**native.config.to_dict(), "model_type": "toy", "architectures": ["ToyForCausalLM"]}
    proven = plan(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    ours = LlmArchForCausalLM(proven.config).eval()
    ours.load_state_dict(dict(proven.stream(tensors.__getitem__)))
    ids = text() % 60
    assert_close(ours(ids).logits, native(ids).logits, "backend")
    back = dict(export_plan(proven.config, family="toy").stream(ours.state_dict().__getitem__, to="theirs"))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())

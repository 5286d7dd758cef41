"""What a config implies, against the model itself: its parameters, torch's counter, real caches, kept tensors; and the
receptive field against gradients."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from transformers import StaticCache

from hf_llmarch import LlmArchConfig, LlmArchForCausalLM, LlmArchModel
from hf_llmarch.model import configuration_llmarch as configuration
from hf_llmarch.study import measure
from hf_llmarch.study.analysis import Analysis, analyze, receptive_field
from hf_llmarch.study.steps import HEADS, Pass, model_steps
from test_properties import FLAG, REFUSALS, maybe, of, switches_of
from tests.tiny import MLA, redraw, tiny_config

BATCH, LENGTH, SOURCE = 2, 11, 7

# What the random configs have seldom or never.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mla": MLA,
    "mla-expanded": {**MLA, "mla_cache": "expanded", "q_lora_rank": None, "attention_sinks": True},
    "windows": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "chunks": {"attention_chunk_size": 5},
    "experts": {"num_experts": 4, "num_shared_experts": 1, "shared_expert_gate": True, "moe_intermediate_size": 9},
    "experts-with-capacity": {"num_experts": 4, "capacity_factor": 0.5, "use_cache": False},
    "experts-that-choose": {"num_experts": 5, "router_type": "expert_choice", "use_cache": False},
    "tied-with-transform": {"lm_head_transform": True, "tie_word_embeddings": True, "embedding_size": 20},
    "bert": {
        "topology": "encoder",
        "position_encoding": "learned",
        "pooler": True,
        "norm_type": "layernorm",
        "norm_placement": "post",
        "type_vocab_size": 2,
        "lm_head_transform": True,
        "lm_head_bias": True,
    },
    "albert": {"topology": "encoder", "num_hidden_layers": 4, "layer_groups": 2, "embedding_size": 20},
    "t5": {
        "topology": "encoder-decoder",
        "position_encoding": "relative_bias",
        "relative_attention_shared": False,
        "nope_layers": [1],
    },
    "two-widths": {
        "topology": "encoder-decoder",
        "qk_norm": "head",
        "attention_sinks": True,
        "source_stack": {"num_hidden_layers": 2, "hidden_size": 40, "head_dim": 10, "num_experts": 3},
        "share_source_embeddings": False,
    },
    "layers-of-their-own": {
        "per_layer_config": {1: {"num_key_value_heads": 1, "intermediate_size": 20, "norm_placement": "sandwich"}},
    },
}


def built(config: LlmArchConfig, architecture: str | None = None) -> Any:
    # Not the meta device: frequencies that follow the text's length, and experts that pick, read their input.
    return measure.skeleton(config, architecture, device="cpu")


def compare(config: LlmArchConfig, batch: int = BATCH, length: int = LENGTH, source: int = SOURCE) -> Analysis:
    """An analysis, after everything that can be measured about it has been."""
    found = analyze(config, batch_size=batch, sequence_length=length, source_length=source, dtype="float32")
    model = built(config)
    assert found.parameters == measure.parameters(model)
    assert found.forward_flops == measure.forward_flops(model, batch, length, source)
    if config.topology == "encoder":
        assert (found.decode_flops, found.kv_cache_bytes) == (0, 0)
    elif config.use_cache:
        assert (found.decode_flops, found.kv_cache_bytes) == measure.decoding(model, batch, length, source)
    return found


@pytest.mark.parametrize("case", CASES)
def test_analysis_is_what_is_measured(case: str) -> None:
    config = tiny_config(**CASES[case])
    found = compare(config)
    assert sum(found.parts.values()) == found.parameters
    assert all(formula.value == formula.counted for formula in found.formulas)


@pytest.mark.parametrize("case", CASES)
def test_every_step_is_its_module(case: str) -> None:
    """By name: two mistakes that make up for each other would not show in a sum."""
    config = tiny_config(**CASES[case])
    sizes = {name: parameter.numel() for name, parameter in built(config).named_parameters()}
    source = SOURCE if config.topology == "encoder-decoder" else 0
    steps = [step for step in model_steps(config, Pass(BATCH, LENGTH, source=source)) if step.parameters]
    claimed = Counter[str]()
    for step in steps:
        mine = {name: size for name, size in sizes.items() if f"{name}.".startswith(f"{step.name}.")}
        assert step.parameters == sum(mine.values()), step
        claimed.update(mine.keys())
    assert claimed == Counter(sizes.keys())


@pytest.mark.parametrize("architecture", HEADS)
def test_heads(architecture: str) -> None:
    topology = {"LlmArchForMaskedLM": "encoder", "LlmArchForConditionalGeneration": "encoder-decoder"}
    config = tiny_config(
        topology=topology.get(architecture, "decoder"),
        classifier_dense=True,
        token_head_dense=True,
        classifier_norm=True,
        classifier_bias=True,
        num_labels=5,
        pad_token_id=0,
    )
    found = analyze(config, batch_size=BATCH, sequence_length=LENGTH, architecture=architecture)
    model = built(config, architecture)
    assert found.parameters == measure.parameters(model)
    given = {"input_ids": torch.ones(BATCH, LENGTH, dtype=torch.long)}
    if architecture == "LlmArchForConditionalGeneration":
        given["decoder_input_ids"] = given["input_ids"]
    with measure.counted() as counter:
        model(**given)
    assert found.forward_flops == counter.get_total_flops()


def test_backward_has_two_products_for_each() -> None:
    config = tiny_config(num_experts=4, qk_norm="head", sliding_window=4)
    model = built(config)
    with measure.counted() as counter:
        model(torch.ones(BATCH, LENGTH, dtype=torch.long)).logits.sum().backward()
    found = analyze(config, batch_size=BATCH, sequence_length=LENGTH)
    assert found.training_flops == counter.get_total_flops()
    model = built(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with measure.counted() as counter:
        model.train()(torch.ones(BATCH, LENGTH, dtype=torch.long)).logits.sum().backward()
    assert found.checkpointed_flops == counter.get_total_flops()


@pytest.mark.parametrize("case", ["plain", "mla", "mla-expanded", "windows", "chunks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_static_cache(case: str, dtype: str) -> None:
    config = tiny_config(**CASES[case])
    found = analyze(config, batch_size=BATCH, sequence_length=LENGTH, dtype=dtype)
    cache = StaticCache(config=config, max_cache_len=LENGTH)
    model: Any = LlmArchForCausalLM(config).to(getattr(torch, dtype))
    model(torch.ones(BATCH, LENGTH, dtype=torch.long), past_key_values=cache)
    assert found.serving.static_kv_cache == measure.cache_bytes(cache)


@st.composite
def any_topology(draw: st.DrawFn) -> dict[str, Any]:
    switches = draw(switches_of())
    topology = draw(of(configuration.Topology))
    switches["topology"] = topology
    if topology == "encoder":
        switches["pooler"] = draw(FLAG)
        switches["layer_groups"] = draw(maybe(1))
    if topology != "decoder":
        # Of decoders alone; nearly every draw would be refused.
        switches |= {"attention_chunk_size": None, "alibi_in_bf16": False}
        switches["layer_types"] = [kind.replace("chunked", "full") for kind in switches["layer_types"]]
        rope = switches.get("rope_parameters")
        if rope and "chunked_attention" in rope:
            switches["rope_parameters"] = rope["chunked_attention"]
    if topology == "encoder-decoder":
        switches["parallel_block"] = False
        switches.pop("parallel_norms", None)
        switches["source_stack"] = draw(maybe({"ffn_bias": True}, {"intermediate_size": 13}))
        switches["share_source_embeddings"] = draw(FLAG)
    return switches


@pytest.mark.parametrize("examples", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_any_legal_config_is_analysed_as_it_is_measured(examples: int) -> None:
    drawn: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples == 40,
        suppress_health_check=list(HealthCheck),
    )
    @given(any_topology())
    def property_holds(switches: dict[str, Any]) -> None:
        try:
            config = LlmArchConfig(**switches)
        except REFUSALS as refused:
            drawn[str(refused).splitlines()[-1][:160]] += 1
            reject()
        drawn[config.topology] += 1
        note(str(switches))
        compare(config)

    property_holds()
    assert min(drawn[topology] for topology in ("decoder", "encoder", "encoder-decoder")) > examples / 8, drawn


@pytest.mark.parametrize(
    ("switches", "checkpointing"),
    [
        ({}, False),
        ({}, True),
        ({"norm_type": "layernorm", "ffn_type": "mlp", "hidden_act": "gelu"}, False),
        ({"num_key_value_heads": 6, "position_encoding": "learned", "tie_word_embeddings": True}, False),
        (MLA, False),
        ({"num_experts": 4}, False),
        ({"topology": "encoder", "norm_placement": "post", "norm_type": "layernorm"}, False),
    ],
)
def test_activations_are_about_what_autograd_keeps(switches: dict[str, Any], checkpointing: bool) -> None:
    sizes: dict[str, Any] = {"hidden_size": 96, "head_dim": 16, "intermediate_size": 256, **switches}
    model: Any = built(tiny_config(**sizes, num_hidden_layers=6)).train()
    model.set_attn_implementation("sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(torch.ones(BATCH, 48, dtype=torch.long)).logits  # held on to, with all that it keeps
    assert logits.requires_grad
    found = [
        analyze(tiny_config(**sizes, num_hidden_layers=layers), batch_size=BATCH, sequence_length=48, dtype="float32")
        for layers in (5, 6)
    ]
    fewer, memory = (analysis.training for analysis in found)
    # What is being computed again has come and gone by now: the activations of one block.
    expected = (
        memory.activations if not checkpointing else memory.checkpointed - (memory.activations - fewer.activations)
    )
    assert sum(kept.values()) == pytest.approx(expected, rel=0.15)


REACH = 14


def moved_by(model: LlmArchModel, layers: int) -> int:
    """How many input embeddings have a gradient on the last token's state after so many layers."""
    embeds = torch.randn(1, REACH, model.config.hidden_size, requires_grad=True)
    hidden = model(inputs_embeds=embeds, output_hidden_states=list(range(layers + 1))).hidden_states
    state = hidden[layers]
    (gradient,) = torch.autograd.grad(state[0, -1].sum(), embeds)
    return int((gradient.abs().sum(-1) > 0).sum())


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"sliding_window": 3},
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"attention_chunk_size": 4},
        {"attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
        {"topology": "encoder", "sliding_window": 2},
    ],
)
def test_reach_is_what_gradients_show(switches: dict[str, object]) -> None:
    config = tiny_config(final_norm=False, **switches)
    model = redraw(LlmArchModel(config)).double().eval()
    torch.set_default_dtype(torch.float64)
    try:
        for layer in receptive_field(config, REACH)[:-1]:  # the last state is replaced by the final one
            assert moved_by(model, layer.layer + 1) == layer.reach, layer
    finally:
        torch.set_default_dtype(torch.float32)


def test_positions_by_layer() -> None:
    config = tiny_config(
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        nope_layers=[2],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    )
    assert [layer.positions for layer in receptive_field(config)] == [
        "rope (default, theta 10000)",
        "rope (linear, theta 1e+06)",
        "none",
    ]

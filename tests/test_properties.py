"""Random legal configs over all architecture switches: build, forward, backward, cached decoding, save and reload."""

import tempfile
from collections import Counter
from typing import Any, get_args

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from hypothesis import HealthCheck, given, note, reject, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from hf_llmarch import LlmArchConfig, LlmArchForCausalLM
from hf_llmarch.model import configuration_llmarch as configuration
from test_cache import decode
from tiny import assert_close, redraw

LENGTH, CHUNKS = 11, (5, 1, 1, 3, 1)
LONGEST = 32  # of positions: the text never reaches it, so dynamic frequencies are those of a short text throughout

REFUSALS = (ValueError, StrictDataclassClassValidationError)


def of(literal: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(literal))


def maybe(*options: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from((None, *options))


FLAG = st.booleans()
Draw = st.DrawFn


@st.composite
def rope_of(draw: Draw, rotated: int) -> dict[str, Any]:
    """Flat parameters of any type, for a part of a head so wide."""
    kind = draw(of(configuration.RopeType))
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from([100.0, 10000, 5e5]))}
    # Half of an odd number of pairs is refused.
    fraction = draw(st.sampled_from([1.0, 1.0, 0.5]))
    if fraction != 1.0:
        parameters["partial_rotary_factor"] = fraction
    pairs = int(rotated * fraction) // 2
    if kind != "default" and kind != "longrope":
        parameters["factor"] = draw(st.sampled_from([1.5, 2.0, 8]))
    if kind in ("yarn", "llama3"):
        parameters["original_max_position_embeddings"] = draw(st.sampled_from([8, 16]))
    if kind == "yarn":
        parameters |= draw(
            st.sampled_from([{}, {"mscale": 0.7, "mscale_all_dim": 0.9}, {"truncate": False}, {"beta_fast": 4}])
        )
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        factors = st.lists(st.floats(1, 8), min_size=pairs, max_size=pairs)
        parameters |= {"short_factor": draw(factors), "long_factor": draw(factors)}
        # Either side of it from the first piece on.
        parameters["original_max_position_embeddings"] = draw(st.sampled_from([4, 16]))
    return parameters


@st.composite
def attention_of(draw: Draw) -> dict[str, Any]:
    kind = draw(st.one_of(st.none(), of(configuration.AttentionType)))
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    switches: dict[str, Any] = {
        "attention_type": kind,
        "num_attention_heads": heads,
        **{name: draw(FLAG) for name in ("attention_bias", "attention_output_bias", "attention_sinks")},
        "attention_scale_by_layer": draw(FLAG),
        "attention_scale": draw(maybe(0.3, 1)),
        "attn_logit_softcapping": draw(maybe(0.1, 30)),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
    }
    if kind == "mla":
        rotated = draw(st.sampled_from([2, 4, 8]))
        return switches | {
            **{"num_key_value_heads": heads, "head_dim": rotated, "qk_rope_head_dim": rotated},
            "q_lora_rank": draw(maybe(7, 12)),
            **{name: draw(st.integers(3, 12)) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
            "mla_cache": draw(st.sampled_from(["latent", "expanded"])),
            "latent_norm_eps": draw(maybe(1e-3)),
        }
    # What the head counts contradict, and odd heads under RoPE, are refused.
    counts: dict[str | None, list[int | None]] = {
        None: [1, heads],
        "mha": [heads],
        "mqa": [1, None],
        "gqa": [k for k in (2, 3) if heads % k == 0] or [2],
    }
    qk_norm = draw(of(configuration.QKNorm))
    switches |= {
        "num_key_value_heads": draw(st.sampled_from(counts[kind])),
        "head_dim": draw(st.sampled_from([4, 6, 8, 12, 5])),
        "qk_norm": qk_norm,
        "clip_qkv": draw(maybe(0.5)),
    }
    if qk_norm != "none":
        switches |= {
            "qk_norm_type": draw(st.one_of(st.none(), of(configuration.NormType))),
            "qk_norm_bias": draw(maybe(True, False)),
        }
    return switches


@st.composite
def layers_of(draw: Draw) -> dict[str, Any]:
    layers = draw(st.integers(1, 3))
    # Windows and blocks in one model are refused, as one cache serves them.
    allowed = draw(
        st.sampled_from(
            [["full_attention"], ["full_attention", "sliding_attention"], ["full_attention", "chunked_attention"]]
        )
    )
    kinds = draw(st.lists(st.sampled_from(allowed), min_size=layers, max_size=layers))
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "sliding_window": draw(st.integers(2, 7)) if "sliding_attention" in kinds else None,
        "attention_chunk_size": draw(st.integers(2, 7)) if "chunked_attention" in kinds else None,
    }


@st.composite
def positions_of(draw: Draw, attention: dict[str, Any], layers: dict[str, Any]) -> dict[str, Any]:
    mla = attention["attention_type"] == "mla"
    kind = "rope" if mla else draw(of(configuration.PositionEncoding))
    switches: dict[str, Any] = {"position_encoding": kind}
    if kind in ("rope", "alibi", "relative_bias"):
        last = layers["num_hidden_layers"] - 1
        switches["nope_layers"] = draw(maybe([last] if last else [], []))
    if kind == "rope":
        rotated = attention["head_dim"]
        parameters = rope_of(rotated)
        kinds = sorted(set(layers["layer_types"]))
        by_type = st.fixed_dictionaries(dict.fromkeys(kinds, parameters))
        switches["rope_parameters"] = draw(st.one_of(st.none(), parameters, by_type))
        switches["rope_interleaved"] = draw(FLAG)
    elif kind == "alibi":
        switches |= {
            "alibi_bias_max": draw(st.sampled_from([4, 8, 16])),
            "alibi_scaled": draw(FLAG),
            "alibi_in_bf16": draw(FLAG),
        }
    elif kind == "relative_bias":
        switches |= {
            "relative_attention_num_buckets": draw(st.integers(4, 9)),
            "relative_attention_max_distance": draw(st.integers(10, 40)),
            "relative_attention_shared": draw(FLAG),
        }
    elif kind in ("learned", "sinusoidal"):
        switches["position_offset"] = draw(st.sampled_from([0, 2]))
        if kind == "sinusoidal":
            switches["sinusoidal_layout"] = draw(of(configuration.SinusoidalLayout))
    return switches


@st.composite
def block_of(draw: Draw) -> dict[str, Any]:
    parallel = draw(FLAG)
    act = draw(st.sampled_from(["silu", "gelu", "relu2", "gelu_pytorch_tanh", "sigmoid"]))
    switches: dict[str, Any] = {
        "parallel_block": parallel,
        "norm_placement": draw(st.sampled_from(["pre", *([] if parallel else get_args(configuration.NormPlacement))])),
        "residual_scale": draw(st.sampled_from([1.0, 0.22])),
        "ffn_type": draw(of(configuration.FFNType)),
        "hidden_act": act,
        "swish_beta": draw(maybe(1.7, "learned")) if act == "silu" else None,
        "ffn_bias": draw(FLAG),
        "intermediate_size": draw(maybe(17, 24)),
        "ffn_multiple_of": draw(st.sampled_from([1, 10])),
        "norm_type": draw(of(configuration.NormType)),
        "norm_eps": draw(st.sampled_from([1e-3, 0.1, 1])),
        "norm_bias": draw(maybe(True, False)),
        "norm_offset": draw(st.sampled_from([0.0, 1])),
        "norm_weight_in_fp32": draw(FLAG),
        "hidden_dropout": draw(st.sampled_from([0.0, 0.1])),
    }
    if switches["norm_placement"] in ("pre", "sandwich"):
        switches["first_attention_norm"] = draw(FLAG)
    if switches["ffn_type"] == "glu":
        switches |= {"glu_limit": draw(maybe(0.5)), "glu_up_offset": draw(st.sampled_from([0.0, 1]))}
    if parallel:
        switches["parallel_norms"] = draw(st.sampled_from([1, 2]))
    return switches


@st.composite
def experts_of(draw: Draw, layers: int) -> dict[str, Any]:
    """Experts without a capacity: its room is a share of the tokens that a forward sees, which pieces cut anew."""
    if draw(st.integers(0, 2)):
        return {}
    count = draw(st.sampled_from([1, 4, 6]))
    switches: dict[str, Any] = {
        "num_experts": count,
        "num_experts_per_tok": draw(st.integers(1, min(count, 3))),
        "moe_intermediate_size": draw(maybe(9, 12)),
        "router_type": draw(st.sampled_from(["top_k", "top_k", "sparsemixer"])),
        "num_shared_experts": draw(st.integers(0, 2)),
        "mlp_layer_types": draw(
            st.one_of(st.none(), st.lists(st.sampled_from(["dense", "sparse"]), min_size=layers, max_size=layers))
        ),
        "experts_layout": draw(of(configuration.ExpertsLayout)),
        "norm_topk_prob": draw(FLAG),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "router_aux_loss_coef": draw(st.sampled_from([0.0, 0.01])),
        "router_aux_loss_scope": draw(of(configuration.RouterLossScope)),
        "router_z_loss_coef": draw(st.sampled_from([0.0, 0.01])),
        "router_jitter_noise": draw(st.sampled_from([0.0, 0.1])),
    }
    if switches["router_type"] == "top_k":
        switches |= {
            "router_score": draw(of(configuration.RouterScore)),
            "router_bias": draw(FLAG),
            "router_selection_bias": draw(FLAG),
        }
        if count == 6 and draw(FLAG):
            switches |= {"n_group": 3, "topk_group": 2, "router_group_score": draw(of(configuration.RouterGroupScore))}
    if switches["num_shared_experts"]:
        switches |= {"shared_expert_gate": draw(FLAG), "shared_expert_intermediate_size": draw(maybe(11))}
    return switches


@st.composite
def ends_of(draw: Draw) -> dict[str, Any]:
    transform = draw(FLAG)
    switches: dict[str, Any] = {
        **{name: draw(FLAG) for name in ("final_norm", "embedding_norm", "lm_head_bias")},
        "tie_word_embeddings": draw(FLAG),
        "type_vocab_size": draw(st.sampled_from([0, 2])),
        "lm_head_transform": transform,
        "embedding_scale": draw(st.sampled_from([1.0, 4])),
        "logit_scale": draw(st.sampled_from([1.0, 0.3])),
        "final_logit_softcapping": draw(maybe(2.0)),
        "embedding_dropout": draw(st.sampled_from([0.0, 0.1])),
    }
    if transform or not switches["tie_word_embeddings"]:
        switches["embedding_size"] = draw(maybe(10))
    if transform:
        switches |= {"head_act": draw(maybe("relu")), "head_bias": draw(FLAG)}
    return switches


@st.composite
def switches_of(draw: Draw) -> dict[str, Any]:
    attention, layers = draw(attention_of()), draw(layers_of())
    return {
        **{"vocab_size": 31, "hidden_size": draw(st.sampled_from([16, 20, 24])), "max_position_embeddings": LONGEST},
        **attention,
        **layers,
        **draw(positions_of(attention, layers)),
        **draw(block_of()),
        **draw(experts_of(layers["num_hidden_layers"])),
        **draw(ends_of()),
    }


def check(config: LlmArchConfig) -> None:
    model: Any = redraw(LlmArchForCausalLM(config)).eval()
    ids = torch.randint(0, 31, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        assert whole.shape == (2, LENGTH, 31)
        assert whole.isfinite().all()
        for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=LENGTH + 2)):
            assert_close(decode(model, ids, cache, CHUNKS), whole, "property")

    model.train()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        # An expert that no token was sent to has none.
        assert parameter.grad is not None or ".experts." in name, name
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    assert any(parameter.grad.abs().max() > 0 for parameter in model.parameters() if parameter.grad is not None)

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert_close(again(ids, use_cache=False).logits, whole, "reload")
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert {**again.config.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}


@pytest.mark.parametrize("examples", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_any_legal_config_works(examples: int) -> None:
    drawn: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        # The same thirty every time; the long run looks for new ones.
        derandomize=examples == 30,
        suppress_health_check=list(HealthCheck),
    )
    @given(switches_of())
    def property_holds(switches: dict[str, Any]) -> None:
        try:
            config = LlmArchConfig(**switches)
        except REFUSALS as refused:
            drawn["refused"] += 1
            drawn[str(refused).splitlines()[-1][:160]] += 1
            reject()
        drawn["legal"] += 1
        note(str(switches))
        check(config)

    property_holds()
    assert drawn["legal"] >= examples
    # Else the draw would be mostly noise, and what it reaches a matter of luck.
    assert drawn["legal"] >= drawn["refused"], drawn

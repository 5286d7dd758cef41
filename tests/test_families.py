"""Each family against transformers' own class: plan, numbers, generated tokens, and the bytes on the way back."""

import copy
import dataclasses
import json
import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import hf_llmarch
from family_configs import CASES, DROPOUTS, TEXT_LENGTH, TOLERANCES, VOCABULARY, redraw
from hf_llmarch import LlmArchConfig
from hf_llmarch.conversion.certificate import AUTO_CLASSES
from hf_llmarch.conversion.errors import NotExpressible, PlanError, UnknownFamily, UnsupportedField
from hf_llmarch.conversion.families import families
from hf_llmarch.conversion.families.common import CAUSAL_LM
from hf_llmarch.conversion.plans import Plan, export_plan, plan
from hf_llmarch.model.backends import demands, honours
from hf_llmarch.model.compat import CACHE
from hf_llmarch.model.declarations import Feature

# Names on disk that are not those of transformers' modules.
MODULES = {
    "exaone": {
        **{"transformer.h": "model.layers", "transformer.ln_f": "model.norm"},
        **{"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"},
    },
}
HEADS = [
    (name, ours)
    for name, family in families().items()
    if next(iter(family.architectures)) == CAUSAL_LM
    for ours in family.architectures
    if ours != CAUSAL_LM
]
REAL = Path(__file__).parents[2] / "shared" / "real"

pytestmark = pytest.mark.core


@dataclass
class Converted:
    """A native model as it is on disk, and what became of it."""

    native: PreTrainedModel
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    plan: Plan
    ours: Any


def model_type(case: str) -> str:
    return max((name for name in families() if case == name or case.startswith(f"{name}-")), key=len)


def native_model(config: dict[str, Any], ours: str = CAUSAL_LM) -> PreTrainedModel:
    """transformers' own class, with attention written out, and put right where it departs from the family's papers."""
    family = config["model_type"]
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {family}")
    # Falcon's eager attention adds ALiBi to the scores a second time: it is in the mask already.
    backend = "sdpa" if family == "falcon" else "eager"
    auto: Any = getattr(transformers, AUTO_CLASSES[ours])
    native = auto.from_config(AutoConfig.for_model(**copy.deepcopy(config)), attn_implementation=backend).eval()
    if family == "mpt":
        # Its class reads alibi_bias_max and never passes it on.
        native.transformer.build_mpt_alibi_tensor = partial(
            build_mpt_alibi_tensor, alibi_bias_max=native.config.attn_config.alibi_bias_max
        )
    if family == "gpt_oss":
        # Its class had constants in their place before transformers read them from the config.
        for layer in native.model.layers:
            layer.mlp.experts.alpha = getattr(native.config, "swiglu_alpha", 1.702)
            layer.mlp.experts.limit = getattr(native.config, "swiglu_limit", 7.0)
    return native


def build(case: str, folder: Path, ours: str = CAUSAL_LM, **changes: Any) -> Converted:
    # What its authors wrote, not what this version of transformers would.
    config = {"model_type": model_type(case), "torch_dtype": "float32", **CASES[case], **changes}
    native = native_model(config, ours)
    redraw(native)
    native.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    proven = plan(config, {name: tuple(t.shape) for name, t in tensors.items()})
    model = getattr(hf_llmarch, proven.architecture)(proven.config).eval()
    outcome = model.load_state_dict(dict(proven.stream(tensors.__getitem__)), strict=False)
    assert not outcome.unexpected_keys
    tied = proven.config.tie_word_embeddings and ours == CAUSAL_LM
    assert outcome.missing_keys == (["lm_head.weight"] if tied else [])
    model.tie_weights()
    return Converted(native, config, tensors, proven, model)


@pytest.fixture(scope="module", params=CASES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return build(request.param, tmp_path_factory.mktemp("native"))


def text(batch: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, TEXT_LENGTH), generator=torch.Generator().manual_seed(1))


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = text(), torch.ones(2, TEXT_LENGTH, dtype=torch.long)
    ids[1, :7], mask[1, :7] = 0, 0
    return ids, mask


def assert_equal_logits(ours: torch.Tensor, native: torch.Tensor) -> None:
    spread = (native.max() - native.min()).item()
    assert spread > 0.1
    assert (ours - native).abs().max().item() <= TOLERANCES["fp32"] * spread


def test_every_family_has_a_case() -> None:
    # nanoGPT has no class in transformers: see test_nanogpt.py.
    native = {name: family for name, family in families().items() if name != "nanogpt"}
    first = {name: next(iter(family.architectures)) for name, family in native.items()}
    assert {model_type(case) for case in CASES} == {name for name in first if first[name] == "LlmArchForCausalLM"}


def test_every_family_of_a_file_is_listed() -> None:
    known = families()
    held = {f.name for name in known for f in getattr(known.module(name), "FAMILIES", (known[name],))}
    assert held == set(known)
    assert all(known[name].name == name for name in known)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_logits(converted: Converted, backend: str) -> None:
    for demand in demands(converted.ours.config):
        if not honours(backend, (demand.feature,)):
            with pytest.raises(ValueError, match=demand.field):
                converted.ours.set_attn_implementation(backend)
            return
    converted.ours.set_attn_implementation(backend)
    assert_equal_logits(converted.ours(text()).logits, converted.native(text()).logits)


@torch.no_grad()
def test_norms_round_where_the_native_class_does(converted: Converted) -> None:
    """Half precision tells whether the gain is applied before or after the cast; fp32 cannot."""
    ours, native = copy.deepcopy(converted.ours).bfloat16(), copy.deepcopy(converted.native).bfloat16()
    x = torch.randn(50, ours.config.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()
    norms = {
        step.ours[0].removesuffix(".weight"): step.theirs[0].removesuffix(".weight")
        for step in converted.plan.steps
        if re.fullmatch(r"model\.(norm|embed_norm|layers\.1\.attn_norm\.\w+)\.weight", step.ours[0])
    }
    assert norms
    for mine, theirs in norms.items():
        for disk, module in MODULES.get(converted.plan.family.name, {}).items():
            theirs = theirs.replace(disk, module)
        differing = ours.get_submodule(mine)(x) != native.get_submodule(theirs)(x)
        # A sum in another order may tip a tie; the other order of cast and gain changes a third of all values.
        assert differing.float().mean() < 0.01, mine


@torch.no_grad()
def test_logits_with_left_padding(converted: Converted) -> None:
    ids, mask = left_padded()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ours, native = (
        model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
        for model in (converted.ours, converted.native)
    )
    assert_equal_logits(ours, native)


def masks() -> dict[str, torch.Tensor]:
    """Where padding is, and tokens masked inside a text, `(2, TEXT_LENGTH)`."""
    _, left = left_padded()
    holes, both = torch.ones_like(left), left.clone()
    holes[0, 4:6] = holes[1, 11] = holes[1, 17] = 0
    # Not [12:15], under which two experts of one token score alike to 3e-8, and rounding decides between them.
    both[0, 9] = both[1, 11:15] = 0
    return {"left": left, "right": left.flip(-1), "inside": holes, "left and inside": both}


@torch.no_grad()
@pytest.mark.parametrize("kind", masks())
def test_logits_under_a_mask_without_positions(converted: Converted, kind: str) -> None:
    """Scoring code gives a mask and no positions: at once, and in two parts with a cache."""
    ids, mask = text(), masks()[kind]
    real, cut = mask.bool(), 13
    expected = converted.native(ids, attention_mask=mask).logits
    assert_equal_logits(converted.ours(ids, attention_mask=mask).logits[real], expected[real])
    if Feature.WHOLE_ROWS in {demand.feature for demand in demands(converted.ours.config)}:
        return  # frequencies that follow the text's length: what is cached was turned by others
    first = converted.ours(ids[:, :cut], attention_mask=mask[:, :cut], use_cache=True)
    rest = converted.ours(ids[:, cut:], attention_mask=mask, past_key_values=first.get(CACHE))
    assert_equal_logits(torch.cat((first.logits, rest.logits), 1)[real], expected[real])


@pytest.mark.parametrize(("family", "field"), [(family, field) for family in DROPOUTS for field in DROPOUTS[family]])
@torch.no_grad()
def test_dropout_goes_where_the_native_class_has_it(family: str, field: str, tmp_path: Path) -> None:
    """At a probability of 1 dropout is no longer random: what it drops is gone, in both models."""
    converted = build(family, tmp_path, **{**dict.fromkeys(DROPOUTS[family], 0.0), field: 1.0})
    trained = converted.native.train()(text()).logits
    assert not torch.equal(trained, converted.native.eval()(text()).logits)
    assert_equal_logits(converted.ours.train()(text()).logits, trained)


def test_greedy_tokens_with_cache(converted: Converted) -> None:
    ids, mask = left_padded()
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    models: tuple[Any, Any] = converted.ours, converted.native
    ours, native = (model.generate(ids, attention_mask=mask, **options) for model in models)
    assert ours.shape[1] == TEXT_LENGTH + 9
    assert ours.tolist() == native.tolist()


def test_the_way_back_is_byte_equal(converted: Converted) -> None:
    state = converted.ours.state_dict()
    back = export_plan(converted.ours.config)
    written = dict(back.stream(state.__getitem__, to="theirs"))
    assert written.keys() == converted.tensors.keys()
    for name, tensor in converted.tensors.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name], tensor), name
    assert back.foreign_config == converted.config


def test_a_config_written_afresh_is_read_by_the_native_class(converted: Converted) -> None:
    """Without a record of the origin the family's config is made anew: the native class must compute the same."""
    config = LlmArchConfig.from_dict({**converted.ours.config.to_dict(), "converted_from": None})
    foreign = json.loads(json.dumps(export_plan(config, family=converted.plan.family.name).foreign_config))
    assert foreign["architectures"] == [type(converted.native).__name__]
    native = native_model(foreign)
    fields = {field.name for field in dataclasses.fields(native.config)}
    # The same layers may be grouped otherwise there.
    for name in converted.config.keys() & fields - {"attention_types"}:
        if converted.config[name] is not None:
            assert getattr(native.config, name) == getattr(converted.native.config, name), name
    # Fresh, because a dynamic RoPE remembers the longest text it has seen.
    reference = native_model(converted.config)
    for model in (native, reference):
        model.load_state_dict(converted.native.state_dict())
    with torch.no_grad():
        assert torch.equal(native(text()).logits, reference(text()).logits)


@torch.no_grad()
@pytest.mark.parametrize(("family", "ours"), HEADS)
def test_every_class(family: str, ours: str, tmp_path: Path) -> None:
    """The base model and the heads beside the one over the vocabulary: numbers, bytes back, and a config of its own."""
    theirs = families()[family].architectures[ours]
    labels: dict[str, Any] = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}
    labels["label2id"] = {name: int(i) for i, name in labels["id2label"].items()}
    named = labels if ours.endswith("Classification") else {}
    converted = build(family, tmp_path, ours, architectures=[theirs], **named)
    assert [type(converted.ours).__name__, type(converted.native).__name__] == [ours, theirs]
    converted.ours.set_attn_implementation("eager")
    ids, mask = text(), torch.ones(2, TEXT_LENGTH, dtype=torch.long)
    pad = CASES[family]["pad_token_id"]
    ids[1, -7:], mask[1, -7:] = pad, 0
    ids[ids == pad], ids[1, -7:] = 7, pad
    found, expected = (model(ids, attention_mask=mask) for model in (converted.ours, converted.native))
    compared = {"last_hidden_state", "logits", "start_logits", "end_logits"} & expected.keys()
    assert compared
    for name in compared:
        by_token = expected[name].shape[1:2] == mask.shape[1:]
        assert_equal_logits(*(out[name][mask.bool()] if by_token else out[name] for out in (found, expected)))
    test_the_way_back_is_byte_equal(converted)
    alone = LlmArchConfig.from_dict({**converted.ours.config.to_dict(), "converted_from": None})
    afresh = export_plan(alone, family=family)
    assert afresh.foreign_config["architectures"] == [theirs]
    # transformers adds or takes away the prefix of a base model by itself, and of no other.
    prefix = f"{converted.native.base_model_prefix}." if ours == "LlmArchModel" else ""
    assert {name.removeprefix(prefix) for name in afresh.their_shapes} == converted.tensors.keys()


def test_a_bare_base_model_is_recognised(tmp_path: Path) -> None:
    """A base model saved alone has no prefix, as OpenAI's GPT-2 on the Hub; its old mask buffers are dropped."""
    native = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **CASES["gpt2"]))
    tensors = dict(native.transformer.state_dict())
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    config = {"model_type": "gpt2", "n_ctx": 64, **CASES["gpt2"]}
    proven = plan(config, {name: tuple(t.shape) for name, t in tensors.items()})
    assert proven.dropped == {"h.0.attn.bias": "causal mask, a constant"}
    ours = dict(proven.stream(tensors.__getitem__))
    written = dict(export_plan(proven.config).stream(ours.__getitem__, to="theirs"))
    assert written.keys() == tensors.keys() - proven.dropped.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in written)


def tied_with_a_copy(case: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    native = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type(case), **CASES[case]))
    tensors = {name: t.clone() for name, t in native.state_dict().items()}
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    return {"model_type": model_type(case), **CASES[case]}, tensors


def test_a_tied_head_on_disk_comes_back() -> None:
    config, tensors = tied_with_a_copy("llama-biases-tied")
    proven = plan(config, list(tensors))
    ours = dict(proven.stream(tensors.__getitem__))
    assert "lm_head.weight" not in ours
    written = dict(export_plan(proven.config).stream(ours.__getitem__, to="theirs"))
    assert torch.equal(written["lm_head.weight"], tensors["lm_head.weight"])


def test_a_tied_head_that_differs_is_refused() -> None:
    config, tensors = tied_with_a_copy("llama-biases-tied")
    tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        list(plan(config, list(tensors)).stream(tensors.__getitem__))


# -- refusals ----------------------------------------------------------------------------------------------------------


def llama() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    config = {"model_type": "llama", **CASES["llama"]}
    with torch.device("meta"):
        native = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CASES["llama"]))
    return config, {name: tuple(t.shape) for name, t in native.state_dict().items()}


def test_unknown_and_missing_tensors_are_named() -> None:
    config, shapes = llama()
    del shapes["model.layers.2.mlp.up_proj.weight"]
    shapes["model.layers.3.mlp.up_proj.weight"] = (44, 60)
    with pytest.raises(PlanError, match=r"(?s)layers\.3\.mlp.*Missing: model\.layers\.2\.mlp\.up_proj"):
        plan(config, shapes)


def test_a_bias_on_disk_that_the_config_denies_is_refused() -> None:
    config, shapes = llama()
    with pytest.raises(PlanError, match=r"q_proj\.bias"):
        plan(config, [*shapes, "model.layers.0.self_attn.q_proj.bias"])


def test_a_wrong_shape_is_named() -> None:
    config, shapes = llama()
    shapes["model.layers.1.self_attn.k_proj.weight"] = (48, 60)
    with pytest.raises(PlanError, match=r"k_proj\.weight is \[48, 60\], expected \[16, 60\]"):
        plan(config, shapes)


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_source_fields_without_a_counterpart_are_refused(case: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedField, match=named):
        plan({"model_type": model_type(case), **CASES[case], **changes}, [])


def test_an_unknown_family_lists_the_known() -> None:
    with pytest.raises(UnknownFamily, match=r"(?s)Did you mean 'llama'\?.*qwen3"):
        plan({"model_type": "lama"}, [])


@pytest.mark.parametrize(
    ("changes", "family", "named"),
    [
        ({"norm_placement": "sandwich"}, "llama", "norm_placement is 'sandwich', llama would read 'pre'"),
        ({"position_encoding": "alibi"}, "llama", "position_encoding is 'alibi'"),
        ({"logit_scale": 0.5}, "mistral", "logit_scale"),
        ({"attention_bias": True}, "llama", "attention_output_bias is False, llama would read True"),
        ({"sliding_window": 7}, "llama", "sliding_window is 7"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "llama", "ntk"),
        ({"qk_norm": "head"}, "qwen2", "attention_bias"),
        ({"attention_scale": 0.3}, "gemma2", "attention_scale is 0.3"),
    ],
)
def test_what_a_family_cannot_say_is_refused(changes: dict[str, Any], family: str, named: str) -> None:
    with pytest.raises(NotExpressible, match=named):
        export_plan(LlmArchConfig(hidden_size=48, num_hidden_layers=2, **changes), family=family)


def test_an_edited_model_goes_out_with_only_those_keys_changed() -> None:
    config, shapes = llama()
    ours = plan(config, shapes).config
    ours.vocab_size, ours.norm_eps = 100, 0.25
    assert export_plan(ours).foreign_config == {**config, "vocab_size": 100, "rms_norm_eps": 0.25}


def test_an_edited_rope_is_written_in_both_spellings() -> None:
    config, shapes = llama()
    ours = plan(config, shapes).config
    ours.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}
    assert export_plan(ours).foreign_config == {
        **config,
        "rope_parameters": ours.rope_parameters,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }


def test_another_family_may_say_the_same() -> None:
    """A LLaMA is a Mistral without a window."""
    config, shapes = llama()
    there = export_plan(plan(config, shapes).config, family="mistral")
    assert there.foreign_config["model_type"] == "mistral"
    assert there.their_shapes == shapes


# -- published checkpoints ---------------------------------------------------------------------------------------------

BYTES = {"float16": 2, "bfloat16": 2}
# What is dropped, in bytes: legacy buffers of each layer, the fp16 RoPE table (64 channels), the fp16 mask value, and
# the 2048 x 2048 boolean mask, which old releases counted as an eighth of a byte each.
DROPPED_BYTES = {
    "llama-7b-hf": 32 * 64 * 2,
    "gemma-2b": 0,
    "devstral-small-2507": 0,
    "redpajama-incite-7b": 32 * (64 * 2 + 2 + 2048 * 2048 // 8),
    "falcon-180b-chat": 0,
    "bloom-176b": 0,
    "phi3-mini-merge": 0,
    "wizardlm-2-8x22b": 0,
}


@pytest.mark.skipif(not REAL.is_dir(), reason="the published name lists (../shared/real) are not on this machine")
@pytest.mark.parametrize("name", DROPPED_BYTES)
def test_published_checkpoints_plan_without_a_gap(name: str) -> None:
    published = json.loads((REAL / f"{name}.json").read_text())
    proven = plan(published["config"], published["names"])
    assert proven.their_shapes.keys() | proven.dropped.keys() == set(published["names"])
    assert not proven.their_shapes.keys() & proven.dropped.keys()
    assert all(proven.dropped.values())
    parameters = sum(math.prod(shape) for shape in proven.their_shapes.values())
    size = parameters * BYTES[published["config"].get("torch_dtype", "bfloat16")] + DROPPED_BYTES[name]
    assert size == published["total_size"]
    assert export_plan(proven.config).foreign_config == published["config"]

"""Encoder-decoders: each family against transformers' own class, the loss under every Trainer, and learning to copy."""

import copy
import importlib.util
import json
import math
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForQuestionAnswering,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.models.mbart.modeling_mbart import shift_tokens_right

from hf_llmarch import LlmArchConfig, LlmArchForConditionalGeneration
from hf_llmarch.conversion.engine import convert, load
from hf_llmarch.conversion.errors import CheckpointError, NotExpressible, UnsupportedField
from hf_llmarch.conversion.families import families
from hf_llmarch.conversion.plans import Plan, export_plan, plan
from hf_llmarch.model.compat import CACHE
from tiny import assert_close, differs, tiny_stack

Config = dict[str, Any]

VOCABULARY, SOURCE_LENGTH, LENGTH = 53, 11, 9

# Stacks that differ in depth, heads and inner width; a head width that is not hidden / heads; an eps that is seen. The
# encoder is the deeper one: transformers' T5 and Switch make too short a cache where the decoder is.
T5: Config = {
    **{"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 10, "d_ff": 34, "num_heads": 3, "layer_norm_epsilon": 0.1},
    **{"num_layers": 4, "num_decoder_layers": 3, "dropout_rate": 0.1, "decoder_start_token_id": 0},
    # Buckets and distances that the text reaches.
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 7, "pad_token_id": 0, "eos_token_id": 1},
}
BART: Config = {
    **{"vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "init_std": 0.03},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 6, "encoder_ffn_dim": 30, "decoder_ffn_dim": 34},
    **{"max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    **{"decoder_start_token_id": 2, "forced_eos_token_id": 2},
}
GATED: Config = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MARIAN: Config = {**BART, "scale_embedding": True, "activation_function": "swish", "decoder_start_token_id": 1}
SWITCH: Config = {
    **T5,
    **{"num_experts": 5, "expert_capacity": 2, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 3},
}

CASES: dict[str, Config] = {
    "t5": T5,
    "t5-gated": GATED,
    "t5-silu-scaled": {**T5, "feed_forward_proj": "gated-silu"},
    "mt5": {**GATED, "num_decoder_layers": None},
    "umt5": GATED,
    "bart": BART,
    "bart-scaled": {**BART, "scale_embedding": True, "encoder_layers": 3, "activation_function": "relu"},
    "mbart": {**BART, "scale_embedding": True, "decoder_start_token_id": None},
    "pegasus": {**BART, "scale_embedding": True, "activation_function": "relu"},
    "marian": MARIAN,
    "marian-two-vocabularies": {**MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 61},
    "m2m_100": BART,
    "switch_transformers": SWITCH,
    "switch_transformers-biased": {**SWITCH, "router_bias": True, "num_decoder_layers": 4, "dense_act_fn": "silu"},
}
# Not so in the oldest supported releases of transformers: there umT5 scales whatever its config says, Switch lets no
# token overflow, and beams count the source's vocabulary.
AT_ODDS = ("umt5", "switch_transformers", "switch_transformers-biased", "marian-two-vocabularies")
# What transformers writes into their files and rebuilds by itself.
TABLES = {"pegasus": {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}}


@dataclass
class Converted:
    """A native model as it is on disk, and the folder that it became."""

    native: PreTrainedModel
    config: Config
    tensors: dict[str, torch.Tensor]
    plan: Plan
    ours: LlmArchForConditionalGeneration


def model_type(case: str) -> str:
    return case.split("-")[0]


def redraw(model: nn.Module) -> None:
    """Every weight anew, the bias on the logits included; tables that follow from a formula stay."""
    tensors = [*((n, p) for n, p in model.named_parameters() if p.requires_grad), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in tensors:
            if tensor.requires_grad or name == "final_logits_bias":
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)


def native_model(config: Config) -> Any:
    native: Any = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model(**copy.deepcopy(config)), attn_implementation="eager"
    ).eval()
    if config.get("tie_word_embeddings") is False:
        # As on disk in T5 1.1 and its kin; the class ties all the same until it finds one there.
        native.lm_head.weight = nn.Parameter(torch.empty_like(native.lm_head.weight))
    redraw(native)
    return native


@pytest.fixture(scope="module", params=[c if c in AT_ODDS else pytest.param(c, marks=pytest.mark.core) for c in CASES])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    case, folder = request.param, tmp_path_factory.mktemp("seq2seq")
    config = {"model_type": model_type(case), "torch_dtype": "float32", **CASES[case]}
    native = native_model(config)
    config["architectures"] = [type(native).__name__]
    native.save_pretrained(folder / "native")
    # What its authors wrote, not what this release of transformers would.
    (folder / "native" / "config.json").write_text(json.dumps(config))
    convert(folder / "native", folder / "ours", progress=False)
    ours = AutoModelForSeq2SeqLM.from_pretrained(folder / "ours").eval()
    assert isinstance(ours, LlmArchForConditionalGeneration)
    tensors = load_file(folder / "native" / "model.safetensors")
    return Converted(native, config, tensors, plan(config, {n: tuple(t.shape) for n, t in tensors.items()}), ours)


def random_ids(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(native: PreTrainedModel, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows: whole, padded at the end, padded at the beginning."""
    ids, mask = random_ids(3, length, seed), torch.ones(3, length, dtype=torch.long)
    mask[1, -4:] = 0
    # transformers' Switch lets padding take an expert's places, which is seen where it comes first.
    mask[2, :3] = native.config.model_type == "switch_transformers"
    return ids.masked_fill(mask == 0, native.config.pad_token_id), mask


def inputs_of(native: PreTrainedModel) -> dict[str, torch.Tensor]:
    source, source_mask = padded(native, SOURCE_LENGTH, seed=1)
    target, target_mask = padded(native, LENGTH, seed=2)
    return {
        "input_ids": source,
        "attention_mask": source_mask,
        "decoder_input_ids": target,
        "decoder_attention_mask": target_mask,
    }


def test_every_encoder_decoder_family_has_a_case() -> None:
    ours = {name for name, family in families().items() if "LlmArchForConditionalGeneration" in family.architectures}
    assert {model_type(case) for case in CASES} == ours


def stack_of(model: Any, side: str) -> Any:
    return model.model.encoder if side == "encoder" else model.model


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_every_number_of_a_forward(converted: Converted, backend: str) -> None:
    """Logits, and the states and attentions of all layers of both stacks, wherever there is no padding."""
    converted.ours.set_attn_implementation(backend)
    given = inputs_of(converted.native)
    wanted = {"output_hidden_states": True, "output_attentions": backend == "eager"}
    ours, native = (model(**given, **wanted) for model in (converted.ours, converted.native))
    real = {"encoder": given["attention_mask"].bool(), "decoder": given["decoder_attention_mask"].bool()}
    assert_close(ours.logits[real["decoder"]], native.logits[real["decoder"]], "native")
    for side, mask in real.items():
        states = f"{side}_hidden_states"
        assert len(ours[states]) == len(native[states]) == len(stack_of(converted.ours, side).layers) + 1
        for mine, theirs in zip(ours[states], native[states], strict=True):
            assert_close(mine[mask], theirs[mask], "native")
    if backend == "eager" and converted.native.config.model_type != "switch_transformers":
        for name, queries in (
            ("encoder_attentions", "encoder"),
            ("decoder_attentions", "decoder"),
            ("cross_attentions", "decoder"),
        ):
            for mine, theirs in zip(ours[name], native[name], strict=True):
                assert_close(mine.transpose(1, 2)[real[queries]], theirs.transpose(1, 2)[real[queries]], "native")


@torch.no_grad()
def test_tokens_masked_inside_a_text(converted: Converted) -> None:
    """In both stacks, which give no positions; at once, and the decoder's in two parts with a cache."""
    given = inputs_of(converted.native)
    if converted.native.config.model_type != "switch_transformers":  # see `padded`
        given["attention_mask"][:, 5] = given["decoder_attention_mask"][:, 3] = 0
    real = given["decoder_attention_mask"].bool()
    expected = converted.native(**given).logits[real]
    assert_close(converted.ours(**given).logits[real], expected, "native")
    if converted.plan.config.expert_capacity is not None:
        return  # an expert's room is that of a call
    cut, names = 5, ("decoder_input_ids", "decoder_attention_mask")
    ids, mask = (given.pop(name) for name in names)

    def in_two_parts(model: Any) -> torch.Tensor:
        first = model(**given, decoder_input_ids=ids[:, :cut], decoder_attention_mask=mask[:, :cut])
        then = {"decoder_input_ids": ids[:, cut:], "decoder_attention_mask": mask, CACHE: first.get(CACHE)}
        return torch.cat((first.logits, model(**given, **then).logits), 1)[real]

    # M2M-100 counts a cache's padding, so its parts are not the whole.
    assert_close(in_two_parts(converted.ours), in_two_parts(converted.native), "native")


EXPERTS: Config = {"num_experts": 3, "topology": "encoder-decoder", "decoder_start_token_id": 3}


@torch.no_grad()
@pytest.mark.parametrize("base", [False, True])
def test_outputs_asked_for_by_the_config_are_those_asked_for_by_the_call(base: bool) -> None:
    """Of both stacks, under the names of native encoder-decoders; `set_experts_implementation` reaches both too."""
    model = tiny_stack(**EXPERTS)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    assert model.model.encoder.config._experts_implementation == model.config._experts_implementation == "eager"
    ids = random_ids(2, 5)
    flags = dict.fromkeys(("output_hidden_states", "output_attentions", "output_router_logits"), True)
    called = model.model if base else model
    by_call = called(ids, decoder_input_ids=ids, **flags)
    for name in flags:
        setattr(model.config, name, True)
    by_config = called(ids, decoder_input_ids=ids)
    for name in ("hidden_states", "attentions", "router_logits"):
        for side in ("encoder", "decoder"):
            mine, theirs = by_config[f"{side}_{name}"], by_call[f"{side}_{name}"]
            assert len(mine) == 3 + (name == "hidden_states")
            assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("beams", [1, 3])
def test_generation(converted: Converted, beams: int) -> None:
    """Greedily and with beams, from padded sources, with the source's own generation config."""
    given = inputs_of(converted.native)
    # No word twice: random weights like to repeat one.
    options = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "no_repeat_ngram_size": 1}
    if converted.native.config.decoder_start_token_id is None:
        options["decoder_start_token_id"] = 7  # mBART's is the language, which its tokenizer knows
    ours, native = (
        model.generate(given["input_ids"], attention_mask=given["attention_mask"], **options)
        for model in (converted.ours, converted.native)
    )
    assert ours.tolist() == native.tolist()
    assert ours.shape == (3, 9)


def test_the_way_back_is_byte_equal(converted: Converted) -> None:
    back = export_plan(converted.ours.config)
    written = dict(back.stream(converted.ours.state_dict().__getitem__, to="theirs"))
    tables = TABLES.get(converted.plan.family.name, set())
    assert converted.plan.dropped.keys() == set(converted.plan.aside) == tables
    assert written.keys() == converted.tensors.keys() - tables
    for name, tensor in written.items():
        assert torch.equal(tensor, converted.tensors[name]), name
    assert back.foreign_config == converted.config


def test_a_config_written_afresh_is_read_by_the_native_class(converted: Converted) -> None:
    config = LlmArchConfig.from_dict({**converted.ours.config.to_dict(), "converted_from": None})
    foreign = json.loads(json.dumps(export_plan(config, family=converted.plan.family).foreign_config))
    assert foreign["architectures"] == [type(converted.native).__name__]
    native = native_model(foreign)
    assert native.config.decoder_start_token_id == converted.native.config.decoder_start_token_id
    native.load_state_dict(converted.native.state_dict())
    given = inputs_of(converted.native)
    with torch.no_grad():
        assert torch.equal(native(**given).logits, converted.native(**given).logits)


@pytest.mark.parametrize("case", ["t5-gated", "marian-two-vocabularies", "switch_transformers"])
def test_the_certificate_of_a_conversion(case: str, tmp_path: Path) -> None:
    config = {"model_type": model_type(case), **CASES[case]}
    native = native_model(config)
    native.save_pretrained(tmp_path / "native")
    certificate = convert(tmp_path / "native", tmp_path / "ours", verify=True, progress=False).certificate
    assert certificate is not None
    assert certificate.problems == ()
    assert certificate.new_tokens == 32


# -- what the families are known for -----------------------------------------------------------------------------------


def native_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """As transformers would write them: tied copies once."""
    with torch.device("meta"):
        native: Any = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)))
    tied = native.all_tied_weights_keys
    return {name: tuple(t.shape) for name, t in native.state_dict().items() if name not in tied}


def t5(**changes: Any) -> tuple[Config, dict[str, tuple[int, ...]]]:
    config = {"model_type": "t5", **T5, **changes}
    return config, native_shapes({"model_type": "t5", **T5})


HEAD = {"lm_head.weight": (VOCABULARY, 24)}


@pytest.mark.parametrize(
    ("changes", "head", "scaled", "tied"),
    [
        ({}, {}, True, True),
        ({"tie_word_embeddings": True}, {}, True, True),
        ({}, HEAD, True, True),  # a copy, as in the first releases
        ({"tie_word_embeddings": False}, HEAD, False, False),
        ({"tie_word_embeddings": False}, {}, False, True),  # trained from scratch with transformers 5
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, HEAD, False, False),  # 1.1, saved by 5
    ],
)
def test_t5_scales_unless_the_saved_config_denied_the_tie(
    changes: Config, head: dict[str, Any], scaled: bool, tied: bool
) -> None:
    config, shapes = t5(**changes)
    proven = plan(config, {**shapes, **head})
    assert proven.config.logit_scale == (24**-0.5 if scaled else 1.0)
    assert proven.config.tie_word_embeddings == tied
    back = export_plan(proven.config)
    assert back.foreign_config == config
    assert back.their_shapes == {**shapes, **head}


def test_t5_copies_and_leftovers_of_old_files() -> None:
    config, shapes = t5()
    leftover = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), shapes["shared.weight"])
    given = {**shapes, **copies, **HEAD, leftover: (8, 3)}
    proven = plan(config, given)
    assert list(proven.dropped) == [leftover]
    tensors = {name: torch.randn(shape) for name, shape in given.items()}
    for name in (*copies, *HEAD):
        tensors[name] = tensors["shared.weight"].clone()
    ours = dict(proven.stream(tensors.__getitem__))
    written = dict(export_plan(proven.config).stream(ours.__getitem__, to="theirs"))
    assert written.keys() == given.keys() - {leftover}
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in written.items())
    tensors["decoder.embed_tokens.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match="copy"):
        list(proven.stream(tensors.__getitem__))


def test_a_decoder_deeper_than_its_encoder() -> None:
    """transformers' T5 cannot generate with one: it sizes the cache by the encoder."""
    config = {"model_type": "t5", **T5, "num_layers": 2, "num_decoder_layers": 5}
    native = native_model(config)
    tensors = {name: t for name, t in native.state_dict().items() if name not in native.all_tied_weights_keys}
    proven = plan(config, {name: tuple(t.shape) for name, t in tensors.items()})
    ours = LlmArchForConditionalGeneration(proven.config).eval()
    ours.load_state_dict(dict(proven.stream(tensors.__getitem__)), strict=False)
    ours.tie_weights()
    given = inputs_of(native)
    with torch.no_grad():
        expected = native(**given, use_cache=False).logits
        assert_close(
            ours(**given).logits[given["decoder_attention_mask"] == 1],
            expected[given["decoder_attention_mask"] == 1],
            "native",
        )
    assert ours.generate(given["input_ids"], max_new_tokens=4).shape[0] == 3


def test_a_bare_bart_generates_all_the_same(tmp_path: Path) -> None:
    """facebook/bart-base on the Hub is a BartModel: no prefix, no bias on the logits, a number of fairseq's format."""
    config = {"model_type": "bart", "architectures": ["BartModel"], **BART}
    native = native_model({"model_type": "bart", **BART})
    native.final_logits_bias.zero_()
    native.model.save_pretrained(tmp_path / "native")
    (tmp_path / "native" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "native" / "model.safetensors")
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    given = {**shapes, "encoder.version": (1,), "encoder.embed_tokens.weight": shapes["shared.weight"]}
    proven = plan(config, given)
    assert proven.architecture == "LlmArchModel"
    assert proven.dropped == {"encoder.version": "the number of fairseq's file format, a constant"}
    back = export_plan(proven.config)
    assert back.their_shapes == {name: shape for name, shape in given.items() if name != "encoder.version"}
    assert back.foreign_config == config
    convert(tmp_path / "native", tmp_path / "ours", progress=False)
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    assert isinstance(ours, LlmArchForConditionalGeneration)
    source, options = random_ids(2, SOURCE_LENGTH), {"max_new_tokens": 8, "no_repeat_ngram_size": 1}
    assert ours.generate(source, **options).tolist() == native.generate(source, **options).tolist()
    # Where no class is named it is the one that generates, whose logits then have no bias.
    unnamed = plan({"model_type": "bart", **BART}, shapes)
    assert unnamed.architecture == "LlmArchForConditionalGeneration"
    assert not unnamed.config.lm_head_bias
    assert export_plan(unnamed.config).their_shapes == shapes


# As published before transformers 4.0, when one class served BART, mBART, PEGASUS and Marian.
OLD: Config = {
    **{"_num_labels": 3, "add_bias_logits": False, "classif_dropout": 0.1, "early_stopping": True, "num_beams": 4},
    **{"extra_pos_embeddings": 2, "force_bos_token_to_be_generated": True, "length_penalty": 2.0, "max_length": 142},
    **{"no_repeat_ngram_size": 3, "output_past": True, "prefix": " ", "save_step": 9, "gradient_checkpointing": False},
    **{
        "task_specific_params": {"summarization": {"num_beams": 4}},
        "activation_dropout": 0.1,
        "encoder_layerdrop": 0.1,
    },
}
FLAGS = ("normalize_before", "add_final_layer_norm", "normalize_embedding", "static_position_embeddings")


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("bart", (False, False, True, False)),
        ("mbart", (True, True, True, False)),
        ("pegasus", (True, True, False, True)),
        ("marian", (False, False, False, True)),
    ],
)
def test_configs_of_old_releases(family: str, flags: tuple[bool, ...]) -> None:
    config = {"model_type": family, **BART, **OLD, **dict(zip(FLAGS, flags, strict=True))}
    proven = plan(config, native_shapes({"model_type": family, **BART}))
    assert export_plan(proven.config).foreign_config == config
    for name, value in zip(FLAGS, flags, strict=True):
        with pytest.raises(UnsupportedField, match=name):
            plan({**config, name: not value}, [])


def test_generation_settings_in_an_old_config_are_kept(tmp_path: Path) -> None:
    """facebook/bart-large-cnn's beams and lengths are in its config.json."""
    native_model({"model_type": "bart", **BART}).save_pretrained(tmp_path / "native")
    (tmp_path / "native" / "generation_config.json").unlink()
    config = {"model_type": "bart", **BART, **OLD, "forced_bos_token_id": 0, "max_length": 12}
    (tmp_path / "native" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "native", tmp_path / "ours", progress=False)
    native, ours = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / folder) for folder in ("native", "ours"))
    for model in (ours, load(tmp_path / "native")):
        said = model.generation_config.to_diff_dict()
        expected = native.generation_config.to_diff_dict()
        for name in ("num_beams", "max_length", "length_penalty", "no_repeat_ngram_size", "early_stopping"):
            assert said[name] == expected[name] == config[name], name
        for name in ("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id", "eos_token_id"):
            assert said[name] == expected[name] == config[name], name
    source = random_ids(2, SOURCE_LENGTH)
    assert ours.generate(source).tolist() == native.generate(source).tolist()


def test_marian_drops_its_table_of_sinusoids() -> None:
    config, shapes = {"model_type": "marian", **BART}, native_shapes({"model_type": "marian", **BART})
    tables = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    proven = plan(config, {**shapes, **dict.fromkeys(tables, (40, 24))})
    assert proven.dropped == dict.fromkeys(tables, "table of sinusoids: it follows from the width")


def test_mbart_begins_with_the_last_label() -> None:
    """In training its decoder starts with the language, which ends the labels."""
    config = {"model_type": "mbart", **BART}
    model = LlmArchForConditionalGeneration(plan(config, native_shapes(config)).config)
    labels = random_ids(3, 8)
    labels[1, -3:], labels[2, -1:] = -100, BART["pad_token_id"]
    expected = shift_tokens_right(labels.clone(), BART["pad_token_id"])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), expected)
    assert expected[:, 0].tolist() == [labels[0, 7], labels[1, 4], labels[2, 6]]


@torch.no_grad()
def test_m2m_100_counts_real_tokens() -> None:
    """Padding moves no position, wherever it is, also where no mask says so."""
    config = {"model_type": "m2m_100", **BART}
    native = native_model(config)
    tensors = {name: t for name, t in native.state_dict().items() if name not in native.all_tied_weights_keys}
    proven = plan(config, {name: tuple(t.shape) for name, t in tensors.items()})
    ours = LlmArchForConditionalGeneration(proven.config).eval()
    ours.load_state_dict(dict(proven.stream(tensors.__getitem__)), strict=False)
    ours.tie_weights()
    pad, ids = torch.ones(1, 3, dtype=torch.long), random_ids(1, 6)
    scattered = torch.cat((pad, ids[:, :2], pad, ids[:, 2:]), dim=1)
    given: Config = {"input_ids": scattered, "decoder_input_ids": random_ids(1, 5)}
    assert_close(ours(**given).logits, native(**given).logits, "native")
    alone = ours(ids, decoder_input_ids=given["decoder_input_ids"]).logits
    assert_close(ours(attention_mask=(scattered != 1).long(), **given).logits, alone, "padding")


def test_sinusoids_are_those_of_the_tables() -> None:
    """At the last of 512 positions the angle of the fastest wave is known to 512 * 2^-24."""
    pegasus = {"model_type": "pegasus", **BART, "max_position_embeddings": 512}
    m2m = {"model_type": "m2m_100", **BART, "max_position_embeddings": 512}
    positions = torch.arange(512)[None]
    for config, table in (
        (pegasus, native_model(pegasus).model.encoder.embed_positions.weight),
        (m2m, native_model(m2m).model.encoder.embed_positions.weights[2:]),
    ):
        ours = LlmArchForConditionalGeneration(plan(config, native_shapes(config)).config)
        mine = ours.model.embed_positions.embed(torch.zeros(1, 512, 24), positions)[0]
        assert (mine - table).abs().max() < 1e-4


@torch.no_grad()
def test_switch_capacity_is_a_number_of_a_row() -> None:
    """A full expert passes the residual alone; rows and padding take nobody's place."""
    config = {"model_type": "switch_transformers", **SWITCH}
    ours = tiny_seq2seq(plan(config, native_shapes(config)).config)
    ids, labels = random_ids(2, SOURCE_LENGTH), random_ids(2, 4, seed=3)
    both = ours(ids, decoder_input_ids=labels).logits
    for row in range(2):
        alone = ours(ids[row : row + 1], decoder_input_ids=labels[row : row + 1]).logits
        assert_close(both[row : row + 1], alone, "padding")
    longer = torch.cat((torch.zeros(2, 5, dtype=torch.long), ids), dim=1)
    assert_close(ours(longer, attention_mask=(longer != 0).long(), decoder_input_ids=labels).logits, both, "padding")
    roomy = tiny_seq2seq(plan({**config, "expert_capacity": 64}, native_shapes(config)).config)
    assert differs(roomy(ids, decoder_input_ids=labels).logits, both)


def tiny_seq2seq(config: LlmArchConfig) -> Any:
    model = LlmArchForConditionalGeneration(config)
    redraw(model)
    model.tie_weights()
    return model.eval()


SPARSE_COUNTS = [(12, 6), (12, 12), (12, 0), (4, 2), (5, 3), (11, 3), (3, 1)]


@pytest.mark.parametrize(("layers", "sparse"), SPARSE_COUNTS)
def test_switch_has_experts_where_the_native_class_has(layers: int, sparse: int) -> None:
    config = {
        **{"model_type": "switch_transformers", **SWITCH, "num_layers": layers, "num_decoder_layers": layers},
        **{"num_sparse_encoder_layers": sparse, "num_sparse_decoder_layers": sparse},
    }
    proven = plan(config, native_shapes(config))
    assert export_plan(proven.config).foreign_config == config
    config = LlmArchConfig.from_dict({**proven.config.to_dict(), "converted_from": None}).to_dict()
    back = export_plan(LlmArchConfig.from_dict(config), family="switch_transformers")
    assert back.their_shapes == proven.their_shapes


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("bart", {"embedding_scale": 3.0}, "embedding_scale"),
        ("bart", {"norm_placement": "pre"}, "norm_placement"),
        ("bart", {"position_encoding": "rope", "position_offset": 0}, "position"),
        ("bart", {"source_stack": {"num_hidden_layers": 2, "norm_placement": "pre"}}, "source_stack.norm_placement"),
        ("t5", {"attention_scale": None}, "attention_scale"),
        ("t5", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("t5", {"ffn_bias": True}, "ffn_bias"),
        ("umt5", {"relative_attention_shared": True}, "relative_attention_shared"),
        ("switch_transformers", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ("switch_transformers", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
    ],
)
def test_what_a_family_cannot_say_is_refused(case: str, changes: Config, named: str) -> None:
    config = {"model_type": model_type(case), **CASES[case]}
    ours = plan(config, native_shapes(config)).config.to_dict()
    with pytest.raises(NotExpressible, match=named):
        export_plan(LlmArchConfig.from_dict({**ours, **changes}))


def test_no_decoder_is_an_encoder_decoder() -> None:
    with pytest.raises(NotExpressible):
        export_plan(LlmArchConfig(hidden_size=48, num_hidden_layers=2), family="bart")


# -- loss --------------------------------------------------------------------------------------------------------------

BOTH: Config = {"topology": "encoder-decoder", "decoder_start_token_id": 1, "pad_token_id": 0}
OTHERS: Config = {**BOTH, "source_stack": {"num_hidden_layers": 2, "intermediate_size": 27}}
ARCHITECTURES: dict[str, Config] = {
    "rope": OTHERS,
    "relative-bias": {**BOTH, "position_encoding": "relative_bias", "tie_word_embeddings": True, "lm_head_bias": True},
    "learned": {**BOTH, "position_encoding": "learned", "norm_placement": "post", "share_source_embeddings": False},
}
each_architecture = pytest.mark.parametrize("switches", ARCHITECTURES.values(), ids=ARCHITECTURES)


def labelled(batch: int) -> dict[str, torch.Tensor]:
    """Sources, and targets of which each row has another number of labels, so that a mean of means is not the mean."""
    source, labels = random_ids(batch, SOURCE_LENGTH), random_ids(batch, LENGTH, seed=2)
    for row in range(batch):
        labels[row, LENGTH - row % LENGTH :] = -100
    return {"input_ids": source, "labels": labels}


def cross_entropy_by_hand(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> list[float]:
    """-log p of each label at its own place, mixed with the mean over all words, in double precision."""
    losses = []
    for row, targets in zip(logits.double(), labels, strict=True):
        for scores, target in zip(row, targets.tolist(), strict=True):
            if target != -100:
                surprise = scores.logsumexp(-1) - scores
                losses.append(((1 - smoothing) * surprise[target] + smoothing * surprise.mean()).item())
    return losses


@torch.no_grad()
@each_architecture
def test_loss_is_the_cross_entropy_in_place(switches: Config) -> None:
    model, given = tiny_stack(**switches), labelled(8)
    outputs = model(**given)
    losses = cross_entropy_by_hand(outputs.logits, given["labels"])
    assert len(losses) == sum(LENGTH - row for row in range(8))
    assert outputs.loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert model(**given, num_items_in_batch=1000).loss.item() == pytest.approx(sum(losses) / 1000, rel=1e-5)
    shifted = torch.cat((torch.ones(8, 1, dtype=torch.long), given["labels"][:, :-1]), dim=1)
    decoded = model(given["input_ids"], decoder_input_ids=shifted.masked_fill(shifted == -100, 0))
    assert torch.equal(decoded.logits, outputs.logits)
    assert decoded.loss is None


@each_architecture
def test_gradients_do_not_depend_on_how_a_batch_is_split(switches: Config) -> None:
    given = labelled(8)
    items = (given["labels"] != -100).sum()
    gradients = []
    for rows in (8, 2):
        model = tiny_stack(**switches).train()
        for start in range(0, 8, rows):
            part = {name: tensor[start : start + rows] for name, tensor in given.items()}
            model(**part, num_items_in_batch=items).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, "gradient")


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, columns: dict[str, torch.Tensor]):
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {name: column[i] for name, column in self.columns.items()}


def trainer_of(kind: type[Trainer], model: Any, rows: Rows, folder: Path, **arguments: Any) -> Trainer:
    make = Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else TrainingArguments
    options = {
        **{"num_train_epochs": 1, "report_to": [], "save_strategy": "no", "logging_steps": 1, "use_cpu": True},
        **{"disable_tqdm": True, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0},
        # A large eps: AdamW divides by the gradient's size, and so magnifies the rounding of the smallest ones.
        **{"learning_rate": 0.01, "adam_epsilon": 1e-3},
    }
    return kind(model=model, args=make(output_dir=str(folder), **{**options, **arguments}), train_dataset=rows)


@pytest.mark.parametrize("kind", [Trainer, Seq2SeqTrainer])
def test_trainers_accumulate_as_one_batch(kind: type[Trainer], tmp_path: Path) -> None:
    """8 x 1 == 2 x 4, in the losses that are logged and in the parameters that come out."""
    models, losses = [], []
    for size, steps in ((8, 1), (2, 4)):
        model = tiny_stack(**OTHERS)
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        trainer = trainer_of(kind, model, Rows(labelled(16)), tmp_path, **options)
        trainer.train()
        models.append(model)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    start = dict(tiny_stack(**OTHERS).named_parameters())
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert not torch.equal(one, start[name]), name
        assert_close(other, one, "accumulation")


@pytest.mark.parametrize("size", [8, 2])
def test_label_smoothing_is_in_place(size: int, tmp_path: Path) -> None:
    """The Trainer's own smoothing takes the labels away, so a collator hands over the decoder's inputs."""
    model, given = tiny_stack(**OTHERS), labelled(8)
    given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(given["labels"])
    logits = model(**{name: tensor for name, tensor in given.items() if name != "labels"}).logits
    losses = cross_entropy_by_hand(logits, given["labels"], smoothing=0.1)
    options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size, "learning_rate": 0.0}
    trainer = trainer_of(Seq2SeqTrainer, model, Rows(given), tmp_path, label_smoothing_factor=0.1, **options)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # Logged with four decimals.
    assert logged == pytest.approx([sum(losses) / len(losses)], rel=1e-3)


def test_gradient_checkpointing_of_both_stacks() -> None:
    given, gradients = labelled(4), []
    for checkpointing in (None, True, False):
        model = tiny_stack(**OTHERS).train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        model(**given, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            assert_close(other[name], gradient, "gradient")


@torch.no_grad()
def test_resizing_keeps_all_that_is_tied() -> None:
    model = tiny_stack(**ARCHITECTURES["relative-bias"])
    given = {"input_ids": random_ids(2, 7), "decoder_input_ids": random_ids(2, 5, seed=2)}
    before = model(**given).logits
    model.resize_token_embeddings(104, mean_resizing=False)
    embedding = model.model.embed_tokens.weight
    assert embedding.shape == (104, 48)
    assert model.lm_head.weight is embedding
    assert model.model.encoder.embed_tokens.weight is embedding
    assert model.lm_head.bias.shape == (104,)
    assert torch.equal(model(**given).logits[..., :99], before)


# -- cache -------------------------------------------------------------------------------------------------------------

ENCODINGS = ("none", "rope", "learned", "sinusoidal", "alibi", "relative_bias")
WINDOW: Config = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("window", [{}, WINDOW], ids=["full", "window"])
def test_cached_generation_is_uncached_generation(encoding: str, window: Config) -> None:
    """The encoder's keys outlive a window that is shorter than the source, in dynamic and in static caches."""
    model = tiny_stack(**BOTH, **window, position_encoding=encoding)
    source, mask = random_ids(2, SOURCE_LENGTH), torch.ones(2, SOURCE_LENGTH, dtype=torch.long)
    mask[1, -4:] = 0
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = model.generate(source, use_cache=False, **options)
    assert expected.shape == (2, 10)
    for kind in ("dynamic", "static"):
        results = model.generate(
            source, cache_implementation=kind, return_dict_in_generate=True, disable_compile=True, **options
        )
        assert torch.equal(results.sequences, expected), kind
        cache = results.get("cache", results.get("past_key_values"))
        assert isinstance(cache, EncoderDecoderCache)
        assert all(layer.keys.shape[-2] == SOURCE_LENGTH for layer in cache.cross_attention_cache.layers)


@torch.no_grad()
def test_a_window_cuts_neither_cross_attention_nor_a_cache_of_ones_own() -> None:
    model = tiny_stack(**BOTH, sliding_window=4)
    model.set_attn_implementation("eager")
    source, target = random_ids(2, SOURCE_LENGTH), random_ids(2, 8, seed=2)
    whole = model(source, decoder_input_ids=target, output_attentions=True)
    assert (whole.cross_attentions[0] > 0).all()
    encoded = model.get_encoder()(source)
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache())
    steps = [
        model(encoder_outputs=encoded, decoder_input_ids=target[:, t : t + 1], cache=cache, use_cache=True).logits
        for t in range(8)
    ]
    assert_close(torch.cat(steps, dim=1), whole.logits, "cache")


# -- learning ----------------------------------------------------------------------------------------------------------

# Sizes of embeddings at which a wave of height 1 does not drown the words, and distances that the texts have.
SETTINGS: dict[str, Config] = {
    "rope": {},
    "learned": {},
    "sinusoidal": {"embedding_scale": 8.0, "initializer_range": 0.125},
    "alibi": {},
    "relative_bias": {
        **{"initializer_range": 0.1, "relative_attention_num_buckets": 16, "relative_attention_max_distance": 16},
    },
}


def texts(rows: int, generator: torch.Generator) -> torch.Tensor:
    """`(rows, 9)`: eight words in any order, none twice, and the end."""
    words = torch.stack([torch.randperm(21, generator=generator)[:8] for _ in range(rows)]) + 3
    return torch.cat((words, torch.full((rows, 1), 2)), dim=1)


def copying_accuracy(encoding: str, steps: int) -> float:
    """Share of tokens right, generated for new texts, after training from scratch to repeat the source."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    config = LlmArchConfig(
        **{"topology": "encoder-decoder", "vocab_size": 24, "hidden_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "ffn_type": "mlp", "hidden_act": "relu", "intermediate_size": 128},
        **{"max_position_embeddings": 32, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2},
        **{"position_encoding": encoding, **SETTINGS[encoding]},
    )
    model = LlmArchForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps, pct_start=0.2)
    for _ in range(steps):
        source = texts(64, generator)
        model(source, labels=source).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    source = texts(128, generator)
    said = model.eval().generate(source, max_new_tokens=9, do_sample=False)[:, 1:]
    said = nn.functional.pad(said, (0, 9 - said.shape[1]))
    return (said == source).float().mean().item()


def test_learns_to_copy() -> None:
    assert copying_accuracy("learned", steps=160) >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("encoding", SETTINGS)
def test_learns_to_copy_with_every_position_encoding(encoding: str) -> None:
    assert copying_accuracy(encoding, steps=400) >= 0.99


def test_a_trained_trainer_generates(tmp_path: Path) -> None:
    """Seq2SeqTrainer's predict_with_generate, which asks for sequences in place of logits."""
    model, rows = tiny_stack(**OTHERS, eos_token_id=2), Rows(labelled(4))
    options = {"predict_with_generate": True, "generation_max_length": 6, "per_device_eval_batch_size": 2}
    trainer = trainer_of(Seq2SeqTrainer, model, rows, tmp_path, **options)
    predicted = trainer.predict(rows)
    expected = model.generate(rows.columns["input_ids"], max_length=6)
    assert predicted.predictions[:, : expected.shape[1]].tolist() == expected.tolist()


# -- examples ----------------------------------------------------------------------------------------------------------

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "then", "dog", "lay", "under", "it", "who", "where", "?", ".")
EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for the module that they are in.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def word_tokenizer(folder: Path, special: tuple[str, ...], template: str) -> PreTrainedTokenizerFast:
    """A token a word, with these special tokens first."""
    vocabulary = {word: i for i, word in enumerate((*special, *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    named = [(token, vocabulary[token]) for token in special]
    tokenizer.post_processor = TemplateProcessing(
        single=template, pair=f"{template} $B:1 [SEP]:1", special_tokens=named
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", sep_token="[SEP]", eos_token="[SEP]"
    )
    fast.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    fast.save_pretrained(folder)
    return fast


def test_the_translation_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same words as transformers' own class, from the foreign folder and from the converted one."""
    config = {**{"model_type": "marian", **MARIAN}, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    native = native_model({**config, "vocab_size": 19, "forced_eos_token_id": 2})
    native.save_pretrained(tmp_path / "native")
    tokenizer = word_tokenizer(tmp_path / "native", ("[PAD]", "[UNK]", "[SEP]"), "$A [SEP]")
    convert(tmp_path / "native", tmp_path / "ours", progress=False)
    texts = ["the cat sat on a mat .", "who ?"]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    written = native.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], num_beams=3, max_new_tokens=7
    )
    expected = tokenizer.batch_decode(written, skip_special_tokens=True)
    translation = example("translation")
    for folder in ("native", "ours"):
        translation.main([str(tmp_path / folder), *texts, "--beams", "3", "--length", "7"])
        assert capsys.readouterr().out.splitlines() == expected
    model = translation.open_model(str(tmp_path / "ours"))
    (said,) = translation.say(model, tokenizer, ["cat ."], target="mat", beams=1, length=4)
    assert said.split()[0] == "mat"
    with pytest.raises(ValueError, match="Klingon"):
        translation.say(model, tokenizer, ["cat ."], target="Klingon")


def test_the_question_answering_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best pair of a start and an end by transformers' own class, each pair tried; also over windows."""
    native = BertForQuestionAnswering(
        BertConfig(
            **{"vocab_size": 20, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"intermediate_size": 30, "max_position_embeddings": 24},
        )
    ).eval()
    redraw(native)
    native.save_pretrained(tmp_path / "native")
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    tokenizer = word_tokenizer(tmp_path / "native", special, "[CLS] $A [SEP]")
    convert(tmp_path / "native", tmp_path / "ours", progress=False)
    question, text = "where sat the cat ?", "the cat sat on a mat and then a dog lay under it ."
    inputs = tokenizer(question, text, return_tensors="pt", return_offsets_mapping=True)
    offsets = inputs.pop("offset_mapping")[0]
    output = native(**inputs)
    places = [i for i, part in enumerate(inputs.sequence_ids(0)) if part == 1]
    pairs = [(first, last) for first in places for last in places if first <= last < first + 15]
    scores = [(output.start_logits[0, first] + output.end_logits[0, last]).item() for first, last in pairs]
    first, last = pairs[scores.index(max(scores))]
    expected = text[offsets[first, 0] : offsets[last, 1]]
    answering = example("question_answering")
    for folder in ("native", "ours"):
        answering.main([str(tmp_path / folder), question, text])
        assert capsys.readouterr().out.startswith(f"{expected}  (")
    model = answering.open_model(str(tmp_path / "ours"))
    found = answering.answer(model, tokenizer, question, text)
    assert found.score == pytest.approx(torch.tensor(scores).softmax(0).max().item(), rel=1e-4)
    # A text that does not fit: as long as the windows, each tried as above, have no better pair.
    long = f"{'it . ' * 20}{text}"
    far = answering.answer(model, tokenizer, question, long, window=22, overlap=5)
    windows = tokenizer(
        *(question, long),
        **{"truncation": "only_second", "max_length": 22, "stride": 5, "return_overflowing_tokens": True},
        **{"return_offsets_mapping": True, "padding": True, "return_tensors": "pt"},
    )
    assert len(windows["input_ids"]) > 3
    best = (-math.inf, 0, 0)
    for row, ids in enumerate(windows["input_ids"]):
        kinds, mask = windows["token_type_ids"][row : row + 1], windows["attention_mask"][row : row + 1]
        output = native(ids[None], attention_mask=mask, token_type_ids=kinds)
        places = [i for i, part in enumerate(windows.sequence_ids(row)) if part == 1]
        for first, last in ((first, last) for first in places for last in places if first <= last < first + 15):
            score = (output.start_logits[0, first] + output.end_logits[0, last]).item()
            offsets = windows["offset_mapping"][row]
            best = max(best, (score, int(offsets[first, 0]), int(offsets[last, 1])))
    assert (far.start, far.end) == best[1:]
    assert far.text == long[far.start : far.end]
    with pytest.raises(ValueError, match="shorter"):
        answering.answer(model, tokenizer, question * 5, text)

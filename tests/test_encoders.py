"""Encoders and their task heads: each family against transformers' own classes, what is on disk, pipelines, windows."""

import copy
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

import hf_llmarch
from family_configs import TOLERANCES
from hf_llmarch import (
    LlmArchConfig,
    LlmArchForCausalLM,
    LlmArchForMaskedLM,
    LlmArchForSequenceClassification,
    LlmArchModel,
)
from hf_llmarch.conversion import convert, export, load, verify
from hf_llmarch.conversion.errors import NotExpressible, PlanError, UnsupportedField
from hf_llmarch.conversion.families import families
from hf_llmarch.conversion.families.encoders import ANSWER, MASKED_LM, MODEL, SEQUENCE, TOKEN
from hf_llmarch.conversion.plans import Plan, export_plan, plan

pytestmark = pytest.mark.core
transformers.utils.logging.disable_progress_bar()

VOCABULARY, LENGTH, LABELS, PAD = 83, 19, 3, 4
Inputs = dict[str, torch.Tensor]

BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 34,
    "hidden_act": "gelu_new",
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.3,
    "max_position_embeddings": 47,
    "type_vocab_size": 3,
    "layer_norm_eps": 0.1,
    "pad_token_id": PAD,
}
WINDOWED = ("modernbert", "modernbert-biases")
# Beside the family's name, a case may have one of its own.
CASES: dict[str, dict[str, Any]] = {
    "bert": {**BERT, "classifier_dropout": 0.15, "position_embedding_type": "absolute"},
    "roberta": {**BERT, "hidden_act": "relu", "bos_token_id": 1, "eos_token_id": 2},
    "xlm-roberta": {**BERT, "hidden_act": "relu", "type_vocab_size": 1, "bos_token_id": 1, "eos_token_id": 2},
    "ernie": {**BERT, "classifier_dropout": 0.15},
    "megatron-bert": {**BERT, "hidden_act": "relu"},
    "camembert": {**BERT, "bos_token_id": 1, "eos_token_id": 2},
    "data2vec-text": {**BERT, "bos_token_id": 1, "eos_token_id": 2},
    "xlm-roberta-xl": {**BERT, "type_vocab_size": 1, "bos_token_id": 1, "eos_token_id": 2},
    "roberta-prelayernorm": {**BERT, "bos_token_id": 1, "eos_token_id": 2},
    "jina_embeddings_v3": {**BERT, "rope_theta": 321.0, "bos_token_id": 1, "eos_token_id": 2},
    "nomic_bert": {**BERT, "hidden_act": "silu", "head_dim": 10, "rope_theta": 321.0},
    "eurobert": {
        **{"vocab_size": VOCABULARY, "hidden_size": 36, "num_hidden_layers": 3, "intermediate_size": 34},
        **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 47},
        **{"rms_norm_eps": 0.1, "rope_theta": 321.0, "attention_bias": True, "classifier_pooling": "bos"},
        **{"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2},
    },
    "eurobert-mlp-biases": {
        **{"vocab_size": VOCABULARY, "hidden_size": 36, "num_hidden_layers": 2, "intermediate_size": 34},
        **{"num_attention_heads": 3, "num_key_value_heads": 3, "mlp_bias": True, "classifier_pooling": "mean"},
        **{"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True},
    },
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": 36,
        "n_layers": 3,
        "n_heads": 3,
        "hidden_dim": 34,
        "activation": "relu",
        "max_position_embeddings": 47,
        "dropout": 0.2,
        "attention_dropout": 0.3,
        "pad_token_id": PAD,
    },
    "electra": {**BERT, "embedding_size": 22, "hidden_act": "relu"},
    "electra-wide": {**BERT, "embedding_size": 36},
    "roformer": {**BERT, "embedding_size": 22, "hidden_act": "relu"},
    "roformer-wide": BERT,
    "albert": {
        **BERT,
        "embedding_size": 22,
        "num_hidden_layers": 4,
        "num_hidden_groups": 2,
        "classifier_dropout_prob": 0.2,
    },
    "albert-one-group": {**BERT, "embedding_size": 36, "num_hidden_layers": 4},
    "modernbert": {
        "vocab_size": VOCABULARY,
        "hidden_size": 36,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "intermediate_size": 34,
        "max_position_embeddings": 47,
        "norm_eps": 0.1,
        "local_attention": 6,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 777.0,
        "local_rope_theta": 33.0,
        "classifier_pooling": "mean",
        "hidden_activation": "gelu_pytorch_tanh",
        "classifier_activation": "relu",
        **{"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    },
    "modernbert-biases": {
        "vocab_size": VOCABULARY,
        "hidden_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 34,
        "norm_eps": 0.1,
        "local_attention": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 33.0},
        },
        **{"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True, "decoder_bias": False},
        **{"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
    },
}
ENCODERS = {name: family for name, family in families().items() if next(iter(family.architectures)) == MASKED_LM}


def redraw(model: Any) -> Any:
    """Every parameter anew, so that tokens stay apart through all layers; but for RoFormer's table, a constant."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                gain = parameter.dim() == 1 and name.endswith("weight")
                parameter.normal_(*((1.0, 0.3) if gain else (0.0, 0.2)), generator=generator)
    model.tie_weights()
    return model.eval()


def model_type(case: str) -> str:
    return max((name for name in ENCODERS if case == name or case.startswith(f"{name}-")), key=len)


def heads(*cases: str) -> list[tuple[str, str]]:
    """(case, class of ours) for every class of the cases' families that is an encoder."""
    return [
        (case, ours)
        for case in cases or CASES
        for ours in ENCODERS[model_type(case)].architectures
        if ours != "LlmArchForCausalLM"
    ]


@dataclass
class Converted:
    """A native model as it is on disk, and what became of it."""

    native: PreTrainedModel
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    plan: Plan
    ours: Any


def foreign_config(case: str, ours: str, **changes: Any) -> dict[str, Any]:
    """A config.json for a class, as its authors wrote it and not as this version of transformers would."""
    family = ENCODERS[model_type(case)]
    config: dict[str, Any] = {"model_type": family.name, "architectures": [family.architectures[ours]]}
    config["torch_dtype"] = "float32"
    if ours in (SEQUENCE, TOKEN):
        config["id2label"] = {str(i): f"label {i}" for i in range(LABELS)}
        config["label2id"] = {f"label {i}": i for i in range(LABELS)}
    return {**config, **CASES[case], **changes}


def native_model(config: dict[str, Any], backend: str = "eager", **options: Any) -> PreTrainedModel:
    values = copy.deepcopy(config)
    native_config = AutoConfig.for_model(values.pop("model_type"), **values)
    native_config._attn_implementation = backend
    return redraw(getattr(transformers, config["architectures"][0])(native_config, **options))


def build(case: str, ours: str, folder: Path, *, options: dict[str, Any] | None = None, **changes: Any) -> Converted:
    config = foreign_config(case, ours, **changes)
    native = native_model(config, **(options or {}))
    native.save_pretrained(folder)
    return through_plan(native, config, load_file(folder / "model.safetensors"))


def through_plan(native: PreTrainedModel, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Converted:
    proven = plan(config, {name: tuple(t.shape) for name, t in tensors.items()})
    model = getattr(hf_llmarch, proven.architecture)(proven.config).eval()
    missing, unexpected = model.load_state_dict(dict(proven.stream(tensors.__getitem__)), strict=False)
    assert not unexpected
    assert set(missing) <= set(model.all_tied_weights_keys)
    model.tie_weights()
    return Converted(native, config, tensors, proven, model)


def inputs(config: dict[str, Any], side: str = "right") -> Inputs:
    """Three texts of different lengths, padded on a side, with token types where there are any."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCABULARY, (3, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) >= torch.tensor([0, 5, 9])[:, None]).long()
    mask = mask.flip(-1) if side == "right" else mask
    types = config.get("type_vocab_size", 0)
    typed = {"token_type_ids": torch.randint(types, ids.shape, generator=generator)} if types else {}
    return {"input_ids": ids.where(mask.bool(), PAD), "attention_mask": mask, **typed}


def labels(ours: str, batch: Inputs) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    real = batch["attention_mask"].bool()
    tokens = batch["input_ids"].masked_fill(~real | (torch.rand(real.shape, generator=generator) < 0.5), -100)
    targets: dict[str, Inputs] = {
        MODEL: {},
        MASKED_LM: {"labels": tokens},
        SEQUENCE: {"labels": torch.tensor([2, 0, 1])},
        TOKEN: {"labels": torch.where(tokens < 0, tokens, tokens % LABELS)},
        ANSWER: {"start_positions": torch.tensor([6, 5, 4]), "end_positions": torch.tensor([8, 9, 7])},
    }
    return {name: target[: len(tokens)] for name, target in targets[ours].items()}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    spread = (expected.max() - expected.min()).item()
    assert spread > 0.01
    assert (actual - expected).abs().max().item() <= TOLERANCES["fp32"] * spread


def assert_same_output(converted: Converted, ours: str, batch: Inputs) -> None:
    """Hidden states, logits and loss. At padding, what a window holds may be padding alone, and means nothing."""
    real = batch["attention_mask"].bool()
    given = {**batch, **labels(ours, batch), "output_hidden_states": True}
    expected, found = converted.native(**given), converted.ours(**given)
    assert len(found.hidden_states) == len(expected.hidden_states) == converted.plan.config.num_hidden_layers + 1
    for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert_close(mine[real], theirs[real])
    compared = {"last_hidden_state", "pooler_output", "logits", "start_logits", "end_logits"} & expected.keys()
    assert compared
    for name in compared:
        mine, theirs = found[name], expected[name]
        by_token = theirs.shape[:2] == real.shape
        assert_close(*((mine[real], theirs[real]) if by_token else (mine, theirs)))
    if ours != MODEL:
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_every_encoder_has_a_case() -> None:
    assert {model_type(case) for case in CASES} == set(ENCODERS)


@torch.no_grad()
@pytest.mark.parametrize(("case", "ours"), heads())
def test_numbers_and_the_way_back(case: str, ours: str, tmp_path: Path) -> None:
    converted = build(case, ours, tmp_path)
    state = converted.ours.state_dict()
    back = export_plan(converted.ours.config)
    written = dict(back.stream(state.__getitem__, to="theirs"))
    assert written.keys() == converted.tensors.keys() - converted.plan.dropped.keys()
    for name, tensor in written.items():
        assert tensor.dtype == converted.tensors[name].dtype
        assert torch.equal(tensor, converted.tensors[name]), name
    assert back.foreign_config == converted.config

    assert type(converted.ours).__name__ == ours
    for backend, side in itertools.product(("eager", "sdpa"), ("right", "left")):
        converted.ours.set_attn_implementation(backend)
        batch = inputs(converted.config, side)
        if case in WINDOWED and (ours == ANSWER or converted.ours.config.classifier_pooling == "first"):
            # Backends differ in what becomes of padding that sees padding alone, and these read it.
            batch = {name: tensor[:1] for name, tensor in batch.items()}
        assert_same_output(converted, ours, batch)


@pytest.mark.parametrize(("case", "ours"), heads())
def test_a_config_written_afresh_is_read_by_the_native_class(case: str, ours: str, tmp_path: Path) -> None:
    converted = build(case, ours, tmp_path)
    config, native, proven = converted.config, converted.native, converted.plan
    family = ENCODERS[config["model_type"]]
    alone = LlmArchConfig.from_dict({**proven.config.to_dict(), "converted_from": None})
    foreign = json.loads(json.dumps(export_plan(alone, family=family.name).foreign_config))
    assert foreign["architectures"] == [family.architectures[ours]]
    again = native_model(foreign)
    with torch.no_grad():
        for mine, theirs in zip(again(**inputs(config)).values(), native(**inputs(config)).values(), strict=True):
            assert torch.equal(mine, theirs)
    if ours in (SEQUENCE, TOKEN):
        assert again.config.id2label == {i: f"label {i}" for i in range(LABELS)}


@torch.no_grad()
@pytest.mark.parametrize("case", ["bert", "roberta"])
@pytest.mark.parametrize("kind", ["regression", "single_label_classification", "multi_label_classification"])
def test_problem_types(case: str, kind: str, tmp_path: Path) -> None:
    converted = build(case, SEQUENCE, tmp_path, problem_type=kind)
    assert converted.ours.config.problem_type == kind
    target = torch.tensor([2, 0, 1]) if kind.startswith("single") else torch.rand(3, LABELS)
    batch = inputs(converted.config)
    expected = converted.native(**batch, labels=target).loss
    assert converted.ours(**batch, labels=target).loss.item() == pytest.approx(expected.item(), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("wanted", [False, True, None])
@pytest.mark.parametrize("case", ["bert", "roberta", "xlm-roberta", "albert"])
def test_the_pooler_may_be_left_out(case: str, wanted: bool | None, tmp_path: Path) -> None:
    """A keyword of the native classes, of which several are so without one."""
    build(case, MODEL, tmp_path / "theirs", options={})
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(foreign_config(case, MODEL)))
    convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    given = {} if wanted is None else {"add_pooling_layer": wanted}
    models = (transformers.AutoModel.from_pretrained(tmp_path / side, **given).eval() for side in ("ours", "theirs"))
    ours, native = (model(**inputs(CASES[case])) for model in models)
    if wanted is False:
        assert native.pooler_output is None
        assert ours.get("pooler_output") is None
    else:
        assert_close(ours.pooler_output, native.pooler_output)
    with pytest.raises(ValueError, match=r"add_pooling_layer=True.*topology='decoder'"):
        LlmArchModel(LlmArchConfig(num_hidden_layers=1), add_pooling_layer=True)


@pytest.mark.parametrize("ours", [MASKED_LM, SEQUENCE, TOKEN, ANSWER])
def test_every_weight_that_trains_has_a_gradient(ours: str, tmp_path: Path) -> None:
    """Else DistributedDataParallel raises at its second step; what a head does not read is carried along untrained."""
    config = encoder_config(pooler=True, classifier_pooling="pooler", num_labels=LABELS, architectures=None)
    getattr(hf_llmarch, ours)(config).save_pretrained(tmp_path)
    model = getattr(hf_llmarch, ours).from_pretrained(tmp_path)
    batch = inputs({"type_vocab_size": 2})
    model(**batch, **labels(ours, batch)).loss.backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert "model.pooler.dense.weight" in model.state_dict()


@torch.no_grad()
@pytest.mark.parametrize("case", ["bert", "albert"])
def test_a_base_model_without_its_pooler(case: str, tmp_path: Path) -> None:
    converted = build(case, MODEL, tmp_path, options={"add_pooling_layer": False})
    assert not converted.ours.config.pooler
    assert_same_output(converted, MODEL, inputs(converted.config))
    assert export_plan(converted.ours.config).their_shapes.keys() == converted.tensors.keys()


@torch.no_grad()
@pytest.mark.parametrize(
    ("field", "ours"),
    [("hidden_dropout_prob", MASKED_LM), ("attention_probs_dropout_prob", MASKED_LM)]
    + [("classifier_dropout", ours) for ours in (SEQUENCE, TOKEN)],
)
def test_dropout_goes_where_the_native_class_has_it(field: str, ours: str, tmp_path: Path) -> None:
    """At a probability of 1 dropout is no longer random: what it drops is gone, in both models."""
    none: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    converted = build("bert", ours, tmp_path, **{**none, field: 1.0})
    batch = inputs(converted.config)
    trained = converted.native.train()(**batch).logits
    assert not torch.equal(trained, converted.native.eval()(**batch).logits)
    assert torch.allclose(converted.ours.train()(**batch).logits, trained, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "dense", "dropout"),
    [
        ("roberta", "classifier.dense", {"classifier_dropout": 1.0}),
        ("electra", "classifier.dense", {"classifier_dropout": 1.0}),
        ("distilbert", "pre_classifier", {"seq_classif_dropout": 1.0}),
    ],
)
def test_dropout_before_the_classifiers_dense_layer(case: str, dense: str, dropout: Any, tmp_path: Path) -> None:
    """Some families drop what the dense layer is given and what it makes, DistilBERT the latter alone."""
    converted = build(case, SEQUENCE, tmp_path, **dropout)
    given: list[torch.Tensor] = []
    for model, name in ((converted.native, dense), (converted.ours, "head.dense")):
        layer: Any = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda module, args: given.append(args[0]))
        model.train()(**inputs(converted.config))
    dropped = [bool(x.abs().max() == 0) for x in given]
    assert dropped == [case != "distilbert"] * 2


@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    [name for name, family in ENCODERS.items() if "LlmArchForCausalLM" in family.architectures],
)
def test_a_causal_model_of_an_encoder_family(case: str, tmp_path: Path) -> None:
    converted = build(case, "LlmArchForCausalLM", tmp_path, is_decoder=True)
    assert isinstance(converted.ours, LlmArchForCausalLM)
    ids = inputs(converted.config)["input_ids"][:1]
    assert_close(converted.ours(ids).logits, converted.native(ids).logits)
    written: Any = converted.ours
    written = written.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    for _ in range(6):
        # Not by their `generate`, which counts RoBERTa's positions from row 0 on, where padding is.
        ids = torch.cat((ids, converted.native(ids).logits[:, -1:].argmax(-1)), dim=-1)
    assert written.tolist() == ids.tolist()
    assert export_plan(converted.ours.config).foreign_config == converted.config


@torch.no_grad()
def test_positions_of_roberta_given_embeddings(tmp_path: Path) -> None:
    """From embeddings alone padding cannot be told: both count on through it."""
    converted = build("roberta", MODEL, tmp_path)
    embeds = torch.randn(2, 7, 36)
    mine, theirs = (model(inputs_embeds=embeds).last_hidden_state for model in (converted.ours, converted.native))
    assert_close(mine, theirs)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_tokens_masked_inside_a_text(case: str, tmp_path: Path) -> None:
    converted = build(case, MODEL, tmp_path)
    ids, mask = inputs({})["input_ids"], torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, 5:8] = mask[1, 11] = mask[2, :3] = mask[2, 15] = 0
    mine, theirs = (model(ids, attention_mask=mask).last_hidden_state for model in (converted.ours, converted.native))
    assert_close(mine[mask.bool()], theirs[mask.bool()])


# Positions `(1 or 3, LENGTH)` that say no more than where tokens stand. In several rows a restart is no other text.
PLACES = {
    "none": torch.zeros(1, LENGTH, dtype=torch.long),
    "one row for all": torch.arange(LENGTH)[None],
    "backwards": torch.arange(LENGTH).flip(0)[None],
    "every other": torch.arange(0, 2 * LENGTH, 2)[None],
    "a gap": torch.cat((torch.arange(7), torch.arange(11, LENGTH + 4)))[None],
    "left-padded": (torch.arange(LENGTH) - torch.tensor([0, 5, 9])[:, None]).clamp(min=0),
    "restarting": torch.arange(LENGTH).remainder(8).repeat(3, 1),
}


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("case", [case for case in CASES if model_type(case) != "roformer"])  # it takes no positions
def test_positions_are_read_as_the_native_class_reads_them(case: str, places: str, rows: int, tmp_path: Path) -> None:
    if (places, rows) == ("restarting", 1):
        return  # packed documents, see below
    converted = build(case, MODEL, tmp_path)
    ids, position_ids = inputs({}, "left")["input_ids"][-rows:], PLACES[places]
    given = {"input_ids": ids, "position_ids": position_ids[-rows:]}
    # RoBERTa's class takes rows of its table, where ours takes places in the text, as `generate` gives them to both.
    rows_read = given["position_ids"] + (PAD + 1 if "roberta" in case or case in ("camembert", "data2vec-text") else 0)
    theirs = converted.native(ids, position_ids=rows_read.expand(rows, -1)).last_hidden_state
    assert_close(converted.ours(**given).last_hidden_state, theirs)


# -- on disk -----------------------------------------------------------------------------------------------------------


def on_disk(case: str, ours: str, folder: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    converted = build(case, ours, folder, **changes)
    return converted.config, converted.tensors


def assert_back(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Plan:
    """All that is not dropped comes back under its own name, and all that others may want is kept aside."""
    proven = plan(config, {name: tuple(t.shape) for name, t in tensors.items()})
    ours = dict(proven.stream(tensors.__getitem__))
    back = export_plan(LlmArchConfig.from_dict(proven.config.to_dict()))
    written = dict(back.stream(ours.__getitem__, to="theirs"))
    assert written.keys() == tensors.keys() - proven.dropped.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in written)
    assert back.foreign_config == config
    return proven


def test_names_of_the_first_years(tmp_path: Path) -> None:
    """gamma and beta, the pooler in a masked language model, the head for the next sentence, a buffer of positions."""
    config, tensors = on_disk("bert", MASKED_LM, tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in old
    old |= {
        "bert.pooler.dense.weight": torch.randn(36, 36),
        "bert.pooler.dense.bias": torch.randn(36),
        "bert.embeddings.position_ids": torch.arange(47)[None],
        "cls.seq_relationship.weight": torch.randn(2, 36),
        "cls.seq_relationship.bias": torch.randn(2),
    }
    proven = assert_back(config, old)
    assert proven.config.pooler
    assert set(proven.dropped) == {
        "bert.embeddings.position_ids",
        *(f"cls.seq_relationship.{p}" for p in ("weight", "bias")),
    }
    assert proven.aside == ("cls.seq_relationship.weight", "cls.seq_relationship.bias")
    assert_back({**config, "architectures": ["BertForPreTraining"]}, old)


@pytest.mark.parametrize("case", ["bert", "roberta", "roformer", "albert"])
def test_the_bias_of_the_vocabulary_under_either_name(case: str, tmp_path: Path) -> None:
    config, tensors = on_disk(case, MASKED_LM, tmp_path)
    (bias,) = (name for name, tensor in tensors.items() if tensor.shape == (VOCABULARY,))
    second = f"{bias.removesuffix('bias')}decoder.bias"
    assert_back(config, {**tensors, second: tensors[bias].clone()})
    assert_back(config, {second if name == bias else name: tensor for name, tensor in tensors.items()})
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        assert_back(config, {**tensors, second: tensors[bias] + 1})
    # And the head itself, which is the embedding once more.
    (embedding,) = (name for name in tensors if name.endswith("word_embeddings.weight"))
    assert_back(config, {**tensors, second.replace("bias", "weight"): tensors[embedding].clone()})


@torch.no_grad()
@pytest.mark.parametrize("case", ["bert", "roberta", "roformer", "albert"])
def test_a_head_that_is_not_tied_has_the_bias_in_its_last_layer(case: str, tmp_path: Path) -> None:
    converted = build(case, MASKED_LM, tmp_path, tie_word_embeddings=False)
    biases = [name for name, tensor in converted.tensors.items() if tensor.shape == (VOCABULARY,)]
    assert len(biases) == 2
    assert_same_output(converted, MASKED_LM, inputs(converted.config))
    proven = assert_back(converted.config, converted.tensors)
    (unread,) = {*proven.aside} & {*biases}
    assert not unread.endswith("decoder.bias")


@pytest.mark.parametrize("case", [case for case in CASES if case not in WINDOWED])
def test_a_base_model_has_no_prefix_and_a_head_may_say_so(case: str, tmp_path: Path) -> None:
    config, tensors = on_disk(case, MODEL, tmp_path)
    assert_back(config, tensors)
    prefix = f"{getattr(transformers, config['architectures'][0]).base_model_prefix}."
    assert_back(config, {prefix + name: tensor for name, tensor in tensors.items()})


def test_a_discriminator_keeps_its_head_aside(tmp_path: Path) -> None:
    config, tensors = on_disk("electra", MODEL, tmp_path)
    tensors = {f"electra.{name}": tensor for name, tensor in tensors.items()}
    head = {f"discriminator_predictions.{name}": torch.randn(36) for name in ("dense.weight", "dense_prediction.bias")}
    proven = assert_back({**config, "architectures": ["ElectraForPreTraining"]}, {**tensors, **head})
    assert proven.architecture == MODEL
    assert set(proven.aside) == set(head)
    assert all("aside" in reason for reason in proven.dropped.values())


@pytest.mark.parametrize(("case", "theirs"), [("electra", "ElectraForPreTraining"), ("bert", "BertForPreTraining")])
def test_heads_kept_aside_go_back(case: str, theirs: str, tmp_path: Path) -> None:
    config = foreign_config(case, MODEL, architectures=[theirs])
    native_model(config).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    report = convert(tmp_path / "theirs", tmp_path / "ours", verify=True, progress=False)
    assert report.certificate is not None
    assert report.certificate.ok, report.certificate.problems
    assert report.dropped
    export(tmp_path / "ours", tmp_path / "back", progress=False)
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


BASE: dict[str, Any] = {
    **{"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768},
    **{"initializer_range": 0.02, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12},
}
ROBERTA_BASE: dict[str, Any] = {
    **BASE,
    **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "layer_norm_eps": 1e-05},
    **{"max_position_embeddings": 514, "type_vocab_size": 1},
}
# config.json of published checkpoints, the class whose tensors they hold, and how many numbers these are.
PUBLISHED: dict[str, tuple[dict[str, Any], str, int]] = {
    "bert-base-uncased": (
        {
            **BASE,
            **{"architectures": ["BertForMaskedLM"], "model_type": "bert", "gradient_checkpointing": False},
            **{"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "pad_token_id": 0, "type_vocab_size": 2},
            **{"position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0", "use_cache": True},
            "vocab_size": 30522,
        },
        "BertForPreTraining",
        110_106_428,
    ),
    "roberta-base": (
        {**ROBERTA_BASE, "architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "vocab_size": 50265},
        "RobertaForMaskedLM",
        124_697_433,
    ),
    "xlm-roberta-base": (
        {
            **ROBERTA_BASE,
            **{"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta", "vocab_size": 250002},
            **{"output_past": True, "position_embedding_type": "absolute", "use_cache": True},
        },
        "XLMRobertaForMaskedLM",
        278_885_778 - 768 * 769,  # the pooler, which transformers' class leaves out
    ),
    "distilbert-base-uncased": (
        {
            **{"activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768},
            **{"dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512},
            **{"model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1},
            **{"seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522},
        },
        "DistilBertForMaskedLM",
        66_985_530,
    ),
    "ModernBERT-base": (
        {
            **{"architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0},
            **{"bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "decoder_bias": True},
            **{"classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 50281, "eos_token_id": 50282},
            **{"deterministic_flash_attn": False, "embedding_dropout": 0.0, "global_attn_every_n_layers": 3},
            **{"global_rope_theta": 160000.0, "gradient_checkpointing": False, "hidden_activation": "gelu"},
            **{
                "hidden_size": 768,
                "initializer_cutoff_factor": 2.0,
                "initializer_range": 0.02,
                "layer_norm_eps": 1e-05,
            },
            **{"intermediate_size": 1152, "local_attention": 128, "local_rope_theta": 10000.0, "mlp_bias": False},
            **{"max_position_embeddings": 8192, "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": False},
            **{"norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283},
            **{"position_embedding_type": "absolute", "sep_token_id": 50282, "tie_word_embeddings": True},
            **{"torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "vocab_size": 50368},
        },
        "ModernBertForMaskedLM",
        149_655_232,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_plan_to_the_published_number_of_parameters(name: str) -> None:
    config, holds, parameters = PUBLISHED[name]
    values = copy.deepcopy(config)
    with torch.device("meta"):
        native = getattr(transformers, holds)(AutoConfig.for_model(values.pop("model_type"), **values))
    shapes = {n: tuple(t.shape) for n, t in native.state_dict().items() if n not in native.all_tied_weights_keys}
    if "bert.embeddings.LayerNorm.weight" in shapes:
        # Its file has the names of the first years.
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, first in old.items():
            shapes = {name.replace(new, first): shape for name, shape in shapes.items()}
    proven = plan(config, shapes)
    assert proven.their_shapes.keys() | proven.dropped.keys() == shapes.keys()
    assert sum(map(math.prod, shapes.values())) == parameters
    assert export_plan(LlmArchConfig.from_dict(proven.config.to_dict())).foreign_config == config


@pytest.mark.parametrize(("case", "ours"), heads("bert", "roberta", "distilbert", "electra"))
def test_without_architectures_the_tensors_tell_the_class(case: str, ours: str, tmp_path: Path) -> None:
    config, tensors = on_disk(case, ours, tmp_path)
    del config["architectures"]
    assert assert_back(config, tensors).architecture == ours


# -- both ways on disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "ours"), [*heads("bert"), ("roberta", MASKED_LM), ("modernbert", SEQUENCE)])
def test_a_folder_there_and_back(case: str, ours: str, tmp_path: Path) -> None:
    config = foreign_config(case, ours)
    native_model(config).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    report = convert(tmp_path / "theirs", tmp_path / "ours", verify=True, progress=False)
    assert report.certificate is not None
    assert report.certificate.ok, report.certificate.problems
    assert report.certificate.new_tokens == 0
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["architectures"] == [ours]
    # Each Auto class of transformers finds ours by itself.
    auto = "AutoModel" + ours.removeprefix("LlmArch").removeprefix("Model")
    assert type(getattr(transformers, auto).from_pretrained(tmp_path / "ours")).__name__ == ours
    assert type(load(tmp_path / "theirs")).__name__ == ours
    export(tmp_path / "ours", tmp_path / "back", progress=False)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_difference_is_found(tmp_path: Path) -> None:
    native_model(foreign_config("bert", SEQUENCE)).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    tensors["score.bias"] += 0.1
    save_file(tensors, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    certificate = verify(tmp_path / "theirs", tmp_path / "ours", progress=False)
    assert certificate.tensors_different == ("classifier.bias",)
    assert certificate.first_divergent_layer is None
    assert certificate.relative_logit_difference > certificate.tolerance


@torch.no_grad()
def test_a_new_head_is_exported_with_its_class_and_labels(tmp_path: Path) -> None:
    """A masked language model, tuned as a classifier, goes back as their classifier."""
    config = foreign_config("bert", MASKED_LM)
    native_model(config).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    names = {0: "no", 1: "maybe", 2: "yes", 3: "never"}
    tuned = LlmArchForSequenceClassification.from_pretrained(
        tmp_path / "ours",
        id2label=names,
        label2id={name: i for i, name in names.items()},
        pooler=True,
        classifier_pooling="pooler",
    )
    redraw(tuned)
    tuned.eval().save_pretrained(tmp_path / "tuned")
    export(tmp_path / "tuned", tmp_path / "back", progress=False)
    native = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    assert type(native) is transformers.BertForSequenceClassification
    assert native.config.id2label == names
    batch = inputs(config)
    assert_close(tuned(**batch).logits, native(**batch).logits)


def test_what_sentence_transformers_runs_behind_the_model_comes_along(tmp_path: Path) -> None:
    native_model(foreign_config("bert", MODEL)).save_pretrained(tmp_path / "theirs")
    for folder in ("1_Pooling", "2_Dense", "other"):
        (tmp_path / "theirs" / folder).mkdir()
        (tmp_path / "theirs" / folder / "config.json").write_text("{}")
    (tmp_path / "theirs" / "2_Dense" / "model.safetensors").write_bytes(b"dense")
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "..")]
    (tmp_path / "theirs" / "modules.json").write_text(json.dumps(modules))
    report = convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    carried = {name for name in report.files if "/" in name}
    assert carried == {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    assert (tmp_path / "ours" / "2_Dense" / "model.safetensors").read_bytes() == b"dense"


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "ours", "changes", "error", "named"),
    [
        ("bert", MASKED_LM, {"position_embedding_type": "relative_key"}, UnsupportedField, "relative_key"),
        ("bert", MASKED_LM, {"is_decoder": True}, UnsupportedField, "is_decoder=True"),
        ("bert", "LlmArchForCausalLM", {}, UnsupportedField, "is_decoder=False"),
        (
            "bert",
            "LlmArchForCausalLM",
            {"is_decoder": True, "add_cross_attention": True},
            UnsupportedField,
            "add_cross",
        ),
        ("electra", MASKED_LM, {"is_decoder": True}, UnsupportedField, "is_decoder=True"),
        ("roberta", MASKED_LM, {"pad_token_id": None}, UnsupportedField, "pad_token_id"),
        ("roformer", MASKED_LM, {"rotary_value": True}, UnsupportedField, "rotary_value"),
        ("albert", MASKED_LM, {"inner_group_num": 2}, UnsupportedField, "inner_group_num"),
        ("albert", MASKED_LM, {"num_hidden_groups": 3}, UnsupportedField, "num_hidden_groups=3"),
        ("modernbert", MASKED_LM, {"mlp_dropout": 0.1}, UnsupportedField, "mlp_dropout"),
        ("bert", MASKED_LM, {"architectures": ["BertForMultipleChoice"]}, PlanError, "BertForMultipleChoice"),
    ],
)
def test_what_is_refused(case: str, ours: str, changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        plan(foreign_config(case, ours, **changes), [])


@pytest.mark.parametrize(
    ("family", "switches", "named"),
    [
        ("bert", {"norm_placement": "pre"}, "norm_placement is 'pre'"),
        ("bert", {"position_encoding": "rope"}, "position_encoding is 'rope'"),
        ("bert", {"embedding_size": 20}, "embedding_size is 20"),
        ("roberta", {}, "positions_skip_padding is False"),
        ("distilbert", {}, "type_vocab_size is 2"),
        ("llama", {}, "LlmArchForMaskedLM"),
    ],
)
def test_what_a_family_cannot_say_is_refused(family: str, switches: dict[str, Any], named: str) -> None:
    with pytest.raises(NotExpressible, match=named):
        export_plan(encoder_config(**switches), family=family)


# -- an encoder of ours ------------------------------------------------------------------------------------------------


def encoder_config(**switches: Any) -> LlmArchConfig:
    """What BERT is, with tiny sizes."""
    bert: dict[str, Any] = {
        **{"topology": "encoder", "vocab_size": VOCABULARY, "hidden_size": 36, "num_hidden_layers": 3},
        **{"num_attention_heads": 3, "intermediate_size": 34, "max_position_embeddings": 47, "type_vocab_size": 2},
        **{
            "norm_type": "layernorm",
            "norm_placement": "post",
            "norm_eps": 0.1,
            "embedding_norm": True,
            "final_norm": False,
        },
        **{"ffn_type": "mlp", "hidden_act": "gelu", "position_encoding": "learned", "pad_token_id": PAD},
        **dict.fromkeys(
            ("attention_bias", "attention_output_bias", "ffn_bias", "lm_head_bias", "lm_head_transform"), True
        ),
        **{"tie_word_embeddings": True, "architectures": [MASKED_LM]},
    }
    return LlmArchConfig(**{**bert, **switches})


@torch.no_grad()
def test_an_encoder_built_here_becomes_a_bert(tmp_path: Path) -> None:
    ours = LlmArchForMaskedLM(encoder_config())
    redraw(ours)
    ours.eval().save_pretrained(tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "bert", family="bert", progress=False)
    native = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "bert")
    assert type(native) is transformers.BertForMaskedLM
    batch = inputs({"type_vocab_size": 2})
    assert_close(ours(**batch).logits, native(**batch).logits)


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 4])
def test_a_window_of_either_side_ends_at_its_width(window: int) -> None:
    """One layer, one changed token: who is within the window sees it, at exactly that distance too, and no one else."""
    switches: dict[str, Any] = {"num_hidden_layers": 1, "sliding_window": window, "position_encoding": "rope"}
    model = LlmArchModel(encoder_config(**switches, norm_placement="pre", architectures=None))
    redraw(model)
    ids = inputs({})["input_ids"][:1]
    changed, at = ids.clone(), 9
    changed[0, at] = 5 + (changed[0, at] - 4) % (VOCABULARY - 5)
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        before, after = (model.eval()(text).last_hidden_state for text in (ids, changed))
        moved = (before != after).any(-1)[0].nonzero().flatten()
        assert moved.tolist() == list(range(at - window, at + window + 1))
    model.set_attn_implementation("eager")
    eager = model(ids).last_hidden_state
    model.set_attn_implementation("sdpa")
    assert_close(model(ids).last_hidden_state, eager)


@torch.no_grad()
@pytest.mark.parametrize("switches", [{}, {"position_encoding": "rope", "sliding_window": 3, "norm_placement": "pre"}])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_packed_documents_do_not_see_each_other(switches: dict[str, Any], backend: str) -> None:
    model = LlmArchForMaskedLM(encoder_config(**switches))
    redraw(model)
    model.eval().set_attn_implementation(backend)
    ids = inputs({})["input_ids"][:1]
    parts = ids.split([6, 8, 1, LENGTH - 15], dim=1)  # one of a single token
    position_ids = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    packed = model(ids, position_ids=position_ids).logits
    assert_close(packed, torch.cat([model(part).logits for part in parts], dim=1))


@torch.no_grad()
def test_a_decoder_becomes_an_encoder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    decoder = LlmArchForCausalLM(
        LlmArchConfig(vocab_size=VOCABULARY, hidden_size=36, num_hidden_layers=2, num_attention_heads=3)
    )
    redraw(decoder)
    decoder.save_pretrained(tmp_path)
    caplog.set_level("WARNING")
    transformers.utils.logging.enable_propagation()
    try:
        encoder = LlmArchModel.from_pretrained(tmp_path, topology="encoder").eval()
    finally:
        transformers.utils.logging.disable_propagation()
    assert "topology changed from 'decoder' to 'encoder'" in caplog.text
    assert "sees the whole text" in caplog.text
    own = decoder.model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in encoder.state_dict().items())
    ids = inputs({})["input_ids"][:1]
    changed = ids.clone()
    changed[0, -1] = 5 + (changed[0, -1] - 4) % (VOCABULARY - 5)
    causal, whole = (
        (model(ids).last_hidden_state != model(changed).last_hidden_state).any(-1)
        for model in (decoder.eval().model, encoder)
    )
    assert causal[0].tolist() == [False] * (LENGTH - 1) + [True]
    assert whole.all()


# -- pipelines ---------------------------------------------------------------------------------------------------------

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "home", "is", "this", "example", "about", "."],
]


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


TEXTS = ["the cat sat on the mat .", "a dog ran home"]
PIPELINES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "fill-mask": (MASKED_LM, ["the [MASK] sat on the mat .", "a dog [MASK] home"], {}),
    "text-classification": (SEQUENCE, TEXTS, {"top_k": None}),
    "zero-shot-classification": (SEQUENCE, TEXTS, {"candidate_labels": ["cat", "dog", "home"]}),
    "token-classification": (TOKEN, TEXTS, {"aggregation_strategy": "simple"}),
    "feature-extraction": (MODEL, TEXTS, {}),
}


@pytest.mark.parametrize("case", ["bert", "distilbert", "modernbert"])
@pytest.mark.parametrize("task", PIPELINES)
def test_pipelines_say_what_they_said_of_the_original(task: str, case: str, tmp_path: Path) -> None:
    ours, texts, options = PIPELINES[task]
    changes: dict[str, Any] = {"vocab_size": len(WORDS), "pad_token_id": 0}
    if task == "zero-shot-classification":
        changes |= {"id2label": {"0": "entailment", "1": "neutral", "2": "contradiction"}}
        changes |= {"label2id": {"entailment": 0, "neutral": 1, "contradiction": 2}}
    config = foreign_config(case, ours, **changes)
    native_model(config).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    pipeline: Any = transformers.pipeline
    expected, found = (
        pipeline(task, model=str(tmp_path / side), device="cpu")(texts, **options) for side in ("theirs", "ours")
    )
    assert_alike(found, expected)


def assert_alike(found: Any, expected: Any) -> None:
    """Equal words, and numbers within rounding."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_alike(mine, theirs)
    elif isinstance(expected, str):
        assert found == expected
    else:
        assert found == pytest.approx(expected, abs=1e-4)

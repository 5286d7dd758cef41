"""Every class of the encoder-decoder families beside the one over the vocabulary, and task heads of every topology."""

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, Trainer

import hf_llmarch
from hf_llmarch import (
    LlmArchConfig,
    LlmArchForMaskedLM,
    LlmArchForQuestionAnswering,
    LlmArchForSequenceClassification,
    LlmArchForTokenClassification,
    LlmArchModel,
)
from hf_llmarch.conversion.engine import convert, export
from hf_llmarch.conversion.families import families
from hf_llmarch.conversion.plans import Plan, export_plan, plan
from test_encoders import PIPELINES, WORDS, assert_alike, tiny_tokenizer
from test_seq2seq import AT_ODDS, CASES, T5, Config, Rows, model_type, native_shapes, random_ids, trainer_of
from test_seq2seq import redraw as redraw_native
from tiny import assert_close, differs, redraw, tiny_config

core = pytest.mark.core

LENGTH = 10
SEQ2SEQ = "LlmArchForConditionalGeneration"
LABELS: Config = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}


def classes_of(case: str) -> list[str]:
    family = families()[model_type(case)]
    encoder = [family.encoder] if family.encoder else []
    return [*(theirs for ours, theirs in family.architectures.items() if ours != SEQ2SEQ), *encoder]


def with_class(*rows: tuple[str, str]) -> Any:
    """Each for every release of transformers, but for those whose numbers are other ones in the oldest."""
    params = [pytest.param(*row, marks=[] if row[0] in AT_ODDS else [core]) for row in rows]
    return pytest.mark.parametrize(("case", "theirs"), params)


def class_config(case: str, theirs: str, **changes: Any) -> Config:
    """A config.json, as its authors wrote it and not as this version of transformers would."""
    config: Config = {"model_type": model_type(case), "architectures": [theirs], "torch_dtype": "float32"}
    labels = LABELS if theirs.endswith(("SequenceClassification", "TokenClassification")) else {}
    return {**config, **CASES[case], **labels, **changes}


def native_of(config: Config) -> Any:
    values = copy.deepcopy(config)
    native_config = AutoConfig.for_model(values.pop("model_type"), **values)
    native_config._attn_implementation = "eager"
    native: Any = getattr(transformers, config["architectures"][0])(native_config).eval()
    redraw_native(native)
    with torch.no_grad():
        for name, parameter in native.named_parameters():
            # Gains about 1: behind a last norm with small ones all texts look alike.
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    native.tie_weights()
    return native


def through_plan(native: Any, config: Config) -> tuple[Any, Plan, dict[str, torch.Tensor]]:
    tensors = {name: t for name, t in native.state_dict().items() if name not in native.all_tied_weights_keys}
    proven = plan(config, {name: tuple(t.shape) for name, t in tensors.items()})
    ours = getattr(hf_llmarch, proven.architecture)(proven.config).eval()
    missing, unexpected = ours.load_state_dict(dict(proven.stream(tensors.__getitem__)), strict=False)
    assert not unexpected
    assert set(missing) <= set(ours.all_tied_weights_keys)
    ours.tie_weights()
    return ours, proven, tensors


def texts(config: Config) -> dict[str, torch.Tensor]:
    """Three of different lengths, padded at the end; each has two end tokens, as a pair of texts has."""
    ids, mask = random_ids(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.long)
    for row, padding in enumerate((0, 3, 5)):
        mask[row, LENGTH - padding :] = 0
        ids[row, LENGTH - padding :] = config["pad_token_id"]
        ids[row, [1, LENGTH - padding - 1]] = config["eos_token_id"]
    return {"input_ids": ids, "attention_mask": mask}


def targets(theirs: str) -> dict[str, torch.Tensor]:
    if theirs.endswith("SequenceClassification"):
        return {"labels": torch.tensor([2, 0, 1])}
    if theirs.endswith("TokenClassification"):
        return {"labels": random_ids(3, LENGTH, seed=4) % 3}
    if theirs.endswith("QuestionAnswering"):
        return {"start_positions": torch.tensor([3, 0, 2]), "end_positions": torch.tensor([8, 4, 3])}
    return {}


def inputs_of(config: Config) -> dict[str, torch.Tensor]:
    given, theirs = texts(config), config["architectures"][0]
    if theirs.endswith("Model") and "Encoder" not in theirs and "Bart" not in theirs:
        # Of the base models only BART's make the decoder's tokens by themselves.
        given["decoder_input_ids"] = random_ids(3, LENGTH, seed=5)
    return given


# -- every class of a family -------------------------------------------------------------------------------------------


@torch.no_grad()
@with_class(*((case, theirs) for case in CASES for theirs in classes_of(case)))
def test_numbers_and_the_way_back(case: str, theirs: str) -> None:
    """All outputs that their class has, the loss, the bytes, and config.json, as it was and written afresh."""
    config = class_config(case, theirs)
    native = native_of(config)
    ours, proven, tensors = through_plan(native, config)
    back = export_plan(ours.config)
    written = dict(back.stream(ours.state_dict().__getitem__, to="theirs"))
    assert written.keys() == tensors.keys() - proven.dropped.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in written.items())
    assert back.foreign_config == config

    given = inputs_of(config)
    asked = {**targets(theirs), "output_hidden_states": True}
    expected = native(**given, **asked, use_cache=False)
    real = given["attention_mask"].bool()
    for backend in ("eager", "sdpa"):
        ours.set_attn_implementation(backend)
        found = ours(**given, **asked)
        assert expected.keys() <= found.keys()
        for name, value in expected.items():
            if name == "loss":
                assert found.loss.item() == pytest.approx(value.item(), rel=1e-5)
                continue
            pairs = zip(found[name], value, strict=True) if isinstance(value, tuple) else [(found[name], value)]
            for mine, other in pairs:
                assert_close(*((mine[real], other[real]) if other.shape[:2] == real.shape else (mine, other)), "native")

    alone = LlmArchConfig.from_dict({**ours.config.to_dict(), "converted_from": None})
    fresh = json.loads(json.dumps(export_plan(alone, family=proven.family).foreign_config))
    assert fresh["architectures"] == [theirs]
    again = native_of(fresh)
    again.load_state_dict(native.state_dict())
    found = again(**given, **asked, use_cache=False)
    for mine, other in zip(found.to_tuple()[:2], expected.to_tuple()[:2], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


@with_class(
    ("bart", "BartForSequenceClassification"),
    ("mbart", "MBartForQuestionAnswering"),
    ("bart-scaled", "BartForCausalLM"),  # theirs caches no more layers than the encoder has
    ("t5", "T5ForSequenceClassification"),
    ("t5-gated", "T5EncoderModel"),
    ("umt5", "UMT5ForTokenClassification"),
    ("pegasus", "PegasusModel"),
    ("switch_transformers", "SwitchTransformersEncoderModel"),
)
def test_folders_there_and_back(case: str, theirs: str, tmp_path: Path) -> None:
    config = class_config(case, theirs)
    native = native_of(config)
    native.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    report = convert(tmp_path / "theirs", tmp_path / "ours", verify=True, progress=False)
    assert report.certificate is not None
    assert report.certificate.ok, report.certificate.problems
    export(tmp_path / "ours", tmp_path / "back", progress=False)
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    # And without a word of where it came from: their class finds every tensor that it reads.
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps({**saved, "converted_from": None}))
    export(tmp_path / "ours", tmp_path / "fresh", family=model_type(case), progress=False)
    again, info = getattr(transformers, theirs).from_pretrained(
        tmp_path / "fresh", attn_implementation="eager", output_loading_info=True
    )
    assert not info["unexpected_keys"]
    mine, other = (model.eval()(**inputs_of(config)).to_tuple()[0] for model in (again, native))
    torch.testing.assert_close(mine, other, rtol=0, atol=0)


@core
def test_an_encoder_published_with_its_embedding_under_either_name() -> None:
    """Both names or one of them; and a file that holds both stacks is read whole, whatever class it names."""
    config = class_config("t5", "T5EncoderModel")
    shapes = {name: tuple(t.shape) for name, t in native_of(config).state_dict().items()}
    assert {"shared.weight", "encoder.embed_tokens.weight"} <= shapes.keys()
    for absent in ("", "shared.weight", "encoder.embed_tokens.weight"):
        given = {name: shape for name, shape in shapes.items() if name != absent}
        proven = plan(config, given)
        assert proven.config.topology == "encoder"
        assert proven.config.num_hidden_layers == T5["num_layers"]
        assert export_plan(proven.config).their_shapes == given
        assert export_plan(proven.config).foreign_config == config
    assert plan(config, native_shapes({"model_type": "t5", **T5})).config.topology == "encoder-decoder"


@core
@pytest.mark.parametrize(
    ("case", "theirs", "name"),
    [
        ("t5", "T5ForConditionalGeneration", "T5WithLMHeadModel"),
        ("mt5", "MT5ForConditionalGeneration", "T5ForConditionalGeneration"),
        ("umt5", "UMT5EncoderModel", "T5EncoderModel"),
        ("mbart", "MBartForConditionalGeneration", "BartForConditionalGeneration"),
    ],
)
def test_names_of_other_releases(case: str, theirs: str, name: str) -> None:
    config = class_config(case, theirs)
    shapes = {n: tuple(t.shape) for n, t in native_of(config).state_dict().items()}
    known, other = plan(config, shapes), plan({**config, "architectures": [name]}, shapes)
    assert (other.architecture, other.config.topology) == (known.architecture, known.config.topology)
    assert export_plan(other.config).foreign_config["architectures"] == [name]


@core
@torch.no_grad()
@pytest.mark.parametrize("case", ["bart", "t5"])
@pytest.mark.parametrize("kind", ["regression", "single_label_classification", "multi_label_classification"])
def test_problem_types(case: str, kind: str) -> None:
    theirs = families()[case].architectures["LlmArchForSequenceClassification"]
    config = class_config(case, theirs, problem_type=kind)
    native = native_of(config)
    ours, _, _ = through_plan(native, config)
    given = {**texts(config), "labels": torch.tensor([2, 0, 1]) if kind.startswith("single") else torch.rand(3, 3)}
    assert ours(**given).loss.item() == pytest.approx(native(**given).loss.item(), rel=1e-5)


@core
@torch.no_grad()
@pytest.mark.parametrize(("case", "dropout"), [("bart", "dropout"), ("t5", "dropout_rate")])
def test_a_classifier_drops_before_both_of_its_layers(case: str, dropout: str) -> None:
    """At a probability of 1 dropout is no longer random: what the layers are given is gone, in both models."""
    theirs = families()[case].architectures["LlmArchForSequenceClassification"]
    config = class_config(case, theirs, classifier_dropout=1.0, **{dropout: 0.0})
    native = native_of(config)
    ours, _, _ = through_plan(native, config)
    given: list[torch.Tensor] = []
    theirs_layers = (native.classification_head.dense, native.classification_head.out_proj)
    for layer in (*theirs_layers, ours.head.dense, ours.score):
        layer.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    for training in (True, False):
        for model in (native, ours):
            model.train(training)(**texts(config))
    assert [bool(x.abs().max() > 0) for x in given] == [False] * 4 + [True] * 4


# -- heads of ours -----------------------------------------------------------------------------------------------------

ENCODER: Config = {"topology": "encoder"}
BOTH: Config = {"topology": "encoder-decoder", "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
SPARSE: Config = {
    **BOTH,
    **{"num_experts": 4, "router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1, "classifier_pooling": "eos"},
}
HEADS = (LlmArchForSequenceClassification, LlmArchForTokenClassification, LlmArchForQuestionAnswering)


def head(kind: Any, **switches: Any) -> Any:
    return redraw(kind(tiny_config(**switches, num_labels=3))).eval()


def ended(batch: int, length: int = LENGTH) -> torch.Tensor:
    ids = random_ids(batch, length)
    ids[:, -1] = 2
    return ids


@core
@pytest.mark.parametrize("kind", [LlmArchModel, LlmArchForMaskedLM, *HEADS])
def test_signatures_name_what_tools_look_for(kind: Any) -> None:
    names = set(inspect.signature(kind.forward).parameters)
    assert names >= {"input_ids", "attention_mask", "inputs_embeds", "past_key_values", "cache", "use_cache"}
    labels = {LlmArchModel: [], LlmArchForQuestionAnswering: ["start_positions", "end_positions"]}
    assert transformers.utils.generic.find_labels(kind) == labels.get(kind, ["labels"])


@core
@torch.no_grad()
def test_the_decoder_is_given_the_text_moved_to_the_right() -> None:
    model, ids = head(LlmArchForSequenceClassification, **BOTH, classifier_pooling="eos"), ended(2)
    shifted = torch.cat((torch.ones(2, 1, dtype=torch.long), ids[:, :-1]), dim=1)
    expected = model.model(ids, decoder_input_ids=shifted)
    assert torch.equal(model.model(ids).last_hidden_state, expected.last_hidden_state)
    assert torch.equal(model(ids).logits, model.score(expected.last_hidden_state[:, -1]))
    assert torch.equal(model(ids, decoder_input_ids=shifted).logits, model(ids).logits)
    assert differs(model(ids, decoder_input_ids=shifted.flip(-1)).logits, model(ids).logits)


@core
@torch.no_grad()
@pytest.mark.parametrize("topology", [{}, ENCODER, BOTH], ids=["decoder", "encoder", "both"])
def test_the_state_of_the_last_end_is_read(topology: Config) -> None:
    """Not that of an earlier one, nor one in the padding, where padding is an end token."""
    switches = {**topology, "classifier_pooling": "eos", "eos_token_id": [2, 5]}
    model, ids = head(LlmArchForSequenceClassification, **switches), random_ids(2, LENGTH).clamp(min=6)
    ids[0, [2, 7]], ids[1, [4, 8, 9]] = torch.tensor([2, 5]), torch.tensor([5, 2, 2])
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    states = model.model(ids, mask).last_hidden_state
    expected = model.score(torch.stack((states[0, 7], states[1, 4])))
    assert_close(model(ids, attention_mask=mask).logits, expected, "native")


@core
def test_what_a_classifier_of_ends_refuses() -> None:
    nameless = {**BOTH, "eos_token_id": None, "classifier_pooling": "eos"}
    with pytest.raises(ValueError, match="set eos_token_id"):
        head(LlmArchForSequenceClassification, **nameless)
    head(LlmArchForQuestionAnswering, **nameless)  # does not read it
    model, ids = head(LlmArchForSequenceClassification, **BOTH, classifier_pooling="eos"), ended(2)
    with pytest.raises(ValueError, match="no eos_token_id"):
        model(ids[:, :-1].clamp(min=3))
    with pytest.raises(ValueError, match="give input_ids"):
        model(inputs_embeds=torch.randn(2, 5, 48), decoder_input_ids=ids)
    with pytest.raises(ValueError, match="as many decoder_input_ids"):
        model(ids, decoder_input_ids=ids[:, :4])
    with pytest.raises(ValueError, match="needs decoder_input_ids as well"):
        model(inputs_embeds=torch.randn(2, 5, 48))
    with pytest.raises(ValueError, match="LlmArchForTokenClassification is for topology decoder or encoder"):
        head(LlmArchForTokenClassification, **BOTH)


@core
@pytest.mark.parametrize("kind", [LlmArchForSequenceClassification, LlmArchForTokenClassification])
@pytest.mark.parametrize("topology", [{}, ENCODER], ids=["decoder", "encoder"])
@torch.no_grad()
def test_heads_read_a_cache(topology: Config, kind: Any) -> None:
    """A prefix of keys and values, as PEFT's prefix tuning gives it, moves the logits."""
    switches = {**topology, "classifier_pooling": "mean"} if kind is HEADS[0] else topology
    model, ids = head(kind, **switches), random_ids(2, LENGTH)
    task = "SEQ_CLS" if kind is HEADS[0] else "TOKEN_CLS"
    plain = model(ids, attention_mask=torch.ones_like(ids)).logits
    tuned: Any = get_peft_model(model, PrefixTuningConfig(task_type=task, num_virtual_tokens=4)).eval()
    tuned.prompt_encoder["default"].embedding.weight.normal_(std=2.0)
    found = tuned(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert found.shape == plain.shape
    assert differs(found, plain)
    # Rows of another length beside it, padded, see the same prefix.
    longer, mask = torch.cat((ids, torch.zeros_like(ids[:, :3])), 1), torch.ones(2, LENGTH + 3, dtype=torch.long)
    mask[:, LENGTH:] = 0
    padded = tuned(input_ids=longer, attention_mask=mask).logits
    assert_close(padded[:, :LENGTH] if kind is HEADS[1] else padded, found, "padding")


# -- training ----------------------------------------------------------------------------------------------------------

TASKS: dict[str, tuple[Any, Config, Any]] = {
    "classes": (HEADS[0], {**BOTH, "classifier_pooling": "eos"}, lambda ids: ids[:, 0] % 3),
    "several": (
        HEADS[0],
        {**ENCODER, "problem_type": "multi_label_classification"},
        lambda ids: (ids[:, :3] % 2).float(),
    ),
    "regression": (HEADS[0], {"problem_type": "regression"}, lambda ids: ids[:, :3] / 50),
    "experts": (HEADS[0], SPARSE, lambda ids: ids[:, 0] % 3),
    "tokens": (HEADS[1], ENCODER, lambda ids: torch.where(torch.arange(LENGTH) > ids[:, :1] % LENGTH, -100, ids % 3)),
}


@pytest.mark.parametrize("name", [*TASKS, "answers"])
def test_trainer_accumulates_as_one_batch(name: str, tmp_path: Path) -> None:
    """8 x 1 == 2 x 4, in the losses that are logged and in the parameters that come out."""
    ids = ended(16)
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "answers":
        kind, switches = HEADS[2], {**BOTH}
        columns |= {"start_positions": ids[:, 0] % LENGTH, "end_positions": ids[:, 1] % LENGTH}
    else:
        kind, switches, labels = TASKS[name]
        columns["labels"] = labels(ids)
    models, losses = [], []
    for size, steps in ((8, 1), (2, 4)):
        model = head(kind, **switches)
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        if name == "answers":
            options["label_names"] = ["start_positions", "end_positions"]
        trainer = trainer_of(Trainer, model, Rows(columns), tmp_path, **options)
        trainer.train()
        models.append(model)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # logged with four decimals
    start = dict(head(kind, **switches).named_parameters())
    for (parameter, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert not torch.equal(one, start[parameter]), parameter
        assert_close(other, one, "accumulation")


@core
def test_experts_of_both_stacks_are_balanced() -> None:
    """The loss in training is that of the labels and, over both stacks, the auxiliary ones."""
    ids, labels = ended(4), torch.tensor([0, 1, 2, 1])
    model = head(LlmArchForSequenceClassification, **SPARSE)
    plain = model(ids, labels=labels).loss
    outputs = model.train().model(ids, output_router_logits=True)
    assert len(outputs.encoder_router_logits) == len(outputs.decoder_router_logits) == 3
    parts = [stack.balance(states, None)[1].mean() for stack, states, _ in model.stacks(outputs, None, None)]
    assert all(part > 0 for part in parts)
    assert model(ids, labels=labels).loss.item() == pytest.approx((plain + sum(parts)).item(), rel=1e-5)


# -- pipelines ---------------------------------------------------------------------------------------------------------


@core
@pytest.mark.parametrize("task", ["zero-shot-classification", "text-classification", "feature-extraction"])
@pytest.mark.parametrize("case", ["bart", "t5"])
def test_pipelines_say_what_they_said_of_the_original(task: str, case: str, tmp_path: Path) -> None:
    """As with facebook/bart-large-mnli: classes named, the last end token read."""
    _, sentences, options = PIPELINES[task]
    theirs = families()[case].architectures["LlmArchForSequenceClassification"]
    if task == "feature-extraction":
        # T5's base model asks for the decoder's tokens, its encoder does not.
        theirs = "BartModel" if case == "bart" else "T5EncoderModel"
    names = {"0": "contradiction", "1": "neutral", "2": "entailment"}
    changes: Config = {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
    changes |= {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = class_config(case, theirs, **changes, decoder_start_token_id=3)
    native_of(config).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    tokenizer = tiny_tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", progress=False)
    pipeline: Any = transformers.pipeline
    models = [str(tmp_path / side) for side in ("theirs", "ours")]
    if task == "feature-extraction" and case == "t5":
        models = [transformers.T5EncoderModel.from_pretrained(models[0]), models[1]]
    expected, found = (
        pipeline(task, model=model, tokenizer=models[1], device="cpu")(sentences, **options) for model in models
    )
    assert_alike(found, expected)

"""Adapters that were trained on an original convert along with it, and go back: the same logits, the same bytes."""

import json
import shutil
from pathlib import Path
from runpy import run_path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, TaskType, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from typer.testing import CliRunner

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.cli.app import Exit, app
from hf_llmarch.conversion import convert, export, families, load
from hf_llmarch.conversion.adapter import BASE_PARTS, UNSAID, initialisation
from hf_llmarch.conversion.certificate import AUTO_CLASSES
from hf_llmarch.conversion.errors import ConversionError
from tests import family_configs, test_encoders, test_seq2seq
from tests.tiny import assert_close, differs, redraw, text

CASES = {**family_configs.CASES, **test_encoders.CASES, **test_seq2seq.CASES}
VOCABULARY = 40  # the smallest of all cases is larger

# Every linear layer of a block, as the native class names them.
ATTENTION_AND_FFN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTED: dict[str, list[str]] = {
    "llama": ATTENTION_AND_FFN,
    "gpt2": ["c_attn", "c_proj", "c_fc", "wte"],  # stored as (in, out), q|k|v fused
    "phi3": ["qkv_proj", "gate_up_proj"],  # fused row by row
    "falcon": ["query_key_value", "dense"],  # fused head by head
    "falcon-new": ["query_key_value"],  # the same by groups of heads
    "gpt_neox": ["query_key_value", "dense_h_to_4h"],
    "gptj": ["q_proj", "v_proj", "fc_in"],  # interleaved rotation
    "cohere": ["q_proj", "k_proj"],
    "mixtral": ["q_proj", "v_proj"],
    "deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj"],
    "bert": ["query", "value", "intermediate.dense"],
    "t5": ["q", "v", "wo"],
    "bart": ["q_proj", "v_proj", "fc1"],
}


def original(case: str, *, ours: str | None = None) -> PreTrainedModel:
    """A redrawn model of transformers' own class."""
    name = next(n for n in sorted(families(), key=len, reverse=True) if case == n or case.startswith(f"{n}-"))
    architectures = families()[name].architectures
    architecture = architectures[ours] if ours else next(iter(architectures.values()))
    config = AutoConfig.for_model(name, **json.loads(json.dumps(CASES[case])))
    model = getattr(transformers, architecture)(config)
    redraw(nn.ParameterList(tensor for tensor in model.parameters() if tensor.requires_grad))  # tables stay
    return model.eval()


def adapt(model: PreTrainedModel, folder: Path, config: Any) -> Any:
    """Under an adapter away from its neutral beginning, saved in `folder`."""
    torch.manual_seed(3)
    adapted = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (0.01 if "magnitude" in name else 0.2))
    adapted.save_pretrained(folder)
    return adapted


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = text(2, 11) % VOCABULARY
    two = {"decoder_input_ids": (text(2, 7, seed=3) % VOCABULARY)} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **two).logits


def reopened(folder: Path, adapter: Path | None = None) -> Any:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, AUTO_CLASSES[architecture]).from_pretrained(folder)
    return PeftModel.from_pretrained(model, adapter or folder / "adapter").eval()


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def assert_same_bytes(actual: Path, expected: Path) -> None:
    a, b = tensors(actual), tensors(expected)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def there_and_back(native: PreTrainedModel, tmp_path: Path, config: Any) -> dict[str, Any]:
    """Our adapter's config, after the logits here, and the bytes and the logits back there, were found equal."""
    native.save_pretrained(tmp_path / "native")
    without = logits(native)
    expected = logits(adapt(native, tmp_path / "adapter", config))
    assert differs(expected, without)
    convert(tmp_path / "native", tmp_path / "ours", adapter=tmp_path / "adapter", progress=False)
    ours = reopened(tmp_path / "ours")
    assert ours.get_base_model().config.model_type == "llmarch"
    assert_close(logits(ours), expected, "native")
    export(tmp_path / "ours", tmp_path / "back", adapter=tmp_path / "ours/adapter", progress=False)
    assert_same_bytes(tmp_path / "back/adapter", tmp_path / "adapter")
    back = PeftModel.from_pretrained(type(native).from_pretrained(tmp_path / "back"), tmp_path / "back/adapter")
    again = PeftModel.from_pretrained(type(native).from_pretrained(tmp_path / "native"), tmp_path / "adapter")
    weights, known = back.state_dict(), again.state_dict()
    assert weights.keys() == known.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in known.items())
    # Not bit for bit: where weights begin in their files decides in which order some kernels add.
    assert_close(logits(back.eval()), expected, "reload")
    written = json.loads((tmp_path / "ours/adapter/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "ours")
    return written


@pytest.mark.shows("PEFT", "LoRA of an original, converted with it (`--adapter`) and back, byte for byte", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ADAPTED)
def test_lora(case: str, tmp_path: Path) -> None:
    config = there_and_back(original(case), tmp_path, LoraConfig(r=3, lora_alpha=7, target_modules=ADAPTED[case]))
    # By their last names, wherever these tell them apart.
    assert all("layers" not in name for name in config["target_modules"])


# Experts are packed on one side or both. transformers' MPT class forgets alibi_bias_max.
SPARSE = {*family_configs.EXPERTS, *(case for case in CASES if case.startswith("switch"))}
DENSE = sorted(set(CASES) - SPARSE - {"mpt-options"})


@pytest.mark.slow
@pytest.mark.shows("PEFT", "LoRA of an original, converted with it (`--adapter`) and back, byte for byte", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", DENSE)
def test_lora_of_every_family(case: str, tmp_path: Path) -> None:
    there_and_back(original(case), tmp_path, LoraConfig(r=3, target_modules="all-linear"))


OPTIONS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "biases": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
    "bias of the update": {"lora_bias": True},
    "some layers": {"layers_to_transform": [1]},
    "ranks": {"rank_pattern": {"c_attn": 5, r"h\.1\.mlp\.c_fc": 2}, "alpha_pattern": {"h.0.attn.c_attn": 9}},
    "modules in full": {"modules_to_save": ["ln_f", "wpe"]},
}


@pytest.mark.shows("PEFT", "DoRA, rsLoRA, biases, patterns and modules trained in full, converted and back", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, tmp_path: Path) -> None:
    there_and_back(original("gpt2"), tmp_path, LoraConfig(r=3, target_modules=["c_attn", "c_fc"], **OPTIONS[option]))


@pytest.mark.shows("PEFT", "A classifier's head beside LoRA, converted and back", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["bert", "roberta"])
def test_classifiers(case: str, tmp_path: Path) -> None:
    native = original(case, ours="LlmArchForSequenceClassification")
    config = there_and_back(native, tmp_path, LoraConfig(r=3, task_type=TaskType.SEQ_CLS))
    assert set(config["target_modules"]) == {"q_proj", "v_proj"}
    assert "score" in config["modules_to_save"]


@pytest.mark.shows("PEFT", "A prompt of an original, converted with it and back", "peft")
@pytest.mark.filterwarnings("ignore")
def test_prompts(tmp_path: Path) -> None:
    there_and_back(original("gpt2"), tmp_path, PromptTuningConfig(num_virtual_tokens=4, task_type=TaskType.CAUSAL_LM))


@pytest.mark.shows("PEFT", "LoRA trained here, exported to families with fused projections", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("case", ["gpt2", "phi3", "falcon-new", "gpt_neox"])
def test_trained_here(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Queries and values, which do not share what they read: the fused projection gets both, side by side."""
    original(case).save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "ours", progress=False)
    ours = LlmArchForCausalLM.from_pretrained(tmp_path / "ours").eval()
    expected = logits(adapt(ours, tmp_path / "adapter", LoraConfig(r=3, lora_alpha=5, **options)))
    export(tmp_path / "ours", tmp_path / "back", adapter=tmp_path / "adapter", progress=False)
    native = getattr(transformers, json.loads((tmp_path / "back/config.json").read_text())["architectures"][0])
    back = PeftModel.from_pretrained(native.from_pretrained(tmp_path / "back"), tmp_path / "back/adapter").eval()
    assert {name.rpartition(".lora")[0].rpartition(".")[2] for name in tensors(tmp_path / "back/adapter")} == {
        {"gpt2": "c_attn", "phi3": "qkv_proj"}.get(case, "query_key_value")
    }
    assert_close(logits(back), expected, "native")


def opened(native: PreTrainedModel, folder: Path, adapter: Path) -> Any:
    """What a user of the original gets: transformers' own class from disk, under the adapter as PEFT opens it."""
    return PeftModel.from_pretrained(type(native).from_pretrained(folder), adapter).eval()


def through_our_format(case: str, tmp_path: Path, config: LoraConfig) -> dict[str, Any]:
    """Our adapter's config, after the logits of the opened adapter were found equal here and back there."""
    native = original(case)
    native.save_pretrained(tmp_path / "native")
    before = logits(native)
    adapt(native, tmp_path / "adapter", config)
    expected = logits(opened(native, tmp_path / "native", tmp_path / "adapter"))
    assert differs(expected, before)
    convert(tmp_path / "native", tmp_path / "ours", adapter=tmp_path / "adapter", progress=False)
    assert_close(logits(reopened(tmp_path / "ours")), expected, "decomposed")
    export(tmp_path / "ours", tmp_path / "back", adapter=tmp_path / "ours/adapter", progress=False)
    assert_close(logits(opened(native, tmp_path / "back", tmp_path / "back/adapter")), expected, "decomposed")
    return json.loads((tmp_path / "ours/adapter/adapter_config.json").read_text())


TAKEN_OUT = ("pissa", "olora")
# PEFT's OLoRA does not turn the weight of GPT-2's Conv1D, so that it opens square ones alone.
CANNOT = {("gpt2", "olora"), ("openai-gpt", "olora")}
FUSED = ("phi3", "gpt_neox", "falcon", "falcon-new", "bloom", "gpt2", "mpt", "gptj", "llama")


@pytest.mark.shows("PEFT", "PiSSA and OLoRA, which take a part out of the weights, converted and back", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TAKEN_OUT)
@pytest.mark.parametrize("case", FUSED)
def test_a_part_taken_out_of_the_weights(case: str, kind: str, tmp_path: Path) -> None:
    square = {"target_modules": r".*attn\.c_proj"} if (case, kind) in CANNOT else {"target_modules": "all-linear"}
    config = through_our_format(case, tmp_path, LoraConfig(r=3, lora_alpha=7, init_lora_weights=kind, **square))
    # As it was where every weight is whole on both sides, a plain LoRA of twice the rank elsewhere.
    moved = case not in ("gptj", "llama")
    assert (config["init_lora_weights"], config["r"]) == ((True, 6) if moved else (kind, 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TAKEN_OUT)
@pytest.mark.parametrize("case", DENSE)
def test_a_part_taken_out_in_every_family(case: str, kind: str, tmp_path: Path) -> None:
    if not any(case == name or case.startswith(f"{name}-") for name, unsaid in CANNOT if unsaid == kind):
        through_our_format(case, tmp_path, LoraConfig(r=3, init_lora_weights=kind, target_modules="all-linear"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"qkv_proj": 5}}], ids=str
)
def test_a_part_taken_out_with(options: dict[str, Any], tmp_path: Path) -> None:
    modules = ["qkv_proj", "gate_up_proj", "down_proj", "embed_tokens"]
    options |= {"target_modules": modules[:3] if "use_dora" in options else modules}
    through_our_format("phi3", tmp_path, LoraConfig(r=3, lora_alpha=7, init_lora_weights="pissa", **options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TAKEN_OUT)
@pytest.mark.parametrize("case", ["gpt2", "phi3", "falcon-new"])
def test_a_part_taken_out_here(case: str, kind: str, tmp_path: Path) -> None:
    native = original(case)
    native.save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "ours", progress=False)
    config = LoraConfig(r=3, lora_alpha=5, init_lora_weights=kind, target_modules=["q_proj", "v_proj", "o_proj"])
    adapt(LlmArchForCausalLM.from_pretrained(tmp_path / "ours"), tmp_path / "adapter", config)
    expected = logits(reopened(tmp_path / "ours", tmp_path / "adapter"))
    export(tmp_path / "ours", tmp_path / "back", adapter=tmp_path / "adapter", progress=False)
    assert_close(logits(opened(native, tmp_path / "back", tmp_path / "back/adapter")), expected, "decomposed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["pissa_niter_4", "corda", "loftq"])
def test_a_change_of_the_weights_that_no_adapter_can_say_is_refused(kind: str, tmp_path: Path) -> None:
    for case, modules in (("phi3", ["qkv_proj"]), ("llama", ["q_proj"])):
        folder = tmp_path / case
        native = original(case)
        native.save_pretrained(folder / "native")
        adapt(native, folder / "adapter", LoraConfig(r=3, target_modules=modules))
        path = folder / "adapter/adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "init_lora_weights": kind}))
    with pytest.raises(ConversionError, match=rf"init_lora_weights='{kind}'.*merge_and_unload"):
        convert(tmp_path / "phi3/native", tmp_path / "ours", adapter=tmp_path / "phi3/adapter", progress=False)
    # The same weights on both sides: PEFT does here what it does there.
    convert(tmp_path / "llama/native", tmp_path / "ours", adapter=tmp_path / "llama/adapter", progress=False)
    assert_same_bytes(tmp_path / "ours/adapter", tmp_path / "llama/adapter")


@pytest.mark.filterwarnings("ignore")
def test_the_kinds_that_change_the_weights_are_those_that_the_installed_peft_changes() -> None:
    hints = get_args(get_type_hints(LoraConfig)["init_lora_weights"])
    kinds = [kind for hint in hints for kind in get_args(hint) if isinstance(kind, str)]
    assert len(kinds) >= 8
    for kind in [True, "lora_ga", *(kind.replace("[number of iters]", "4") for kind in kinds)]:
        layer = nn.Linear(12, 10, bias=False)
        weight = layer.weight.detach().clone()
        try:
            options = LoraConfig(r=4, target_modules=["0"], init_lora_weights=kind)
            model: Any = get_peft_model(nn.Sequential(layer), options)
            changes = not torch.equal(model.base_model.model[0].base_layer.weight, weight)
        except (ValueError, ImportError):  # wants data, or another package
            changes = True
        assert changes == (initialisation({"init_lora_weights": kind}) in {*BASE_PARTS, *UNSAID}), kind


@pytest.mark.shows("PEFT", "LoRA with new tokens (embedding and head trained in full), converted and back", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["llama", "llama-biases-tied", "phi3", "gpt2", "falcon-new", "cohere"])
def test_new_tokens(case: str, tmp_path: Path) -> None:
    native = original(case)
    native.save_pretrained(tmp_path / "native")
    native.resize_token_embeddings(103, mean_resizing=False)
    embedding = next(name for name, module in native.named_modules() if isinstance(module, nn.Embedding))
    modules = [embedding.rpartition(".")[2], "lm_head"]
    config = LoraConfig(r=3, target_modules="all-linear", exclude_modules=["lm_head"], modules_to_save=modules)
    # As PEFT does by itself where it sees that the vocabulary has grown.
    adapt(native, tmp_path / "adapter", config).save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert any(".original_module." in name for name in tensors(tmp_path / "adapter"))

    def resized(model: Any, adapter: Path) -> Any:
        model.resize_token_embeddings(103, mean_resizing=False)
        return PeftModel.from_pretrained(model, adapter).eval()

    expected = logits(resized(type(native).from_pretrained(tmp_path / "native"), tmp_path / "adapter"))
    convert(tmp_path / "native", tmp_path / "ours", adapter=tmp_path / "adapter", progress=False)
    ours = LlmArchForCausalLM.from_pretrained(tmp_path / "ours")
    assert_close(logits(resized(ours, tmp_path / "ours/adapter")), expected, "native")
    export(tmp_path / "ours", tmp_path / "back", adapter=tmp_path / "ours/adapter", progress=False)
    back = resized(type(native).from_pretrained(tmp_path / "back"), tmp_path / "back/adapter")
    assert_close(logits(back), expected, "native")


@pytest.mark.shows("PEFT", "An adapter beside a model's weights, which transformers opens unasked", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [True, "pissa"])
@pytest.mark.parametrize("case", ["llama", "phi3", "gpt2", "bert"])
def test_beside_the_weights(case: str, kind: Any, tmp_path: Path) -> None:
    native = original(case)
    native.save_pretrained(tmp_path / "native")
    plain = logits(native)
    config = LoraConfig(r=3, target_modules="all-linear", exclude_modules=["lm_head"], init_lora_weights=kind)
    adapt(native, tmp_path / "adapter", config)
    for file in (tmp_path / "adapter").glob("adapter_*"):
        shutil.copy(file, tmp_path / "native")
    expected = logits(type(native).from_pretrained(tmp_path / "native").eval())
    assert differs(expected, plain)
    assert_close(logits(load(tmp_path / "native")), expected, "decomposed")
    report = convert(tmp_path / "native", tmp_path / "ours", verify=kind is True, progress=False)
    assert "adapter/adapter_model.safetensors" in report.files
    assert report.certificate is None or report.certificate.ok
    assert_close(logits(reopened(tmp_path / "ours")), expected, "decomposed")
    with pytest.raises(ConversionError, match="one model takes one"):
        convert(tmp_path / "native", tmp_path / "other", adapter=tmp_path / "adapter", progress=False)


def test_an_adapter_alone_says_what_to_convert(tmp_path: Path) -> None:
    adapt(original("llama"), tmp_path / "adapter", LoraConfig(r=3))
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "owner/base"}))
    with pytest.raises(ConversionError, match=r"adapter alone: convert owner/base.*--adapter"):
        convert(tmp_path / "adapter", tmp_path / "ours", progress=False)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "another kind": ("gpt2", IA3Config(target_modules=["c_attn"], feedforward_modules=[]), "IA3"),
    "packed experts": ("mixtral", LoraConfig(target_parameters=["mlp.experts.gate_up_proj"]), "mlp.experts.lora_A"),
    "tokens": ("gpt2", LoraConfig(target_modules=["c_attn"], trainable_token_indices=[1, 2]), "trainable_tokens"),
}


@pytest.mark.shows("PEFT", "Adapters that cannot be said on the other side, refused by name", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    name, config, named = REFUSED[case]
    native = original(name)
    native.save_pretrained(tmp_path / "native")
    adapt(native, tmp_path / "adapter", config)
    with pytest.raises(ConversionError, match=named):
        convert(tmp_path / "native", tmp_path / "ours", adapter=tmp_path / "adapter", progress=False)
    assert not (tmp_path / "ours").exists()


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    original("llama").save_pretrained(tmp_path / "native")
    adapt(original("mistral"), tmp_path / "named alike", LoraConfig(target_modules=["down_proj"]))
    adapt(original("gpt2"), tmp_path / "named otherwise", LoraConfig(target_modules=["c_attn"]))
    other = original("llama")
    other.resize_token_embeddings(101)
    adapt(other, tmp_path / "shaped otherwise", LoraConfig(target_modules=["lm_head"]))
    for folder, named in (("named otherwise", "c_attn"), ("shaped otherwise", "lm_head"), ("", "adapter_config.json")):
        with pytest.raises(ConversionError, match=named):
            convert(tmp_path / "native", tmp_path / "ours", adapter=tmp_path / folder, progress=False)
    # Nothing tells apart two models of one shape.
    convert(tmp_path / "native", tmp_path / "ours", adapter=tmp_path / "named alike", progress=False)


@pytest.mark.filterwarnings("ignore")
def test_different_ranks_do_not_fuse(tmp_path: Path) -> None:
    original("gpt2").save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "ours", progress=False)
    ours = LlmArchForCausalLM.from_pretrained(tmp_path / "ours")
    adapt(ours, tmp_path / "adapter", LoraConfig(r=3, rank_pattern={"q_proj": 5}))
    with pytest.raises(ConversionError, match=r"q_proj.*one module on the other side"):
        export(tmp_path / "ours", tmp_path / "back", adapter=tmp_path / "adapter", progress=False)


@pytest.mark.filterwarnings("ignore")
def test_on_the_command_line(tmp_path: Path) -> None:
    native = original("llama")
    native.save_pretrained(tmp_path / "native")
    adapt(native, tmp_path / "adapter", LoraConfig(r=2))
    for command in (("convert", "native", "ours", "adapter"), ("export", "ours", "back", "ours/adapter")):
        name, source, destination, adapter = command
        arguments = [name, tmp_path / source, tmp_path / destination, "--adapter", tmp_path / adapter, "--quiet"]
        result = CliRunner().invoke(app, [str(argument) for argument in [*arguments, "--json"]])
        assert result.exit_code == Exit.OK, result.output
        assert "adapter/adapter_model.safetensors" in json.loads(result.stdout)["files"]
    assert_same_bytes(tmp_path / "back/adapter", tmp_path / "adapter")


@pytest.mark.shows("PEFT", "Convert, LoRA by Trainer, merge and save: `examples/lora.py`", "peft", "accelerate")
@pytest.mark.filterwarnings("ignore")
def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original("llama").save_pretrained(tmp_path / "native")
    test_encoders.tiny_tokenizer().save_pretrained(tmp_path / "native")
    (tmp_path / "texts").write_text("\n".join(test_encoders.TEXTS))
    output = tmp_path / "output"
    script = run_path(str(Path(__file__).parents[2] / "examples/lora.py"))
    options = {"--texts": tmp_path / "texts", "--output": output, "--steps": 3, "--prompt": "the cat"}
    script["main"]([str(tmp_path / "native"), *(str(part) for option in options.items() for part in option)])
    assert str(output / "merged") in capsys.readouterr().out
    merged = transformers.AutoModelForCausalLM.from_pretrained(output / "merged").eval()
    base = transformers.AutoModelForCausalLM.from_pretrained(output / "converted").eval()
    before = logits(base)
    assert differs(logits(merged), before)
    assert_close(logits(PeftModel.from_pretrained(base, output / "adapter").eval()), logits(merged), "merged")

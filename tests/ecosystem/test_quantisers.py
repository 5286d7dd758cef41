"""Quantisers on models of ours: what they quantise, what they leave, how near the result is, and what it takes."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    HqqConfig,
    LlamaConfig,
    LlamaForCausalLM,
    QuantoConfig,
    TorchAoConfig,
)
from typer.testing import CliRunner

from hf_llmarch import LlmArchForCausalLM, LlmArchForSequenceClassification
from hf_llmarch.cli.app import app
from hf_llmarch.conversion import convert
from hf_llmarch.integrations.quantisation import introduce_to_hqq, plain_tensors, quantised_share
from hf_llmarch.model.modeling_llmarch import UNQUANTISED
from hf_llmarch.surgery import convert_experts_layout
from tests.tiny import MLA, assert_close, redraw, text, tiny_stack

# Every width that a projection reads is 64, the block of bitsandbytes' 4-bit codes, and every one that it gives a
# multiple of 16, the block of torchao's. (When bitsandbytes 0.50 leaves the layout in which it evaluates on a CPU, as
# training makes it, it spoils 4-bit weights that are wider, those of a native Llama as well.)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
}
LATENT: dict[str, Any] = {
    **MLA,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 64, "num_shared_experts": 1}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
FFN = {"gate_proj", "up_proj", "down_proj"}
# Switches, and the last names of the modules to be quantised.
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "gqa": ({}, ATTENTION | FFN),
    "mla": (LATENT, {"q_b_proj", "o_proj"} | FFN),
    "packed experts": ({**EXPERTS, "shared_expert_gate": True}, ATTENTION | FFN),
    "linear experts": ({**EXPERTS, "experts_layout": "linear", "shared_expert_gate": True}, ATTENTION | FFN),
    "encoder-decoder": ({"topology": "encoder-decoder", "decoder_start_token_id": 0}, ATTENTION | FFN),
}
each_case = pytest.mark.parametrize("case", CASES)


@dataclass(frozen=True)
class Quantiser:
    """A setting of transformers, and what to expect of it.

    Attributes:
        error: largest |quantised - whole| / |whole| of all logits.
        refusal: why it cannot be saved; None: it can.
    """

    config: Callable[[], Any]
    error: float
    refusal: str | None = None


QUANTISERS = {
    "torchao int8": Quantiser(lambda: TorchAoConfig(Int8WeightOnlyConfig(version=2)), 0.004),
    "torchao int4": Quantiser(
        lambda: TorchAoConfig(PrototypeInt4WeightOnlyConfig(group_size=32)), 0.06, "Unsupported tensor type"
    ),
    "bitsandbytes int8": Quantiser(lambda: BitsAndBytesConfig(load_in_8bit=True), 0.008),
    "bitsandbytes nf4": Quantiser(
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
        0.06,
    ),
    "quanto int8": Quantiser(lambda: QuantoConfig(weights="int8"), 0.004, "not serializable"),
}
each_quantiser = pytest.mark.parametrize(
    "name",
    [
        pytest.param("torchao int8", marks=pytest.mark.shows("Quantisation", "torchao, weights in 8 bits", "torchao")),
        pytest.param(
            "torchao int4",
            marks=pytest.mark.shows(
                "Quantisation", "torchao, weights in 4 bits: its prototype for CPUs, which cannot be saved", "torchao"
            ),
        ),
        pytest.param(
            "bitsandbytes int8",
            marks=pytest.mark.shows("Quantisation", "bitsandbytes in 8 bits, on CPU", "bitsandbytes"),
        ),
        pytest.param(
            "bitsandbytes nf4",
            marks=pytest.mark.shows("Quantisation", "bitsandbytes in 4 bits (nf4), on CPU", "bitsandbytes"),
        ),
        pytest.param(
            "quanto int8",
            marks=pytest.mark.shows(
                "Quantisation", "quanto, weights in 8 bits (transformers cannot save them)", "optimum-quanto"
            ),
        ),
    ],
)


def whole_model(case: str, std: float = 0.1) -> Any:
    return redraw(tiny_stack(**{**SIZES, **CASES[case][0]}), std=std)


def quantised(folder: Path, config: Any = None) -> Any:
    seq2seq = json.loads((folder / "config.json").read_text())["topology"] == "encoder-decoder"
    auto = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    given = {} if config is None else {"quantization_config": config}
    return auto.from_pretrained(folder, **given).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    both = {"decoder_input_ids": text(seed=2)} if model.config.is_encoder_decoder else {}
    return model(text(), **both).logits.float()


def relative_error(model: Any, whole: Any) -> float:
    expected = logits(whole)
    return ((logits(model) - expected).norm() / expected.norm()).item()


def reached(whole: nn.Module, names: set[str]) -> Iterator[tuple[str, nn.Linear]]:
    """The projections of a whole model that a quantiser is to replace."""
    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in names:
            yield name, module


def is_whole(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and type(weight) is nn.Parameter and weight.is_floating_point()


@each_quantiser
@each_case
def test_what_is_quantised_and_how_near_it_is(name: str, case: str, tmp_path: Path) -> None:
    quantiser, whole = QUANTISERS[name], whole_model(case)
    whole.save_pretrained(tmp_path / "whole")
    model = quantised(tmp_path / "whole", quantiser.config())

    projections = dict(reached(whole, CASES[case][1]))
    linear = {n for n, module in whole.named_modules() if isinstance(module, nn.Linear)}
    assert {n for n in linear if not is_whole(model.get_submodule(n))} == set(projections)
    assert {n.rpartition(".")[2] for n in linear - set(projections)} <= {"lm_head", *UNQUANTISED}
    assert 0 < relative_error(model, whole) < quantiser.error
    tokens = model.generate(text(), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 1 + 4 if whole.config.is_encoder_decoder else text().shape[1] + 4)

    share = quantised_share(model)
    assert share.parameters == sum(parameter.numel() for parameter in whole.parameters())
    assert share.quantised == sum(module.weight.numel() for module in projections.values())
    packed = sum(p.numel() for n, p in whole.named_parameters() if p.dim() == 3)
    assert share.packed_experts == packed
    assert (share.advice is not None) == (packed > 0)
    assert share.bytes < sum(parameter.nbytes for parameter in whole.parameters())

    if quantiser.refusal is not None:
        with pytest.raises(ValueError, match=quantiser.refusal):
            model.save_pretrained(tmp_path / "quantised")
        return
    model.save_pretrained(tmp_path / "quantised")
    again = quantised(tmp_path / "quantised")
    assert_close(logits(again), logits(model), "reload")
    on_disk = quantised_share(tmp_path / "quantised")
    assert (on_disk.parameters, on_disk.quantised, on_disk.whole) == (share.parameters, share.quantised, share.whole)


@each_quantiser
def test_a_converted_model_is_quantised_like_the_native_one(name: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        **{k: SIZES[k] for k in SIZES}, vocab_size=99, num_hidden_layers=2, max_position_embeddings=64, rms_norm_eps=0.1
    )
    redraw(LlamaForCausalLM(config), std=0.1).save_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "ours", progress=False)
    settings = QUANTISERS[name].config
    native = LlamaForCausalLM.from_pretrained(tmp_path / "native", quantization_config=settings()).eval()
    ours = quantised(tmp_path / "ours", settings())
    assert type(ours) is LlmArchForCausalLM
    assert_close(logits(ours), logits(native), "native")
    assert sum(t.nbytes for t in ours.state_dict().values() if isinstance(t, torch.Tensor)) == sum(
        t.nbytes for t in native.state_dict().values() if isinstance(t, torch.Tensor)
    )


@pytest.mark.shows("Quantisation", "gates, MLA's narrow projections and new heads stay whole", "torchao")
def test_a_head_that_is_yet_to_be_trained_stays_whole(tmp_path: Path) -> None:
    whole_model("gqa").save_pretrained(tmp_path)
    settings = QUANTISERS["torchao int8"].config()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, quantization_config=settings)
    assert type(model) is LlmArchForSequenceClassification
    assert is_whole(model.score)
    assert model.score.weight.requires_grad
    assert not is_whole(model.model.layers[0].self_attn.q_proj)


@pytest.mark.shows("Quantisation", "gates, MLA's narrow projections and new heads stay whole", "torchao")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_staying_whole_does_not_mean_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    whole_model("mla").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.shows("Quantisation", "gates, MLA's narrow projections and new heads stay whole", "torchao")
def test_a_quantised_latent_model_still_decodes_absorbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_model("mla").save_pretrained(tmp_path)
    model = quantised(tmp_path, QUANTISERS["torchao int8"].config())
    attention = type(model.model.layers[0].self_attn)
    absorbed, calls = attention.absorbed, []
    monkeypatch.setattr(attention, "absorbed", lambda self, *given: calls.append(1) or absorbed(self, *given))
    model.generate(text(), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert len(calls) == 2 * 3, "two tokens of three layers are decoded after the prompt"


@pytest.mark.shows(
    "Quantisation", "packed experts: reported; reached by torchao, or after a change of layout", "torchao"
)
def test_packed_experts_are_reached_by_name_or_as_layers(tmp_path: Path) -> None:
    whole = whole_model("packed experts")
    whole.save_pretrained(tmp_path / "packed")
    plain = quantised_share(quantised(tmp_path / "packed", QUANTISERS["torchao int8"].config()))
    assert plain.advice is not None
    assert "convert_experts_layout" in str(plain)

    int8 = Int8WeightOnlyConfig(version=2)
    names = FqnToConfig({r"re:.*\.experts\.(gate_up|down)_proj": int8, "_default": int8})
    named = quantised(tmp_path / "packed", TorchAoConfig(names))
    convert_experts_layout(tmp_path / "packed", tmp_path / "linear", "linear")
    layers = quantised(tmp_path / "linear", TorchAoConfig(int8))
    for model in (named, layers):
        share = quantised_share(model)
        assert share.advice is None
        assert share.quantised == plain.quantised + plain.packed_experts
        assert 0 < relative_error(model, whole) < 0.004


def plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all that a model would save, of a quantiser's own tensors the plain ones that they are made of."""
    return {
        f"{name}.{i}": part.clone()
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
        for i, part in enumerate(plain_tensors(tensor))
    }


HQQ = BaseQuantizeConfig(nbits=4, group_size=32, axis=1)


@pytest.mark.shows("Quantisation", "HQQ by its own library, in 4 bits (transformers 5 has no HQQ loader)", "hqq")
@pytest.mark.parametrize("case", ["gqa", "mla", "linear experts"])
def test_hqq(case: str, tmp_path: Path) -> None:
    whole, names = whole_model(case), CASES[case][1]
    introduce_to_hqq()
    model = copy.deepcopy(whole)
    # It takes a setting for each kind of projection, by its name within a layer, and leaves the others whole.
    kinds = {
        ".".join(p for p in n.split(".") if p not in ("model", "layers") and not p.isdigit())
        for n, _ in reached(whole, names)
    }
    AutoHQQHFModel.quantize_model(model, dict.fromkeys(kinds, HQQ), compute_dtype=torch.float32, device="cpu")
    replaced = {name for name, module in model.named_modules() if isinstance(module, HQQLinear)}
    assert replaced == {name for name, _ in reached(whole, names)}
    assert 0 < relative_error(model, whole) < 0.06
    assert model.generate(text(), max_new_tokens=4, do_sample=False, pad_token_id=0).shape[1] == text().shape[1] + 4
    assert quantised_share(model).quantised == sum(module.weight.numel() for _, module in reached(whole, names))

    AutoHQQHFModel.save_quantized(model, str(tmp_path))
    again = AutoHQQHFModel.from_quantized(str(tmp_path), compute_dtype=torch.float32, device="cpu")
    assert_close(logits(again), logits(model), "reload")


@pytest.mark.shows("Quantisation", "HQQ by its own library, in 4 bits (transformers 5 has no HQQ loader)", "hqq")
def test_transformers_refuses_hqq_for_native_models_too(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, vocab_size=99, num_hidden_layers=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "native")
    whole_model("gqa").save_pretrained(tmp_path / "ours")
    for folder in ("native", "ours"):
        with pytest.raises(NotImplementedError, match="HQQ is not available"):
            AutoModelForCausalLM.from_pretrained(
                tmp_path / folder, quantization_config=HqqConfig(nbits=4, group_size=32)
            )


@pytest.mark.shows("Quantisation", "LoRA on a quantised base (QLoRA)", "peft", "bitsandbytes", "torchao")
@pytest.mark.parametrize("name", ["bitsandbytes nf4", "bitsandbytes int8", "torchao int8"])
@pytest.mark.parametrize("case", ["gqa", "mla", "linear experts"])
def test_lora_on_a_quantised_base(name: str, case: str, tmp_path: Path) -> None:
    whole_model(case, std=0.3).save_pretrained(tmp_path)  # so that its logits have room to move
    base = quantised(tmp_path, QUANTISERS[name].config())
    base = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": False})
    # In this order: on some CPUs bitsandbytes' first pass in evaluation rounds the scales to bf16.
    untrained = logits(base.eval())
    before = plain_state(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-2)
    losses = []
    for _ in range(16):
        loss = model(text(), labels=text()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(ValueError, match="adapters"):
        quantised_share(base)
    model.save_pretrained(tmp_path / "adapter")
    base = model.unload()
    after = plain_state(base)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert_close(logits(base.eval()), untrained, "reload")


@pytest.mark.shows("Quantisation", "the share that is quantised, of a model or in `hf-llmarch inspect`", "torchao")
def test_inspect_tells_what_is_quantised(tmp_path: Path) -> None:
    whole_model("packed experts").save_pretrained(tmp_path / "whole")
    model = quantised(tmp_path / "whole", QUANTISERS["torchao int8"].config())
    model.save_pretrained(tmp_path / "quantised")
    answer = CliRunner().invoke(app, ["inspect", str(tmp_path / "quantised"), "--json"])
    assert answer.exit_code == 0, answer.output
    told, share = json.loads(answer.stdout)["quantised"], quantised_share(model)
    assert told["parameters"] == share.parameters
    assert told["quantised"] == share.quantised
    assert told["packed_experts"] == share.packed_experts
    assert "convert_experts_layout" in told["advice"]
    assert "quantised" not in json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "whole"), "--json"]).stdout)

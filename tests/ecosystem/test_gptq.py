"""GPTQ, by optimum and GPTQModel through transformers, and AWQ, by GPTQModel itself, on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.models import auto
from gptqmodel.models.base import BaseQModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoModelForCausalLM, GPTQConfig, PreTrainedTokenizerFast

from hf_llmarch.integrations.quantisation import quantised_share
from tests.tiny import assert_close, differs, redraw, text, tiny_model

VOCABULARY = 99
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"intermediate_size": 128, "num_hidden_layers": 2},
}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "linear experts": {"num_experts": 4, "moe_intermediate_size": 64, "experts_layout": "linear"},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: w0, w1, …"""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1")


def texts() -> list[str]:
    """To calibrate on."""
    return [" ".join(f"w{i}" for i in text(batch=1, length=64, seed=seed)[0].tolist()) for seed in range(8)]


@pytest.mark.shows("Quantisation", "GPTQ in 4 bits, on CPU: calibrated, saved, loaded", "gptqmodel", "optimum")
@pytest.mark.parametrize("case", CASES)
def test_calibrated_saved_and_loaded(case: str, tmp_path: Path) -> None:
    whole = redraw(tiny_model(**SIZES, **CASES[case]), std=0.1)
    whole.save_pretrained(tmp_path / "whole")
    settings = GPTQConfig(bits=4, group_size=32, dataset=texts(), tokenizer=tokenizer(), model_seqlen=64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=settings)
    model.save_pretrained(
        tmp_path / "quantised"
    )  # before it runs, which puts the weights into a layout of the kernel's
    with torch.no_grad():
        expected, given = whole(text()).logits, model(text()).logits.float()
    assert 0 < (given - expected).norm() / expected.norm() < 0.05
    assert model.generate(text(), max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] == text().shape[1] + 3

    in_layers = sum(m.weight.numel() for m in whole.model.layers.modules() if isinstance(m, nn.Linear))
    assert quantised_share(model).quantised == in_layers

    assert quantised_share(tmp_path / "quantised").quantised == in_layers
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")
    with torch.no_grad():
        assert_close(again(text()).logits.float(), given, "bf16")  # its kernel works in half precision


class LlmArchQModel(BaseQModel):
    """What GPTQModel must know of the model for AWQ: its layers, and which norm feeds which projections.

    It divides the weights of norms, so `norm_offset` must be 0: add another one to the weights first.
    """

    module_tree = [
        *("model", "layers", "#"),
        {
            **{"attn_norm": ("pre:!",), "self_attn": ("q_proj:0", "k_proj:0", "v_proj:0", "o_proj:1")},
            **{"mlp_norm": ("pre:!",), "mlp": ("gate_proj:0", "up_proj:0", "down_proj:1")},
        },
    ]


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of an AWQ folder by its format's definition: (q - zero) * scale, each scale over 32 inputs; an int32
    holds eight outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
    """

    def unpacked(numbers: torch.Tensor) -> torch.Tensor:
        """(R, N / 8) -> (R, N), from 0 to 15."""
        return (numbers[..., None] >> 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]) & 15).flatten(-2)

    tensors = load_file(folder / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in tensors.items() if name.endswith(".weight")}
    for name in (name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")):
        q, zero = unpacked(tensors[f"{name}.qweight"]), unpacked(tensors[f"{name}.qzeros"]).repeat_interleave(32, 0)
        weights[f"{name}.weight"] = ((q - zero) * tensors[f"{name}.scales"].float().repeat_interleave(32, 0)).T
    return weights


@pytest.mark.shows("Quantisation", "AWQ in 4 bits, on CPU: calibrated, saved, loaded (`norm_offset=0`)", "gptqmodel")
def test_awq_calibrated_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it writes logs/ where it runs
    monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "2")  # by default one on two cores, and its loader asks for two
    monkeypatch.setitem(auto.MODEL_MAP, "llmarch", LlmArchQModel)
    monkeypatch.setattr(auto, "SUPPORTED_MODELS", [*auto.SUPPORTED_MODELS, "llmarch"])
    whole = redraw(tiny_model(**{**SIZES, "head_dim": 32}), std=0.1)  # its search takes 64 outputs at a time
    whole.save_pretrained(tmp_path / "whole")
    tokenizer().save_pretrained(tmp_path / "whole")
    settings = QuantizeConfig(
        bits=4, group_size=32, sym=False, quant_method="awq", format="gemm", offload_to_disk=False
    )
    quantiser = GPTQModel.load(str(tmp_path / "whole"), settings, device="cpu")
    quantiser.quantize(texts(), backend=BACKEND.AWQ_TORCH)
    quantiser.save(str(tmp_path / "quantised"))

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", dtype=torch.float32)
    in_layers = sum(m.weight.numel() for m in whole.model.layers.modules() if isinstance(m, nn.Linear))
    assert quantised_share(model).quantised == quantised_share(tmp_path / "quantised").quantised == in_layers
    with torch.no_grad():
        original, given = whole(text()).logits, model(text()).logits
        norm, scaled = (m.model.layers[0].attn_norm.pre.weight for m in (whole, model))
        assert differs(scaled, norm)  # its inputs' scales were searched for, and moved into the norm
        whole.load_state_dict(dequantised(tmp_path / "quantised"))
        assert_close(given, whole(text()).logits, "bf16")  # its kernel works in half precision
    assert 0 < (given - original).norm() / original.norm() < 0.05
    assert model.generate(text(), max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] == text().shape[1] + 3

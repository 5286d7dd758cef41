"""GPTQ, by optimum and GPTQModel through transformers, on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import AutoModelForCausalLM, GPTQConfig, PreTrainedTokenizerFast

from hf_llmarch.quantisation import quantised_share
from tests.tiny import assert_close, redraw, text, tiny_model

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


@pytest.mark.shows("Quantisation", "GPTQ in 4 bits, on CPU: calibrated, saved, loaded", "gptqmodel", "optimum")
@pytest.mark.parametrize("case", CASES)
def test_calibrated_saved_and_loaded(case: str, tmp_path: Path) -> None:
    whole = redraw(tiny_model(**SIZES, **CASES[case]), std=0.1)
    whole.save_pretrained(tmp_path / "whole")
    texts = [" ".join(f"w{i}" for i in text(batch=1, length=64, seed=seed)[0].tolist()) for seed in range(8)]
    settings = GPTQConfig(bits=4, group_size=32, dataset=texts, tokenizer=tokenizer(), model_seqlen=64)
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

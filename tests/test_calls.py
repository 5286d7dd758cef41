"""How many Python functions of ours a decoding step calls: their cost is the same for a small model and a large one."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hf_llmarch
from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.integrations import processors
from hf_llmarch.integrations.processors import prepacked
from hf_llmarch.model.compat import CACHE
from tiny import text, tiny_model

PACKAGE = str(Path(hf_llmarch.__file__).parent)

# The switches of LLaMA: grouped-query attention, RoPE, RMSNorm before each branch, SwiGLU.
LLAMA: dict[str, Any] = {"num_key_value_heads": 2, "tie_word_embeddings": False}
BOUND = 15


def calls_of_a_step(model: LlmArchForCausalLM) -> Counter[str]:
    """Our functions that are called for one token after a text, each by its name."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_qualname] += 1

    with torch.no_grad():
        cache = model(text(1, 6), use_cache=True)[CACHE]
        token = text(1, 1)
        sys.setprofile(note)
        try:
            model(token, use_cache=True, **{CACHE: cache})
        finally:
            sys.setprofile(None)
    return calls


@pytest.mark.parametrize("product", ["BY_ONEDNN", "WEIGHT_FIRST", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_layer_calls_few_functions(
    dtype: torch.dtype, product: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if product == "BY_ONEDNN" and processors.ONEDNN_LINEAR is None:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(processors, "SMALL", 0)
    monkeypatch.setattr(processors, "AMX", product == "WEIGHT_FIRST")
    for name in ("BY_ONEDNN", "WEIGHT_FIRST"):
        monkeypatch.setattr(processors, name, {dtype} if name == product else set())
    counted = []
    for layers in (2, 3):
        model = tiny_model(**LLAMA, num_hidden_layers=layers).to(dtype)
        with prepacked(model):
            counted.append(calls_of_a_step(model))
    one_layer = counted[1] - counted[0]
    assert one_layer["Block.forward"] == 1
    assert one_layer.total() <= BOUND, dict(one_layer)

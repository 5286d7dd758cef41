"""nanoGPT's ckpt.pt, against a model written here from its description (transformers has no such class)."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_llmarch.conversion import convert, export
from hf_llmarch.conversion.errors import CheckpointError
from hf_llmarch.model.modeling_llmarch import LlmArchForCausalLM

ARGS: dict[str, Any] = {"n_layer": 3, "n_head": 6, "n_embd": 48, "block_size": 32, "bias": True, "dropout": 0.0}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width, bias=bias), "c_proj": nn.Linear(width, width, bias=bias)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias=bias), "c_proj": nn.Linear(4 * width, width, bias=bias)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        x = x + self.attn["c_proj"]((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGpt(nn.Module):
    def __init__(self, vocab_size: int, bias: bool):
        super().__init__()
        width = ARGS["n_embd"]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, width),
                "wpe": nn.Embedding(ARGS["block_size"], width),
                "h": nn.ModuleList(Block(width, ARGS["n_head"], bias) for _ in range(ARGS["n_layer"])),
                "ln_f": nn.LayerNorm(width, bias=bias),
            }
        )
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def checkpoint(path: Path, vocab_size: int, bias: bool, prefix: str = "") -> NanoGpt:
    torch.manual_seed(0)
    model = NanoGpt(vocab_size, bias)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    # Older releases save the causal mask too.
    state |= {f"{prefix}transformer.h.{i}.attn.bias": torch.ones(1, 1, 4, 4).tril() for i in range(ARGS["n_layer"])}
    arguments = {**ARGS, "vocab_size": vocab_size, "bias": bias}
    torch.save({"model": state, "model_args": arguments, "iter_num": 7, "config": {"out_dir": "out"}}, path)
    return model


@torch.no_grad()
@pytest.mark.parametrize(("bias", "prefix"), [(True, ""), (False, "_orig_mod.")])
def test_logits_and_bytes(bias: bool, prefix: str, tmp_path: Path) -> None:
    native = checkpoint(tmp_path / "ckpt.pt", 99, bias, prefix)
    report = convert(tmp_path / "ckpt.pt", tmp_path / "ours", progress=False)
    assert set(report.dropped.values()) == {"causal mask, a constant"}
    ours = LlmArchForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids = torch.randint(0, 99, (2, 19))
    expected = native(ids)
    assert (ours(ids).logits - expected).abs().max() < 1e-5 * (expected.max() - expected.min())
    export(tmp_path / "ours", tmp_path / "back", progress=False)
    assert [file.name for file in (tmp_path / "back").iterdir()] == ["ckpt.pt"]
    back = torch.load(tmp_path / "back" / "ckpt.pt", weights_only=True)
    assert back["model_args"] == {**ARGS, "vocab_size": 99, "bias": bias}
    state = native.state_dict()
    assert set(back["model"]) == set(state)
    assert all(torch.equal(back["model"][name], tensor) for name, tensor in state.items())


def test_padded_rows_are_never_sampled(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt.pt", 50304, True)
    convert(tmp_path / "ckpt.pt", tmp_path / "ours", progress=False)
    model = LlmArchForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[50257:] *= 100  # what greedy decoding would choose
    tokens = model.generate(torch.randint(0, 50257, (2, 5)), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert tokens.max() < 50257


def test_another_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"state": {}}, tmp_path / "ckpt.pt")
    with pytest.raises(CheckpointError, match="lacks 'model' or 'model_args'"):
        convert(tmp_path / "ckpt.pt", tmp_path / "ours", progress=False)
    (tmp_path / "bad.pt").write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match=r"bad\.pt cannot be read"):
        convert(tmp_path / "bad.pt", tmp_path / "ours", progress=False)

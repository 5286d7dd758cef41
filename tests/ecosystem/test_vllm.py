"""vLLM on our folders, by the plug-in and without remote code: the tokens and their probabilities are those of ours."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

# Read by vLLM when it is imported: the engine in this process, small, and quiet.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
# Its CPU kernels know no latent cache: MLA runs with whole keys and values.
os.environ["VLLM_MLA_DISABLE"] = "1"

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.cli.demo import bundled_model
from hf_llmarch.conversion import convert
from tests.ecosystem.servers import ask, serving
from tests.tiny import LOCAL_AND_GLOBAL, MIXED, MLA, MOE, YARN, text, tiny_model

pytestmark = pytest.mark.slow

NEW_TOKENS = 12
PROMPTS = (text()[0], text()[1, :9])  # in one batch
CHAT = [{"role": "user", "content": "What is the capital of France?"}]

# Heads of 32, the least width that vLLM's CPU kernels take.
HEADS = {"head_dim": 32}
SERVED: dict[str, dict[str, Any]] = {
    "gqa": HEADS,
    "mla": {**MLA, "qk_nope_head_dim": 24},
    "moe": {**HEADS, **MOE},
    "moe, sigmoid and shared": {**HEADS, **MOE, "router_score": "sigmoid", "num_shared_experts": 1},
    "experts one by one": {**HEADS, **MOE, "experts_layout": "linear", "hidden_act": "gelu"},
    "sliding": {**HEADS, **MIXED, "rope_parameters": LOCAL_AND_GLOBAL},
    "query and key norms": {**HEADS, "qk_norm": "head", "norm_placement": "sandwich"},
    "soft-caps": {**HEADS, "attn_logit_softcapping": 0.1, "final_logit_softcapping": 0.5},
    "sinks": {**HEADS, **MIXED, "attention_sinks": True},
    "no rope here and there": {**HEADS, "nope_layers": [1], "rope_parameters": YARN},
    "learned positions": {**HEADS, "position_encoding": "learned", "norm_type": "layernorm", "ffn_type": "mlp"},
    "scales": {**HEADS, "attention_scale_by_layer": True, "logit_scale": 0.3, "embedding_scale": 7.0},
    "layers that differ": {**HEADS, "per_layer_config": {1: {"num_key_value_heads": 3}}},
    "tied": {**HEADS, "tie_word_embeddings": True, "parallel_block": True},
}
REFUSED: dict[str, dict[str, Any]] = {
    "position_encoding": {**HEADS, "position_encoding": "alibi"},
    "attention_chunk_size": {"attention_chunk_size": 5},
    "rope_parameters": {"rope_parameters": {"rope_theta": 777.0, "rope_type": "dynamic", "factor": 3.0}},
    "capacity_factor": {**MOE, "capacity_factor": 0.5},
    "lm_head_transform": {"lm_head_transform": True},
    "logit_scale": {"logit_scale": 0.3, "final_logit_softcapping": 0.5},
}


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=64, enforce_eager=True, **options)


def greedy(model: Any, prompt: torch.Tensor) -> tuple[list[int], list[float]]:
    """The new tokens and their log-probabilities, by our own `generate()`."""
    out = model.generate(
        prompt[None],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[0, prompt.shape[0] :].tolist()
    logits = torch.cat(out.logits).log_softmax(-1)
    return new, [logits[i, token].item() for i, token in enumerate(new)]


@dataclass(frozen=True)
class Ours:
    """What was made, and what our own `generate()` says: before vLLM, which changes our class in this process."""

    folders: dict[str, Path]
    answers: dict[str, list[tuple[list[int], list[float]]]]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    home = tmp_path_factory.mktemp("served")
    folders = {name: home / name for name in (*SERVED, *REFUSED, "smollm2")}
    answers = {}
    for name, switches in {**SERVED, **REFUSED}.items():
        model = tiny_model(**switches)
        model.save_pretrained(folders[name])
        if name in SERVED:
            answers[name] = [greedy(model, prompt) for prompt in PROMPTS]
    convert(str(bundled_model()), folders["smollm2"])
    smollm2 = LlmArchForCausalLM.from_pretrained(folders["smollm2"], dtype=torch.float32)
    answers["smollm2"] = [greedy(smollm2, chat_tokens(folders["smollm2"]))]
    return Ours(folders, answers)


def chat_tokens(folder: Path) -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt")["input_ids"][0]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.shows("Serving", "vLLM without remote code: what it can do, with the tokens of generate()", "vllm-cpu")
def test_tokens_and_probabilities(name: str, ours: Ours) -> None:
    asked = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = engine(ours.folders[name], skip_tokenizer_init=True).generate(
        [{"prompt_token_ids": prompt.tolist()} for prompt in PROMPTS], asked, use_tqdm=False
    )
    for output, (tokens, probabilities) in zip(outputs, ours.answers[name], strict=True):
        new = output.outputs[0]
        assert list(new.token_ids) == tokens
        found = [step[token].logprob for step, token in zip(new.logprobs, tokens, strict=True)]
        torch.testing.assert_close(found, probabilities, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.shows("Serving", "vLLM: what it would ignore is refused by name", "vllm-cpu")
def test_refused(name: str, ours: Ours) -> None:
    with pytest.raises(ValueError, match=f"attn_implementation='vllm' cannot do {name}="):
        engine(ours.folders[name], skip_tokenizer_init=True)


@pytest.mark.shows("Serving", "vLLM: the converted SmolLM2 answers with the tokens of generate()", "vllm-cpu")
def test_smollm2(ours: Ours) -> None:
    asked = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    output = engine(ours.folders["smollm2"]).chat(CHAT, asked, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == ours.answers["smollm2"][0][0]
    assert "Paris" in output.outputs[0].text


@pytest.mark.shows("Serving", "vLLM's OpenAI server: the converted SmolLM2 over HTTP, without remote code", "vllm-cpu")
def test_serve(ours: Ours, tmp_path: Path) -> None:
    folder = str(ours.folders["smollm2"])
    # What `vllm serve` runs: the command itself asks for a distribution "vllm", which vllm-cpu is not.
    server = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder)
    with serving(*server, "--max-model-len", "128", "--enforce-eager", log=tmp_path / "log") as address:
        assert "Paris" in ask(address, model=folder, messages=CHAT, max_tokens=16)

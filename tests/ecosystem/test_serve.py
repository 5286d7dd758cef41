"""The servers of transformers on our models: its commands `serve` and `chat`, and its continuous batching."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.conversion import convert
from tests.ecosystem.servers import ask, quiet, serving
from tests.tiny import MIXED, MLA, MOE, redraw, text, tiny_config, tiny_model

QUESTION = [{"role": "user", "content": "w7 w21 w3 w50"}]
NEW_TOKENS = 8
# The host's own command, in a process that knows our classes.
TRANSFORMERS = (sys.executable, "-m", "hf_llmarch.integrations.transformers_cli")
CONTINUOUS = ("--continuous-batching", "--cb-num-blocks", "32", "--cb-max-batch-tokens", "64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer that can chat, converted."""
    source, converted = (tmp_path_factory.mktemp(name) / "tiny-llama" for name in ("source", "converted"))
    words = {f"w{i}": i for i in range(tiny_config().vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    chat = FastTokenizer(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1", pad_token="w2")
    chat.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}w9"
    sizes = {name: getattr(tiny_config(), name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2))
    llama.generation_config = GenerationConfig(do_sample=False, eos_token_id=1, pad_token_id=2)
    redraw(llama, std=0.6).save_pretrained(source)
    chat.save_pretrained(source)
    convert(source, converted)
    return converted


def expected(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlmArchForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    new = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), CONTINUOUS], ids=["one by one", "continuous"])
@pytest.mark.shows("Serving", "transformers serve: a chat over HTTP, the words of generate()", "fastapi", "uvicorn")
def test_serve(folder: Path, flags: tuple[str, ...], tmp_path: Path) -> None:
    with serving(*TRANSFORMERS, "serve", str(folder), "--device", "cpu", *flags, log=tmp_path / "log") as address:
        words = ask(address, model=str(folder), messages=QUESTION, max_tokens=NEW_TOKENS)
    assert words == expected(folder)
    assert len(set(words.split())) > NEW_TOKENS / 2  # not one word again and again


@pytest.mark.slow
@pytest.mark.shows("Serving", "transformers chat, talking to transformers serve", "fastapi", "uvicorn", "openai")
def test_chat(folder: Path, tmp_path: Path) -> None:
    with serving(*TRANSFORMERS, "serve", str(folder), "--device", "cpu", log=tmp_path / "log") as address:
        command = [*TRANSFORMERS, "chat", str(folder), address, f"max_new_tokens={NEW_TOKENS}", "do_sample=False"]
        typed = f"{QUESTION[0]['content']}\n!exit\n"
        # The client is the Hub's, which offline goes nowhere.
        online = {**quiet(), "HF_HUB_OFFLINE": "0"}
        chat = subprocess.run(command, input=typed, capture_output=True, text=True, env=online, cwd=tmp_path)
    assert expected(folder) in chat.stdout, chat.stdout + chat.stderr


# -- continuous batching in this process ------------------------------------------------------------------------------

BATCHED: dict[str, dict[str, Any]] = {
    "gqa": {},
    "moe": MOE,
    "sliding": MIXED,
    "learned": {"position_encoding": "learned"},
    "qk_norm": {"qk_norm": "head"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "attention_type": MLA,
    "position_encoding": {"position_encoding": "alibi"},
    "attn_logit_softcapping": {"attn_logit_softcapping": 0.1},
    "attention_sinks": {"attention_sinks": True},
    "attention_chunk_size": {"attention_chunk_size": 5},
    "rope_parameters": {"rope_parameters": {"rope_theta": 777.0, "rope_type": "dynamic", "factor": 3.0}},
    "capacity_factor": {**MOE, "capacity_factor": 0.5},
}
PAGES = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=64)


def batched(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    greedy = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = model.generate_batch(prompts, greedy, continuous_batching_config=PAGES, progress_bar=False)
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize("switches", BATCHED.values(), ids=BATCHED)
@pytest.mark.shows("Serving", "Continuous batching (generate_batch): texts of many lengths, the tokens of generate()")
def test_continuous_batching(switches: dict[str, Any]) -> None:
    model, ids = tiny_model(**switches), text(3)
    prompts = [ids[0].tolist(), ids[1, :9].tolist(), ids[2, :17].tolist()]
    alone = [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert batched(model, prompts) == alone


@pytest.mark.parametrize(("name", "switches"), REFUSED.items(), ids=REFUSED)
@pytest.mark.shows("Serving", "Continuous batching refuses by name what its paged cache cannot do")
def test_continuous_batching_refuses(name: str, switches: dict[str, Any]) -> None:
    """Unasked, the host answers with empty texts, or with those of a model without the switch."""
    with pytest.raises(ValueError, match=rf"'paged\|(sdpa|eager)' cannot do {name}="):
        batched(tiny_model(**switches), [[5, 6, 7]])

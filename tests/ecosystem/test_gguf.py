"""The way to llama.cpp: a converted model, exported to its family, written as GGUF, runs there to the same tokens."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from llama_cpp import Llama
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.cli.demo import bundled_model
from hf_llmarch.conversion import convert, export

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:llama_cpp")]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    convert(str(bundled_model()), folder / "ours")
    return folder


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection, whose rotary pairs lie half a head apart, as llama.cpp has them: side by
    side."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(native: Path, known: gguf.GGUFReader, path: Path) -> dict[str, np.ndarray]:
    """The tensors of an exported Llama in fp32, with the tokenizer and the sizes that are `known` of it; as written."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in known.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    tensors = load_file(native / "model.safetensors")
    config = LlmArchForCausalLM.config_class.from_pretrained(native.with_name("ours"))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    written = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        moved = interleaved(tensor.float(), heads[part]) if part in heads else tensor.float()
        written[names.get_name(name, try_suffixes=(".weight",))] = moved.contiguous().numpy()
    for name, array in written.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.mark.shows(
    "Export",
    "GGUF by way of the native family: llama.cpp answers with the tokens of generate()",
    "gguf",
    "llama-cpp-python",
)
def test_llama_cpp(smollm2: Path) -> None:
    export(smollm2 / "ours", smollm2 / "native")
    known = gguf.GGUFReader(bundled_model())
    written = write_gguf(smollm2 / "native", known, smollm2 / "f32.gguf")
    # The model came from GGUF: its numbers are those of the file it was read from.
    assert written.keys() == {tensor.name for tensor in known.tensors}
    for tensor in known.tensors:
        assert np.array_equal(written[tensor.name], gguf.dequantize(tensor.data, tensor.tensor_type)), tensor.name

    tokenizer = AutoTokenizer.from_pretrained(smollm2 / "ours")
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = LlmArchForCausalLM.from_pretrained(smollm2 / "ours", dtype=torch.float32)
    length = prompt["input_ids"].shape[1]
    expected = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0, length:].tolist()

    llama = Llama(str(smollm2 / "f32.gguf"), n_ctx=128, n_threads=1, verbose=False)
    found = []
    for token in llama.generate(prompt["input_ids"][0].tolist(), temp=0.0):
        found.append(token)
        if len(found) == len(expected):
            break
    assert found == expected
    assert "Paris" in tokenizer.decode(found)

"""A GGUF file of the llama family as a checkpoint: named as in a llama folder, dequantised tensor by tensor.

What comes out are the bytes that transformers' own GGUF loader gives, in float32. Transformers reads a fixed set of the
metadata and passes over the rest; here a key that would change the numbers and that it does not read is refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from gguf import MODEL_ARCH, GGUFReader, ReaderTensor, dequantize, get_tensor_name_map
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

from ..errors import CheckpointError, some
from .base import Checkpoint, TensorInfo
from .bounds import check_config
from .files import GENERATION_CONFIG

ARCHITECTURE = "llama"

# Metadata that transformers turns into the config.
READ = {
    *("context_length", "block_count", "feed_forward_length", "embedding_length", "vocab_size"),
    *("rope.dimension_count", "rope.freq_base", "attention.head_count", "attention.head_count_kv"),
    "attention.layer_norm_rms_epsilon",
}
# Metadata that it does not read, and the value with which that is right; beside these, key_length and value_length.
NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.type": "none",
    "rope.scale_linear": 1.0,
    "tensor_data_layout": "Meta AI original pth",
}
TOKENIZER_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
# transformers keeps how a tokenizer was loaded among its settings, and would save it.
LOADING_ARGUMENTS = ("is_local", "local_files_only")


class GgufCheckpoint(Checkpoint):
    """A `.gguf` file; `read` dequantises to float32 and undoes llama.cpp's reordering of query and key rows."""

    made = "dequantised; equal to what transformers dequantises"

    def __init__(self, source: str, path: Path):
        check_header(path)
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # GGUFReader raises anything from ValueError to IndexError
            raise CheckpointError(f"{path} is no complete GGUF file: {error}. Fetch it again.") from error
        config = read_config(path, self._reader)
        # Before a model is built to name its tensors.
        check_config(path, config, {t.name: tuple(int(size) for size in t.shape) for t in self._reader.tensors})
        names = hugging_face_names(config)
        self._stored: dict[str, ReaderTensor] = {}
        for tensor in self._reader.tensors:
            if tensor.name not in names:
                raise CheckpointError(
                    f"{path}: tensor {tensor.name!r} has no counterpart in a llama model. Convert from the safetensors "
                    "folder that the GGUF was made from."
                )
            self._stored[names[tensor.name]] = tensor
        # The file lists dimensions from the innermost out.
        tensors = {
            name: TensorInfo(tuple(int(size) for size in reversed(tensor.shape)), torch.float32)
            for name, tensor in self._stored.items()
        }
        super().__init__(source, path, config, tensors)

    def read(self, name: str) -> Tensor:
        stored = self._stored[name]
        try:
            values = torch.tensor(dequantize(stored.data, stored.tensor_type))
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path}: {name} is stored as {stored.tensor_type.name}: {error}") from error
        heads = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
        for part, count in heads.items():
            if part in name:
                return pairs_to_halves(values, self.config[count])
        return values

    @property
    def companions(self) -> tuple[str, ...]:
        has_tokenizer = "tokenizer.ggml.model" in self._reader.fields
        return (GENERATION_CONFIG, *(TOKENIZER_FILES if has_tokenizer else ()))

    @property
    def companion_bytes(self) -> int:
        # As JSON, a token or a merge with its quotes, escapes and number takes a few times the bytes it has here.
        return 4 * sum(int(part.nbytes) for field in self._reader.fields.values() for part in field.parts) + 2**16

    def write_companions(self, directory: Path) -> None:
        ids = {name: self.config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        GenerationConfig(**ids).save_pretrained(directory)
        if len(self.companions) == 1:
            return
        try:
            tokenizer = AutoTokenizer.from_pretrained(**self.native_kwargs, trust_remote_code=False)
        except Exception as error:  # the many ways in which transformers refuses a vocabulary
            raise CheckpointError(f"{self.path}: transformers cannot read its tokenizer: {error}") from error
        for argument in LOADING_ARGUMENTS:
            tokenizer.init_kwargs.pop(argument, None)
        tokenizer.save_pretrained(directory)

    @property
    def native_kwargs(self) -> dict[str, Any]:
        return {"pretrained_model_name_or_path": str(self.path.parent), "gguf_file": self.path.name}


# Bytes of a value of the metadata by its type; beside these, strings and arrays.
VALUES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
# Name, type and at least one byte of a value; name, dimensions, type and place of a tensor.
SHORTEST_VALUE, SHORTEST_TENSOR = 13, 24


def check_header(path: Path) -> None:
    """Walk over the metadata once: the reader believes a length before it looks whether so much is there.

    Raises:
        CheckpointError: naming the length that the file cannot hold.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        order: Literal["little", "big"] = "big" if start[4:6] == b"\0\0" else "little"

        def number(width: int) -> int:
            return int.from_bytes(file.read(width), order)

        def bounded(what: str, count: int, width: int) -> int:
            if count * width > size - file.tell():
                raise CheckpointError(
                    f"{path} is no complete GGUF file: {what} has {count} entries, more than the {size} bytes of the "
                    "file can hold. Fetch it again."
                )
            return count

        def string(what: str) -> bytes:
            return file.read(bounded(what, number(8), 1))

        tensors, values = number(8), number(8)
        bounded("its list of tensors", tensors, SHORTEST_TENSOR)
        for _ in range(bounded("its metadata", values, SHORTEST_VALUE)):
            name = string("the name of a key").decode(errors="replace")
            kind, count = number(4), 1
            if kind == ARRAY:
                kind, count = number(4), number(8)
            if kind == STRING:
                for _ in range(bounded(name, count, 8)):
                    string(name)
            elif kind in VALUES:
                file.seek(bounded(name, count, VALUES[kind]) * VALUES[kind], os.SEEK_CUR)
            else:
                raise CheckpointError(f"{path}: the metadata {name!r} is of type {kind}, which GGUF files do not use.")


def read_config(path: Path, reader: GGUFReader) -> dict[str, Any]:
    """The config.json that the metadata amounts to, as transformers reads it.

    Raises:
        CheckpointError: for another architecture, a part of a split file, or metadata that transformers passes over.
    """
    metadata = {name: field for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    architecture = metadata["general.architecture"].contents() if "general.architecture" in metadata else None
    if architecture != ARCHITECTURE:
        raise CheckpointError(f"{path} is a GGUF of architecture {architecture!r}; only {ARCHITECTURE!r} can be read.")
    if "split.count" in metadata and metadata["split.count"].contents() > 1:
        raise CheckpointError(f"{path} is one part of a split GGUF: join them with llama.cpp's gguf-split --merge.")
    values, _ = PreTrainedConfig.get_config_dict(path.parent, gguf_file=path.name)
    # A tokenizer's field, and the name that a person gave the model: neither belongs to a config.json.
    config = {name: value for name, value in values.items() if name not in ("unk_token_id", "_model_name_or_path")}
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    names = {tensor.name for tensor in reader.tensors}
    config["attention_bias"] = "blk.0.attn_q.bias" in names
    config["mlp_bias"] = "blk.0.ffn_up.bias" in names
    widths = dict.fromkeys(("attention.key_length", "attention.value_length"), config["head_dim"])
    stated = {
        key: field.contents()
        for name, field in metadata.items()
        if (key := name.removeprefix(f"{ARCHITECTURE}.")) not in {name, *READ}
    }
    passed_over = [f"{k}={found!r}" for k, found in stated.items() if found != (NEUTRAL | widths).get(k)]
    if "rope_freqs.weight" in names:
        passed_over.append("rope_freqs.weight (a scaled RoPE, as Llama 3.1 has)")
    if passed_over:
        raise CheckpointError(
            f"{path} says {some(passed_over)}, which transformers' GGUF reader passes over, so the numbers would be "
            "wrong. Convert from the safetensors folder that the GGUF was made from."
        )
    return {"architectures": ["LlamaForCausalLM"], **config, "dtype": "float32"}


def hugging_face_names(config: dict[str, Any]) -> dict[str, str]:
    """GGUF tensor name -> llama's name in transformers, by the gguf package's own table."""
    with torch.device("meta"):
        native = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    table = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    split = (name.rsplit(".", 1) for name in native.state_dict())
    return {f"{table.get_name(module)}.{kind}": f"{module}.{kind}" for module, kind in split}


def pairs_to_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection from llama.cpp's order to transformers'.

    llama.cpp rotates neighbours (2j, 2j+1), transformers (j, j + D/2), so its converter interleaved the two halves of
    each head, and this takes them apart again. A bias is reordered alike.

    Args:
        rows: (H * D, …) or a bias (H * D,).
        heads: H, the number of query heads for q and of key/value heads for k.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # (H, D/2, 2, …) -> (H, 2, D/2, …)

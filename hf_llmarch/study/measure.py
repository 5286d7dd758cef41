"""The same numbers as `analysis`, measured: parameters of the model itself, matrix products as torch counts them, bytes
of a cache that the model has filled. On the meta device, so without weights and at any size.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import EncoderDecoderCache
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from hf_llmarch.integrations.processors import free_memory
from hf_llmarch.model import modeling_llmarch
from hf_llmarch.model.compat import CACHE
from hf_llmarch.model.configuration_llmarch import LlmArchConfig
from hf_llmarch.model.experts import PackedExperts
from hf_llmarch.model.routing import Router
from hf_llmarch.study.hardware import Hardware
from hf_llmarch.study.steps import architecture_of


@dataclass(frozen=True)
class Measured:
    """What was measured; the names are those of `analysis.Analysis`."""

    parameters: int
    forward_flops: int
    decode_flops: int | None
    kv_cache_bytes: int | None


def skeleton(
    config: LlmArchConfig, architecture: str | None = None, dtype: torch.dtype | None = None, device: str = "meta"
) -> Any:
    """The model, on the meta device without weights. Attention in plain operations, whose products the counter sees;
    experts one by one, or by gathered weights, which need no numbers to know their shapes."""
    config = copy.deepcopy(config)
    with torch.device(device):
        model = getattr(modeling_llmarch, architecture or architecture_of(config))(config)
    model.set_attn_implementation("eager")
    for module in model.modules():
        if isinstance(module, PackedExperts):
            module.config._experts_implementation = "batched_mm" if device == "meta" else "eager"
        if isinstance(module, Router) and device == "meta":
            module.in_fp32 = False  # which is done by leaving autocast, and the meta device has none
    return model.to(dtype or torch.float32)


def parameters(model: nn.Module) -> int:
    """Each counted once, however many modules share it."""
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def counted() -> Iterator[FlopCounterMode]:
    """What torch's counter sees inside: products of matrices, not those of a matrix and a vector, nor anything else."""
    with FlopCounterMode(display=False) as counter:
        yield counter


def inputs(config: LlmArchConfig, batch: int, length: int, source_length: int, device: Any) -> dict[str, Any]:
    def ids(count: int) -> torch.Tensor:
        return torch.zeros(batch, count, dtype=torch.long, device=device)

    if config.topology == "encoder-decoder":
        return {"input_ids": ids(source_length), "decoder_input_ids": ids(length)}
    return {"input_ids": ids(length)}


def cache_bytes(cache: Cache | EncoderDecoderCache) -> int:
    """Of the keys and values that a cache holds."""
    halves = [cache]
    if isinstance(cache, EncoderDecoderCache):
        halves = [cache.self_attention_cache, cache.cross_attention_cache]
    layers = [cast(Any, layer) for half in halves for layer in half.layers if getattr(layer, "keys", None) is not None]
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def forward_flops(model: Any, batch: int, length: int, source_length: int | None = None) -> int:
    """Of a pass in training: latents are expanded there."""
    given = inputs(model.config, batch, length, source_length or length, model.device)
    if model.config.topology != "encoder":
        given["use_cache"] = False
    with counted() as counter:
        model.train()(**given)
    return counter.get_total_flops()


@torch.no_grad()
def decoding(model: Any, batch: int, length: int, source_length: int | None = None) -> tuple[int, int]:
    """The products of the step that reads the last of `length` tokens, and the bytes of the cache after it."""
    given = inputs(model.eval().config, batch, length, source_length or length, model.device)
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    past: dict[str, Any] = {}
    if length > 1:
        first = model(**{**given, name: given[name][:, 1:]}, use_cache=True)
        past = {CACHE: first[CACHE]}
        if name == "decoder_input_ids":
            past["encoder_outputs"] = BaseModelOutput(last_hidden_state=first["encoder_last_hidden_state"])
    with counted() as counter:
        outputs = model(**{**given, name: given[name][:, :1]}, **past, use_cache=True)
    return counter.get_total_flops(), cache_bytes(outputs[CACHE])


def measure(
    config: LlmArchConfig,
    *,
    batch_size: int = 1,
    sequence_length: int,
    source_length: int | None = None,
    dtype: torch.dtype | str | None = None,
    architecture: str | None = None,
) -> Measured:
    """All of it for one config; needs no memory for weights, and as much time as the layers of the model take.

    Raises:
        ValueError: for a dtype that torch does not compute in.
    """
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and (kind is None or not kind.is_floating_point or kind.itemsize < 2):
        raise ValueError(f"dtype={dtype}: a model can be measured in float32, bfloat16, float16 and float64.")
    model = skeleton(config, architecture, kind)
    forward = forward_flops(model, batch_size, sequence_length, source_length)
    decodes = config.topology != "encoder" and "lm_head" in dict(model.named_children())
    flops, cached = decoding(model, batch_size, sequence_length, source_length) if decodes else (None, None)
    return Measured(parameters(model), forward, flops, cached)


def this_machine(dtype: torch.dtype = torch.float32) -> Hardware:
    """What a large matrix product and a large copy reach on this processor, or on its GPU in bf16; takes a second."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, dtype)
    a, b = (torch.rand(size, size, dtype=dtype, device=device) for _ in range(2))
    # Larger than any cache.
    long = torch.empty(2**26, dtype=torch.float32, device=device).fill_(1.0)
    other = torch.empty_like(long)
    flops = 2 * size**3 / fastest_of(lambda: torch.mm(a, b))
    bandwidth = 2 * long.nbytes / fastest_of(lambda: other.copy_(long))
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else free_memory()
    return Hardware("here", flops, bandwidth, memory, f"measured on this {device.type}, {str(dtype)[6:]}")


def fastest_of(work: Callable[[], Any], runs: int = 5) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    times = []
    for _ in range(runs + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])

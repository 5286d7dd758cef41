"""The closed forms that textbooks give, with a model's own numbers put in. What is shown is what is computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import prod
from typing import Any, cast

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from .steps import Pass, Step, cache_numbers, latent_sizes, layer_steps, layers_of

# The letters of the formulas below.
LETTERS = {
    "d": "hidden_size",
    "h": "query heads",
    "h_kv": "key/value heads",
    "d_h": "width of a head",
    "d_ff": "inner width of the feed-forward",
    "N": "tokens",
    "L": "layers",
    "b": "bytes of a number",
    "r_q": "q_lora_rank",
    "r_kv": "kv_lora_rank",
    "n": "qk_nope_head_dim",
    "r": "qk_rope_head_dim",
    "v": "v_head_dim",
    "E": "experts",
    "k": "experts a token",
    "d_e": "inner width of an expert",
    "d_s": "inner width of what every token passes",
}


@dataclass(frozen=True)
class Formula:
    """A closed form.

    Attributes:
        name: what it counts.
        symbols: as in a textbook.
        numbers: the same with numbers in place of the letters.
        value: what it comes to.
        counted: the same, summed over the model's steps.
    """

    name: str
    symbols: str
    numbers: str
    value: int
    counted: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


LETTER = re.compile("[A-Za-z_]+")


def evaluate(symbols: str, letters: dict[str, float]) -> int:
    """The value of a formula of sums, products, quotients and squares, in exact fractions.

    Raises:
        ValueError: where it is not a whole number.
    """
    values = {name: Fraction(value) for name, value in letters.items()}
    code = symbols.replace("·", "*").replace("²", "**2")
    value = Fraction(eval(code, {"__builtins__": {}}, values))  # our own texts, of this file
    if value.denominator != 1:
        raise ValueError(f"{symbols} is {value}, not a whole number, with {letters}.")
    return int(value)


def formula(name: str, symbols: str, letters: dict[str, float], counted: float) -> Formula:
    numbers = LETTER.sub(lambda letter: f"{letters[letter[0]]:.9g}", symbols)
    return Formula(name, symbols, numbers, evaluate(symbols, letters), int(counted))


def matrix(step: Step) -> int:
    """The size of the matrix that a step multiplies each of its rows by; 0 where it multiplies two activations."""
    return step.flops // (2 * prod(step.shape[:-1])) if step.weights else 0


def attention_forms(config: LlmArchConfig, letters: dict[str, float]) -> tuple[str, str]:
    """Weights, and FLOPs of N tokens without a window, of a layer's attention."""
    if config.attention_kind == "mla":
        query = "d·h·(n + r)" if config.q_lora_rank is None else "d·r_q + r_q·h·(n + r)"
        weights = f"{query} + d·(r_kv + r) + r_kv·h·(n + v) + h·v·d"
        return weights, f"2·N·({weights}) + 2·N²·h·(n + r + v)"
    if letters["h"] * letters["d_h"] != letters["d"]:
        weights = "2·d·h·d_h + 2·d·h_kv·d_h"
        return weights, f"2·N·({weights}) + 4·N²·h·d_h"
    if config.attention_kind == "mha":
        return "4·d²", "8·N·d² + 4·N²·d"
    return "2·d² + 2·d·d_h·h_kv", "4·N·d²·(1 + h_kv/h) + 4·N²·d"


def closed_forms(config: LlmArchConfig, length: int, size: float) -> list[Formula]:
    """Those of the last layer, without biases and norms, at batch 1, and of the cache of all layers."""
    return list(_closed_forms(config, length, size))


def _closed_forms(config: LlmArchConfig, length: int, size: float) -> Iterator[Formula]:
    last = config.num_hidden_layers - 1
    layer = layers_of(config)[last]
    letters: dict[str, float] = {
        "d": layer.hidden_size,
        "h": layer.num_attention_heads,
        "h_kv": layer.num_key_value_heads,
        "d_h": layer.head_dim,
        "d_ff": layer.intermediate_size,
        "N": length,
        "L": config.num_hidden_layers,
        "b": size,
    }
    if layer.attention_kind == "mla":
        letters |= zip(("r_kv", "n", "r", "v"), latent_sizes(layer), strict=True)
        letters["r_q"] = layer.q_lora_rank or 0
    run = Pass(1, length, source=length if config.topology == "encoder-decoder" else 0)
    steps = list(layer_steps(config, last, layer, run))
    products = sum(step.flops for step in steps if step.part == "attention")
    weights = {part: sum(matrix(step) for step in steps if step.part == part) for part in {s.part for s in steps}}
    size_form, flops_form = attention_forms(layer, letters)
    kind = layer.attention_kind.upper()
    yield formula(f"{kind} weights", size_form, letters, weights["attention"])
    yield formula(f"{kind} FLOPs", flops_form, letters, products)
    matrices = 3 if layer.ffn_type == "glu" else 2
    if config.mlp_layer_types is not None and config.mlp_layer_types[last] == "sparse":
        experts, picks = cast(int, layer.num_experts), layer.num_experts_per_tok
        letters |= {"E": experts, "k": picks, "d_e": layer.moe_intermediate_size or layer.intermediate_size}
        letters["d_s"] = layer.shared_width
        every = "E·d" + (f" + {matrices}·d·d_s" if layer.shared_width else "") + (" + d" * layer.shared_expert_gate)
        rest = weights["router"] + weights.get("shared expert", 0)
        for name, letter, count in (("experts' weights", "E", experts), ("active weights", "k", picks)):
            yield formula(name, f"{letter}·{matrices}·d·d_e + {every}", letters, count * weights["experts"] + rest)
    else:
        name = "GLU weights" if matrices == 3 else "FFN weights"
        yield formula(name, f"{matrices}·d·d_ff", letters, weights["feed-forward"])
    if config.topology != "encoder" and not config.is_heterogeneous:
        form = "2·L·h_kv·d_h·b"
        if layer.attention_kind == "mla":
            form = "L·(r_kv + r)·b" if layer.mla_cache == "latent" else "L·h·(n + r + v)·b"
        yield formula("KV bytes a token", form, letters, config.num_hidden_layers * cache_numbers(layer) * size)

"""The receipt of a change: what it claims, what it costs and saves, and how far the outputs have moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_llmarch.model.configuration_llmarch import LlmArchConfig
from hf_llmarch.study.analysis import receptive_field

from .subject import Subject


@dataclass(frozen=True)
class Step:
    """One operation of a chain.

    Attributes:
        operation, options: what was done.
        exact: whether it is exact up to rounding.
        why: why it is, or what it approximates.
        retrain: what has to be trained again.
    """

    operation: str
    options: Mapping[str, Any]
    exact: bool
    why: str
    retrain: str


@dataclass(frozen=True)
class Cost:
    """What a model costs, for a text of `length` tokens.

    Attributes:
        parameters: numbers that are stored; a tied head counts once.
        cache_bytes: of keys and values (or latents) of the whole text, in the model's dtype.
        flops: floating-point operations of a forward pass for the text's last token: two for each weight that it is
            multiplied with, and two for each score and each weighted value.
        length: `max_position_embeddings` of the model before.
    """

    parameters: int
    cache_bytes: int
    flops: int
    length: int


@dataclass(frozen=True)
class Difference:
    """How far the logits have moved on a sample.

    Attributes:
        largest, mean: absolute difference of the logits.
        spread: largest minus smallest logit before.
        kl: mean Kullback-Leibler divergence, in nats, of the new distribution from the old one; None for a model
            without logits.
        top1: share of tokens with the same likeliest token; None for a model without logits.
        tokens: in the sample.
    """

    largest: float
    mean: float
    spread: float
    kl: float | None
    top1: float | None
    tokens: int


@dataclass(frozen=True)
class Receipt:
    """What a chain of operations did.

    Attributes:
        steps: the operations.
        before, after: what the model cost and costs.
        difference: measured; None: not measured, or nothing that could be compared.
        sample: what it was measured on.
    """

    steps: tuple[Step, ...]
    before: Cost
    after: Cost
    difference: Difference | None
    sample: str

    @property
    def exact(self) -> bool:
        """Whether all operations are."""
        return all(step.exact for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The receipt in JSON's own types."""
        return {"exact": self.exact, **asdict(self)}


# Tensors that no token is multiplied with: looked up, added, or applied channel by channel.
NO_PRODUCT = ("embed_tokens", "embed_types", "embed_positions", "norm", "relative_attention_bias")


def cost_of(subject: Subject, length: int | None = None) -> Cost:
    """What a model costs, from its config and the shapes of its tensors."""
    config, infos = subject.config, subject.weights.infos
    length = length or config.max_position_embeddings
    repeats = config.num_hidden_layers // (config.layer_groups or config.num_hidden_layers)
    flops = Fraction(0)
    for name, info in infos.items():
        if len(info.shape) < 2 or any(part in name for part in NO_PRODUCT):
            continue
        share = Fraction(repeats if ".layers." in f".{name}" else 1)
        if ".experts." in name and config.num_experts is not None:
            share *= Fraction(config.num_experts_per_tok, config.num_experts)
        flops += 2 * prod(info.shape) * share
    if subject.has_head and config.tie_word_embeddings:
        flops += 2 * config.vocab_size * (config.embedding_size or config.hidden_size)
    cached = 0
    for reach in receptive_field(config, length):
        layer = config.layer(reach.layer)
        scores, values, kept = widths(layer)
        flops += 2 * reach.direct * layer.num_attention_heads * (scores + values)
        # A sliding layer's cache holds its window; the others hold the text.
        cached += kept * (reach.direct if reach.kind == "sliding_attention" else length)
    bits = next(iter(infos.values())).dtype.itemsize
    parameters = sum(prod(info.shape) for info in infos.values())
    return Cost(parameters, cached * bits if config.topology != "encoder" else 0, int(flops), length)


def widths(layer: LlmArchConfig) -> tuple[int, int, int]:
    """Of a layer: width of a query, of a value, and the numbers that it caches a token."""
    if layer.attention_kind != "mla":
        return layer.head_dim, layer.head_dim, 2 * layer.num_key_value_heads * layer.head_dim
    scores, values = layer.query_key_head_dim, layer.v_head_dim
    whole = layer.num_attention_heads * (scores + values)
    latent = layer.kv_lora_rank + layer.qk_rope_head_dim
    return scores, values, latent if layer.mla_cache == "latent" else whole


@torch.no_grad()
def outputs(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, bool]:
    """A model's logits, or without a head its last hidden states, in fp32; and which of them they are."""
    training = model.training
    model.eval()
    try:
        out = model(tokens.to(model.device), use_cache=False)
    finally:
        model.train(training)
    is_head = "logits" in out
    return (out.logits if is_head else out.last_hidden_state).float().cpu(), is_head


def compare(
    before: PreTrainedModel, after: PreTrainedModel, tokens: Tensor, vocabulary: Sequence[tuple[int, int]] | None = None
) -> Difference | None:
    """How far two models' outputs lie apart on the same tokens; None where they are of different widths.

    Args:
        tokens: `(batch, length)`, ids of the model before.
        vocabulary: where it has changed, the ids of each token that both have. Tokens that the model after lacks are
            left out of the sample.
    """
    renamed = tokens
    if vocabulary is not None:
        now = torch.full((before.config.vocab_size,), -1)
        now[[old for old, _ in vocabulary]] = torch.tensor([new for _, new in vocabulary])
        known = sorted(old for old, _ in vocabulary)
        # A token that is gone gives its place to one that is there.
        tokens = torch.where(now[tokens] >= 0, tokens, torch.tensor(known)[tokens % len(known)])
        renamed = now[tokens]
    (a, is_head), (b, _) = outputs(before, tokens), outputs(after, renamed)
    if vocabulary is not None and is_head and a.shape[-1] == before.config.vocab_size:
        a, b = a[..., [old for old, _ in vocabulary]], b[..., [new for _, new in vocabulary]]
    if a.shape != b.shape:
        return None
    apart = (a - b).abs()
    kl = top1 = None
    if is_head and a.shape[-1] > 1:
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).mean().item()
        top1 = (a.argmax(-1) == b.argmax(-1)).float().mean().item()
    spread = (a.max() - a.min()).item()
    return Difference(apart.max().item(), apart.mean().item(), spread, kl, top1, tokens.numel())

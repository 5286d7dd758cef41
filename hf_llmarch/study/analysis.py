"""What a config implies, worked out from it alone: parameters, FLOPs, cache, memory, intensity, shapes and reach.

No weights are read and nothing here imports torch. The numbers are sums over `steps`, which tests compare with the
model itself (on the meta device), with torch's counter of matrix products and with the caches of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from .formulas import Formula, closed_forms
from .hardware import Hardware, Roofline
from .steps import (
    Pass,
    Step,
    architecture_of,
    cache_numbers,
    cached_window,
    cross_numbers,
    layers_of,
    model_steps,
)

# Bytes of a number.
DTYPES = {
    "float64": 8.0,
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}
# Bytes that an optimiser keeps a parameter, in fp32 if not said otherwise: AdamW two moments (arXiv 1711.05101), SGD
# with momentum one, 8-bit AdamW two of a byte (arXiv 2110.02861).
OPTIMIZERS = {"adamw": 8.0, "adamw_8bit": 2.0, "momentum": 4.0, "sgd": 0.0}


@dataclass(frozen=True)
class LayerFacts:
    """One layer.

    Attributes:
        stack: `encoder` or `decoder`.
        kind: `full_attention`, `sliding_attention` or `chunked_attention`.
        heads, key_value_heads: of attention; `head_width` is that of a query.
        feed_forward: `dense` or `sparse`.
        width: inner width of the feed-forward, or of one expert.
        parameters: those of its own; a layer that shares its block with an earlier one has none.
        flops: of its matrix products, in a forward pass over batch and length.
        decode_flops: in the step that reads the last token.
        cache_bytes_per_token: what a token adds to the cache while it is in the window.
        cache_bytes: at the length, in a dynamic cache.
    """

    stack: str
    layer: int
    kind: str
    attention: str
    heads: int
    key_value_heads: int
    head_width: int
    feed_forward: str
    width: int
    parameters: int
    active_parameters: int
    flops: int
    decode_flops: int
    cache_bytes_per_token: float
    cache_bytes: float


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training step on one device, without what frameworks and fragmentation add.

    Weights and gradients are in the dtype; with 16 bits the optimiser keeps a master copy in fp32 beside its moments
    (arXiv 1910.02054 section 3.1: 16 bytes a parameter with AdamW).

    Attributes:
        activations: what autograd keeps for the backward pass, without dropout, where attention is one fused kernel; an
            estimate, within 15 % of what torch is seen to keep.
        scores: what attention that writes its scores down keeps in addition.
        checkpointed: the activations where each block keeps its input alone, and the block that is being computed again
            all of its own.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    scores: float
    checkpointed: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total_checkpointed(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.checkpointed


@dataclass(frozen=True)
class ServingMemory:
    """Bytes of decoding at batch and length.

    Attributes:
        kv_cache: of a dynamic cache, which of a windowed layer keeps one token less than the window.
        static_kv_cache: of a static one, made for that length.
    """

    weights: float
    kv_cache: float
    static_kv_cache: float

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache


@dataclass(frozen=True)
class Analysis:
    """What `analyze` finds.

    FLOPs are those of matrix products, a multiplication and an addition being two, as torch's counter has them. Norms,
    activations, softmax, rotations, lookups and the loss are left out; so is the masked half of causal attention left
    in, which kernels in plain operations compute.

    Attributes:
        parameters: each once, tied ones too.
        active_parameters: those that a token passes: of experts the ones that it goes to. The embedding counts whole.
        active_without_embedding: the same without the tables of which a token reads a row; a head that is tied to one
            counts. Papers count active parameters in either way.
        embedding_parameters: of token, type and position embeddings; not of an output head of its own.
        parts: parameters by part.
        forward_flops: of a pass over `batch_size` x `sequence_length` with logits for every token, as in training.
        backward_flops: twice that, each product having two gradients.
        prefill_flops: the same pass with logits for the last token alone, as `generate` begins.
        decode_flops: the step that reads the last of the tokens, the others being cached. 0 for an encoder.
        kv_cache_bytes_per_token: what a token adds to the cache of all layers, before any window is full.
        kv_cache_bytes: at batch and length, of cross-attention too.
    """

    config: LlmArchConfig
    architecture: str
    batch_size: int
    sequence_length: int
    source_length: int
    dtype: str
    optimizer: str
    parameters: int
    active_parameters: int
    active_without_embedding: int
    embedding_parameters: int
    parts: dict[str, int]
    layers: list[LayerFacts]
    forward_flops: int
    prefill_flops: int
    decode_flops: int
    kv_cache_bytes_per_token: float
    kv_cache_bytes: float
    training: TrainingMemory
    serving: ServingMemory
    prefill_bytes: float
    decode_bytes: float

    @property
    def backward_flops(self) -> int:
        return 2 * self.forward_flops

    @property
    def training_flops(self) -> int:
        """Of a step, without checkpointing."""
        return self.forward_flops + self.backward_flops

    @property
    def checkpointed_flops(self) -> int:
        """Of a step in which every block runs forward twice."""
        return self.training_flops + sum(layer.flops for layer in self.layers)

    @cached_property
    def formulas(self) -> list[Formula]:
        """The textbook's closed forms, of the last layer."""
        return closed_forms(self.config, self.sequence_length, DTYPES[self.dtype])

    def rooflines(self, hardware: Hardware) -> dict[str, Roofline]:
        """Prefill and a decoding step on hardware. What is moved: every weight once (of experts those that some token
        goes to, were they picked evenly), and the cache; what steps hand to each other stays on the chip."""
        passes = {"prefill": Roofline(hardware, self.prefill_flops, self.prefill_bytes)}
        if self.decode_flops:
            passes["decode"] = Roofline(hardware, self.decode_flops, self.decode_bytes)
        return passes

    def shapes(self, layer: int | None = None) -> list[Step]:
        """The data on its way through one block (None: the last) in a forward pass."""
        run = Pass(self.batch_size, self.sequence_length, source=self.source_length)
        index = self.config.num_hidden_layers - 1 if layer is None else layer
        stack = "encoder" if self.config.topology == "encoder" else "decoder"
        return [s for s in model_steps(self.config, run, self.architecture) if (s.layer, s.stack) == (index, stack)]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        values = {name: value for name, value in vars(self).items() if name not in ("config", "formulas")}
        values |= {name: asdict(values[name]) for name in ("training", "serving")}
        values["training"] |= {"total": self.training.total, "total_checkpointed": self.training.total_checkpointed}
        values["serving"]["total"] = self.serving.total
        values["layers"] = [asdict(layer) for layer in self.layers]
        for name in ("backward_flops", "training_flops", "checkpointed_flops"):
            values[name] = getattr(self, name)
        values["formulas"] = [formula.to_dict() for formula in self.formulas]
        values["shapes"] = [{"name": step.name, "part": step.part, "shape": step.shape} for step in self.shapes()]
        return values


def analyze(
    config: LlmArchConfig,
    *,
    batch_size: int = 1,
    sequence_length: int | None = None,
    source_length: int | None = None,
    dtype: Any = None,
    optimizer: str = "adamw",
    architecture: str | None = None,
) -> Analysis:
    """Work out what a config implies.

    Args:
        sequence_length: tokens a row; None: `max_position_embeddings`.
        source_length: of an encoder-decoder, the tokens of the text that it reads; None: `sequence_length`.
        dtype: of weights, cache and activations, a torch dtype or its name; None: the config's, else bfloat16.
        optimizer: one of `OPTIMIZERS`.
        architecture: the class of ours; None: the one that the config names, else the one over the vocabulary.

    Raises:
        ValueError: for a length, dtype, optimiser or class that cannot be, naming those that can.
    """
    length = config.max_position_embeddings if sequence_length is None else sequence_length
    source = (length if source_length is None else source_length) if config.topology == "encoder-decoder" else 0
    for name, value in (("batch_size", batch_size), ("sequence_length", length)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    kind = str(dtype or config.dtype or "bfloat16").removeprefix("torch.")
    for name, given, known in (("dtype", kind, DTYPES), ("optimizer", optimizer, OPTIMIZERS)):
        if given not in known:
            raise ValueError(f"{name}={given!r} is not one of {', '.join(known)}.")
    size, architecture = DTYPES[kind], architecture or architecture_of(config)

    forward = model_steps(config, Pass(batch_size, length, source=source), architecture)
    prefill = model_steps(config, Pass(batch_size, length, source=source, logits=1), architecture)
    step = Pass(batch_size, 1, past=length - 1, source=source, encodes=False, absorbs=True)
    decode = [] if config.topology == "encoder" else model_steps(config, step, architecture)
    layers = list(layer_facts(config, forward, decode, batch_size, length, size))
    cached = sum(layer.cache_bytes for layer in layers)
    cross = batch_size * source * sum(cross_numbers(config)) * size
    parameters, active, fp32 = total(forward, "parameters"), total(forward, "active"), DTYPES["float32"]
    tables = [s for s in forward if s.name.rpartition("embed_")[2] in ("tokens", "types", "positions")]
    tied = config.tie_word_embeddings and any(s.name == "lm_head" for s in forward)
    return Analysis(
        config=config,
        architecture=architecture,
        batch_size=batch_size,
        sequence_length=length,
        source_length=source,
        dtype=kind,
        optimizer=optimizer,
        parameters=parameters,
        active_parameters=active,
        active_without_embedding=active - sum(s.active for s in tables if not (tied and s.name.endswith("tokens"))),
        embedding_parameters=sum(s.parameters for s in forward if s.part in ("embedding", "positions")),
        parts=by_part(forward),
        layers=layers,
        forward_flops=total(forward, "flops"),
        prefill_flops=total(prefill, "flops"),
        decode_flops=total(decode, "flops"),
        kv_cache_bytes_per_token=sum(layer.cache_bytes_per_token for layer in layers),
        kv_cache_bytes=cached + cross,
        training=TrainingMemory(
            weights=parameters * size,
            gradients=parameters * size,
            optimizer=parameters * (OPTIMIZERS[optimizer] + (fp32 if size < fp32 else 0)),
            activations=total(forward, "kept") * size,
            scores=total(forward, "scores") * size,
            checkpointed=checkpointed(config, forward, batch_size, length, source) * size,
        ),
        serving=ServingMemory(
            weights=parameters * size,
            kv_cache=cached + cross,
            static_kv_cache=sum(static_cache(config, batch_size, length, size)) + cross,
        ),
        prefill_bytes=moved(prefill, batch_size * length, config) * size + cached + cross,
        decode_bytes=moved(decode, batch_size, config) * size + cached + cross,
    )


def total(steps: Iterable[Step], name: str) -> int:
    return sum(getattr(step, name) for step in steps)


def by_part(steps: Iterable[Step]) -> dict[str, int]:
    parts: dict[str, int] = {}
    for step in steps:
        parts[step.part] = parts.get(step.part, 0) + step.parameters
    return {part: count for part, count in parts.items() if count}


def cached_tokens(layer: LlmArchConfig, kind: str, length: int) -> int:
    """Tokens that a dynamic cache keeps of a text so long."""
    window = cached_window(layer, kind)
    return length if window is None else min(length, window - 1)


def static_cache(config: LlmArchConfig, batch: int, length: int, size: float) -> Iterator[float]:
    """Bytes of each layer in a static cache for texts so long."""
    if config.topology != "encoder":
        for layer, kind in zip(layers_of(config), config.layer_types, strict=True):
            yield batch * min(length, cached_window(layer, kind) or length) * cache_numbers(layer) * size


def layer_facts(
    config: LlmArchConfig, forward: list[Step], decode: list[Step], batch: int, length: int, size: float
) -> Iterator[LayerFacts]:
    stacks = {"encoder" if config.topology == "encoder" else "decoder": config}
    if config.topology == "encoder-decoder":
        stacks = {"encoder": config.source_config(), **stacks}
    sums: dict[tuple[str, int | None], list[int]] = {}
    for step in forward:
        row = sums.setdefault((step.stack, step.layer), [0, 0, 0, 0])
        row[0], row[1], row[2] = row[0] + step.parameters, row[1] + step.active, row[2] + step.flops
    for step in decode:
        sums[step.stack, step.layer][3] += step.flops
    for stack, stacked in stacks.items():
        sparse = stacked.mlp_layer_types or ["dense"] * stacked.num_hidden_layers
        for i, (layer, kind) in enumerate(zip(layers_of(stacked), stacked.layer_types, strict=True)):
            parameters, active, flops, decoding = sums[stack, i]
            caches = stack == "decoder"
            yield LayerFacts(
                stack=stack,
                layer=i,
                kind=kind,
                attention=layer.attention_kind,
                heads=layer.num_attention_heads,
                key_value_heads=layer.num_key_value_heads,
                head_width=layer.query_key_head_dim,
                feed_forward=sparse[i],
                width=(layer.moe_intermediate_size if sparse[i] == "sparse" else None) or layer.intermediate_size,
                parameters=parameters,
                active_parameters=active,
                flops=flops,
                decode_flops=decoding,
                cache_bytes_per_token=cache_numbers(layer) * size if caches else 0,
                cache_bytes=batch * cached_tokens(layer, kind, length) * cache_numbers(layer) * size if caches else 0,
            )


def checkpointed(config: LlmArchConfig, forward: list[Step], batch: int, length: int, source: int) -> int:
    """Numbers that are kept where each block keeps its input alone: those, what is outside of the blocks, and all that
    the largest block keeps."""
    blocks: dict[tuple[str, int], int] = {}
    outside = 0
    for step in forward:
        if step.layer is None:
            outside += step.kept
        else:
            blocks[step.stack, step.layer] = blocks.get((step.stack, step.layer), 0) + step.kept
    inputs = batch * length * config.hidden_size * config.num_hidden_layers
    if config.topology == "encoder-decoder":
        encoder = config.source_config()
        inputs += batch * source * encoder.hidden_size * encoder.num_hidden_layers
    return outside + inputs + max(blocks.values())


def moved(steps: Iterable[Step], tokens: int, config: LlmArchConfig) -> float:
    """Weights that a pass reads, each once: of experts the ones that some token goes to, were all picked alike."""
    share = 1.0
    if config.num_experts is not None:
        share = 1 - (1 - config.layer_configs()[-1].num_experts_per_tok / config.num_experts) ** tokens
    # A step that has nothing to do reads nothing: cross-attention's keys of a text that is known.
    return sum(step.weights * (share if step.part == "experts" else 1) for step in steps if prod(step.shape))


@dataclass(frozen=True)
class LayerReach:
    """How far back, or to either side, the last token of a text sees at one layer.

    Attributes:
        layer: index.
        kind: `full_attention`, `sliding_attention` or `chunked_attention`.
        positions: the position encoding in force, with RoPE's base; `none` for a NoPE layer.
        direct: tokens that the layer's own attention can read, itself included.
        reach: tokens of the input that can have influenced the layer's output, through this and all layers before it.
    """

    layer: int
    kind: str
    positions: str
    direct: int
    reach: int


def receptive_field(config: LlmArchConfig, sequence_length: int | None = None) -> list[LayerReach]:
    """The reach of each layer for the last of `sequence_length` tokens (None: `max_position_embeddings`).

    The earliest token behind a state is found by going down: from a token to the first one that its layer reads, from
    there to the first that the layer below reads, and so on.
    """
    length = sequence_length or config.max_position_embeddings
    field = []
    for i, kind in enumerate(config.layer_types):
        earliest = length - 1
        for below in range(i, -1, -1):
            earliest = first_read(config.layer(below), config.layer_types[below], earliest)
        direct = length - first_read(config.layer(i), kind, length - 1)
        field.append(LayerReach(i, kind, positions_of(config, i, kind), direct, length - earliest))
    return field


def first_read(layer: LlmArchConfig, kind: str, token: int) -> int:
    """Index of the first token that `token` reads at this layer."""
    if kind == "sliding_attention" and layer.sliding_window is not None:
        return max(0, token - layer.sliding_window + (layer.topology != "encoder"))
    if kind == "chunked_attention" and layer.attention_chunk_size is not None:
        return token // layer.attention_chunk_size * layer.attention_chunk_size
    return 0


def positions_of(config: LlmArchConfig, layer: int, kind: str) -> str:
    if layer in (config.nope_layers or ()):
        return "none"
    if config.position_encoding != "rope":
        return config.position_encoding
    parameters = config.rope_by_layer_type[kind]
    return f"rope ({parameters['rope_type']}, theta {parameters['rope_theta']:g})"

"""A forward pass as a list of steps: what each computes, its parameters, its matrix products and the shape it returns.

Everything that `analysis` says of a model is a sum over these steps, so each fact about a module is stated here, once,
and from the config alone: nothing imports torch. Names are those of the modules, so that the tests can compare every
step with the module it describes.

Letters: `B` batch, `T` tokens that are read, `S` keys, `C` hidden_size, `H` query heads, `G` key/value heads, `D` head
width, `I` inner width of a feed-forward, `E` experts, `K` experts a token, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    Attributes:
        part: what it is a part of: embedding, positions, attention, cross-attention, feed-forward, router, experts,
            shared expert, norms, head.
        name: its module's, below the model; the operations without parameters have a name of their own.
        shape: of what it returns, with the batch.
        parameters: without those that it shares with an earlier step.
        active: those of them that one token passes (of experts, its own).
        weights: the numbers of the matrices that it multiplies by, shared or not: what has to be read to run it.
        flops: of its matrix products, a multiplication and an addition being two.
        kept: numbers that autograd keeps of it for the backward pass.
        scores: those that only attention that writes its scores down keeps, in addition.
        layer: index; None outside of the layers.
        stack: `encoder` or `decoder`.
    """

    part: str
    name: str
    shape: Shape
    parameters: int = 0
    active: int = 0
    weights: int = 0
    flops: int = 0
    kept: int = 0
    scores: int = 0
    layer: int | None = None
    stack: str = "decoder"


@dataclass(frozen=True)
class Pass:
    """What a model is run on.

    Attributes:
        batch: rows.
        tokens: read in this pass, a row.
        past: tokens a row whose keys and values are cached.
        source: of an encoder-decoder, the tokens of the text it reads, a row.
        encodes: whether that text is read in this pass; else its keys and values are cached.
        logits: the tokens a row that get logits; None: all.
        absorbs: latent attention may fold its up-projections into the query and the output, as the model does when it
            decodes (DeepSeek-V2, arXiv 2405.04434 section 2.1.2).
    """

    batch: int
    tokens: int
    past: int = 0
    source: int = 0
    encodes: bool = True
    logits: int | None = None
    absorbs: bool = False

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


def cached_window(layer: LlmArchConfig, kind: str) -> int | None:
    """Tokens that a layer's cache is bounded by, None: none."""
    return {"sliding_attention": layer.sliding_window, "chunked_attention": layer.attention_chunk_size}.get(kind)


def keys_of(layer: LlmArchConfig, kind: str, run: Pass) -> int:
    """Keys that the queries of a pass are multiplied with, a row: those of a window's cache are one fewer than the
    window, which the newest token fills up."""
    window = cached_window(layer, kind)
    return run.tokens + (run.past if window is None else min(run.past, window - 1))


def linear(
    part: str,
    name: str,
    run: Pass,
    inputs: int,
    outputs: int,
    bias: bool,
    *,
    tokens: int | None = None,
    kept: int = 0,
    tied: bool = False,
) -> Step:
    """A projection of `tokens` a row (None: those of the pass); `kept` numbers a token."""
    tokens = run.tokens if tokens is None else tokens
    rows, weight = run.batch * tokens, inputs * outputs
    own = (0 if tied else weight) + (outputs if bias else 0)
    return Step(
        part,
        name,
        (run.batch, tokens, outputs),
        own,
        own,
        weight + (outputs if bias else 0),
        2 * rows * weight,
        rows * kept,
    )


def norm(
    name: str, run: Pass, config: LlmArchConfig, width: int, *, bias: bool | None = None, tokens: int | None = None
) -> Step:
    """Keeps its input, for RMSNorm also the normed one, and what it returns, which some projection reads."""
    tokens = run.tokens if tokens is None else tokens
    size = width * (2 if (config.norm_bias if bias is None else bias) else 1)
    copies = 3 if config.norm_type == "rmsnorm" else 2
    return Step("norms", name, (run.batch, tokens, width), size, size, size, kept=run.batch * tokens * width * copies)


def plain(
    part: str, name: str, shape: Shape, parameters: int = 0, *, flops: int = 0, kept: int = 0, scores: int = 0
) -> Step:
    """A step without a matrix product by a weight."""
    return Step(part, name, shape, parameters, parameters, parameters, flops, kept, scores)


# -- attention ---------------------------------------------------------------------------------------------------------


def query_key_norms(layer: LlmArchConfig, run: Pass, tokens: int) -> Iterator[Step]:
    heads, groups, width = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    if layer.qk_norm == "none":
        return
    bias = layer.norm_bias if layer.qk_norm_bias is None else layer.qk_norm_bias
    for name, count, read in (("q_norm", heads, run.tokens), ("k_norm", groups, tokens)):
        size = (width if layer.qk_norm == "head" else count * width) * (2 if bias else 1)
        shape = (run.batch, read, count, width)
        yield plain("norms", name, shape, size, kept=2 * run.batch * read * count * width)


def scores_and_mix(
    part: str, run: Pass, heads: int, keys: int, key_width: int, value_width: int, sinks: bool
) -> Iterator[Step]:
    """The two products of attention, over the whole rectangle of queries and keys: kernels in plain operations compute
    also what the mask then hides."""
    batch, tokens = run.batch, run.tokens
    square = batch * heads * tokens * keys
    if sinks:
        yield plain(part, "sinks", (heads,), heads)
    # softmax in fp32 keeps its result, and the copy in the model's dtype that the values are multiplied by.
    yield plain(part, "q · k", (batch, heads, tokens, keys), flops=2 * square * key_width, scores=2 * square)
    yield plain(
        part,
        "weights · v",
        (batch, heads, tokens, value_width),
        flops=2 * square * value_width,
        kept=batch * heads * tokens * value_width,
    )


def attention(layer: LlmArchConfig, run: Pass, kind: str) -> Iterator[Step]:
    """MHA, GQA and MQA."""
    part, heads, groups, width = "attention", layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    for name, count in (("q_proj", heads), ("k_proj", groups), ("v_proj", groups)):
        yield linear(part, name, run, layer.hidden_size, count * width, layer.attention_bias, kept=count * width)
    yield from query_key_norms(layer, run, run.tokens)
    yield from scores_and_mix(part, run, heads, keys_of(layer, kind, run), width, width, layer.attention_sinks)
    yield linear(part, "o_proj", run, heads * width, layer.hidden_size, layer.attention_output_bias)


def absorbing_is_cheaper(layer: LlmArchConfig, tokens: int, keys: int) -> bool:
    """As the model decides, by the multiplications of a head."""
    rank, nope, rope, value = latent_sizes(layer)
    up = rank * (nope + value)
    absorbed = tokens * (keys * (2 * rank + rope) + up)
    return absorbed < keys * up + tokens * keys * (nope + rope + value)


def latent_sizes(layer: LlmArchConfig) -> tuple[int, int, int, int]:
    """kv_lora_rank, and the widths of a head's part without position, of its rotated part and of its values."""
    return layer.kv_lora_rank, layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim


def latent_attention(layer: LlmArchConfig, run: Pass, kind: str) -> Iterator[Step]:
    """MLA. What is cached decides how many tokens are expanded again: of latents all, of whole keys the new ones."""
    part, heads = "attention", layer.num_attention_heads
    rank, nope, rope, value = latent_sizes(layer)
    width, keys = layer.hidden_size, keys_of(layer, kind, run)
    query = heads * (nope + rope)
    if layer.q_lora_rank is None:
        yield linear(part, "q_proj", run, width, query, False, kept=query)
    else:
        yield linear(part, "q_a_proj", run, width, layer.q_lora_rank, layer.attention_bias)
        yield norm("q_a_layernorm", run, layer, layer.q_lora_rank)
        yield linear(part, "q_b_proj", run, layer.q_lora_rank, query, False, kept=query)
    yield linear(part, "kv_a_proj_with_mqa", run, width, rank + rope, layer.attention_bias)
    yield norm("kv_a_layernorm", run, layer, rank)
    up = linear(
        part,
        "kv_b_proj",
        run,
        rank,
        heads * (nope + value),
        False,
        tokens=keys if layer.mla_cache == "latent" else run.tokens,
        # The keys are put together anew, with the shared rotated part in each head.
        kept=heads * (nope + rope + value),
    )
    absorbs = (
        run.absorbs
        and layer.mla_cache == "latent"
        and not layer.attention_sinks
        and absorbing_is_cheaper(layer, run.tokens, keys)
    )
    if absorbs:
        tokens = run.rows * heads
        yield replace(up, shape=(run.batch, heads, run.tokens, rank), flops=2 * tokens * rank * (nope + value), kept=0)
        yield from scores_and_mix(part, run, heads, keys, rank + rope, rank, layer.attention_sinks)
    else:
        yield up
        yield from scores_and_mix(part, run, heads, keys, nope + rope, value, layer.attention_sinks)
    yield linear(part, "o_proj", run, heads * value, width, layer.attention_output_bias)


def cross_attention(config: LlmArchConfig, layer: LlmArchConfig, run: Pass) -> Iterator[Step]:
    """A decoder's queries on the encoder's states, whose keys and values are made once a text."""
    part, heads, groups, width = "cross-attention", layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    read = (config.source_stack or {}).get("hidden_size", config.hidden_size)
    fresh = run.source if run.encodes else 0
    yield linear(part, "q_proj", run, layer.hidden_size, heads * width, layer.attention_bias, kept=heads * width)
    for name in ("k_proj", "v_proj"):
        yield linear(part, name, run, read, groups * width, layer.attention_bias, tokens=fresh, kept=groups * width)
    yield from query_key_norms(layer, run, fresh)
    yield from scores_and_mix(part, run, heads, run.source, width, width, layer.attention_sinks)
    yield linear(part, "o_proj", run, heads * width, layer.hidden_size, layer.attention_output_bias)


# -- feed-forward ------------------------------------------------------------------------------------------------------


def beta(layer: LlmArchConfig) -> int:
    """Parameters of an activation."""
    return 1 if layer.swish_beta == "learned" else 0


def feed_forward(
    layer: LlmArchConfig, run: Pass, width: int, part: str = "feed-forward", prefix: str = ""
) -> Iterator[Step]:
    """A GLU keeps both halves, what the activation makes of one, and their product; an MLP what is before and after."""
    size, bias = layer.hidden_size, layer.ffn_bias
    if layer.ffn_type == "glu":
        yield linear(part, f"{prefix}gate_proj", run, size, width, bias, kept=2 * width)
    yield linear(part, f"{prefix}up_proj", run, size, width, bias, kept=width)
    if beta(layer):
        yield plain(part, f"{prefix}act_fn", (run.batch, run.tokens, width), beta(layer))
    yield replace(linear(part, f"{prefix}down_proj", run, width, size, bias), kept=run.rows * width)


def expert_tokens(layer: LlmArchConfig, run: Pass) -> int:
    """Tokens that all experts of a layer work on. A capacity drops a token's weight, not the work on it; where experts
    pick, each takes ceil(T K / E x capacity_factor) tokens of a row."""
    experts, picks = cast(int, layer.num_experts), layer.num_experts_per_tok
    if layer.router_type != "expert_choice":
        return run.rows * picks
    exact = Fraction(str(layer.capacity_factor or 1.0)) * picks / experts
    room = -(run.tokens * -exact.numerator // exact.denominator)
    return run.batch * experts * min(run.tokens, room)


def sparse_feed_forward(layer: LlmArchConfig, run: Pass) -> Iterator[Step]:
    """A router, experts, and what every token passes besides."""
    experts, picks, size = cast(int, layer.num_experts), layer.num_experts_per_tok, layer.hidden_size
    width = layer.moe_intermediate_size or layer.intermediate_size
    yield linear("router", "gate", run, size, experts, layer.router_bias, kept=2 * experts)
    tokens, inner = expert_tokens(layer, run), width * (2 if layer.ffn_type == "glu" else 1)
    weight = size * inner + width * size
    one = weight + (inner + size if layer.ffn_bias else 0)
    yield Step(
        "experts",
        "experts",
        (tokens, size),
        experts * one + beta(layer),
        picks * one + beta(layer),
        experts * one,
        2 * tokens * weight,
        # As a feed-forward, on copies of the tokens, and each result before it is weighed.
        tokens * (2 * size + inner + 2 * width),
    )
    if layer.shared_width:
        yield from feed_forward(layer, run, layer.shared_width, "shared expert", "shared_experts.")
    if layer.shared_expert_gate:
        yield linear("shared expert", "shared_expert_gate", run, size, 1, False, kept=1)


# -- cache -------------------------------------------------------------------------------------------------------------


def layers_of(config: LlmArchConfig) -> list[LlmArchConfig]:
    """The config of each layer."""
    if config.is_heterogeneous:
        return [config.layer(i) for i in range(config.num_hidden_layers)]
    return [config] * config.num_hidden_layers


def cache_numbers(layer: LlmArchConfig) -> int:
    """Numbers that a token leaves in the cache of a layer: keys and values; of MLA the latent and the rotated key, or
    what they expand to."""
    if layer.attention_kind != "mla":
        return 2 * layer.num_key_value_heads * layer.head_dim
    rank, nope, rope, value = latent_sizes(layer)
    return rank + rope if layer.mla_cache == "latent" else layer.num_attention_heads * (nope + rope + value)


def cross_numbers(config: LlmArchConfig) -> list[int]:
    """Numbers that a token of the source leaves in the cache of each layer's cross-attention."""
    if config.topology != "encoder-decoder":
        return []
    return [2 * layer.num_key_value_heads * layer.head_dim for layer in layers_of(config)]


# -- layers ------------------------------------------------------------------------------------------------------------

ATTENTIONS: dict[str, Callable[[LlmArchConfig, Pass, str], Iterator[Step]]] = {
    "mha": attention,
    "gqa": attention,
    "mqa": attention,
    "mla": latent_attention,
}
# The slots around a branch that hold a norm, by placement; see `norms.NORM_SLOTS`, which cannot be read without torch.
SLOTS: dict[str, tuple[str, ...]] = {
    "pre": ("pre",),
    "post": ("out",),
    "sandwich": ("pre", "post"),
    "branch": ("post",),
}


def around(
    steps: Iterable[Step], place: str, module: str, slots: tuple[str, ...], run: Pass, layer: LlmArchConfig
) -> Iterator[Step]:
    """The steps of a branch between its norms."""
    norms = {slot: norm(f"{place}.{slot}", run, layer, layer.hidden_size) for slot in slots}
    if "pre" in norms:
        yield norms["pre"]
    for step in steps:
        yield replace(step, name=f"{module}.{step.name}")
    yield from (norms[slot] for slot in ("post", "out") if slot in norms)


def layer_steps(config: LlmArchConfig, index: int, layer: LlmArchConfig, run: Pass) -> Iterator[Step]:
    """One layer, whose own config is `layer`; names are below it."""
    kind = config.layer_types[index]
    slots = SLOTS[layer.norm_placement]
    first = slots if index or layer.first_attention_norm else tuple(slot for slot in slots if slot != "pre")
    shares_norm = layer.parallel_block and layer.parallel_norms == 1
    yield from around(ATTENTIONS[layer.attention_kind](layer, run, kind), "attn_norm", "self_attn", first, run, layer)
    if config.topology == "encoder-decoder":
        yield from around(cross_attention(config, layer, run), "cross_norm", "cross_attn", slots, run, layer)
    sparse = config.mlp_layer_types is not None and config.mlp_layer_types[index] == "sparse"
    feeding = sparse_feed_forward(layer, run) if sparse else feed_forward(layer, run, layer.intermediate_size)
    yield from around(feeding, "mlp_norm", "mlp", () if shares_norm else slots, run, layer)


def positions(config: LlmArchConfig, run: Pass, width: int) -> Iterator[Step]:
    """Those encodings that have parameters."""
    shape = (run.batch, run.tokens, width)
    if config.position_encoding == "learned":
        rows = config.max_position_embeddings + config.position_offset
        yield plain("positions", "embed_positions", shape, rows * width)
    if config.position_encoding == "relative_bias":
        tables = 1 if config.relative_attention_shared else config.num_hidden_layers - len(config.nope_layers or ())
        size = config.relative_attention_num_buckets * config.num_attention_heads
        yield plain(
            "positions",
            "embed_positions",
            (run.tokens, run.past + run.tokens, config.num_attention_heads),
            tables * size,
        )


def stack_steps(config: LlmArchConfig, run: Pass, shares_embedding: bool = False) -> Iterator[Step]:
    """One stack, from its embedding to its last norm; names are below the base model."""
    width = config.embedding_size or config.hidden_size
    embedded = (run.batch, run.tokens, width)
    # A lookup multiplies nothing; what it reads is a row a token.
    yield replace(
        plain("embedding", "embed_tokens", embedded, 0 if shares_embedding else config.vocab_size * width), weights=0
    )
    if config.type_vocab_size:
        yield plain("embedding", "embed_types", embedded, config.type_vocab_size * width)
    yield from positions(config, run, width)
    if config.embedding_norm:
        yield norm("embed_norm", run, config, width)
    if config.embedding_size:
        yield linear("embedding", "embed_projection", run, width, config.hidden_size, True)
    blocks = config.layer_groups or config.num_hidden_layers
    repeats = config.num_hidden_layers // blocks
    for index, layer in enumerate(layers_of(config)):
        block, again = divmod(index, repeats)
        for step in layer_steps(config, index, layer, run):
            step = replace(step, name=f"layers.{block}.{step.name}", layer=index)
            yield replace(step, parameters=0, active=0) if again else step
    if config.final_norm:
        yield norm("norm", run, config, config.hidden_size)
    if config.pooler:
        yield linear("head", "pooler.dense", run, config.hidden_size, config.hidden_size, True, tokens=1)


# -- heads -------------------------------------------------------------------------------------------------------------


def vocabulary_head(config: LlmArchConfig, run: Pass) -> Iterator[Step]:
    """The dense layer before it where there is one, and the projection onto the vocabulary."""
    tokens = run.tokens if run.logits is None else run.logits
    width = (config.embedding_size if config.lm_head_transform else None) or config.hidden_size
    if config.lm_head_transform:
        yield linear(
            "head", "transform.dense", run, config.hidden_size, width, config.head_bias, tokens=tokens, kept=width
        )
        if config.head_act is None and beta(config):
            yield plain("head", "transform.act_fn", (run.batch, tokens, width), beta(config))
        yield replace(norm("transform.norm", run, config, width, tokens=tokens), part="head")
    yield linear(
        "head",
        "lm_head",
        run,
        width,
        config.vocab_size,
        config.lm_head_bias,
        tokens=tokens,
        kept=config.vocab_size,
        tied=config.tie_word_embeddings,
    )


def task_head(
    config: LlmArchConfig, run: Pass, dense: bool, last: str, outputs: int, bias: bool, pools: bool
) -> Iterator[Step]:
    """A classifier of a text (`pools`) or of each token."""
    tokens = 1 if pools else run.tokens
    width = config.hidden_size
    if dense:
        yield linear("head", "head.dense", run, width, width, config.head_bias, tokens=tokens, kept=width)
        if config.classifier_norm:
            yield replace(norm("head.norm", run, config, width, tokens=tokens), part="head")
    yield linear("head", last, run, width, outputs, bias, tokens=tokens)


def text_classifier(config: LlmArchConfig, run: Pass) -> Iterator[Step]:
    labels = cast(int, config.num_labels)
    return task_head(config, run, config.classifier_dense, "score", labels, config.classifier_bias, True)


def token_classifier(config: LlmArchConfig, run: Pass) -> Iterator[Step]:
    labels = cast(int, config.num_labels)
    return task_head(config, run, config.token_head_dense, "score", labels, config.classifier_bias, False)


def answer_finder(config: LlmArchConfig, run: Pass) -> Iterator[Step]:
    return task_head(config, run, config.token_head_dense, "qa_outputs", 2, True, False)


def no_head(config: LlmArchConfig, run: Pass) -> Iterator[Step]:
    return iter(())


HEADS: dict[str, Callable[[LlmArchConfig, Pass], Iterator[Step]]] = {
    "LlmArchModel": no_head,
    "LlmArchForCausalLM": vocabulary_head,
    "LlmArchForMaskedLM": vocabulary_head,
    "LlmArchForConditionalGeneration": vocabulary_head,
    "LlmArchForSequenceClassification": text_classifier,
    "LlmArchForTokenClassification": token_classifier,
    "LlmArchForQuestionAnswering": answer_finder,
}
# The class that speaks the whole vocabulary, by topology.
LANGUAGE_MODELS = {
    "decoder": "LlmArchForCausalLM",
    "encoder": "LlmArchForMaskedLM",
    "encoder-decoder": "LlmArchForConditionalGeneration",
}


def architecture_of(config: LlmArchConfig) -> str:
    """The class that the config names, or the one over the vocabulary."""
    named = next(iter(config.architectures or ()), "")
    return named if named in HEADS else LANGUAGE_MODELS[config.topology]


def model_steps(config: LlmArchConfig, run: Pass, architecture: str | None = None) -> list[Step]:
    """A whole model: its encoder where there is one, its stack and its head.

    Raises:
        ValueError: for a class that is none of ours.
    """
    architecture = architecture or architecture_of(config)
    if architecture not in HEADS:
        raise ValueError(f"architecture={architecture!r} is not one of {', '.join(HEADS)}.")
    prefix = "" if architecture == "LlmArchModel" else "model."
    steps = []
    if config.topology == "encoder-decoder":
        reading = replace(run, tokens=run.source if run.encodes else 0, past=0, logits=None)
        encoder = stack_steps(config.source_config(), reading, config.share_source_embeddings)
        steps += [replace(step, name=f"{prefix}encoder.{step.name}", stack="encoder") for step in encoder]
    stack = "encoder" if config.topology == "encoder" else "decoder"
    reads_pooler = architecture == "LlmArchForSequenceClassification" and config.classifier_pooling == "pooler"
    for step in stack_steps(config, run):
        if step.name == "pooler.dense" and prefix and not reads_pooler:
            step = replace(step, parameters=0, active=0)  # such a head keeps the weights as buffers
        steps.append(replace(step, name=f"{prefix}{step.name}", stack=stack))
    steps += [replace(step, stack=stack) for step in HEADS[architecture](config, run)]
    return steps

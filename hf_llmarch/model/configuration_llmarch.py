"""The switches: one flat config for the whole Transformer line.

Each field states one behaviour; nothing in the package asks for a model's name. Fields are grouped by topic in the
mixins below, in the order in which a reader meets them in a model; `config.json` stays flat. The docstring of a mixin
names the files, tables and classes in which its fields take effect. What a value means is in the text below the field
(`docs()` has them all); which combinations are refused is in the table `CONSTRAINTS`, and in what a field declares of
itself (`Switch`).

Do not add `from __future__ import annotations` here: with string annotations `@strict` checks no field.
"""

# This import comes first because it refuses releases of transformers that lack names imported below.
from .host import FOUND  # isort: skip  # noqa: F401

import ast
import copy
import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, dataclass, field, fields
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast, get_args

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig
from transformers.utils import logging

from .declarations import Condition, Feature, Number, Switch, differs, equals

logger = logging.get_logger(__name__)

Topology = Literal["decoder", "encoder", "encoder-decoder"]
AttentionType = Literal["mha", "gqa", "mqa", "mla"]
QKNorm = Literal["none", "head", "heads", "projection"]
PositionEncoding = Literal["none", "sinusoidal", "learned", "rope", "alibi", "relative_bias"]
SinusoidalLayout = Literal["interleaved", "halves"]
FFNType = Literal["mlp", "glu"]
NormType = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post", "sandwich", "branch"]
RopeType = Literal["default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"]
ClassifierPooling = Literal["last", "first", "mean", "pooler", "eos"]
RouterType = Literal["top_k", "sparsemixer", "expert_choice"]
RouterScore = Literal["softmax", "sigmoid"]
RouterGroupScore = Literal["max", "top2"]
RouterLossScope = Literal["sequence", "batch", "model"]
Overflow = Literal["drop", "next_best"]
ExpertsLayout = Literal["packed", "linear"]
LayerType = Literal["full_attention", "sliding_attention", "chunked_attention"]

# Fields of these types may be given as None: `__post_init__` fills them in, except where nothing reads them. The code
# that reads them therefore sees the filled type.
if TYPE_CHECKING:
    FilledInt: TypeAlias = int
    FilledBool: TypeAlias = bool
    FilledList: TypeAlias = list[str]
else:
    FilledInt, FilledBool, FilledList = int | None, bool | None, list[str] | None


def switch(default: Any, **declared: Any) -> Any:
    """A config field with what it declares of itself, the attributes of `Switch`.

    The string below the field says what it does: editors show it, and `LlmArchConfig.docs()` reads it.
    """
    return field(default=default, metadata={"switch": Switch(default, **declared)})


LATENT = Condition("attention_type='mla'", lambda c: c.attention_kind == "mla")
WHOLE_KEYS = Condition("an attention_type other than 'mla'", lambda c: c.attention_kind != "mla")
QK_NORM = Condition("a qk_norm", lambda c: c.qk_norm != "none")
DENSE_HEAD = Condition("lm_head_transform or classifier_dense", lambda c: c.lm_head_transform or c.classifier_dense)
ROPE = equals("position_encoding", "rope")
SINUSOIDAL = equals("position_encoding", "sinusoidal")
TABLED = equals("position_encoding", "learned", "sinusoidal")
ALIBI = equals("position_encoding", "alibi")
RELATIVE = equals("position_encoding", "relative_bias")
TWO_STACKS = equals("topology", "encoder-decoder")
CLASSIFIER_DENSE = equals("classifier_dense", True)
EXPERTS = Condition("num_experts", lambda c: c.num_experts is not None)

# A field that no layer may override, and a field that only experts read.
model_switch = partial(switch, per_layer=False)
expert_switch = partial(switch, needs=EXPERTS)

# The classes with a head, as a field's `read_by` names them.
VOCABULARY = ("LlmArchForCausalLM", "LlmArchForConditionalGeneration", "LlmArchForMaskedLM")
CLASSIFIER = "LlmArchForSequenceClassification"
TAGGER = "LlmArchForTokenClassification"
ANSWERER = "LlmArchForQuestionAnswering"


def _topology_asks(config: "LlmArchConfig") -> Feature | None:
    return {"encoder": Feature.BOTH_SIDES, "encoder-decoder": Feature.TWO_STACKS}.get(config.topology)


def _qk_norm_asks(config: "LlmArchConfig") -> Feature | None:
    return Feature.ALL_HEADS if config.qk_norm in ("heads", "projection") else None


def _rope_asks(config: "LlmArchConfig") -> Feature | None:
    """Dynamic NTK and LongRoPE pick their frequencies by the longest text of a batch, so a row must hold one text."""
    follows = any(p["rope_type"] in ("dynamic", "longrope") for p in config.rope_by_layer_type.values())
    return Feature.WHOLE_ROWS if follows else None


def _logit_scale_asks(config: "LlmArchConfig") -> Feature | None:
    both = config.logit_scale != 1.0 and config.final_logit_softcapping is not None
    return Feature.SCALE_BEFORE_CAP if both else None


@dataclass(repr=False, eq=False, kw_only=True)
class SizeSwitches:
    """Sizes and stacks: `LlmArchModel` builds the stacks from them (`modeling_llmarch.py`)."""

    vocab_size: int = model_switch(32000, above=0)
    """Rows of the token embedding and of the output head."""

    hidden_size: int = model_switch(512, above=0)
    """Width of the residual stream."""

    num_hidden_layers: int = model_switch(8, above=0)
    """Number of blocks."""

    intermediate_size: FilledInt = switch(None, above=0, follows=("hidden_size", "ffn_type"))
    """Inner width of the feed-forward. None: 4 x hidden_size for `mlp`, 8/3 x hidden_size rounded up to
    `ffn_multiple_of` for `glu`, so that both have about the same number of parameters.
    """

    max_position_embeddings: int = model_switch(2048, above=0)
    """Longest sequence that the positions are made for: a learned table has as many rows, and RoPE scaling refers to
    this length.
    """

    topology: Topology = model_switch("decoder", asks=_topology_asks)
    """Which stacks there are, and so which masks: causal, bidirectional, or both with cross-attention."""

    source_stack: dict[str, Any] | None = model_switch(None, needs=TWO_STACKS)
    """Fields in which the encoder of an encoder-decoder differs from the decoder, with their values."""

    share_source_embeddings: bool = model_switch(True, needs=TWO_STACKS)
    """Encoder-decoder: both stacks share one token embedding."""

    layer_groups: int | None = model_switch(None, above=0)
    """Encoder: number of distinct blocks. Each is run num_hidden_layers / layer_groups times in a row, so that
    consecutive layers share their weights (ALBERT). None: every layer has a block of its own.
    """


@dataclass(repr=False, eq=False, kw_only=True)
class AttentionSwitches:
    """Attention: `Block` takes its class from `ATTENTIONS` (`block.py`).

    `ScoredAttention` (`attention.py`) reads what concerns scores: scale, soft-cap, sinks, windows, dropout. `Attention`
    in that file reads the projections and `qk_norm` (`QK_NORM_SHAPES`), and `LatentAttention` (`latent_attention.py`)
    the sizes of MLA.
    """

    attention_type: AttentionType | None = switch(None)
    """How heads share keys and values. None: follows from the head counts (`mla` when `kv_lora_rank` is set). MQA:
    arXiv 1911.02150; GQA: arXiv 2305.13245; MLA: arXiv 2405.04434.
    """

    num_attention_heads: int = switch(
        8, per_layer=equals("position_encoding", "none", "sinusoidal", "learned", "rope"), above=0
    )
    """Number of query heads."""

    num_key_value_heads: FilledInt = switch(None, above=0, follows=("num_attention_heads",))
    """Number of key and value heads. None: as many as query heads (1 for `mqa`)."""

    head_dim: FilledInt = switch(None, above=0, follows=("hidden_size", "num_attention_heads"))
    """Width of a head. None: hidden_size / num_attention_heads."""

    v_head_dim: FilledInt = switch(None, above=0)
    """MLA: width of a value head."""

    q_lora_rank: int | None = switch(None, needs=LATENT, above=0)
    """MLA: rank of the query compression. None: queries are not compressed."""

    kv_lora_rank: FilledInt = switch(None, above=0)
    """MLA: rank of the joint key and value compression, the cached latent."""

    qk_nope_head_dim: FilledInt = switch(None, above=0)
    """MLA: width of the part of a query/key head that is not rotated."""

    qk_rope_head_dim: FilledInt = switch(None, above=0)
    """MLA: width of the part of a query/key head that is rotated; all heads share the key of this part."""

    mla_cache: Literal["latent", "expanded"] = model_switch("latent", needs=LATENT, inert=True)
    """MLA: what is cached. `latent`: the latent and the shared rotated key; `expanded`: the keys and values of all
    heads, for tools that expect them.
    """

    latent_norm_eps: Number | None = switch(None, needs=LATENT, least=0)
    """MLA: eps of the norms on the latents. None: as `norm_eps`."""

    attention_bias: bool = switch(False)
    """Biases on the query, key and value projections."""

    attention_output_bias: bool = switch(False)
    """Bias on the output projection."""

    qk_norm: QKNorm = switch("none", asks=_qk_norm_asks)
    """Norm of queries and keys before the rotation: `head` over a head with one weight for all heads (Qwen3), `heads`
    over a head with a weight per head (Command R+), `projection` over all heads together (OLMo 2).
    """

    qk_norm_type: NormType | None = switch(None, needs=QK_NORM)
    """Norm used by `qk_norm`. None: as `norm_type`."""

    qk_norm_bias: bool | None = switch(None, needs=QK_NORM)
    """A bias on the norms of `qk_norm`. None: as `norm_bias`."""

    attention_scale: Number | None = switch(None, above=0)
    """Factor on q.k. None: 1/sqrt(query/key head width), times YaRN's mscale squared for `mla`."""

    attention_scale_by_layer: bool = switch(False)
    """Divide the attention scale by the 1-based layer number (GPT-2's scale_attn_by_inverse_layer_idx)."""

    attn_logit_softcapping: Number | None = switch(None, above=0, asks=Feature.SOFT_CAP)
    """Bound c on attention scores, c * tanh(score / c), before the mask (Gemma 2, arXiv 2408.00118)."""

    attention_sinks: bool = switch(False, asks=Feature.SINKS)
    """A learned logit per head takes part in the softmax and is dropped afterwards, so that attention weights sum to
    less than 1 (gpt-oss).
    """

    clip_qkv: Number | None = switch(None, needs=WHOLE_KEYS, above=0)
    """Clamp queries, keys and values to [-c, c] after projection (MPT, OLMo)."""

    attention_dropout: Number = switch(0.0, least=0, most=1)
    """Dropout on attention weights, in training."""

    sliding_window: int | None = model_switch(None, least=0, asks=Feature.WINDOWS)
    """Width w of the window of `sliding_attention` layers: the query at position i sees keys i-w+1 to i, and in an
    encoder keys i-w to i+w.
    """

    attention_chunk_size: int | None = model_switch(None, above=0, asks=Feature.CHUNKS)
    """Length of the chunks of `chunked_attention` layers: a query sees keys of its own chunk only (Llama 4)."""

    layer_types: FilledList = model_switch(None, follows=("num_hidden_layers",))
    """One of `full_attention`, `sliding_attention`, `chunked_attention` for each layer. None: sliding when
    `sliding_window` is set, chunked when `attention_chunk_size` is, else full.
    """


@dataclass(repr=False, eq=False, kw_only=True)
class PositionSwitches:
    """Position encoding: `LlmArchModel` takes a class from `POSITIONS` (`positions.py`), which reads the fields of its
    own encoding; `rope_by_layer_type` below resolves `rope_parameters`.

    `ScoredAttention` (`attention.py`) applies the rotation, and leaves it out in `nope_layers`.
    """

    position_encoding: PositionEncoding = model_switch("rope")
    """How positions are encoded: `sinusoidal` (arXiv 1706.03762) and `learned` are added to the embedding, `rope`
    (arXiv 2104.09864) rotates queries and keys, `alibi` (arXiv 2108.12409) and `relative_bias` (T5, arXiv 1910.10683)
    are added to the scores.
    """

    rope_parameters: dict[str, Any] | None = model_switch(None, asks=_rope_asks)
    """RoPE: `rope_theta`, `partial_rotary_factor`, and `rope_type` (default, linear, ntk, dynamic, yarn, llama3,
    longrope) with its own keys; or one such dict for each layer type, where local and global layers differ in them.
    """

    rope_interleaved: bool = model_switch(False, needs=ROPE)
    """Rotate neighbouring channels (2i, 2i+1) as in the paper and GPT-J, not (i, i + d/2) as in LLaMA."""

    nope_layers: list[int] | None = model_switch(
        None, needs=differs("position_encoding", "none", "sinusoidal", "learned")
    )
    """Indices of layers that use no position encoding at all (SmolLM3, Command R7B)."""

    sinusoidal_layout: SinusoidalLayout = model_switch("interleaved", needs=SINUSOIDAL)
    """Sine and cosine alternate as in the paper, or fill one half each as in Marian."""

    sinusoidal_endpoint: bool = model_switch(False, needs=SINUSOIDAL)
    """Frequencies end at 1/10000, as in tensor2tensor and M2M-100; in the paper and Marian they stop a step before."""

    position_offset: int = model_switch(0, needs=TABLED, least=0)
    """Added to the position before a learned or sinusoidal table is read (BART, OPT: 2)."""

    positions_skip_padding: bool = model_switch(False, needs=TABLED)
    """Learned or sinusoidal positions count real tokens only. Padding gets position -1 of a learned table (RoBERTa),
    and zeros in place of sinusoids (M2M-100).
    """

    alibi_bias_max: int = model_switch(8, needs=ALIBI, above=0)
    """ALiBi: exponent of the smallest slope, 2^-alibi_bias_max."""

    alibi_scaled: bool = model_switch(False, needs=ALIBI)
    """ALiBi: the bias is multiplied by the attention scale as well (Falcon)."""

    alibi_in_bf16: bool = model_switch(False, needs=ALIBI)
    """ALiBi: the bias is the slope times the key's index among the real tokens, and this product is rounded to bf16
    whatever the model's dtype (Falcon).
    """

    relative_attention_num_buckets: int = model_switch(32, needs=RELATIVE, above=0)
    """T5 bias: number of distance buckets."""

    relative_attention_max_distance: int = model_switch(128, needs=RELATIVE)
    """T5 bias: distances from this one on share the last bucket."""

    relative_attention_shared: bool = model_switch(True, needs=RELATIVE)
    """T5 bias: one table for all layers; else each layer has its own (umT5)."""


@dataclass(repr=False, eq=False, kw_only=True)
class FeedForwardSwitches:
    """Feed-forward: `dense_feed_forward` takes a class from `FEED_FORWARDS` (`feedforward.py`).

    In that file, `activation` reads `hidden_act` and `swish_beta`, and `gated_activation` the fields of a GLU.
    """

    ffn_type: FFNType = switch("glu")
    """`mlp`: down(act(up(x))); `glu`: down(act(gate(x)) * up(x)), arXiv 2002.05202."""

    hidden_act: str = switch("silu")
    """Activation, any name transformers knows. With `glu`: sigmoid is GLU, relu ReGLU, gelu GEGLU, silu SwiGLU."""

    swish_beta: float | int | Literal["learned"] | None = switch(None)
    """Beta in x * sigmoid(beta x), a number or learned per layer (arXiv 1710.05941). None: 1, the plain silu."""

    glu_limit: Number | None = switch(None, above=0)
    """Clamp inside a GLU: the gate to at most this, the up projection to within +- this (gpt-oss)."""

    glu_up_offset: Number = switch(0.0)
    """Added to the output of a GLU's up projection (gpt-oss: 1)."""

    ffn_bias: bool = switch(False)
    """Biases in the feed-forward, experts included."""

    ffn_multiple_of: int = switch(256, above=0)
    """Rounding of the derived `intermediate_size` of `glu`."""


@dataclass(repr=False, eq=False, kw_only=True)
class ExpertSwitches:
    """Mixtures of experts: a sparse layer has a class from `SPARSE_FEED_FORWARDS` (`experts.py`).

    That class builds a router from `ROUTERS`, with `SCORES` and `GROUP_SCORES` (`routing.py`), experts from
    `EXPERT_LAYOUTS` (`experts.py`), and a limit to their load from `capacity` and `OVERFLOWS` (`routing.py`). The
    losses, and the updates of the selection bias, are in `balancing.py`.
    """

    num_experts: int | None = model_switch(None, above=0)
    """Experts of a sparse layer. None: every feed-forward is dense."""

    num_experts_per_tok: int = expert_switch(2)
    """Experts a token is sent to (expert choice: on average)."""

    moe_intermediate_size: int | None = expert_switch(None, above=0)
    """Inner width of one expert. None: `intermediate_size`."""

    num_shared_experts: int = expert_switch(0, least=0)
    """Number of experts that every token passes through; they form one feed-forward of that many times the width."""

    shared_expert_intermediate_size: int | None = expert_switch(None, least=0)
    """Inner width of the shared experts together. None: num_shared_experts x moe_intermediate_size."""

    shared_expert_gate: bool = expert_switch(False)
    """A sigmoid gate on the shared expert's output (Qwen2-MoE)."""

    mlp_layer_types: list[str] | None = expert_switch(None, per_layer=False, follows=("num_hidden_layers",))
    """`dense` or `sparse` for each layer. None: all sparse if there are experts."""

    router_type: RouterType = expert_switch("top_k")
    """`top_k`: each token picks its best experts; `sparsemixer`: it picks them one after another (Phi-3.5-MoE, arXiv
    2409.12136); `expert_choice`: each expert picks tokens of a row, later ones included, so that the model cannot
    generate (arXiv 2202.09368).
    """

    router_score: RouterScore = expert_switch("softmax")
    """How router logits become scores. Softmax over the picked logits alone is `softmax` with `norm_topk_prob`."""

    router_bias: bool = expert_switch(False)
    """A bias on the router's logits (gpt-oss)."""

    router_in_fp32: bool = expert_switch(True)
    """Compute router logits in fp32 whatever the model's dtype."""

    norm_topk_prob: bool = expert_switch(True)
    """Renormalise the picked experts' weights to sum to one."""

    routed_scaling_factor: Number = expert_switch(1.0)
    """Factor on the routed experts' weights."""

    n_group: int | None = expert_switch(None, above=0)
    """Groups of experts for group-limited routing (DeepSeek). None: no groups."""

    topk_group: int | None = expert_switch(None, above=0)
    """Number of groups that a token's experts may come from, the best ones by `router_group_score`."""

    router_group_score: RouterGroupScore = expert_switch("max")
    """A group's score: its best expert's (DeepSeek-V2), or the sum of its best two (V3)."""

    router_selection_bias: bool = expert_switch(False)
    """Per-expert bias used to select experts, not to weight them; it is saved with the model (DeepSeek-V3)."""

    router_bias_update_rate: Number = expert_switch(0.0, least=0, inert=True)
    """Step by which `router_selection_bias` moves after each optimiser step: balance without an auxiliary loss (arXiv
    2408.15664).
    """

    router_aux_loss_coef: Number = expert_switch(0.0, per_layer=False, least=0, inert=True)
    """Weight of the load-balancing loss in training (arXiv 2101.03961)."""

    router_aux_loss_scope: RouterLossScope = expert_switch("sequence", per_layer=False, inert=True)
    """What the load is averaged over: each `sequence` by itself, so that the loss does not depend on how a batch is
    split; the whole `batch` (Switch Transformers); or the batch and all layers together, `model` (Mixtral).
    """

    router_z_loss_coef: Number = expert_switch(0.0, per_layer=False, least=0, inert=True)
    """Weight of the router z-loss in training (arXiv 2202.08906)."""

    router_jitter_noise: Number = expert_switch(0.0, least=0)
    """Relative noise on the router's input, in training. `sparsemixer` adds no noise: it compares the experts within
    twice this relative distance of the best, in inference as well.
    """

    capacity_factor: Number | None = expert_switch(None, above=0, asks=Feature.WHOLE_ROWS)
    """An expert takes at most ceil(real tokens x num_experts_per_tok / num_experts x factor) tokens of each row of a
    forward pass. Whether it takes a token depends on the row's other tokens, so this is for training and not for cached
    decoding. None: no limit.
    """

    expert_capacity: int | None = expert_switch(None, above=0, asks=Feature.WHOLE_ROWS)
    """The most tokens of a row that an expert takes, however long the row is (Switch). None: see `capacity_factor`."""

    overflow: Overflow = expert_switch("drop")
    """What happens to a token whose expert is full: `drop` skips the expert, so that the residual passes unchanged;
    `next_best` sends the token to its best expert that has room.
    """

    experts_layout: ExpertsLayout = expert_switch("packed", inert=True)
    """`packed`: one 3-D weight for all experts, for speed; `linear`: a plain Linear each, for PEFT and quantisers."""


@dataclass(repr=False, eq=False, kw_only=True)
class NormSwitches:
    """Norms: `norm` takes a class from `NORMS`, and `norm_placement` is looked up in `NORM_SLOTS` (`norms.py`).

    `LlmArchModel` (`modeling_llmarch.py`) has the embedding's norm and the final one, `Block` (`block.py`) the first.
    """

    norm_type: NormType = model_switch("rmsnorm")
    """Norm of the residual stream (LayerNorm: arXiv 1607.06450, RMSNorm: 1910.07467)."""

    norm_placement: NormPlacement = switch("pre")
    """Where the norms of a branch f stand: `pre` x+f(n(x)), `post` n(x+f(x)), `sandwich` x+n(f(n(x))) (Gemma 2),
    `branch` x+n(f(x)) (OLMo 2).
    """

    norm_eps: Number = model_switch(1e-6, least=0)
    """Added to the variance or mean square, in every norm of the model."""

    norm_bias: FilledBool = model_switch(None, follows=("norm_type",))
    """A bias on norms. None: yes for layernorm, no for rmsnorm."""

    norm_offset: Number = model_switch(0.0)
    """The gain is offset + weight: 1.0 where a checkpoint stores gain - 1 (Gemma)."""

    norm_weight_in_fp32: bool = model_switch(False)
    """Apply the gain before the result is cast back to the input's dtype (Gemma, OLMo 2), not after (LLaMA)."""

    final_norm: bool = model_switch(True)
    """A norm after the last block."""

    embedding_norm: bool = model_switch(False, asks=Feature.BEFORE_LAYERS)
    """A norm after the embedding (BLOOM)."""

    first_attention_norm: bool = model_switch(True, needs=equals("norm_placement", "pre", "sandwich"))
    """A norm before the first layer's attention. ModernBERT has none there, because its embedding norm precedes it."""


@dataclass(repr=False, eq=False, kw_only=True)
class BlockSwitches:
    """Blocks: `block` takes a class from `BLOCKS` (`block.py`).

    `NormSlots` (`norms.py`) reads `residual_scale` and `hidden_dropout`, `MLP` (`feedforward.py`) reads `ffn_dropout`,
    and `LlmArchModel` (`modeling_llmarch.py`) the dropouts at both ends.
    """

    parallel_block: bool = switch(False)
    """Attention and feed-forward read the same input and are added together (GPT-J)."""

    parallel_norms: Literal[1, 2] = switch(1, needs=equals("parallel_block", True))
    """A parallel block's norms: one shared (GPT-J), or one a branch (GPT-NeoX)."""

    residual_scale: Number = switch(1.0)
    """Factor on each branch before it joins the residual stream (Granite)."""

    hidden_dropout: Number = switch(0.0, least=0, most=1)
    """Dropout on each branch's output, in training."""

    ffn_dropout: Number = switch(0.0, least=0, most=1)
    """Dropout inside dense feed-forwards, before the last projection, in training."""

    embedding_dropout: Number = model_switch(0.0, least=0, most=1, asks=Feature.BEFORE_LAYERS)
    """Dropout on the embedding, in training."""

    final_dropout: Number = model_switch(0.0, least=0, most=1, asks=Feature.AFTER_LAYERS)
    """Dropout after the final norm, in training (T5)."""


@dataclass(repr=False, eq=False, kw_only=True)
class EndSwitches:
    """Both ends of a model: `token_embedding` (`embeddings.py`), and the heads, whose classes are in
    `modeling_llmarch.py`.

    `heads.py` has what they are made of: `HeadTransform`, `output_head` and `logits_transform` over the vocabulary;
    `Pooler`, `POOLINGS` (by `classifier_pooling`) and `ClassifierTransform` for a task.
    """

    embedding_scale: Number = model_switch(1.0)
    """Factor on token embeddings, which is first rounded to their dtype (Gemma, where it is sqrt(hidden_size))."""

    embedding_size: int | None = model_switch(None, above=0, asks=Feature.BEFORE_LAYERS)
    """Width of a factorised embedding, which is projected to hidden_size (ALBERT). None: hidden_size."""

    type_vocab_size: int = model_switch(0, least=0, asks=Feature.BEFORE_LAYERS)
    """Rows of a token-type (segment) embedding; 0: none."""

    tie_word_embeddings: bool = model_switch(False)
    """The output head is the embedding's transpose (arXiv 1608.05859)."""

    lm_head_bias: bool = model_switch(False, read_by=VOCABULARY)
    """Bias on the output head."""

    lm_head_transform: bool = model_switch(False, asks=Feature.HEAD_TRANSFORM, read_by=VOCABULARY)
    """A dense layer, an activation and a norm before the output head (BERT)."""

    head_act: str | None = model_switch(None, needs=equals("lm_head_transform", True), read_by=VOCABULARY)
    """Activation of `lm_head_transform`. None: `hidden_act`."""

    head_bias: bool = model_switch(True, needs=DENSE_HEAD, read_by=(*VOCABULARY, CLASSIFIER, TAGGER, ANSWERER))
    """Biases of the dense layers that `lm_head_transform` and `classifier_dense` add."""

    pooler: bool = model_switch(False, needs=equals("topology", "encoder"))
    """Encoder: a dense layer with tanh on the first token (BERT)."""

    classifier_pooling: ClassifierPooling = model_switch("last", read_by=(CLASSIFIER,))
    """What a sequence classifier reads: the state of the `last` real token or of the `first` token, the `mean` over the
    real tokens, the output of the `pooler`, or the state of the last `eos` token (BART).
    """

    classifier_dense: bool = model_switch(False, read_by=(CLASSIFIER,))
    """A dense layer with `classifier_act` before the classifier (RoBERTa)."""

    token_head_dense: bool = model_switch(False, needs=CLASSIFIER_DENSE, read_by=(TAGGER, ANSWERER))
    """Token classification and question answering have the dense layer of `classifier_dense`, with its activation and
    norm, as well (ModernBERT).
    """

    classifier_act: str = model_switch("tanh", needs=CLASSIFIER_DENSE, read_by=(CLASSIFIER, TAGGER, ANSWERER))
    """Activation of the classifier's dense layer."""

    classifier_norm: bool = model_switch(False, needs=CLASSIFIER_DENSE, read_by=(CLASSIFIER, TAGGER, ANSWERER))
    """A norm after the dense layer of `classifier_dense` (ModernBERT)."""

    classifier_bias: bool = model_switch(False, read_by=(CLASSIFIER, TAGGER))
    """Bias of the classifiers' last layer (question answering always has one)."""

    classifier_dropout: Number = model_switch(0.0, least=0, most=1, inert=True)
    """Dropout before the task heads' last layer, in training."""

    classifier_input_dropout: bool = model_switch(False, needs=CLASSIFIER_DENSE, inert=True)
    """`classifier_dropout` also acts before the dense layer of `classifier_dense` (RoBERTa, BART)."""

    logit_scale: Number = model_switch(1.0, asks=_logit_scale_asks, read_by=VOCABULARY)
    """Factor on the logits (Command R)."""

    final_logit_softcapping: Number | None = model_switch(None, above=0, read_by=VOCABULARY)
    """Bound c on the logits, c * tanh(logit / c) (Gemma 2)."""


@dataclass(repr=False, eq=False, kw_only=True)
class TrainingSwitches:
    """Initialisation, caching and special tokens, most of which transformers reads; `token_embedding`
    (`embeddings.py`) reads `pad_token_id`, and the classes of `modeling_llmarch.py` the rest.
    """

    initializer_range: Number = model_switch(0.02, least=0)
    """Standard deviation of fresh weights."""

    use_cache: bool = model_switch(True, inert=True)
    """Return a cache from `forward` unless told otherwise."""

    pad_token_id: int | None = model_switch(None)
    """Padding token."""

    bos_token_id: int | None = model_switch(None)
    """Token that begins a text."""

    eos_token_id: int | list[int] | None = model_switch(None)
    """Token, or tokens, that end a text."""

    decoder_start_token_id: int | None = model_switch(None)
    """Encoder-decoder: the decoder's first token."""

    wrap_decoder_start: bool = model_switch(False, needs=TWO_STACKS)
    """Encoder-decoder: in training the decoder begins with each text's own last label, not with decoder_start_token_id
    (mBART, where that is the language).
    """

    converted_from: dict[str, Any] | None = model_switch(None, inert=True)
    """Written by `convert`, read by `export`, never by the model: the family, and the original config.json, so that
    what its authors wrote can be given back word for word.
    """


# Dataclasses collect the fields of the last base first: in this order they stand as a reader meets them.
@strict
class LlmArchConfig(
    TrainingSwitches,
    EndSwitches,
    BlockSwitches,
    NormSwitches,
    ExpertSwitches,
    FeedForwardSwitches,
    PositionSwitches,
    AttentionSwitches,
    SizeSwitches,
    PreTrainedConfig,
):
    """Configuration of every hf_llmarch model. Fields: see the mixins above, or `LlmArchConfig.docs()`.

    Raises:
        ValueError: for an unknown keyword that is close to a field's name; for RoPE bases that disagree.
        huggingface_hub.errors.StrictDataclassClassValidationError: for values that do not go together, naming the
            fields (`CONSTRAINTS`, and what a field needs); its cause is the ValueError.
        huggingface_hub.errors.StrictDataclassFieldValidationError: for a value of the wrong type, or one that is not
            among those that the field allows.
    """

    model_type = "llmarch"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    def __post_init__(self, **kwargs: Any) -> None:
        _refuse_near_misses(self, kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = 1 if self.attention_type == "mqa" else self.num_attention_heads
        if self.head_dim is None:
            if self.qk_rope_head_dim is None and self.hidden_size % max(self.num_attention_heads, 1):
                raise ValueError(
                    f"hidden_size={self.hidden_size}, num_attention_heads={self.num_attention_heads}: the heads do not "
                    "divide the width; give head_dim."
                )
            # Under MLA transformers reads head_dim for the rotated width alone.
            self.head_dim = self.qk_rope_head_dim or self.hidden_size // max(self.num_attention_heads, 1)
        if self.intermediate_size is None:
            self.intermediate_size = _derived_intermediate_size(self.hidden_size, self.ffn_type, self.ffn_multiple_of)
        if self.norm_bias is None:
            self.norm_bias = self.norm_type == "layernorm"
        if self.layer_types is None:
            # Caches, masks and serving engines read it, and without it transformers makes every cache layer sliding.
            self.layer_types = [self._only_layer_type()] * self.num_hidden_layers
        if self.num_experts is not None and self.mlp_layer_types is None:
            self.mlp_layer_types = ["sparse"] * self.num_hidden_layers
        self.is_encoder_decoder = self.topology == "encoder-decoder"
        # An encoder sees the whole text at once: there is nothing to cache.
        self.use_cache = self.use_cache and self.topology != "encoder"
        # Instance attributes: TRL reads `auto_map` without a default, and a class attribute is not saved.
        self.auto_map = dict(AUTO_MAP)
        kwargs.pop("auto_map", None)
        asked = kwargs.pop("output_router_logits", False)
        if self.num_experts is not None:
            # TRL tells by this attribute whether there are experts to balance, and sets it.
            self.output_router_logits = bool(asked)
        kwargs.pop("qk_head_dim", None)
        # Transformers sizes a static cache by head_dim unless qk_head_dim is set; a latent cache has another shape.
        self.qk_head_dim = (
            (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0) if self.attention_kind == "mla" else None
        )
        super().__post_init__(**kwargs)

    def _only_layer_type(self) -> LayerType:
        if self.sliding_window is not None:
            return "sliding_attention"
        return "full_attention" if self.attention_chunk_size is None else "chunked_attention"

    @property
    def attention_kind(self) -> AttentionType:
        """`attention_type`, or what the head counts say where that is None."""
        if self.attention_type is not None:
            return self.attention_type
        if self.kv_lora_rank is not None:
            return "mla"
        if self.num_key_value_heads in (None, self.num_attention_heads):
            return "mha"
        return "mqa" if self.num_key_value_heads == 1 else "gqa"

    @property
    def query_key_head_dim(self) -> int:
        """Width over which q.k is summed."""
        return self.qk_head_dim or self.head_dim

    def source_config(self) -> "LlmArchConfig":
        """The encoder's own config: this one, as an encoder, with what `source_stack` says.

        Raises:
            ValueError: where `source_stack` names something that is not a switch, or a switch that both stacks share.
        """
        values = {f.name: getattr(self, f.name) for f in self.switches()}
        overrides = self.source_stack or {}
        for name in overrides:
            if name not in values or name in ENCODER:
                raise ValueError(
                    f"source_stack sets {name!r}, which an encoder does not have for itself: leave it out there."
                )
        values |= dict.fromkeys(followers(overrides))
        config = LlmArchConfig(**copy.deepcopy({**values, **ENCODER, **overrides}))
        config._attn_implementation_internal = self._attn_implementation_internal
        config._experts_implementation_internal = self._experts_implementation_internal
        config.dtype = self.dtype
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "LlmArchConfig":
        """As in transformers, except that switches given beside a saved config are checked together with it, not set
        afterwards, and that what was derived from their old values is derived anew."""
        names = {f.name for f in cls.switches()}
        changed = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
        saved = config_dict.get("topology", "decoder")
        if changed.get("topology", saved) != saved:
            logger.warning(
                f"topology changed from {saved!r} to {changed['topology']!r}: {TOPOLOGY_CHANGES[changed['topology']]}"
            )
        stale = followers(name for name, value in changed.items() if config_dict.get(name) != value)
        kept = {name: value for name, value in config_dict.items() if name not in stale}
        return super().from_dict({**kept, **changed}, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, without the plan that a model has set: it follows from the switches."""
        values = super().to_dict()
        values.pop("base_model_ep_plan", None)
        return values

    @property
    def shared_width(self) -> int:
        """Inner width of the shared experts together, which every token passes through; 0: there are none."""
        if self.shared_expert_intermediate_size is not None:
            return self.shared_expert_intermediate_size
        return self.num_shared_experts * (self.moe_intermediate_size or self.intermediate_size)

    @property
    def rotary_head_dim(self) -> int:
        """Width of the part of a head that RoPE sees (of which `partial_rotary_factor` may rotate less)."""
        return self.qk_rope_head_dim if self.attention_kind == "mla" else self.head_dim

    @property
    def rope_theta(self) -> float:
        """The RoPE base, where readers of older configs look for it; the first of them when layer types differ.

        Raises:
            AttributeError: without RoPE, so that transformers' `getattr(config, "rope_theta", default)` works.
        """
        for parameters in self.rope_by_layer_type.values():
            if "rope_theta" in parameters:
                return parameters["rope_theta"]
        raise AttributeError(f"no rope_theta: position_encoding is {self.position_encoding!r}")

    @rope_theta.setter
    def rope_theta(self, value: float) -> None:
        """
        Raises:
            AttributeError: for any value but the present one, which vLLM writes back after reading it.
        """
        if value != self.rope_theta:
            raise AttributeError(f"rope_theta={value}: set it in rope_parameters, which can have one a layer type.")

    @property
    def rope_by_layer_type(self) -> dict[str, dict[str, Any]]:
        """The flat RoPE parameters of each layer type in use. Empty without RoPE."""
        if self.position_encoding != "rope" or not self.rope_parameters:
            return {}
        nested = any(kind in self.rope_parameters for kind in get_args(LayerType))
        used = dict.fromkeys(self.layer_types)
        return {kind: self.rope_parameters.get(kind, {}) if nested else self.rope_parameters for kind in used}

    @property
    def rope_switch_lengths(self) -> set[int]:
        """The sequence lengths beyond which LongRoPE uses its long factors in place of its short ones."""
        return {
            parameters["original_max_position_embeddings"]
            for parameters in self.rope_by_layer_type.values()
            if parameters["rope_type"] == "longrope"
        }

    def layer(self, layer_idx: int) -> "LlmArchConfig":
        """The config of one layer: this one, with what `per_layer_config` says of that layer."""
        return cast(LlmArchConfig, self.per_layer_config[layer_idx])

    def layer_configs(self) -> "list[LlmArchConfig]":
        """The distinct layer views: every layer of a heterogeneous config, else the config itself once."""
        return [self.layer(i) for i in range(self.num_hidden_layers)] if self.is_heterogeneous else [self]

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Fold the old spellings (`rope_scaling`, `rope_theta`, `partial_rotary_factor`) into `rope_parameters`."""
        old = {name: kwargs[name] for name in ROPE_SPELLINGS if kwargs.get(name) is not None}
        if self.position_encoding != "rope":
            if old:
                raise ValueError(f"{', '.join(old)}: position_encoding={self.position_encoding!r} has no RoPE to set.")
            return {name: value for name, value in kwargs.items() if name not in ROPE_SPELLINGS}
        theta, known = old.get("rope_theta"), (self.rope_parameters or old.get("rope_scaling") or {}).get("rope_theta")
        if theta is not None and known is not None and theta != known:
            raise ValueError(f"rope_theta={theta} disagrees with rope_parameters['rope_theta']={known}: keep one.")
        # Transformers fills in defaults in place, and the caller's dict is not ours to change: this is a copy.
        if self.rope_parameters is not None:
            self.rope_parameters = _copy_nested(self.rope_parameters)
        kwargs = {name: value for name, value in kwargs.items() if name not in ROPE_SPELLINGS or value is not None}
        if "rope_scaling" in kwargs:
            kwargs["rope_scaling"] = _copy_nested(kwargs["rope_scaling"])
        kwargs = super().convert_rope_params_to_dict(**kwargs)
        by_type = {kind: (self.rope_parameters or {}).get(kind) for kind in get_args(LayerType)}
        by_type = {kind: parameters for kind, parameters in by_type.items() if parameters is not None}
        if by_type:
            # Before 5.20 transformers adds a base beside the layer types, and then takes the whole for flat parameters.
            base = cast(dict[str, Any], self.rope_parameters).get("rope_theta", self.default_theta)
            for parameters in by_type.values():
                cast(dict[str, Any], parameters).setdefault("rope_theta", base)
            self.rope_parameters = by_type
            self.standardize_rope_params()
        for parameters in [self.rope_parameters or {}, *self.rope_by_layer_type.values()]:
            parameters.pop("type", None)  # the older key, which transformers copies to rope_type and leaves in place
        return kwargs

    def _validate_ntk_rope_parameters(
        self, rope_parameters: dict[str, Any], ignore_keys: set[str] | None = None
    ) -> None:
        self._check_received_keys(
            "ntk", set(rope_parameters), {"rope_type", "factor"}, {"rope_theta"}, ignore_keys=ignore_keys
        )

    def validate_rope(self) -> None:
        """As in transformers, which only warns of most wrong values; they are refused here first."""
        for layer in self.layer_configs():
            _refuse_rope(layer)
        super().validate_rope()

    def validate_switches(self) -> None:
        """Refuse values that do not go together, and values that nothing would read.

        Raises:
            ValueError: naming the fields, their values, and what to do.
        """
        _refuse_model_wide_overrides(self)
        if self.topology == "encoder-decoder":
            self.source_config()  # refuses what its own combination does not allow
        for config in self.layer_configs():
            _refuse_out_of_range(config)
            _refuse_rope(config)
            _refuse_unused(config)
            for constraint in CONSTRAINTS:
                if not constraint.holds(config):
                    values = ", ".join(f"{name}={getattr(config, name)!r}" for name in constraint.fields)
                    raise ValueError(f"{values}: {constraint.why}")

    @classmethod
    def switches(cls) -> Iterator[Field[Any]]:
        """The architecture's fields, in reading order; `docs()` says what each does."""
        return (f for f in fields(cls) if "switch" in f.metadata)

    @staticmethod
    @cache
    def docs() -> dict[str, str]:
        """What each switch does, by name. Python keeps no string below a field, so this reads them in this file."""
        texts: dict[str, str] = {}
        for group in ast.parse(Path(__file__).read_text("utf-8")).body:
            for line, below in pairwise(group.body) if isinstance(group, ast.ClassDef) else ():
                match line, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        texts[name] = " ".join(text.split())
        return texts


AUTO_MAP = {
    "AutoConfig": "configuration_llmarch.LlmArchConfig",
    "AutoModel": "modeling_llmarch.LlmArchModel",
    "AutoModelForCausalLM": "modeling_llmarch.LlmArchForCausalLM",
    "AutoModelForMaskedLM": "modeling_llmarch.LlmArchForMaskedLM",
    "AutoModelForSeq2SeqLM": "modeling_llmarch.LlmArchForConditionalGeneration",
    "AutoModelForSequenceClassification": "modeling_llmarch.LlmArchForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_llmarch.LlmArchForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_llmarch.LlmArchForQuestionAnswering",
}

# What the encoder of an encoder-decoder always is.
ENCODER: dict[str, Any] = {
    "topology": "encoder",
    "source_stack": None,
    "share_source_embeddings": True,
    "tie_word_embeddings": False,
    "wrap_decoder_start": False,
    "use_cache": False,
    "converted_from": None,
}

# What becomes of a model whose saved config said another topology.
TOPOLOGY_CHANGES: dict[Topology, str] = {
    "encoder": "every token now sees the whole text, nothing is cached, and the weights have yet to learn it.",
    "decoder": "a token now sees only those before it.",
    "encoder-decoder": "the encoder and the cross-attention are new, and begin with fresh weights.",
}

ROPE_SPELLINGS = ("rope_scaling", "rope_theta", "partial_rotary_factor")


def _copy_nested(values: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}


def _derived_intermediate_size(hidden_size: int, ffn_type: FFNType, multiple_of: int) -> int:
    """4d for an MLP; 8/3 d for a GLU, whose third matrix makes that as many parameters (arXiv 2002.05202)."""
    if ffn_type == "mlp":
        return 4 * hidden_size
    return -(-8 * hidden_size // (3 * multiple_of)) * multiple_of


@dataclass(frozen=True)
class Constraint:
    """A relation between fields that must hold. `why` says what to do about it."""

    fields: tuple[str, ...]
    holds: Callable[[LlmArchConfig], bool]
    why: str


def _rotary_dims_fit(c: LlmArchConfig) -> bool:
    for parameters in c.rope_by_layer_type.values():
        width = int(c.rotary_head_dim * (parameters.get("partial_rotary_factor") or 1.0))
        if width % 2 or width < (4 if parameters.get("rope_type") in ("ntk", "dynamic") else 2):
            return False
    return True


def _groups_are_uniform(c: LlmArchConfig) -> bool:
    layers = c.num_hidden_layers
    if c.layer_groups is None or layers % c.layer_groups:
        return True  # another constraint refuses it
    run = layers // c.layer_groups
    if run > 1 and (c.attention_scale_by_layer or not c.first_attention_norm):
        return False
    without_position = [i in (c.nope_layers or ()) for i in range(layers)]
    lists: tuple[list[Any], ...] = (c.layer_types, c.mlp_layer_types or [], without_position)
    return all(len(set(values[i : i + run])) < 2 for values in lists for i in range(0, len(values), run))


def _known_rope_types(c: LlmArchConfig) -> bool:
    return all(p["rope_type"] in get_args(RopeType) for p in c.rope_by_layer_type.values())


_MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        ("num_attention_heads", "num_key_value_heads"),
        lambda c: c.num_attention_heads % c.num_key_value_heads == 0,
        "every key/value head serves the same number of query heads, so the first must divide the second.",
    ),
    Constraint(
        ("attention_type", "num_attention_heads", "num_key_value_heads"),
        lambda c: {
            "mha": c.num_key_value_heads == c.num_attention_heads,
            "mqa": c.num_key_value_heads == 1,
            "gqa": 1 < c.num_key_value_heads < c.num_attention_heads,
            "mla": c.num_key_value_heads == c.num_attention_heads,
        }.get(c.attention_kind, True),
        "the head counts contradict attention_type; leave it out and it follows from them.",
    ),
    Constraint(
        ("attention_type", *_MLA_SIZES),
        lambda c: (
            all(getattr(c, name) is not None for name in _MLA_SIZES)
            if c.attention_kind == "mla"
            else all(getattr(c, name) is None for name in _MLA_SIZES)
        ),
        "mla needs all of these sizes, the other types none of them.",
    ),
    Constraint(
        ("attention_type", "position_encoding"),
        lambda c: c.attention_kind != "mla" or c.position_encoding == "rope",
        "mla splits its heads into a rotated part and one without position, so it needs rope.",
    ),
    Constraint(
        ("attention_type", "qk_norm"),
        lambda c: c.attention_kind != "mla" or c.qk_norm == "none",
        "mla norms its latents already; qk_norm does not apply to it.",
    ),
    Constraint(
        ("layer_types",),
        lambda c: len(c.layer_types) == c.num_hidden_layers and set(c.layer_types) <= set(get_args(LayerType)),
        f"one of {', '.join(get_args(LayerType))} is needed for each of the num_hidden_layers layers.",
    ),
    Constraint(
        ("sliding_window", "layer_types"),
        lambda c: ("sliding_attention" in c.layer_types) == (c.sliding_window is not None),
        "sliding_window and sliding_attention layers need each other: set both or neither.",
    ),
    Constraint(
        ("attention_chunk_size", "layer_types"),
        lambda c: ("chunked_attention" in c.layer_types) == (c.attention_chunk_size is not None),
        "attention_chunk_size and chunked_attention layers need each other: set both or neither.",
    ),
    Constraint(
        ("sliding_window", "attention_chunk_size"),
        lambda c: c.attention_chunk_size is None or c.sliding_window in (None, c.attention_chunk_size),
        "transformers sizes the cache of both kinds of layers by one number: use one kind, or equal sizes.",
    ),
    Constraint(
        ("sliding_window",),
        lambda c: c.sliding_window is None or c.topology == "encoder" or c.sliding_window >= 2,
        "transformers' cache keeps sliding_window - 1 past keys, and needs at least one: set 2 or more.",
    ),
    Constraint(
        ("attention_chunk_size",),
        lambda c: c.attention_chunk_size is None or c.attention_chunk_size >= 2,
        "transformers' cache keeps attention_chunk_size - 1 past keys, and needs at least one: set 2 or more.",
    ),
    Constraint(
        ("embedding_size", "tie_word_embeddings", "lm_head_transform"),
        lambda c: not (c.tie_word_embeddings and c.embedding_size) or c.lm_head_transform,
        "a head tied to a narrower embedding needs a transform to its width: set lm_head_transform=True.",
    ),
    Constraint(
        ("rope_parameters", "position_encoding"),
        lambda c: (c.position_encoding == "rope") == bool(c.rope_parameters),
        "only position_encoding='rope' reads rope_parameters, and it needs them: set both or neither.",
    ),
    Constraint(
        ("rope_parameters", "layer_types"),
        lambda c: all(c.rope_by_layer_type.values()),
        "RoPE parameters by layer type must have an entry for each type in use; layers without RoPE are nope_layers.",
    ),
    Constraint(("rope_parameters",), _known_rope_types, f"rope_type must be one of {', '.join(get_args(RopeType))}."),
    Constraint(
        ("rope_parameters", "head_dim", "qk_rope_head_dim"),
        _rotary_dims_fit,
        "channels are rotated in pairs, so head width times partial_rotary_factor must be even, and 4 or more for ntk "
        "and dynamic, which keep the first frequency and change the last.",
    ),
    Constraint(
        ("nope_layers", "num_hidden_layers"),
        lambda c: (
            all(0 <= i < c.num_hidden_layers for i in c.nope_layers or ())
            and len(set(c.nope_layers or ())) < c.num_hidden_layers
        ),
        "nope_layers holds indices from 0 to num_hidden_layers - 1; all of them would be position_encoding='none'.",
    ),
    Constraint(
        ("position_encoding", "hidden_size", "embedding_size"),
        lambda c: c.position_encoding != "sinusoidal" or (c.embedding_size or c.hidden_size) % 2 == 0,
        "sinusoids come in pairs of sine and cosine, so the width must be even.",
    ),
    Constraint(
        ("parallel_block", "norm_placement"),
        lambda c: not c.parallel_block or c.norm_placement == "pre",
        "both branches of a parallel block read the normed input: only norm_placement='pre' is defined for it.",
    ),
    Constraint(
        ("num_experts", "num_experts_per_tok"),
        lambda c: c.num_experts is None or 1 <= c.num_experts_per_tok <= c.num_experts,
        "a token can go to at least one and at most all of the experts.",
    ),
    Constraint(
        ("num_experts", "n_group", "topk_group"),
        lambda c: (
            c.topk_group is None
            if c.n_group is None
            else c.topk_group is not None
            and c.topk_group <= c.n_group
            and cast(int, c.num_experts) % c.n_group == 0
            and c.topk_group * cast(int, c.num_experts) // c.n_group >= c.num_experts_per_tok
        ),
        "set n_group and topk_group together; n_group must divide num_experts, and topk_group groups must hold at "
        "least num_experts_per_tok experts.",
    ),
    Constraint(
        ("router_group_score", "num_experts", "n_group"),
        lambda c: (
            c.router_group_score == "max" or (c.n_group is not None and cast(int, c.num_experts) >= 2 * c.n_group)
        ),
        "router_group_score='top2' adds up a group's best two experts: set n_group, so that each has two or more.",
    ),
    Constraint(
        ("router_bias_update_rate", "router_selection_bias"),
        lambda c: not c.router_bias_update_rate or c.router_selection_bias,
        "the rate updates the selection bias: set router_selection_bias=True.",
    ),
    Constraint(
        ("router_type", "topology"),
        lambda c: c.router_type != "expert_choice" or c.topology == "encoder" or not c.use_cache,
        "expert choice looks at later tokens of the row, so a causal model cannot generate with it. Set "
        "use_cache=False to train one all the same (its loss then leaks the future), or topology='encoder'.",
    ),
    Constraint(
        ("router_type", "n_group", "router_selection_bias", "overflow"),
        lambda c: (
            c.router_type == "top_k" or (c.n_group is None and not c.router_selection_bias and c.overflow == "drop")
        ),
        "groups, a selection bias and next_best belong to router_type='top_k'.",
    ),
    Constraint(
        ("router_type", "capacity_factor", "expert_capacity", "router_score", "router_bias"),
        lambda c: (
            c.router_type != "sparsemixer"
            or (
                c.capacity_factor is None
                and c.expert_capacity is None
                and c.router_score == "softmax"
                and not c.router_bias
            )
        ),
        "sparsemixer has a softmax of its own, no capacity and no bias: leave these fields at their defaults.",
    ),
    Constraint(
        ("overflow", "capacity_factor", "expert_capacity"),
        lambda c: c.overflow == "drop" or c.capacity_factor is not None or c.expert_capacity is not None,
        "experts are never full without a limit: set capacity_factor or expert_capacity, or leave overflow out.",
    ),
    Constraint(
        ("expert_capacity", "capacity_factor", "router_type"),
        lambda c: c.expert_capacity is None or (c.capacity_factor is None and c.router_type == "top_k"),
        "set expert_capacity or capacity_factor, not both; expert_capacity needs router_type='top_k'.",
    ),
    Constraint(
        ("glu_limit", "glu_up_offset", "ffn_type"),
        lambda c: c.ffn_type == "glu" or (c.glu_limit is None and c.glu_up_offset == 0.0),
        "these are parts of a GLU; set ffn_type='glu'.",
    ),
    Constraint(
        ("shared_expert_gate", "num_shared_experts"),
        lambda c: c.num_experts is None or not c.shared_expert_gate or c.shared_width > 0,
        "the gate needs a shared expert: num_shared_experts or shared_expert_intermediate_size.",
    ),
    Constraint(
        ("num_shared_experts", "shared_expert_intermediate_size"),
        lambda c: c.shared_expert_intermediate_size is None or c.num_shared_experts == 0,
        "both say how wide the shared expert is: give one of them.",
    ),
    Constraint(
        ("swish_beta", "experts_layout", "num_experts"),
        lambda c: c.num_experts is None or c.experts_layout == "packed" or c.swish_beta != "learned",
        "all experts of a layer share one learned beta, which only experts_layout='packed' can do.",
    ),
    Constraint(
        ("num_experts", "mlp_layer_types"),
        lambda c: c.num_experts is None or "sparse" in (c.mlp_layer_types or ()),
        "experts need at least one 'sparse' layer in mlp_layer_types.",
    ),
    Constraint(
        ("router_type", "norm_topk_prob", "router_aux_loss_coef"),
        lambda c: c.router_type != "expert_choice" or (c.norm_topk_prob and not c.router_aux_loss_coef),
        "expert choice balances the load by itself and does not renormalise a token's weights: leave norm_topk_prob "
        "and router_aux_loss_coef at their defaults.",
    ),
    Constraint(
        ("router_type", "router_jitter_noise"),
        lambda c: c.router_type != "sparsemixer" or c.router_jitter_noise > 0,
        "sparsemixer compares the experts within twice router_jitter_noise of the best: at 0 it compares none, and the "
        "router learns nothing. Set it above 0.",
    ),
    Constraint(
        ("alibi_in_bf16", "topology"),
        lambda c: not c.alibi_in_bf16 or c.topology == "decoder",
        "this bias depends on the key's index alone, which is a bias by distance under a causal mask only: it needs "
        "topology='decoder'.",
    ),
    Constraint(
        ("alibi_scaled", "attention_scale_by_layer"),
        lambda c: not (c.alibi_scaled and c.attention_scale_by_layer),
        "all layers share one ALiBi bias, so it cannot be multiplied by a scale that differs between them.",
    ),
    Constraint(
        ("relative_attention_max_distance", "relative_attention_num_buckets"),
        lambda c: c.relative_attention_max_distance > c.relative_attention_num_buckets // 2 >= 2,
        "half of the buckets hold a single distance each, at least two of them, and the maximum must be greater than "
        "those distances.",
    ),
    Constraint(
        ("positions_skip_padding", "pad_token_id", "position_encoding", "position_offset"),
        lambda c: (
            not c.positions_skip_padding
            or (c.pad_token_id is not None and (c.position_encoding != "learned" or c.position_offset > 0))
        ),
        "padding is found by pad_token_id, and has position -1, for which a learned table needs position_offset >= 1.",
    ),
    Constraint(
        ("layer_groups", "layer_types", "mlp_layer_types", "nope_layers", "first_attention_norm"),
        lambda c: c.layer_groups is None or _groups_are_uniform(c),
        "layers that share a block must have the same type, feed-forward, position encoding, scale and norms.",
    ),
    Constraint(
        ("topology", "parallel_block"),
        lambda c: c.topology != "encoder-decoder" or not c.parallel_block,
        "a parallel block has no place for cross-attention.",
    ),
    Constraint(
        ("topology", "attention_chunk_size"),
        lambda c: c.topology == "decoder" or c.attention_chunk_size is None,
        "chunked attention is causal; encoders take sliding_window.",
    ),
    Constraint(
        ("layer_groups", "topology", "num_hidden_layers"),
        lambda c: c.layer_groups is None or (c.topology == "encoder" and c.num_hidden_layers % c.layer_groups == 0),
        "only an encoder's layers can share blocks (a decoder's would share a cache), and layer_groups must divide "
        "num_hidden_layers.",
    ),
    Constraint(
        ("classifier_pooling", "pooler"),
        lambda c: c.classifier_pooling != "pooler" or c.pooler,
        "the classifier reads the pooler's output: set pooler=True.",
    ),
    Constraint(
        ("classifier_pooling", "eos_token_id"),
        lambda c: c.classifier_pooling != "eos" or c.eos_token_id is not None,
        "the classifier reads the state of a text's last eos token: set eos_token_id.",
    ),
    Constraint(
        ("share_source_embeddings", "hidden_size", "source_stack"),
        lambda c: (
            not (
                c.share_source_embeddings
                and {"hidden_size", "embedding_size", "vocab_size"} & set(c.source_stack or ())
            )
        ),
        "a shared embedding has one width and one vocabulary; set share_source_embeddings=False.",
    ),
    Constraint(
        ("swish_beta", "hidden_act"),
        lambda c: c.swish_beta is None or c.hidden_act in ("silu", "swish"),
        "swish_beta is the beta of silu; set hidden_act='silu'.",
    ),
)


SWITCHES: dict[str, Switch] = {f.name: f.metadata["switch"] for f in LlmArchConfig.switches()}


def followers(changed: Iterable[str]) -> set[str]:
    """The fields that are derived from one of these."""
    names = set(changed)
    return {name for name, declared in SWITCHES.items() if names.intersection(declared.follows)}


def _refuse_model_wide_overrides(config: LlmArchConfig) -> None:
    """Refuse `per_layer_config` where it varies what all layers, or all layers of one type, have in common.

    Raises:
        ValueError: naming the field, and where to set it instead.
    """
    if not config.is_heterogeneous:
        return
    for name in sorted(config._heterogeneity_spec.per_layer_attributes):
        allowed = SWITCHES[name].per_layer if name in SWITCHES else True
        if allowed is False:
            raise ValueError(
                f"per_layer_config overrides {name!r}, which the model has once: set it on the config itself."
            )
        if isinstance(allowed, Condition) and not allowed.holds(config):
            raise ValueError(
                f"per_layer_config overrides {name!r}, which layers may have of their own only with {allowed.text}: "
                "set it on the config itself."
            )
    if config.topology == "encoder-decoder":
        raise ValueError("per_layer_config counts the layers of one stack: an encoder-decoder takes source_stack.")
    if config.layer_groups is not None:
        raise ValueError("per_layer_config: layers that share their blocks (layer_groups) cannot differ.")
    layers = config.layer_configs()
    widths: dict[str, int] = {}
    for i, (kind, layer) in enumerate(zip(config.layer_types, layers, strict=False)):
        if widths.setdefault(kind, layer.rotary_head_dim) != layer.rotary_head_dim:
            raise ValueError(
                f"per_layer_config[{i}]: head_dim={layer.rotary_head_dim} differs from other {kind} layers'; positions "
                "are prepared once a layer type, so all layers of a type need one head width."
            )


def _refuse_out_of_range(config: LlmArchConfig) -> None:
    for name, declared in SWITCHES.items():
        declared.refuse(name, getattr(config, name))


# The numbers among RoPE's parameters with their bounds, the lists of numbers, and what each `rope_type` requires.
_POSITIVE = Switch(None, above=0)
_ROPE_NUMBERS: dict[str, Switch] = {
    "rope_theta": _POSITIVE,
    "partial_rotary_factor": Switch(None, above=0, most=1),
    "factor": _POSITIVE,
    "attention_factor": _POSITIVE,
    "original_max_position_embeddings": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "mscale": Switch(None, least=0),
    "mscale_all_dim": Switch(None, least=0),
}
_ROPE_LISTS = ("short_factor", "long_factor")
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": _ROPE_LISTS,
}


def _refuse_rope(config: LlmArchConfig) -> None:
    """
    Raises:
        ValueError: naming a parameter of RoPE that is missing, is no number, or is outside its bounds.
    """
    for parameters in config.rope_by_layer_type.values():
        kind = str(parameters.get("rope_type"))
        for name in _ROPE_NEEDS.get(kind, ()):
            if parameters.get(name) is None:
                raise ValueError(f"rope_parameters[{name!r}] is missing: rope_type={kind!r} needs it.")
        for name, bounds in _ROPE_NUMBERS.items():
            if parameters.get(name) is not None:
                _refuse_rope_number(name, parameters[name], bounds)
        if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
            raise ValueError("rope_parameters['high_freq_factor'] must be greater than its 'low_freq_factor'.")
        for name in _ROPE_LISTS if kind == "longrope" else ():
            _refuse_rope_list(config, name, parameters)


def _refuse_rope_number(name: str, value: Any, bounds: Switch) -> None:
    if isinstance(value, bool) or not isinstance(value, Number):
        raise ValueError(f"rope_parameters[{name!r}]={value!r} must be a number.")
    bounds.refuse(f"rope_parameters[{name!r}]", value)


def _refuse_rope_list(config: LlmArchConfig, name: str, parameters: dict[str, Any]) -> None:
    numbers = parameters[name]
    pairs = int((config.rotary_head_dim or 0) * (parameters.get("partial_rotary_factor") or 1.0)) // 2
    if not isinstance(numbers, list) or len(numbers) != pairs:
        raise ValueError(
            f"rope_parameters[{name!r}]={numbers!r} must be a list of {pairs} numbers: one for each pair of channels "
            "that are rotated."
        )
    for number in numbers:
        _refuse_rope_number(name, number, _POSITIVE)


def _refuse_unused(config: LlmArchConfig) -> None:
    for name, declared in SWITCHES.items():
        value = getattr(config, name)
        if declared.needs is not None and value != declared.default and not declared.needs.holds(config):
            raise ValueError(f"{name}={value!r} has no effect without {declared.needs.text}.")


def _refuse_near_misses(config: LlmArchConfig, unknown: dict[str, Any]) -> None:
    """Refuse keywords that look like a misspelt switch; warn about others, which newer versions may know."""
    names = {f.name for f in fields(config)} | set(ROPE_SPELLINGS)
    generation = GenerationConfig._get_default_generation_params()
    for name in unknown:
        if (
            name in generation
            or name in _TRANSFORMERS_KEYWORDS
            or name.startswith("_")
            or hasattr(PreTrainedConfig, name)
        ):
            continue
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
        if close:
            raise ValueError(f"Unknown field {name!r}. Did you mean {close[0]!r}?")
        logger.warning(f"LlmArchConfig has no field {name!r}: kept in config.json, without effect on the model.")


# Keywords that transformers and its tools put beside a config's fields, or into a saved config.json.
_TRANSFORMERS_KEYWORDS = {
    *ROPE_SPELLINGS,
    *("attn_implementation", "auto_map", "experts_implementation", "finetuning_task", "is_decoder", "name_or_path"),
    "output_router_logits",
    *("num_labels", "output_attentions", "per_layer_config", "qk_head_dim", "quantization_config"),
    *("task_specific_params", "tie_last_hidden_states", "tokenizer_class", "torch_dtype", "torchscript"),
    *("transformers_version", "use_return_dict"),
    *("model_type", "add_cross_attention", "cross_attention_hidden_size", "unsloth_version", "transformers_weights"),
}

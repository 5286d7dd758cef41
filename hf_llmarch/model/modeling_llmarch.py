"""The models: one base model, and a class for each task. Parts are chosen in `__init__`; `forward` holds no switch."""

import copy
from dataclasses import fields
from typing import Any, cast, get_args

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    Seq2SeqMoEModelOutput,
    Seq2SeqMoEOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput, can_return_tuple, logging, torch_compilable_check
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs, maybe_install_capturing_hooks

from .attention import CrossAttention, ScoredAttention
from .backends import demands, honours, refuse_backend
from .balancing import balance_loss, z_loss
from .block import Block, block
from .compat import BIDIRECTIONAL_MASKS, CACHE, MASKS, packed_overlay, prepared
from .configuration_llmarch import OF_MODELS, KeptInFp32, LlmArchConfig, Topology
from .embeddings import dropout, in_sequence, token_embedding
from .generation import LlmArchGenerationMixin
from .heads import POOLINGS, HeadTransform, Pooler, classifier_transform, logits_transform, output_head
from .layer_inputs import AttentionInputs
from .linear import Linear, as_torch_linear
from .norms import norm
from .parallel import (
    expert_parallel_plan,
    keep_whole,
    pick_heads,
    pipeline_plan,
    refuse_sizes,
    supports_context,
    tensor_parallel_plan,
)
from .positions import PADDING, POSITIONS, has_holes
from .routing import ROUTERS, Router

logger = logging.get_logger(__name__)

# The modules that quantisers leave alone: gates, task heads, which may be untrained, and in MLA the narrow projections
# to the latents and `kv_b_proj`, whose weight absorbed decoding folds into the queries.
UNQUANTISED = ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "shared_expert_gate", "score", "qa_outputs")
# As quantisers match them, from the beginning of a module's name.
UNQUANTISED_PATTERNS = frozenset(rf"(.*\.)?{name}" for name in UNQUANTISED)

# Of `keep_in_fp32`, the weights by a part of their names, and what a model is loaded in when they are kept.
KEPT_IN_FP32: dict[KeptInFp32, tuple[str, tuple[torch.dtype, ...]]] = {
    "ffn_output": ("mlp.down_proj", (torch.float16,)),
    "norms": ("norm", (torch.float16,)),
    "router": ("mlp.gate.weight", (torch.float16, torch.bfloat16)),
    "sinks": ("self_attn.sinks", (torch.float16, torch.bfloat16)),
}


def _layer_masks(
    config: LlmArchConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None = None,
) -> dict[str, Any]:
    """One mask for each layer type in use, in the form that the attention implementation takes."""
    if isinstance(attention_mask, dict):
        return attention_mask
    given = {"config": config, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
    kinds = dict.fromkeys(config.layer_types)
    if config.topology == "encoder":
        overlay = packed_overlay(position_ids) if attention_mask is None else None
        return {kind: BIDIRECTIONAL_MASKS[kind](and_mask_function=overlay, **{CACHE: cache}, **given) for kind in kinds}
    return {kind: MASKS[kind](position_ids=position_ids, **{CACHE: cache}, **given) for kind in kinds}


def real_tokens(attention_mask: Any, length: int) -> torch.Tensor | None:
    """`(batch, length)`, True where the mask says that a token is not padding; None: all are real.

    Args:
        attention_mask: the 2-D mask `(batch, past + length)`, or a dict of masks with it under `PADDING`. Others do not
            say what is padding.
        length: the number of new tokens, which the cache does not hold yet.
    """
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get(PADDING)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        return attention_mask[:, -length:].bool()
    return None


def _by_share(rows: torch.Tensor, items: torch.Tensor, num_items: torch.Tensor | int | None) -> torch.Tensor:
    """The mean of the rows' losses `(batch,)`, each weighted by the row's number of labels, `items (batch,)`.

    Given the labels of all micro-batches of a step, `num_items`, the sum over these does not depend on how the step is
    split, as for the loss of tokens.
    """
    items = items.to(rows.device)
    return (rows * items).sum() / (items.sum() if num_items is None else num_items)


def _refuse_moved(i: int, layer: Any, kind: str, has_position: bool) -> None:
    """
    Raises:
        ValueError: for a layer that was made for another place, among layers that differ.
    """
    made = f"layer_type={layer.layer_type!r}, has_position={layer.has_position}"
    raise ValueError(
        f"layers[{i}] was made with {made}, and by the config the layer at this place has {kind!r}, {has_position}. "
        "After moving layers, set config.layer_types, and config.nope_layers where there are any, to what the layers "
        "are, in their order."
    )


def _two_stacks(encoded: ModelOutput, decoded: ModelOutput) -> ModelOutput:
    """The outputs of an encoder and of the decoder that has read it, under transformers' names for both."""
    routed = "router_logits" in encoded or "router_logits" in decoded
    fields = {"last_hidden_state": decoded["last_hidden_state"], CACHE: decoded.get(CACHE)}
    fields["cross_attentions"] = decoded.get("cross_attentions")
    fields["encoder_last_hidden_state"] = encoded["last_hidden_state"]
    for side, outputs in (("encoder", encoded), ("decoder", decoded)):
        for name in ("hidden_states", "attentions", *(("router_logits",) if routed else ())):
            fields[f"{side}_{name}"] = outputs.get(name)
    return (Seq2SeqMoEModelOutput if routed else Seq2SeqModelOutput)(**fields)


def _labelled(labels: torch.Tensor) -> torch.Tensor:
    """How many labels each row has, `(batch,)`."""
    return (labels != -100).sum(-1)


def _shift_right(config: LlmArchConfig, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens `(batch, length)` moved one to the right behind the start token, with padding in place of -100.

    With `wrap_decoder_start` each text starts with its own last token.

    Raises:
        ValueError: where the config names no start token, or no padding token to find the last one by.
    """
    start, pad = config.decoder_start_token_id, config.pad_token_id
    if config.wrap_decoder_start:
        if pad is None:
            raise ValueError(
                "pad_token_id is None: set it on the config, because wrap_decoder_start needs it to find a text's last "
                "label."
            )
        last = ((tokens != -100) & (tokens != pad)).sum(-1, keepdim=True) - 1
        first = tokens.gather(1, last.clamp(min=0))
    elif start is None:
        raise ValueError(
            "decoder_start_token_id is None: set it on the config, because the decoder's tokens begin with it."
        )
    else:
        first = torch.full_like(tokens[:, :1], start)
    shifted = torch.cat((first, tokens[:, :-1]), dim=-1)
    return shifted.masked_fill(shifted == -100, cast(int, start if pad is None else pad))


class LlmArchPreTrainedModel(PreTrainedModel):
    """Loading, saving, initialisation, and which attention implementations a config can use."""

    config: LlmArchConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = [CACHE]
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": Block,
        "attentions": OutputRecorder(ScoredAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
        "router_logits": OutputRecorder(Router, index=0),
    }
    # The selection bias of a router moves by small steps that bf16 cannot hold.
    _keep_in_fp32_modules_strict: set[str] | list[str] = ["e_score_correction_bias"]
    # transformers would look for its decorator of experts in this file; ours dispatch by themselves, in `experts.py`.
    _can_set_experts_implementation_cached_value = True

    # The topologies that the class is for.
    topologies: frozenset[Topology] = frozenset(get_args(Topology))

    def __init__(self, config: LlmArchConfig, *args: Any, **kwargs: Any):
        config.validate_switches()  # once more: fields may have been set since it was built
        if config.topology not in self.topologies:
            raise ValueError(
                f"{type(self).__name__} is for topology {' or '.join(sorted(self.topologies))}, and the config says "
                f"{config.topology!r}. Over a vocabulary, decoders take LlmArchForCausalLM, encoders "
                "LlmArchForMaskedLM, and encoder-decoders LlmArchForConditionalGeneration."
            )
        refuse_backend(config, config._attn_implementation)
        self.demands = frozenset(demand.feature for demand in demands(config))
        super().__init__(config, *args, **kwargs)
        OF_MODELS[id(config)] = config

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, and of a model that was pickled: its config is a model's as well."""
        super().__setstate__(state)
        OF_MODELS[id(self.config)] = self.config

    # transformers has class attributes of these names; here they depend on the config.
    @property
    def _supports_sdpa(self) -> bool:  # type: ignore[override]
        return honours("sdpa", self.demands)

    @property
    def _supports_flash_attn(self) -> bool:  # type: ignore[override]
        return honours("flash_attention_2", self.demands)

    @property
    def _supports_flex_attn(self) -> bool:  # type: ignore[override]
        return honours("flex_attention", self.demands)

    @property
    def _can_compile_fullgraph(self) -> bool:  # type: ignore[override]
        # Dynamic NTK picks its frequencies by the values of the positions.
        return all(p["rope_type"] != "dynamic" for p in self.config.rope_by_layer_type.values())

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        """As in transformers.

        Raises:
            ValueError: naming a switch of the config that the implementation would ignore.
        """
        if isinstance(attn_implementation, str):
            refuse_backend(self.config, attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)
        # An encoder has a config of its own, which releases before 5.24 do not reach.
        for module in self.modules():
            if isinstance(module, LlmArchPreTrainedModel) and module.config is not self.config:
                module.config._attn_implementation = self.config._attn_implementation

    def set_experts_implementation(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, and of the encoder as well."""
        super().set_experts_implementation(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, LlmArchPreTrainedModel) and module.config is not self.config:
                module.config._experts_implementation = self.config._experts_implementation

    def wanted(self, given: dict[str, Any]) -> dict[str, Any]:
        """Which outputs are to be recorded: as the call says, else as the config does, for an encoder too, whose config
        is its own."""
        names = ("output_hidden_states", "output_attentions", "output_router_logits")
        asked = {name: given.get(name) for name in names}
        return {name: getattr(self.config, name, False) if value is None else value for name, value in asked.items()}

    @property
    def supports_context_parallel(self) -> bool:
        """Whether sequences can be cut across devices, where transformers drops masks and what is added to scores."""
        return supports_context(self.config)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, *args: Any) -> Any:
        """As in transformers; where the key and value heads cannot be divided evenly, every device computes them all.

        Raises:
            ValueError: for a form of parallelism, or a number of devices, that the config does not go with.
        """
        if distributed_config is None or not args or args[0] is None:
            return super().maybe_distribute_model(model, distributed_config, *args)
        refuse_sizes(model.config, distributed_config)
        declared, size = dict(model.tp_plan), distributed_config.tp_size or 1
        whole = keep_whole(model, size) if size > 1 and distributed_config.tp_plan != {} else []
        model = super().maybe_distribute_model(model, distributed_config, *args)
        for attention in whole:
            pick_heads(attention, model._device_mesh if model._device_mesh.ndim == 1 else model._device_mesh["tp"])
        if whole:
            # By the plan `generate` tells whether every device has an equal share of the key and value heads, for its
            # cache, which here they do not have.
            model.tp_plan = declared
        return model

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        checkpoint = kwargs.get("gradient_checkpointing_func")
        if self.weighs_balance and getattr(checkpoint, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "Reentrant checkpoints run the routers without gradients, so router_aux_loss_coef and "
                "router_z_loss_coef would train nothing: use gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        super()._set_gradient_checkpointing(*args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # A part that has parameters or unsaved buffers of its own initialises them itself.
        if isinstance(module, PreTrainedModel) or not hasattr(module, "init_weights"):
            super()._init_weights(module)
        else:
            cast(Any, module).init_weights(self.config.initializer_range)

    def post_init(self) -> None:
        """As in transformers; a model that is about to be quantised gets `nn.Linear` for its linear layers."""
        super().post_init()
        # What the class names, this model may not have.
        parts = {part for name in self.state_dict() for part in name.split(".")}
        self._keep_in_fp32_modules_strict = parts.intersection(self._keep_in_fp32_modules_strict or ())
        if getattr(self.config, "quantization_config", None) is not None:
            as_torch_linear(self)
            # Quantisers leave alone what this set names. In fp16 transformers would also keep it in fp32, see
            # `_get_dtype_plan`.
            self._keep_in_fp32_modules = {*UNQUANTISED_PATTERNS, *(self._keep_in_fp32_modules or ())}

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        plan = super()._get_dtype_plan(dtype)
        plan = {name: kept for name, kept in plan.items() if name not in UNQUANTISED_PATTERNS}
        if getattr(self.config, "quantization_config", None) is not None:
            return plan  # a quantised weight has no other dtype
        kept = [KEPT_IN_FP32[part] for part in self.config.keep_in_fp32 or ()]
        return plan | {name: torch.float32 for name, dtypes in kept if dtype in dtypes}

    @property
    def weighs_balance(self) -> bool:
        """Whether the config gives the balance loss or the z-loss a weight."""
        config = self.config
        return bool(config.num_experts and (config.router_aux_loss_coef or config.router_z_loss_coef))

    @property
    def balances(self) -> bool:
        """Whether the loss has auxiliary parts now: they are for training."""
        return self.training and self.weighs_balance

    def balance(self, outputs: ModelOutput, attention_mask: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The balance loss of each row without its weight, and the sum of each row's auxiliary losses with the config's
        weights, both `(batch,)`; None without router logits."""
        logits = outputs.get("router_logits")
        if not logits:
            return None
        batch, length = outputs["last_hidden_state"].shape[:2]
        real = real_tokens(attention_mask, length)
        if real is None:
            real = torch.ones(batch, length, dtype=torch.bool, device=logits[0].device)
        balance = balance_loss(self.routers(), logits, real, self.config.router_aux_loss_scope)
        rows = self.config.router_aux_loss_coef * balance + self.config.router_z_loss_coef * z_loss(logits, real)
        return balance, rows

    def with_auxiliary(
        self,
        loss: torch.Tensor | None,
        outputs: ModelOutput,
        attention_mask: Any,
        items: torch.Tensor | None,
        num_items: torch.Tensor | int | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The loss, in training with the auxiliary losses, and the balance loss by itself (None without router logits).

        Args:
            outputs: of this stack, with its `last_hidden_state` and `router_logits`.
            items: `(batch,)`, the numbers that the loss is a mean over, by row; the auxiliary losses weigh rows by it.
            num_items: see `_by_share`.
        """
        found = self.balance(outputs, attention_mask)
        if found is None:
            return loss, None
        balance, rows = found
        if loss is not None and self.balances:
            loss = loss + _by_share(rows, cast(torch.Tensor, items), num_items)
        return loss, balance.mean()

    def routers(self) -> list[Router]:
        """The routers of this stack's sparse layers, in the order of `router_logits`."""
        layers = cast(nn.ModuleList, self.base_model.layers)
        return [module for module in layers.modules() if isinstance(module, Router)]


class LlmArchModel(LlmArchPreTrainedModel):
    """Embedding, blocks and final norm, without a head; an encoder-decoder is a decoder with an `encoder` to read.

    Args:
        add_pooling_layer: whether there is a pooler, whatever the config says, as BERT's own class takes it.
    """

    def __init__(self, config: LlmArchConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        if add_pooling_layer and config.topology != "encoder":
            raise ValueError(f"add_pooling_layer=True: a pooler is an encoder's, and topology={config.topology!r}.")
        # transformers has these on the config's class; here they depend on the config.
        plans: Any = config
        plans.base_model_tp_plan, plans.base_model_ep_plan = tensor_parallel_plan(config), expert_parallel_plan(config)
        plans.base_model_pp_plan = pipeline_plan(config)
        width = config.embedding_size or config.hidden_size
        self.embed_tokens = token_embedding(config)
        self.embed_types = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.embed_positions = POSITIONS[config.position_encoding](config)
        self.embed_norm = in_sequence(norm(config, width) if config.embedding_norm else None)
        self.embed_dropout = in_sequence(dropout(config.embedding_dropout))
        self.embed_projection = in_sequence(Linear(width, config.hidden_size) if config.embedding_size else None)
        self.runs_in_a_row = config.num_hidden_layers // (config.layer_groups or config.num_hidden_layers)
        self.layers = nn.ModuleList(block(config, i) for i in range(0, config.num_hidden_layers, self.runs_in_a_row))
        # Only classes that this model has: accelerate raises for one that it does not find.
        self._no_split_modules = {type(layer).__name__ for layer in self.layers}
        self.norm = in_sequence(norm(config) if config.final_norm else None)
        self.final_dropout = in_sequence(dropout(config.final_dropout))
        self.pooler = Pooler(config) if (config.pooler if add_pooling_layer is None else add_pooling_layer) else None
        self.encoder = LlmArchModel(config.source_config()) if config.topology == "encoder-decoder" else None
        if self.encoder is not None and config.share_source_embeddings:
            self._tied_weights_keys = {"encoder.embed_tokens.weight": "embed_tokens.weight"}
        self.gradient_checkpointing = False
        self.post_init()
        if self.encoder is not None:
            # For both stacks at once: if each stack did it for itself, the encoder's outputs would be recorded twice.
            maybe_install_capturing_hooks(self)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The embedding that the two stacks share, also where the head is not tied (transformers then ties nothing)."""
        return dict(self._tied_weights_keys or {})

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """
        Args:
            input_ids: `(batch, length)`; or give `inputs_embeds` `(batch, length, width)`, before positions.
            attention_mask: `(batch, past + length)`, 1 where a token is real; a 4-D mask is used as it is; a dict holds
                one mask a layer type.
            position_ids: `(1 or batch, length)`, from 0 for the first token whatever the `position_offset` (RoBERTa's
                own class has the offset in them). None: counted on from the cache. Without mask and cache they also
                tell documents packed together, which do not see each other: in an encoder, where the only row counts
                up and begins again at 0; in a decoder, wherever a step is not +1, as in transformers.
            cache: keys and values so far; also accepted as `past_key_values`, its name before transformers 5.24.
            token_type_ids: `(batch, length)`, for `type_vocab_size`. None: all 0.
            encoder_hidden_states: `(batch, source length, width)`, what an encoder-decoder's decoder reads. None: the
                encoder is run first, on `input_ids` and `attention_mask`.
            encoder_attention_mask: `(batch, source length)`, its padding.
            decoder_input_ids: the decoder's tokens, where the encoder is run. None: `input_ids`, moved to the right.
            decoder_attention_mask: as `attention_mask`, for them.

        Returns:
            `last_hidden_state` `(batch, length, hidden_size)`, the cache, and with a pooler `pooler_output`; of an
            encoder that was run, its states.

        Raises:
            ValueError: unless exactly one of `input_ids` and `inputs_embeds` is given; for arguments of an encoder or a
                decoder that the model does not have, or that are missing; when the attention implementation set on the
                config would ignore one of its switches.
        """
        # The stacks return whole outputs; `can_return_tuple` makes a tuple of the result if the caller wants one.
        kwargs["return_dict"] = True
        given: dict[str, Any] = {"cache": cache, "past_key_values": past_key_values, "use_cache": use_cache, **kwargs}
        if self.encoder is None:
            if decoder_input_ids is not None or encoder_hidden_states is not None:
                raise ValueError(
                    f"topology={self.config.topology!r} has no encoder to read from: leave out decoder_input_ids and "
                    "encoder_hidden_states."
                )
            return self.run_layers(input_ids, attention_mask, position_ids, inputs_embeds, token_type_ids, **given)
        if encoder_hidden_states is not None:
            given |= {"encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask}
            return self.run_layers(input_ids, attention_mask, position_ids, inputs_embeds, token_type_ids, **given)
        if decoder_input_ids is None:
            if input_ids is None:
                raise ValueError("An encoder-decoder that is given inputs_embeds needs decoder_input_ids as well.")
            decoder_input_ids = _shift_right(self.config, input_ids)
        kwargs |= self.wanted(kwargs)
        given |= kwargs
        encoded = self.encoder(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, token_type_ids=token_type_ids, **kwargs
        )
        given |= {"encoder_hidden_states": encoded.last_hidden_state, "encoder_attention_mask": attention_mask}
        outputs = self.run_layers(decoder_input_ids, decoder_attention_mask, position_ids, **given)
        return cast(BaseModelOutput, _two_stacks(encoded, outputs))

    @merge_with_config_defaults
    @capture_outputs
    def run_layers(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """One stack, from its embedding to its last norm. Arguments: see `forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if not honours(self.config._attn_implementation, self.demands):
            refuse_backend(self.config, self.config._attn_implementation)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        given = cache if cache is not None else past_key_values
        past = given if given is not None or not use_cache else self.new_cache()
        # The masks are made without a cache that is new and empty, so that packed documents are told apart.
        masks = _layer_masks(self.config, inputs_embeds, attention_mask, given, position_ids)
        real = real_tokens(attention_mask, inputs_embeds.shape[1])
        if position_ids is None:
            position_ids = self.count_positions(inputs_embeds, input_ids, given, attention_mask)

        x = inputs_embeds
        if self.embed_types is not None:
            x = x + self.embed_types(torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids)
        x = self.embed_norm(self.embed_positions.embed(x, position_ids))
        x = self.embed_projection(self.embed_dropout(x))
        state = self.embed_positions.prepare(x, position_ids, given, attention_mask)
        # Passed by position, as is a bias: reentrant checkpoints carry gradients of positional arguments only.
        source = self.source(x, encoder_hidden_states, encoder_attention_mask)
        shared = cast(AttentionInputs, {"position_ids": position_ids, "use_cache": use_cache, CACHE: past, **kwargs})
        without_position = self.config.nope_layers or ()
        # Both may have been cut or extended since: `layers` by whoever studies them, the config by early exit.
        for i, kind in enumerate(self.config.layer_types[: len(self.layers) * self.runs_in_a_row]):
            layer = self.layers[i // self.runs_in_a_row]
            has_position = i not in without_position
            if (
                getattr(layer, "layer_type", kind) != kind
                or getattr(layer, "has_position", has_position) != has_position
            ):
                _refuse_moved(i, layer, kind, has_position)
            placed = dict(state.get(i, state.get(kind, {}))) if has_position else {}
            bias = placed.pop("position_bias", None)
            tensors = () if bias is None and not source else (bias, *source)
            x = layer(x, *tensors, attention_mask=masks[kind], real_tokens=real, **placed, **shared)
        return self.output(self.final_dropout(self.norm(x)), past)

    def new_cache(self) -> Cache:
        """An empty cache; of an encoder-decoder one with a part for cross-attention."""
        own = DynamicCache(config=self.config)
        return own if self.encoder is None else EncoderDecoderCache(own, DynamicCache())

    def count_positions(
        self,
        inputs_embeds: torch.Tensor,
        input_ids: torch.Tensor | None,
        cache: Cache | None,
        attention_mask: Any,
    ) -> torch.Tensor:
        """`(1 or batch, length)`: on from the cache; of real tokens alone where the config says so."""
        past = cache.get_seq_length() if cache is not None else 0
        if self.config.positions_follow_mask and isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            kept = attention_mask.long()
            return (kept.cumsum(-1) * kept - 1)[:, past : past + inputs_embeds.shape[1]]
        if self.config.positions_skip_padding and input_ids is not None:
            real = torch.ne(input_ids, cast(int, self.config.pad_token_id)).long()
            return (real.cumsum(-1) + past) * real - 1
        return (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past)[None]

    def source(
        self, x: torch.Tensor, states: torch.Tensor | None, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """What layers of a decoder get of its encoder, the states and the mask over them; () without an encoder."""
        if self.encoder is None:
            return ()
        if states is None:
            raise ValueError("An encoder-decoder's decoder reads an encoder: give encoder_hidden_states.")
        full = BIDIRECTIONAL_MASKS["full_attention"]
        mask = full(config=self.config, inputs_embeds=x, attention_mask=mask, encoder_hidden_states=states)
        return states, mask

    def output(self, x: torch.Tensor, cache: Cache | None) -> Any:
        fields: dict[str, Any] = {"last_hidden_state": x, CACHE: cache}
        if self.pooler is not None:
            return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=self.pooler(x))
        dense = self.config.num_experts is None
        return (BaseModelOutputWithPastAndCrossAttentions if dense else MoeModelOutputWithPast)(**fields)


class LlmArchHeadModel(LlmArchPreTrainedModel):
    """The base model, for a class to put a head on."""

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.model = LlmArchModel(config)


class LlmArchVocabularyModel(LlmArchHeadModel):
    """The base model with a head over the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.transform = in_sequence(HeadTransform(config) if config.lm_head_transform else None)
        self.lm_head = output_head(config)
        self.logits = logits_transform(config)

    def over_vocabulary(self, x: torch.Tensor) -> torch.Tensor:
        """The logits `(batch, length, vocab_size)` of last hidden states `(batch, length, hidden_size)`."""
        return self.logits(self.lm_head(self.transform(x)))


class LlmArchForCausalLM(LlmArchVocabularyModel, LlmArchGenerationMixin):
    """The base model with a head over the vocabulary, for next-token prediction and `generate()`."""

    topologies = frozenset({"decoder"})

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        first = config.layer_configs()[0]
        self.looks_ahead = config.num_experts is not None and ROUTERS[first.router_type].pickers == "experts"
        self.rope_switch_lengths = config.rope_switch_lengths
        if self.looks_ahead:
            logger.warning_once(
                "router_type='expert_choice': which tokens an expert picks depends on later ones, so the loss of a "
                "causal model leaks the future."
            )
        self.output_class = CausalLMOutputWithPast if config.num_experts is None else MoeCausalLMOutputWithPast
        self.post_init()

    @staticmethod
    def create_masks_for_generate(
        config: LlmArchConfig, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> dict[str, Any]:
        """The masks that `generate` hands to a compiled forward."""
        masks = _layer_masks(config, inputs_embeds, attention_mask, kwargs.get(CACHE), kwargs.get("position_ids"))
        # The padding mask goes along only where tokens are counted by it: it grows with each token, so that a compiled
        # forward would be compiled again.
        counts = config.alibi_in_bf16 or any(
            layer.capacity_factor is not None or layer.expert_capacity is not None for layer in config.layer_configs()
        )
        if config.positions_follow_mask and config.position_encoding == "alibi" and attention_mask is not None:
            counts = counts or (attention_mask.dim() == 2 and bool(has_holes(attention_mask)))
        return {**masks, PADDING: attention_mask} if counts else masks

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As in transformers; but a text that outgrows the length at which LongRoPE changes its frequencies is read
        again as a whole, because the keys in the cache were rotated by the former frequencies."""
        if self.looks_ahead:
            raise ValueError(
                "router_type='expert_choice' cannot generate, because its experts also pick among later tokens: use a "
                "model with router_type='top_k'."
            )
        cache, lengths = kwargs.get(CACHE), self.rope_switch_lengths
        if cache is not None and hasattr(self, "_pp_stage"):
            raise ValueError(
                "A stage of a pipeline caches its own layers only, and transformers takes the length of the text from "
                "the first layer's cache: use generate(use_cache=False)."
            )
        if cache is not None and lengths:
            seen = int(cache.get_seq_length())
            if any(0 < seen <= length < input_ids.shape[1] for length in lengths):
                kwargs[CACHE] = kwargs["next_sequence_length"] = None
        # `inputs_embeds` is named: by this signature transformers tells whether embeddings can begin a text.
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        return prepared(inputs, kwargs.get("is_first_iteration", False))

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; `generate_batch` and `transformers serve --continuous-batching` call it.

        Raises:
            ValueError: naming a switch of the config that a paged cache cannot do. transformers would answer with empty
                texts.
        """
        implementation = self.config._attn_implementation or "eager"
        refuse_backend(self.config, f"paged|{implementation.removeprefix('paged|')}")
        return super().init_continuous_batching(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_router_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """
        Args:
            input_ids: `(batch, length)`, the tokens that the cache does not hold yet; or give `inputs_embeds`.
            attention_mask: `(batch, past + length)`, 1 where a token is real and 0 where it is padding; a 4-D mask
                `(batch, 1, length, past + length)` is used as it is; a dict holds one mask for each layer type.
            position_ids: `(1 or batch, length)`; see `LlmArchModel.forward`. None: counted on from the cache.
            cache: the keys and values of the tokens so far, which this call extends.
            past_key_values: `cache` by its name before transformers 5.24; either is taken.
            inputs_embeds: `(batch, length, width)`, embeddings in place of `input_ids`, before positions are added; the
                width is the config's `embedding_size`, or `hidden_size` where that is None.
            labels: `(batch, length)`, the tokens of `input_ids` themselves, as they are shifted here. -100 is ignored.
            use_cache: return a cache, and make one where none is given. None: as the config says.
            logits_to_keep: compute logits for that many last positions, or for the positions of these indices
                `(kept,)`; 0: for all.
            output_router_logits: return the router logits `(batch * length, num_experts)` of each sparse layer, and the
                balance loss. None: as the config's attribute of this name says.
            token_type_ids: (keyword) `(batch, length)`, for `type_vocab_size`. None: all 0.
            num_items_in_batch: (keyword) the number of labels in all micro-batches of a step. The summed loss is
                divided by it instead of by this batch's number, so that gradient accumulation is exact.
            output_hidden_states: (keyword) return the hidden states `(batch, length, hidden_size)` before each layer
                and at the end. None: as the config says; so are the next two.
            output_attentions: (keyword) return the attention weights `(batch, heads, length, past + length)` of each
                layer, which not every attention implementation computes.
            return_dict: (keyword) False returns a tuple.

        Further keyword arguments reach the attention implementation (`cu_seq_lens_q`, `max_length_q` and the like).

        Returns:
            `loss` if there are labels, `logits` `(batch, kept, vocab_size)`, the cache under its name in transformers,
            and what was asked for. With router logits, `aux_loss` is the balance loss without its weight; in training,
            the auxiliary losses are in `loss` with the config's weights.

        Raises:
            ValueError: see `LlmArchModel.forward`.
        """
        balances = labels is not None and self.balances
        if output_router_logits is None:
            output_router_logits = getattr(self.config, "output_router_logits", False)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits or balances,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.over_vocabulary(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        results: dict[str, Any] = {
            "logits": logits,
            "hidden_states": outputs.hidden_states,
            "attentions": outputs.attentions,
            CACHE: outputs.get(CACHE),
        }
        items = None if labels is None else _labelled(labels[:, 1:])
        loss, balance = self.with_auxiliary(loss, outputs, attention_mask, items, kwargs.get("num_items_in_batch"))
        if balance is not None:
            results |= {"aux_loss": balance, "router_logits": outputs["router_logits"]}
        return self.output_class(loss=loss, **results)


class LlmArchForConditionalGeneration(LlmArchVocabularyModel, LlmArchGenerationMixin):
    """An encoder-decoder with a head over the vocabulary, for translation and the like."""

    topologies = frozenset({"encoder-decoder"})

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """What the decoder reads in training, see `_shift_right`; transformers' collators call it."""
        return _shift_right(self.config, labels)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in transformers, see `prepared`."""
        return prepared(super().prepare_inputs_for_generation(*args, **kwargs), kwargs.get("is_first_iteration", False))

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        # transformers makes both halves from one config, whose sliding layers would cut the encoder's keys to the
        # window.
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, EncoderDecoderCache) and not getattr(cache, "_is_user_defined", False):
            if isinstance(cache.cross_attention_cache, StaticCache):
                full = copy.deepcopy(self.config)
                full.layer_types, full.sliding_window = ["full_attention"] * full.num_hidden_layers, None
                source = model_kwargs["encoder_outputs"].last_hidden_state.shape[1]
                cast(Any, cache).cross_attention_cache = StaticCache(config=full, max_cache_len=source)
            else:
                cache.cross_attention_cache = DynamicCache()
        return result

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.Tensor, ...] | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput | Seq2SeqMoEOutput:
        """
        Args:
            input_ids: `(batch, source length)`, what the encoder reads; or give `inputs_embeds`, or `encoder_outputs`
                once they are known.
            attention_mask: `(batch, source length)`, 1 where a token of the encoder is real and 0 where it is padding.
            decoder_input_ids: `(batch, length)`, the decoder's tokens that the cache does not hold yet. None: made from
                `labels`; or give `decoder_inputs_embeds`.
            decoder_attention_mask: `(batch, past + length)`, the same as `attention_mask` for the decoder's tokens.
            encoder_outputs: the outputs of the encoder, or a tuple that begins with its last hidden states
                `(batch, source length, hidden_size)`.
            cache: the keys and values of the decoder so far, which this call extends.
            past_key_values: `cache` by its name before transformers 5.24; either is taken.
            inputs_embeds: `(batch, source length, width)`, embeddings in place of `input_ids`.
            decoder_inputs_embeds: `(batch, length, width)`, embeddings in place of `decoder_input_ids`.
            decoder_position_ids: `(1 or batch, length)`. None: counted on from the cache.
            labels: `(batch, length)`, the tokens that the decoder should predict, which are not shifted; -100 is
                ignored.
            use_cache: return a cache, and make one where none is given. None: as the config says.
            logits_to_keep: see `LlmArchForCausalLM.forward`.
            output_hidden_states: return the hidden states of both stacks. None: as the config says; so are the next.
            output_attentions: return the attention weights of both stacks, and those of cross-attention.
            output_router_logits: compute the routers' logits of both stacks.
            num_items_in_batch: divide the summed loss by it, so that gradient accumulation is exact.

        Returns:
            `loss` if there are labels, `logits` `(batch, kept, vocab_size)`, the cache, the encoder's outputs.

        Raises:
            ValueError: without tokens or embeddings for the decoder and without labels; see `LlmArchModel.forward`.
        """
        asked = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        wanted = self.wanted({**asked, "output_router_logits": output_router_logits})
        routed = wanted["output_router_logits"]
        wanted["output_router_logits"] = routed or (labels is not None and self.balances)
        if encoder_outputs is None:
            encoder_outputs = cast(Any, self.model.encoder)(
                input_ids, attention_mask, inputs_embeds=inputs_embeds, **wanted
            )
        elif not isinstance(encoder_outputs, ModelOutput):
            encoder_outputs = BaseModelOutput(*cast(Any, encoder_outputs))
        encoded = cast(BaseModelOutput, encoder_outputs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError("Give decoder_input_ids, or labels to make them from.")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **wanted,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.over_vocabulary(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            # The labels are in place already; the loss function would shift them, did it not get `shift_labels`.
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                shift_labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
            encoder = cast(LlmArchModel, self.model.encoder)
            for stack, states, mask in (
                (encoder, encoded, attention_mask),
                (self.model, outputs, decoder_attention_mask),
            ):
                loss, _ = stack.with_auxiliary(loss, states, mask, _labelled(labels), num_items_in_batch)
        results: dict[str, Any] = {
            "decoder_hidden_states": outputs.hidden_states,
            "decoder_attentions": outputs.attentions,
            "cross_attentions": outputs.get("cross_attentions"),
            "encoder_last_hidden_state": encoded.last_hidden_state,
            "encoder_hidden_states": encoded.get("hidden_states"),
            "encoder_attentions": encoded.get("attentions"),
            CACHE: outputs.get(CACHE),
        }
        if not routed:
            return Seq2SeqLMOutput(loss=loss, logits=logits, **results)
        routers = {"encoder_router_logits": encoded.get("router_logits")}
        routers["decoder_router_logits"] = outputs.get("router_logits")
        return Seq2SeqMoEOutput(loss=loss, logits=logits, **results, **routers)


class LlmArchTaskModel(LlmArchHeadModel):
    """The base model, what makes logits of its states, and the loss by labels. Subclasses say the last two.

    An encoder-decoder's heads read the states of its decoder, which is given the text once more, moved to the right
    (BART).
    """

    output_class: type[ModelOutput]

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        if self.model.pooler is not None and not self.reads_pooler:
            self.model.pooler.carry_along()

    # Every argument by its name: pipelines, Trainer and PEFT read this signature.
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """
        Args:
            input_ids: `(batch, length)`; or give `inputs_embeds`.
            attention_mask: `(batch, past + length)`, 1 where a token is real and 0 where it is padding.
            token_type_ids: `(batch, length)`, for `type_vocab_size`. None: all 0.
            position_ids: `(1 or batch, length)`. None: counted on from the cache.
            inputs_embeds: `(batch, length, width)`, embeddings in place of `input_ids`, before positions are added.
            labels: see the class.
            use_cache: without effect, as nothing is generated; a given cache is read.
            cache: keys and values that precede the text, as prefix tuning gives them.
            past_key_values: `cache` by its name before transformers 5.24; either is taken.
            decoder_input_ids: `(batch, length)`, of an encoder-decoder. None: `input_ids`, shifted to the right.
            decoder_attention_mask: `(batch, length)`, the same as `attention_mask` for them.
            num_items_in_batch: (keyword) divide the summed loss by it, so that gradient accumulation is exact.

        Returns:
            `loss` if there are labels, `logits`, and what was asked for of the base model's outputs.
        """
        kwargs.setdefault("output_router_logits", labels is not None and self.balances)
        outputs = self.model(
            input_ids,
            attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            cache=cache,
            past_key_values=past_key_values,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            return_dict=True,
            **kwargs,
        )
        logits = self.predict(outputs, input_ids, attention_mask)
        loss = None
        if labels is not None:
            loss, items = self.compare(logits, labels, **kwargs), self.items(labels)
            for stack, states, mask in self.stacks(outputs, attention_mask, decoder_attention_mask):
                loss, _ = stack.with_auxiliary(loss, states, mask, items, kwargs.get("num_items_in_batch"))
        return self.results(loss, logits, outputs)

    @property
    def reads_pooler(self) -> bool:
        return False

    def predict(
        self, outputs: ModelOutput, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits, given the outputs of the base model and the inputs that it got, `(batch, length)` each."""
        raise NotImplementedError  # abstract: no logits are right for every task

    def compare(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The loss of the logits that `predict` returns, a scalar."""
        raise NotImplementedError  # abstract: as `predict`

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        """How many numbers of the loss each row has, `(batch,)`."""
        return _labelled(labels.flatten(1) if labels.dim() > 1 else labels[:, None])

    def stacks(
        self, outputs: Any, attention_mask: Any, decoder_attention_mask: Any
    ) -> list[tuple[LlmArchPreTrainedModel, Any, Any]]:
        """Each stack, its states and routers, and the mask over what it has read."""
        if self.model.encoder is None:
            return [(self.model, outputs, attention_mask)]
        encoded, decoded = (
            {"last_hidden_state": outputs[states], "router_logits": outputs.get(f"{side}_router_logits")}
            for side, states in (("encoder", "encoder_last_hidden_state"), ("decoder", "last_hidden_state"))
        )
        return [(self.model.encoder, encoded, attention_mask), (self.model, decoded, decoder_attention_mask)]

    def results(self, loss: torch.Tensor | None, logits: torch.Tensor, outputs: ModelOutput) -> ModelOutput:
        return self.output_class(loss=loss, logits=logits, **self.carried(outputs))

    def carried(self, outputs: ModelOutput) -> dict[str, Any]:
        """Those outputs of the base model that the task's have a place for."""
        known = {f.name for f in fields(cast(Any, self.output_class))}
        return {name: value for name, value in outputs.items() if name in known}


class LlmArchForMaskedLM(LlmArchVocabularyModel, LlmArchTaskModel):
    """The base model with a head over the vocabulary, for filling in masked tokens.

    `labels (batch, length)` are the tokens behind the masks, -100 elsewhere; `logits (batch, length, vocab_size)`.
    """

    topologies = frozenset({"encoder"})
    output_class = MaskedLMOutput

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.post_init()

    def predict(
        self, outputs: ModelOutput, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        return self.over_vocabulary(outputs["last_hidden_state"])

    def compare(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)


class LlmArchForSequenceClassification(LlmArchTaskModel):
    """The base model with a class for a text; regression, single- or multi-label by `problem_type`.

    `labels (batch,)` are classes, or numbers for regression; `(batch, num_labels)` for several labels;
    `logits (batch, num_labels)`.

    Raises:
        ValueError: for a batch of which nothing says where its texts end (no mask, no `pad_token_id`); for a text
            without an end, where the classifier reads its state (`classifier_pooling="eos"`), and then for a config
            without `eos_token_id`.
    """

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        if config.classifier_pooling == "eos" and config.eos_token_id is None:
            raise ValueError(
                "classifier_pooling='eos', eos_token_id=None: the classifier reads the state of a text's last end "
                "token: set eos_token_id."
            )
        two = config.topology == "encoder-decoder"
        self.output_class = Seq2SeqSequenceClassifierOutput if two else SequenceClassifierOutput
        self.pool = POOLINGS[config.classifier_pooling]
        self.readable = self.ends if config.classifier_pooling == "eos" else self.real
        self.head = classifier_transform(config, config.classifier_dense)
        self.dropout = in_sequence(dropout(config.classifier_dropout))
        self.score = nn.Linear(config.hidden_size, cast(int, config.num_labels), bias=config.classifier_bias)
        self.post_init()

    @property
    def reads_pooler(self) -> bool:
        return self.config.classifier_pooling == "pooler"

    def predict(
        self, outputs: ModelOutput, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = outputs["last_hidden_state"]
        readable = self.readable(x, input_ids, attention_mask)
        return self.score(self.dropout(self.head(self.pool(x, outputs.get("pooler_output"), readable))))

    def compare(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        items = kwargs.get("num_items_in_batch")
        if items is None or self.config.problem_type == "single_label_classification":
            return loss
        # transformers' losses are means over this batch, whatever the number of items in the other micro-batches.
        return loss * labels.numel() / items

    def real(
        self, x: torch.Tensor, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`(batch, length)`, True where a token is not padding: by the mask, else by the padding token."""
        known = real_tokens(attention_mask, x.shape[1])
        if known is not None:
            return known
        if input_ids is not None and self.config.pad_token_id is not None:
            return input_ids != self.config.pad_token_id
        if x.shape[0] > 1 and input_ids is not None and self.config.classifier_pooling in ("last", "mean"):
            raise ValueError("A batch of several texts needs an attention_mask, or a pad_token_id in the config.")
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)

    def ends(
        self, x: torch.Tensor, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`(batch, length)`, True where a real token is one that ends a text."""
        if input_ids is None or input_ids.shape != x.shape[:2]:
            raise ValueError(
                "classifier_pooling='eos' reads the state of the text's own last end token: give input_ids, and to an "
                "encoder-decoder as many decoder_input_ids (or none)."
            )
        ends = torch.isin(input_ids, torch.tensor(self.config.eos_token_id, device=input_ids.device))
        real = real_tokens(attention_mask, x.shape[1])
        ends = ends if real is None else ends & real
        torch_compilable_check(
            ends.any(-1).all(),
            "classifier_pooling='eos': a text of this batch has no eos_token_id. Truncation may have removed it.",
        )
        return ends


class LlmArchForTokenClassification(LlmArchTaskModel):
    """The base model with a class for each token.

    `labels (batch, length)`, -100 is ignored; `logits (batch, length, num_labels)`.
    """

    topologies = frozenset({"decoder", "encoder"})
    output_class = TokenClassifierOutput

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.head = classifier_transform(config, config.token_head_dense)
        self.dropout = in_sequence(dropout(config.classifier_dropout))
        self.score = nn.Linear(config.hidden_size, cast(int, config.num_labels), bias=config.classifier_bias)
        self.post_init()

    def predict(
        self, outputs: ModelOutput, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        return self.score(self.dropout(self.head(outputs["last_hidden_state"])))

    def compare(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.loss_function(logits, labels, self.config, **kwargs)


class LlmArchForQuestionAnswering(LlmArchTaskModel):
    """The base model with the start and the end of an answer in the text.

    `start_positions` and `end_positions` `(batch,)` are the labels, token indices; `start_logits` and `end_logits` are
    `(batch, length)`.
    """

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        two = config.topology == "encoder-decoder"
        self.output_class = Seq2SeqQuestionAnsweringModelOutput if two else QuestionAnsweringModelOutput
        self.head = classifier_transform(config, config.token_head_dense)
        self.dropout = in_sequence(dropout(config.classifier_dropout))
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """As the other heads', with two labels a text."""
        labels = None
        if start_positions is not None and end_positions is not None:
            labels = torch.stack((start_positions.flatten(), end_positions.flatten()), dim=-1)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            cache=cache,
            past_key_values=past_key_values,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            **kwargs,
        )

    def predict(
        self, outputs: ModelOutput, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        return self.qa_outputs(self.dropout(self.head(outputs["last_hidden_state"])))

    def compare(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.loss_function(*logits.unbind(-1), *labels.unbind(-1), **kwargs)

    def items(self, labels: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(labels[:, 0])

    def results(self, loss: torch.Tensor | None, logits: torch.Tensor, outputs: ModelOutput) -> ModelOutput:
        start, end = (part.contiguous() for part in logits.unbind(-1))
        return self.output_class(loss=loss, start_logits=start, end_logits=end, **self.carried(outputs))

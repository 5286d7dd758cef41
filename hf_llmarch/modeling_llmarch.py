"""The models: one base model, and a class for each task. Parts are chosen in `__init__`; `forward` holds no switch."""

from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import ScoredAttention, refuse_backend, unhonoured
from .block import Block, block
from .compat import CACHE, MASKS
from .configuration_llmarch import LlmArchConfig
from .embeddings import Scale, SoftCap, chain, dropout, token_embedding
from .experts import Router, balance_loss, z_loss
from .norms import norm
from .positions import PADDING, POSITIONS


def layer_masks(
    config: LlmArchConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None = None,
) -> dict[str, Any]:
    """One mask for each layer type in use, in the form that the attention implementation takes."""
    if isinstance(attention_mask, dict):
        return attention_mask
    return {
        kind: MASKS[kind](
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: cache},
        )
        for kind in dict.fromkeys(config.layer_types)
    }


def by_share_of_labels(rows: torch.Tensor, labels: torch.Tensor, num_items: torch.Tensor | int | None) -> torch.Tensor:
    """The mean of a loss `(batch,)` a row, each row weighted by its labels: like the token loss, the sum over a step's
    micro-batches does not depend on how the step is split."""
    items = (labels[:, 1:] != -100).sum(-1).to(rows.device)
    return (rows * items).sum() / (items.sum() if num_items is None else num_items)


class LlmArchPreTrainedModel(PreTrainedModel):
    """Loading, saving, initialisation, and which attention implementations a config can use."""

    config: LlmArchConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block", "ParallelBlock", "SharedNormParallelBlock"]
    _skip_keys_device_placement = [CACHE]
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": Block,
        "attentions": ScoredAttention,
        "router_logits": OutputRecorder(Router, index=0),
    }
    # A router's bias moves by small steps that bf16 cannot hold.
    _keep_in_fp32_modules_strict = ["e_score_correction_bias"]
    # The host would look for a decorator's name in this file; ours dispatches in `experts.py`.
    _can_set_experts_implementation_cached_value = True

    def __init__(self, config: LlmArchConfig, *args: Any, **kwargs: Any):
        refuse_backend(config, config._attn_implementation)
        super().__init__(config, *args, **kwargs)

    # Properties, where the host has class attributes: they depend on the config.
    @property
    def _supports_sdpa(self) -> bool:  # type: ignore[override]
        return not unhonoured(self.config, "sdpa")

    @property
    def _supports_flash_attn(self) -> bool:  # type: ignore[override]
        return not unhonoured(self.config, "flash_attention_2")

    @property
    def _supports_flex_attn(self) -> bool:  # type: ignore[override]
        return not unhonoured(self.config, "flex_attention")

    @property
    def _can_compile_fullgraph(self) -> bool:  # type: ignore[override]
        # Dynamic NTK picks its frequencies by the values of the positions.
        return all(p["rope_type"] != "dynamic" for p in self.config.rope_by_layer_type.values())

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        """As the host's; refuses, by name, an implementation that would ignore one of the config's switches."""
        if isinstance(attn_implementation, str):
            refuse_backend(self.config, attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # A part with parameters or unsaved buffers of its own says itself how they begin.
        if isinstance(module, PreTrainedModel) or not hasattr(module, "init_weights"):
            super()._init_weights(module)
        else:
            cast(Any, module).init_weights(self.config.initializer_range)


class LlmArchModel(LlmArchPreTrainedModel):
    """Embedding, blocks and final norm, without a head."""

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.embed_tokens = token_embedding(config)
        self.embed_positions = POSITIONS[config.position_encoding](config)
        self.embed_norm = chain(norm(config) if config.embedding_norm else None)
        self.embed_dropout = chain(dropout(config.embedding_dropout))
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_hidden_layers))
        self.norm = chain(norm(config) if config.final_norm else None)
        self.gradient_checkpointing = False
        self.output_class = BaseModelOutputWithPast if config.num_experts is None else MoeModelOutputWithPast
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | MoeModelOutputWithPast:
        """
        Args:
            input_ids: `(batch, length)`; or give `inputs_embeds` `(batch, length, hidden_size)`, before scaling.
            attention_mask: `(batch, past + length)`, 1 where a token is real; a 4-D mask is used as it is; a dict holds
                one mask a layer type.
            position_ids: `(batch, length)`. None: counted on from the cache. Sequences that restart at 0 within a row
                are documents packed together, and do not see each other when neither mask nor cache is given.
            cache: keys and values so far; also accepted as `past_key_values`, its name before transformers 5.24.

        Returns:
            `last_hidden_state` `(batch, length, hidden_size)` and the cache.

        Raises:
            ValueError: unless exactly one of `input_ids` and `inputs_embeds` is given; when the attention
                implementation set on the config would ignore one of its switches.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        refuse_backend(self.config, self.config._attn_implementation)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        given = cache if cache is not None else past_key_values
        past = given
        if use_cache and past is None:
            past = DynamicCache(config=self.config)
        # A cache made by this very call is empty: the masks are the same without it, and packed documents are seen.
        masks = layer_masks(self.config, inputs_embeds, attention_mask, given, position_ids)
        if position_ids is None:
            seen = given.get_seq_length() if given is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen)[None]

        real_tokens = None
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
            real_tokens = attention_mask[:, -inputs_embeds.shape[1] :].bool()
        x = self.embed_dropout(self.embed_norm(self.embed_positions.embed(inputs_embeds, position_ids)))
        state = self.embed_positions.prepare(x, position_ids, given, attention_mask)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            x = layer(
                x,
                real_tokens=real_tokens,
                attention_mask=masks[kind],
                position_ids=position_ids,
                use_cache=use_cache,
                **{CACHE: past},
                **state.get(kind, {}),
                **kwargs,
            )
        outputs: dict[str, Any] = {CACHE: past}
        return self.output_class(last_hidden_state=self.norm(x), **outputs)


class LlmArchForCausalLM(LlmArchPreTrainedModel, GenerationMixin):
    """The base model with a head over the vocabulary, for next-token prediction and `generate()`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.model = LlmArchModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        cap = config.final_logit_softcapping
        self.logits = chain(
            Scale(config.logit_scale) if config.logit_scale != 1.0 else None, SoftCap(cap) if cap is not None else None
        )
        self.balances = bool(config.num_experts and (config.router_aux_loss_coef or config.router_z_loss_coef))
        self.output_class = CausalLMOutputWithPast if config.num_experts is None else MoeCausalLMOutputWithPast
        self.post_init()

    def routers(self) -> list[Router]:
        """The routers of the sparse layers, in the order of `router_logits`."""
        return [module for module in self.modules() if isinstance(module, Router)]

    @staticmethod
    def create_masks_for_generate(
        config: LlmArchConfig, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> dict[str, Any]:
        """The masks that `generate` hands to a compiled forward; the host calls it."""
        masks = layer_masks(config, inputs_embeds, attention_mask, kwargs.get(CACHE), kwargs.get("position_ids"))
        # Only where positions are counted from it: its growing shape would make a compiled forward compile again.
        return {**masks, PADDING: attention_mask} if config.alibi_in_bf16 else masks

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        """As the host's; but where a text outgrows the length at which LongRoPE changes its frequencies, the keys
        cached so far were turned by the others, and the whole text is read again."""
        cache, lengths = kwargs.get(CACHE), self.config.rope_switch_lengths
        if cache is not None and lengths:
            seen = int(cache.get_seq_length())
            if any(0 < seen <= length < input_ids.shape[1] for length in lengths):
                kwargs[CACHE] = kwargs["next_sequence_length"] = None
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

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
            labels: `(batch, length)`, the inputs themselves: they are shifted here. -100 is ignored.
            logits_to_keep: compute logits for the last so many positions, or for these indices; 0: for all.
            num_items_in_batch: (keyword) divide the summed loss by it, so that gradient accumulation is exact.
            output_router_logits: return each sparse layer's `(batch * length, num_experts)`, and the balance loss.

        Returns:
            `loss` if there are labels, `logits` `(batch, kept, vocab_size)`, the cache. With experts, `aux_loss` is the
            unweighted balance loss; in training, the auxiliary losses are in `loss` with the config's weights.
        """
        balances = self.training and labels is not None and self.balances
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
        logits = self.logits(self.lm_head(outputs.last_hidden_state[:, kept]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        results: dict[str, Any] = {
            "logits": logits,
            "hidden_states": outputs.hidden_states,
            "attentions": outputs.attentions,
            CACHE: outputs.get(CACHE),
        }
        router_logits = outputs.get("router_logits")
        if router_logits:
            real = torch.ones(logits.shape[0], router_logits[0].shape[0] // logits.shape[0], device=logits.device)
            if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
                real = attention_mask[:, -real.shape[1] :]
            balance = balance_loss(self.routers(), router_logits, real.bool(), self.config.router_aux_loss_scope)
            if labels is not None and balances:
                rows = self.config.router_aux_loss_coef * balance
                rows = rows + self.config.router_z_loss_coef * z_loss(router_logits, real.bool())
                loss = cast(torch.Tensor, loss) + by_share_of_labels(rows, labels, kwargs.get("num_items_in_batch"))
            results |= {"aux_loss": balance.mean(), "router_logits": router_logits}
        return self.output_class(loss=loss, **results)

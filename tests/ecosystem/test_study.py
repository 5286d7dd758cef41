"""Looking inside: attentions, hidden states, hooks on named modules, attributions; as of the native model."""

from typing import Any, NamedTuple

import pytest
import torch
from captum.attr import LayerIntegratedGradients, TokenReferenceBase
from nnsight import NNsight
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.conversion import convert
from tests.tiny import assert_close, differs, redraw, text, tiny_model

LAYERS = 3


class Pair(NamedTuple):
    native: Any
    ours: Any


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A Llama and its conversion, which records attentions and leaves gradients whole."""
    folder = tmp_path_factory.mktemp("study")
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=34,
        max_position_embeddings=64,
        rms_norm_eps=0.1,
    )
    redraw(LlamaForCausalLM(config)).save_pretrained(folder / "native")
    convert(folder / "native", folder / "ours", progress=False)
    return Pair(
        LlamaForCausalLM.from_pretrained(folder / "native", attn_implementation="eager").eval(),
        LlmArchForCausalLM.from_pretrained(folder / "ours", attn_implementation="eager").eval(),
    )


@pytest.mark.shows("Study", "attentions and hidden states of every layer, equal to the native model's")
@torch.no_grad()
def test_attentions_and_hidden_states(pair: Pair) -> None:
    native, ours = (model(text(), output_attentions=True, output_hidden_states=True) for model in pair)
    assert len(ours.attentions) == LAYERS
    assert len(ours.hidden_states) == LAYERS + 1
    for ours_layer, native_layer in zip(ours.attentions, native.attentions, strict=True):
        assert_close(ours_layer, native_layer, "native")
    for ours_state, native_state in zip(ours.hidden_states, native.hidden_states, strict=True):
        assert_close(ours_state, native_state, "native")


@pytest.mark.shows("Study", "forward hooks on named modules: the same names, the same activations")
@torch.no_grad()
def test_hooks_on_named_modules(pair: Pair) -> None:
    names = ["model.embed_tokens", "model.norm", "lm_head"]
    for i in range(LAYERS):
        names += [f"model.layers.{i}.self_attn.{p}_proj" for p in "qkvo"]
        names += [f"model.layers.{i}.mlp.{p}_proj" for p in ("gate", "up", "down")]
        names += [f"model.layers.{i}", f"model.layers.{i}.mlp"]

    def recorded(model: PreTrainedModel) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}

        def keep(name: str) -> Any:
            return lambda _module, _inputs, output: seen.update(
                {name: output[0] if isinstance(output, tuple) else output}
            )

        hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
        model(text())
        for hook in hooks:
            hook.remove()
        return seen

    native, ours = map(recorded, pair)
    assert set(ours) == set(names)
    for name in names:
        assert_close(ours[name], native[name], "native")


def last_logit(model: PreTrainedModel, token: int) -> Any:
    return lambda ids: model(ids).logits[:, -1, token]


@pytest.mark.shows("Study", "captum: integrated gradients on the embedding and on a layer within", "captum")
def test_attributions_equal_the_native_ones(pair: Pair) -> None:
    baseline = TokenReferenceBase(reference_token_idx=0).generate_reference(text().shape[1], "cpu")[None].expand(2, -1)
    found = []
    for model in pair:
        score = last_logit(model, 7)
        gradients = LayerIntegratedGradients(score, model.model.embed_tokens)
        embedded, delta = gradients.attribute(text(), baseline, n_steps=64, return_convergence_delta=True)
        assert embedded.shape == (2, text().shape[1], 48)
        # Completeness: attributions add up to what the text does to the logit.
        difference = (score(text()) - score(baseline)).detach()
        assert delta.abs().max() < 0.05 * difference.abs().max()
        inner = LayerIntegratedGradients(score, model.model.layers[1].mlp.down_proj)
        found.append((embedded, inner.attribute(text(), baseline, n_steps=64)))
    for given, expected in zip(*reversed(found), strict=True):
        assert_close(given, expected, "gradient")


@pytest.mark.shows("Study", "nnsight: reading and changing named modules inside a run", "nnsight")
def test_traced_and_patched(pair: Pair) -> None:
    def study(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        traced = NNsight(model)
        with torch.no_grad(), traced.trace(text()):
            middle = traced.model.layers[1].mlp.down_proj.output.save()
            logits = traced.lm_head.output.save()
        with torch.no_grad(), traced.trace(text()):
            traced.model.layers[1].mlp.down_proj.output[:] = 0
            patched = traced.lm_head.output.save()
        return middle, logits, patched

    native, ours = map(study, pair)
    for given, expected in zip(ours, native, strict=True):
        assert_close(given, expected, "native")
    with torch.no_grad():
        assert_close(ours[1], pair.ours(text()).logits, "native")
    assert differs(ours[2], ours[1])


@pytest.mark.shows("Study", "nnsight: reading and changing named modules inside a run", "nnsight")
def test_an_expert_traced() -> None:
    """Of experts in a layer each: what one of them says, and the model without it."""
    model = tiny_model(num_experts=4, moe_intermediate_size=14, experts_layout="linear")
    traced = NNsight(model)
    with torch.no_grad(), traced.trace(text()):
        routed = traced.model.layers[0].mlp.gate.output[0].save()
        logits = traced.lm_head.output.save()
    assert routed.shape[-1] == 4
    with torch.no_grad():
        assert_close(logits, model(text()).logits, "backend")

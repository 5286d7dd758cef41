"""Each value of each switch builds, runs, trains, saves and reloads bit-equal, and changes the output."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_llmarch import (
    LlmArchConfig,
    LlmArchForCausalLM,
    LlmArchForConditionalGeneration,
    LlmArchForQuestionAnswering,
    LlmArchForSequenceClassification,
    LlmArchForTokenClassification,
    LlmArchModel,
)
from tiny import (
    BOTH,
    ENCODER,
    EXCEPTIONS,
    MIXED,
    MLA,
    MOE,
    STACKS,
    SWITCHES,
    TEXT_LENGTH,
    TRAINING_ONLY,
    Variant,
    assert_close,
    differs,
    redraw,
    text,
    tiny_config,
    tiny_model,
    tiny_stack,
    variants,
)

pytestmark = pytest.mark.core

VARIANTS = [
    pytest.param(name, variant, id=f"{kind}{label}")
    for kind, table in (("", SWITCHES), ("stack,", STACKS))
    for label, name, variant in variants(table)
]
each_variant = pytest.mark.parametrize(("name", "variant"), VARIANTS)


def test_every_switch_is_tested() -> None:
    declared = {f.name for f in LlmArchConfig.switches()}
    assert set(SWITCHES) | set(STACKS) | set(EXCEPTIONS) == declared
    assert not (set(SWITCHES) | set(STACKS)) & set(EXCEPTIONS)


def test_every_row_sets_its_own_field() -> None:
    for name, rows in (*SWITCHES.items(), *STACKS.items()):
        for row in rows:
            default = getattr(tiny_config(**row.against), name)
            assert row.switches[name] != row.against.get(name, default) or type(row.switches[name]) is bool


def inputs(model: Any, length: int = 40) -> dict[str, torch.Tensor]:
    ids = text(length=length)
    if model.config.topology == "encoder-decoder":
        return {"input_ids": text(length=length - 3, seed=5), "decoder_input_ids": ids}
    return {"input_ids": ids}


def logits(model: Any) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**inputs(model)).logits


@each_variant
def test_changes_the_output(name: str, variant: Variant) -> None:
    model, reference = tiny_stack(**variant.switches), tiny_stack(**variant.against)
    model.train(name in TRAINING_ONLY)
    output = logits(model)
    assert output.isfinite().all()
    assert differs(output, logits(reference))


@pytest.mark.parametrize("name", sorted(TRAINING_ONLY))
def test_noise_acts_in_training_alone(name: str) -> None:
    for variant in SWITCHES[name]:
        assert torch.equal(logits(tiny_model(**variant.switches)), logits(tiny_model(**variant.against)))


@each_variant
def test_every_parameter_gets_a_gradient(name: str, variant: Variant) -> None:
    model = tiny_stack(**variant.switches).train()
    given = inputs(model, length=23)
    model(**given, labels=given.get("decoder_input_ids", given["input_ids"])).loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.abs().max() > 0, parameter_name


def unsaved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def written(config: LlmArchConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_saves_and_reloads_bit_equal(name: str, variant: Variant, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_stack(**variant.switches)
    buffers = unsaved_buffers(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(tmp_path)
    # Built on the meta device: a buffer that is not on disk must be computed anew, in fp32 whatever the weights are.
    again = type(model).from_pretrained(tmp_path, dtype=dtype)
    if model.config.topology == "decoder":
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlmArchForCausalLM
    assert written(again.config) == written(model.config)
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    reloaded = unsaved_buffers(again)
    assert reloaded.keys() == buffers.keys()
    for key, buffer in buffers.items():
        assert reloaded[key].dtype == torch.float32, key
        assert torch.equal(reloaded[key], buffer), key
    assert_close(logits(again.eval()), logits(model), "reload" if dtype == torch.float32 else "bf16")


def test_rotations_stay_in_fp32_under_a_cast() -> None:
    """The host casts a whole model, buffers included; angles of bf16 frequencies would be wrong by whole turns."""
    for switches in ({}, {"position_encoding": "alibi"}, {"position_encoding": "sinusoidal"}):
        model, loaded = tiny_model(**switches), tiny_model(**switches)
        for parameter in loaded.parameters():
            parameter.data = parameter.data.bfloat16()
        cast = logits(model.bfloat16())
        assert torch.equal(cast, logits(loaded)), switches


def test_learned_table_has_a_row_a_position_and_the_offset() -> None:
    table = tiny_model(position_encoding="learned", max_position_embeddings=40, position_offset=2).model.embed_positions
    assert table.weight.shape == (42, 48)


def test_tied_head_is_one_tensor(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    untied = tiny_model()
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("qk_norm", ["none", "head", "heads"])
def test_norm_weight_in_fp32_is_the_order_of_a_cast(norm_type: str, qk_norm: str) -> None:
    switches = {"norm_type": norm_type, "qk_norm": qk_norm, "norm_offset": 1.0}
    before, after = tiny_model(norm_weight_in_fp32=True, **switches), tiny_model(**switches)
    # In fp32 the cast is none.
    torch.testing.assert_close(logits(before), logits(after), rtol=1e-4, atol=1e-4)
    assert not torch.equal(logits(before.bfloat16()), logits(after.bfloat16()))


def test_router_in_fp32_is_the_order_of_a_cast() -> None:
    before, after = tiny_model(router_in_fp32=True, **MOE), tiny_model(router_in_fp32=False, **MOE)
    assert torch.equal(logits(before), logits(after))
    assert not torch.equal(logits(before.bfloat16()), logits(after.bfloat16()))


def test_selection_bias_picks_experts_without_weighing_them() -> None:
    plain, biased = tiny_model(**MOE), tiny_model(router_selection_bias=True, **MOE)
    assert torch.equal(logits(biased), logits(plain))
    for layer in biased.model.layers:
        layer.mlp.gate.e_score_correction_bias.fill_(3.0)
    assert torch.equal(logits(biased), logits(plain))
    for layer in biased.model.layers:
        layer.mlp.gate.e_score_correction_bias[2] = -9.0
    assert differs(logits(biased), logits(plain))
    with torch.no_grad():
        _, weights, indices = biased.model.layers[0].mlp.gate(torch.randn(50, 48))
    assert not (indices == 2).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))


def test_selection_bias_is_saved_in_fp32(tmp_path: Path) -> None:
    model = tiny_model(router_selection_bias=True, **MOE)
    values_of_bias = torch.tensor([0.001, 1.001, -0.3, 0.7, 0.12345])
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias.copy_(values_of_bias)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert torch.equal(again.model.layers[1].mlp.gate.e_score_correction_bias, values_of_bias)


def test_bias_update_rate_moves_the_bias_once_an_optimiser_step() -> None:
    model = tiny_model(router_selection_bias=True, router_bias_update_rate=0.01, **MOE).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gates = [layer.mlp.gate for layer in model.model.layers]
    loads = [torch.zeros(5) for _ in gates]
    for step in range(2):
        ids = text(seed=step)
        with torch.no_grad():
            recorded = model.eval()(ids, output_router_logits=True).router_logits
        for load, one in zip(loads, recorded, strict=True):
            load += one.topk(2, dim=-1).indices.flatten().bincount(minlength=5)
        model.train()(ids, labels=ids).loss.backward()
        assert all((gate.e_score_correction_bias == 0).all() for gate in gates)
    optimizer.step()
    for gate, load in zip(gates, loads, strict=True):
        torch.testing.assert_close(gate.e_score_correction_bias, 0.01 * torch.sign(load.mean() - load))


@pytest.mark.parametrize("name", ["router_aux_loss_coef", "router_z_loss_coef"])
def test_router_losses_join_the_loss_in_training(name: str) -> None:
    ids = text()

    def loss(training: bool, **switches: Any) -> float:
        return tiny_model(**MOE, **switches).train(training)(ids, labels=ids).loss.item()

    plain = loss(True)
    once, twice = loss(True, **{name: 0.1}) - plain, loss(True, **{name: 0.2}) - plain
    assert once > 1e-3
    assert twice == pytest.approx(2 * once, rel=1e-3)
    assert loss(False, **{name: 0.1}) == pytest.approx(loss(False))


def test_router_aux_loss_scope() -> None:
    ids = text()
    losses = {
        scope: tiny_model(**MOE, router_aux_loss_coef=1.0, router_aux_loss_scope=scope)
        .train()(ids, labels=ids)
        .loss.item()
        for scope in ("sequence", "batch", "model")
    }
    assert len({round(loss, 4) for loss in losses.values()}) == 3


@pytest.mark.parametrize("switches", [{}, {"ffn_bias": True}, {"ffn_type": "mlp"}], ids=["glu", "biases", "mlp"])
def test_experts_layouts_compute_the_same(switches: dict[str, Any]) -> None:
    packed, linear = tiny_model(**MOE, **switches), tiny_model(**MOE, **switches, experts_layout="linear")
    with torch.no_grad():
        for one, other in zip(packed.model.layers, linear.model.layers, strict=True):
            for e, expert in enumerate(other.mlp.experts):
                for kind in ("", "_bias") if "ffn_bias" in switches else ("",):
                    leaf = "bias" if kind else "weight"
                    if hasattr(expert, "gate_proj"):
                        gate, up = getattr(one.mlp.experts, f"gate_up_proj{kind}")[e].chunk(2)
                        getattr(expert.gate_proj, leaf).copy_(gate)
                    else:
                        up = getattr(one.mlp.experts, f"up_proj{kind}")[e]
                    getattr(expert.up_proj, leaf).copy_(up)
                    getattr(expert.down_proj, leaf).copy_(getattr(one.mlp.experts, f"down_proj{kind}")[e])
    torch.testing.assert_close(logits(linear), logits(packed), rtol=1e-5, atol=1e-6)


def test_initializer_range_is_the_spread_of_fresh_weights() -> None:
    model = LlmArchForCausalLM(tiny_config(initializer_range=0.3, attention_sinks=True, position_encoding="learned"))
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "pre.weight")):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif parameter.numel() > 100:
            assert parameter.std().item() == pytest.approx(0.3, rel=0.15), name
        else:
            assert 0.03 < parameter.std().item() < 0.9, name


def test_fresh_norms_gain_one_whatever_the_offset() -> None:
    switches: dict[str, Any] = {"qk_norm": "heads", "norm_type": "layernorm", "norm_placement": "sandwich"}
    for offset in (0.0, 1.0):
        model = LlmArchForCausalLM(tiny_config(norm_offset=offset, **switches))
        norms = [p for n, p in model.named_parameters() if "norm" in n and n.endswith("weight")]
        assert len(norms) == 3 * 6 + 1
        assert all((norm + offset == 1).all() for norm in norms)


@pytest.mark.parametrize("switches", [{}, {"embedding_scale": 6.9}, MLA], ids=["plain", "scaled", "mla"])
def test_padding_row_gets_no_gradient(switches: dict[str, Any]) -> None:
    ids = text()
    ids[:, :4] = 2
    for pad, is_zero in ((2, True), (None, False), (-1, False)):
        model = redraw(LlmArchForCausalLM(tiny_config(pad_token_id=pad, **switches)))
        model(ids, labels=ids).loss.backward()
        assert (model.model.embed_tokens.weight.grad[2].abs().max().item() == 0) == is_zero


CLASSIFIERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"classifier_pooling": "first"}, {}),
    ({"classifier_pooling": "mean"}, {}),
    ({"classifier_pooling": "pooler", "pooler": True}, {"pooler": True}),
    ({"classifier_dense": True}, {}),
    ({"classifier_act": "gelu", "classifier_dense": True}, {"classifier_dense": True}),
    ({"classifier_norm": True, "classifier_dense": True}, {"classifier_dense": True}),
    ({"classifier_bias": True}, {}),
    ({"head_bias": False, "classifier_dense": True}, {"classifier_dense": True}),
]


@torch.no_grad()
@pytest.mark.parametrize(("switches", "against"), CLASSIFIERS, ids=[str(row[0]) for row in CLASSIFIERS])
def test_classifier_switches(switches: dict[str, Any], against: dict[str, Any]) -> None:
    scores = []
    for given in (switches, against):
        model = redraw(LlmArchForSequenceClassification(tiny_config(**ENCODER, **given, num_labels=3))).eval()
        scores.append(model(text(), attention_mask=torch.ones_like(text())).logits)
    assert scores[0].shape == (2, 3)
    assert differs(*scores)


@torch.no_grad()
@pytest.mark.parametrize("head", [LlmArchForTokenClassification, LlmArchForQuestionAnswering])
def test_token_heads_have_the_classifiers_dense_layer_where_asked(head: Any) -> None:
    outputs = []
    for given in ({}, {"token_head_dense": True}):
        config = tiny_config(**ENCODER, classifier_dense=True, **given, num_labels=3)
        outputs.append(redraw(head(config)).eval()(text())[0])
    assert differs(*outputs)


@torch.no_grad()
def test_classifier_dropout_acts_in_training() -> None:
    ids = text()
    models = [
        redraw(LlmArchForSequenceClassification(tiny_config(**ENCODER, classifier_dropout=p, num_labels=3)))
        for p in (0.5, 0.0)
    ]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert not torch.equal(models[0].train()(**given).logits, models[1].train()(**given).logits)
    assert torch.equal(models[0].eval()(**given).logits, models[1].eval()(**given).logits)


@torch.no_grad()
def test_pooler_is_tanh_of_a_dense_layer_on_the_first_token() -> None:
    model = redraw(LlmArchModel(tiny_config(**ENCODER, pooler=True))).eval()
    outputs = model(text())
    dense = model.pooler.dense
    expected = torch.tanh(outputs.last_hidden_state[:, 0] @ dense.weight.T + dense.bias)
    torch.testing.assert_close(outputs.pooler_output, expected)
    assert "pooler_output" not in LlmArchModel(tiny_config(**ENCODER))(text())


@torch.no_grad()
@pytest.mark.parametrize("position_encoding", ["learned", "sinusoidal"])
def test_positions_skip_padding(position_encoding: str) -> None:
    """RoBERTa's rule, from its published code: position = offset of padding + count of real tokens so far."""
    switches = {**ENCODER, "position_encoding": position_encoding, "pad_token_id": 1, "position_offset": 2}
    skipping, plain = tiny_stack(**switches, positions_skip_padding=True), tiny_stack(**switches)
    ids, mask = text(), torch.ones_like(text())
    ids[0, :5], mask[0, :5] = 1, 0
    ids[1, 18:], mask[1, 18:] = 1, 0
    positions = torch.tensor([[-1] * 5 + list(range(18)), [*range(18), *[-1] * 5]])
    given = {"input_ids": ids, "attention_mask": mask}
    ours = skipping(**given).logits[mask.bool()]
    torch.testing.assert_close(ours, plain(**given, position_ids=positions).logits[mask.bool()])
    assert differs(ours, plain(**given).logits[mask.bool()])


@torch.no_grad()
@pytest.mark.parametrize("topology", ["decoder", "encoder"])
@pytest.mark.parametrize(
    "switches",
    [
        {"position_encoding": "learned", "position_offset": 2},
        {"position_encoding": "sinusoidal"},
        {"position_encoding": "alibi"},
        {"position_encoding": "alibi", **MIXED},
    ],
)
def test_positions_follow_the_mask(switches: dict[str, Any], topology: str) -> None:
    """Tokens that a mask keeps are what they would be were the others not there."""
    model = tiny_stack(**switches, topology=topology, positions_follow_mask=True)
    if "sliding_window" in switches:
        model.config.restate(sliding_window=2 * TEXT_LENGTH)  # a window counts the masked tokens as well
    ids, mask = text(), torch.ones_like(text())
    mask[0, :4] = mask[0, 9] = mask[1, 3:8] = mask[1, 12] = 0
    expected = [model(row[kept.bool()][None]).logits[0] for row, kept in zip(ids, mask, strict=True)]
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], torch.cat(expected))
    plain = tiny_stack(**switches, topology=topology)(ids, attention_mask=mask).logits[mask.bool()]
    assert differs(plain, torch.cat(expected))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_alibi_follows_a_masks_holes_as_bloom_does(cache: str) -> None:
    """A text is written on as if the tokens that a mask leaves out were not there, with the masks that `generate` makes
    beforehand for a static cache as well."""
    model = tiny_model(position_encoding="alibi", positions_follow_mask=True)
    ids, mask = text(1), torch.ones_like(text(1))
    mask[0, 4:11] = 0
    options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
    written = model.generate(ids, attention_mask=mask, cache_implementation=cache, disable_compile=True, **options)
    expected = model.generate(ids[mask.bool()][None], **options)
    assert written[0, TEXT_LENGTH:].tolist() == expected[0, -7:].tolist()


def test_decoder_start_token_begins_what_labels_become() -> None:
    model = tiny_stack(**{**BOTH, "decoder_start_token_id": 7, "pad_token_id": 0})
    assert isinstance(model, LlmArchForConditionalGeneration)
    labels = torch.tensor([[5, 6, 8], [9, -100, -100]])
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[7, 5, 6], [7, 9, 0]]
    model.config.wrap_decoder_start = True
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[8, 5, 6], [9, 9, 0]]

"""PEFT on models of ours: what works on a native model works here, and where both could be wrong, ours is not."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from peft.utils import constants
from peft.utils.hotswap import hotswap_adapter
from torch import Tensor, nn

from hf_llmarch import LlmArchForSequenceClassification
from hf_llmarch.integrations import peft as peft_defaults
from tests.tiny import MIXED, MLA, MOE, assert_close, differs, redraw, text, tiny_config, tiny_model, tiny_stack

READS: dict[str, Any] = {"topology": "encoder-decoder", "decoder_start_token_id": 1, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "latent": MLA,
    "latent without query rank": {**MLA, "q_lora_rank": None},
    "encoder": {"topology": "encoder", "norm_placement": "post", "ffn_type": "mlp"},
    "encoder-decoder": READS,
    "packed experts": MOE,
    "linear experts": {**MOE, "experts_layout": "linear"},
}
TASKS = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}
METHODS: dict[str, Callable[[], PeftConfig]] = {
    "LoRA": lambda: LoraConfig(r=3),
    "all-linear": lambda: LoraConfig(r=3, target_modules="all-linear"),
    "DoRA": lambda: LoraConfig(r=3, use_dora=True),
    "rsLoRA": lambda: LoraConfig(r=3, use_rslora=True),
    "AdaLoRA": lambda: AdaLoraConfig(init_r=3, target_r=2, total_step=10),
    "IA3": IA3Config,
    "LN tuning": LNTuningConfig,
}
EACH_METHOD = [
    pytest.param("LoRA", marks=pytest.mark.shows("PEFT", "LoRA without naming modules", "peft")),
    pytest.param("all-linear", marks=pytest.mark.shows("PEFT", 'LoRA on `"all-linear"`', "peft")),
    pytest.param("DoRA", marks=pytest.mark.shows("PEFT", "DoRA without naming modules", "peft")),
    pytest.param("rsLoRA", marks=pytest.mark.shows("PEFT", "rsLoRA without naming modules", "peft")),
    pytest.param("AdaLoRA", marks=pytest.mark.shows("PEFT", "AdaLoRA without naming modules", "peft")),
    pytest.param("IA3", marks=pytest.mark.shows("PEFT", "IA³ without naming modules", "peft")),
    pytest.param("LN tuning", marks=pytest.mark.shows("PEFT", "LN tuning without naming modules", "peft")),
]
# What each method adapts, in a decoder and with latent attention: PEFT's own choice for LLaMA, and its counterpart.
ADAPTED = {
    "LoRA": ({"q_proj", "v_proj"}, {"q_b_proj", "kv_a_proj_with_mqa"}),
    "all-linear": (
        {*(f"{x}_proj" for x in "qkvo"), "gate_proj", "up_proj", "down_proj"},
        {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    ),
    "IA3": ({"k_proj", "v_proj", "down_proj"}, {"kv_b_proj", "down_proj"}),
    "LN tuning": ({"pre", "norm"}, {"pre", "norm"}),
}
ADAPTED |= dict.fromkeys(("DoRA", "rsLoRA", "AdaLoRA"), ADAPTED["LoRA"])


def build(model: str) -> Any:
    return tiny_stack(**MODELS[model])


def adapt(model: Any, config: PeftConfig, seed: int = 5) -> Any:
    """Under an adapter of which no part is at its neutral beginning, in evaluation mode."""
    classifies = isinstance(model, LlmArchForSequenceClassification)
    config.task_type = "SEQ_CLS" if classifies else TASKS.get(model.config.topology)
    torch.manual_seed(seed)  # parts of some adapters begin at random
    adapted = get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in trained(adapted).values():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return adapted


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def inputs(model: Any) -> dict[str, Tensor]:
    read = {"decoder_input_ids": text(4, 9, seed=3)} if model.config.topology == "encoder-decoder" else {}
    return {"input_ids": text(4, 40), **read}  # so many that no expert goes without


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(**inputs(model)).logits


@pytest.mark.shows("PEFT", "A default for every method of PEFT that has one", "peft")
def test_every_table_knows_us() -> None:
    tables = {name: table for name, table in vars(constants).items() if name.endswith("_MODULES_MAPPING")}
    assert len(tables) > 20
    assert all(type(table["llmarch"]) is list for table in tables.values())
    # Each name is one that a model has.
    placed = (tiny_stack(**READS, norm_placement=placement) for placement in ("pre", "post", "sandwich"))
    names = [name for model in (*placed, build("latent")) for name, _ in model.named_modules()]
    named = {module for table in tables.values() for module in table["llmarch"]}
    assert all(any(name.endswith(f".{module}") for name in names) for module in named)
    # Lists of their own, so that one who appends to a method's default changes no other's.
    assert len({id(table["llmarch"]) for table in tables.values()}) == len(tables)


def test_without_peft_and_with_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("peft.utils.constants")
    vars(other).update(TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING={"llama": []}, WEIGHTS_NAME="x")
    monkeypatch.setattr("peft.utils.constants", other)
    peft_defaults.register("llmarch")
    table = vars(other)["TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"]
    assert table == {"llama": [], "llmarch": list(peft_defaults.QUERIES_AND_VALUES)}
    monkeypatch.setitem(sys.modules, "peft.utils", None)
    peft_defaults.register("nothing")
    assert "nothing" not in table


def adapted_modules(model: Any) -> set[str]:
    """The last parts of the names of what PEFT has wrapped."""
    wrapped = [name for name, module in model.named_modules() if hasattr(module, "base_layer")]
    return {name.removesuffix(".base_layer").rpartition(".")[2] for name in wrapped}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", EACH_METHOD)
def test_methods(method: str, model: str, tmp_path: Path) -> None:
    base = build(model)
    before = logits(base)
    adapted = adapt(base, METHODS[method]())
    expected = logits(adapted)
    assert differs(expected, before)
    if model in ("decoder", "latent"):
        assert adapted_modules(adapted) == ADAPTED[method][model == "latent"]
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), before)

    adapted.train()
    labels = inputs(adapted).get("decoder_input_ids", inputs(adapted)["input_ids"])
    adapted(**inputs(adapted), labels=labels).loss.backward()
    assert trained(adapted)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained(adapted).values())
    assert all(p.grad is None for p in adapted.parameters() if not p.requires_grad)
    adapted.eval()

    adapted.save_pretrained(tmp_path)
    assert_close(logits(PeftModel.from_pretrained(build(model), tmp_path).eval()), expected, "reload")
    merged = adapted.merge_and_unload()
    assert type(merged) is type(base)
    assert_close(logits(merged), expected, "merged")


PROMPTS: dict[str, Callable[[], PeftConfig]] = {
    "prompt tuning": lambda: PromptTuningConfig(num_virtual_tokens=4),
    "p-tuning": lambda: PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8),
    "prefix tuning": lambda: PrefixTuningConfig(num_virtual_tokens=4),
}
EACH_PROMPT = [
    pytest.param("prompt tuning", marks=pytest.mark.shows("PEFT", "Prompt tuning, right in `generate`", "peft")),
    pytest.param("p-tuning", marks=pytest.mark.shows("PEFT", "P-tuning, right in `generate`", "peft")),
    pytest.param("prefix tuning", marks=pytest.mark.shows("PEFT", "Prefix tuning, right in `generate`", "peft")),
]
READERS: dict[str, dict[str, Any]] = {
    "rope": {},
    "windows": MIXED,
    "alibi": {"position_encoding": "alibi"},
    "learned positions": {"position_encoding": "learned"},
    "experts": MOE,
    "latent": MLA,
    "encoder-decoder": READS,
    "encoder-decoder, t5": {**READS, "position_encoding": "relative_bias"},
}
NEW = 6


def prompted(method: str, **switches: Any) -> Any:
    return adapt(tiny_stack(**switches), PROMPTS[method]())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", READERS)
@pytest.mark.parametrize("method", EACH_PROMPT)
def test_prompts_in_generation(method: str, model: str) -> None:
    """What `generate` reads token by token from a cache is what one forward over the same text reads."""
    if (method, model) == ("prefix tuning", "latent"):
        with pytest.raises(ValueError, match="use prompt tuning"):
            prompted(method, **MLA)(**inputs(prompted(method, **MLA)))
        return
    adapted = prompted(method, **READERS[model])
    two = adapted.config.topology == "encoder-decoder"
    source = text(2, 7)
    out = adapted.generate(
        input_ids=source,
        attention_mask=torch.ones_like(source),
        max_new_tokens=NEW,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    read = out.sequences[:, :-1]
    given = {"input_ids": source, "decoder_input_ids": read} if two else {"input_ids": read}
    with torch.no_grad():
        whole = adapted(attention_mask=torch.ones_like(given["input_ids"]), **given).logits[:, -NEW:]
        without = adapted.get_base_model()(**given).logits[:, -NEW:]
    assert differs(whole, without)
    assert_close(torch.stack(out.logits, dim=1), whole, "cache")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", EACH_PROMPT)
def test_prompts_in_other_ways_of_generating(method: str) -> None:
    adapted = prompted(method)
    source = text(3, 7)
    greedy = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(source)
    expected = adapted.generate(input_ids=source, attention_mask=mask, **greedy)
    assert torch.equal(adapted.generate(input_ids=source, attention_mask=mask, use_cache=False, **greedy), expected)
    # Padding stands between a prompt and the text, as in one forward; a prefix is as near as without.
    padded, real = (torch.cat((torch.zeros(3, 2, dtype=torch.long), part), dim=1) for part in (source, mask))
    out = adapted.generate(input_ids=padded, attention_mask=real, **greedy)
    if method == "prefix tuning":
        assert torch.equal(out[:, 2:], expected)
    read = torch.cat((real, torch.ones(3, NEW - 1, dtype=torch.long)), dim=1)
    places = {"position_ids": (read.cumsum(-1) - 1).clamp(min=0)} if method == "prefix tuning" else {}
    with torch.no_grad():
        best = adapted(input_ids=out[:, :-1], attention_mask=read, **places).logits[:, -NEW:].argmax(-1)
    assert torch.equal(out[:, -NEW:], best)
    # Beams know the likelihood of what they found.
    options = {"num_beams": 3, "length_penalty": 0.0, "return_dict_in_generate": True, "output_scores": True}
    beams = adapted.generate(input_ids=source, attention_mask=mask, **options, **greedy)
    torch.testing.assert_close(beams.sequences_scores, likelihood(adapted, beams.sequences))


@torch.no_grad()
def likelihood(model: Any, ids: Tensor) -> Tensor:
    """Of the last NEW tokens of each row, `(batch,)`."""
    steps = model(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1])).logits[:, -NEW:].log_softmax(-1)
    return steps.gather(-1, ids[:, -NEW:, None]).sum((1, 2))


@pytest.mark.shows("PEFT", "Prompts and prefixes before classifiers", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "switches", [{}, {"topology": "encoder"}, {"topology": "encoder", "sliding_window": 3}], ids=str
)
@pytest.mark.parametrize("method", PROMPTS)
def test_prompts_before_classifiers(method: str, switches: dict[str, Any]) -> None:
    model = redraw(LlmArchForSequenceClassification(tiny_config(**switches, classifier_pooling="mean"))).eval()
    adapted = adapt(model, PROMPTS[method]())
    ids, mask = text(2, 7), torch.ones(2, 7, dtype=torch.long)
    with torch.no_grad():
        expected = adapted(input_ids=ids, attention_mask=mask).logits
        assert differs(expected, model(input_ids=ids, attention_mask=mask).logits)
        longer, padded = (torch.cat((part, torch.zeros(2, 3, dtype=torch.long)), dim=1) for part in (ids, mask))
        assert_close(adapted(input_ids=longer, attention_mask=padded).logits, expected, "padding")


@pytest.mark.shows("PEFT", "LoRA where absorbed decoding reads the weight (MLA's `kv_b_proj`)", "peft")
def test_an_adapter_is_not_absorbed() -> None:
    adapted = adapt(tiny_model(**MLA), LoraConfig(r=3, target_modules=["kv_b_proj"]))
    ids = text(2, 12)
    whole = logits_of(adapted, ids)
    assert_close(by_tokens(adapted, ids), whole, "cache")
    merged = adapted.merge_and_unload()
    assert_close(by_tokens(merged, ids), whole, "absorbed")


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids).logits


@torch.no_grad()
def by_tokens(model: Any, ids: Tensor) -> Tensor:
    """The logits of a text that is read token by token from a cache."""
    cache, steps = None, []
    for token in ids.split(1, dim=1):
        out = model(input_ids=token, past_key_values=cache, use_cache=True)
        cache = out.get("cache", out.get("past_key_values"))
        steps.append(out.logits)
    return torch.cat(steps, dim=1)


@pytest.mark.shows("PEFT", "LoRA on packed experts (`target_parameters`), merged", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_packed_experts(implementation: str) -> None:
    model = tiny_model(**MOE)
    model.set_experts_implementation(implementation)
    before = logits(model)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = adapt(model, LoraConfig(r=2, target_modules=[], target_parameters=parameters))
    sparse = (model.config.mlp_layer_types or []).count("sparse")
    assert len(trained(adapted)) == 2 * len(parameters) * sparse  # an A and a B each, and nothing of the router
    expected = logits(adapted)
    assert differs(expected, before)
    assert_close(logits(adapted.merge_and_unload()), expected, "merged")


@pytest.mark.shows("PEFT", "Several adapters: switched, combined, replaced in place, deleted", "peft")
@pytest.mark.filterwarnings("ignore")
def test_several_adapters(tmp_path: Path) -> None:
    expected = {}
    for seed in (1, 2):
        one = adapt(tiny_model(), LoraConfig(r=3), seed=seed)
        one.save_pretrained(tmp_path / str(seed))
        expected[seed] = logits(one)
    model = PeftModel.from_pretrained(tiny_model(), tmp_path / "1", adapter_name="first").eval()
    model.load_adapter(tmp_path / "2", adapter_name="second")
    assert_close(logits(model), expected[1], "reload")
    model.set_adapter("second")
    assert_close(logits(model), expected[2], "reload")
    # Both at once are what merging one after the other gives.
    model.add_weighted_adapter(["first", "second"], [1.0, 1.0], "both", combination_type="cat")
    model.set_adapter("both")
    base = PeftModel.from_pretrained(tiny_model(), tmp_path / "1").merge_and_unload()
    base = PeftModel.from_pretrained(base, tmp_path / "2").merge_and_unload()
    assert_close(logits(model), logits(base.eval()), "merged")
    model.set_adapter("first")
    model.delete_adapter("second")
    hotswap_adapter(model, str(tmp_path / "2"), adapter_name="first")
    assert_close(logits(model), expected[2], "reload")


@pytest.mark.shows("PEFT", "LoRA under gradient checkpointing, both kinds", "peft")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("model", ["decoder", "latent", "encoder-decoder"])
def test_gradient_checkpointing(model: str, reentrant: bool) -> None:
    def gradients(checkpointing: bool) -> dict[str, Tensor]:
        base = build(model)
        if checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": reentrant})
            base.enable_input_require_grads()
        adapted = adapt(base, LoraConfig(r=3)).train()
        given = inputs(adapted)
        adapted(**given, labels=given.get("decoder_input_ids", given["input_ids"]), use_cache=False).loss.backward()
        return {name: p.grad for name, p in trained(adapted).items() if p.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys() != set()
    for name, gradient in plain.items():
        assert_close(checkpointed[name], gradient, "recompute")

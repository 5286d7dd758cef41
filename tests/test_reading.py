"""Keys that transformers never reads: found in its code, and checked against what it reads when it runs."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_llmarch.conversion import export_plan, families, plan
from hf_llmarch.conversion.errors import UnsupportedField
from hf_llmarch.conversion.families import NAMES
from hf_llmarch.conversion.reading import keys_read
from hf_llmarch.conversion.relation import INERT
from hf_llmarch.conversion.sources import open_checkpoint
from tests import family_configs, test_encoders, test_seq2seq
from tests.tiny import text

CASES = {**family_configs.CASES, **test_encoders.CASES, **test_seq2seq.CASES}
# nanoGPT's class is not transformers'.
FAMILIES = [name for name in NAMES if name in CASES]
# Of published configs, and one that nobody has written yet.
UNREAD: dict[str, Any] = {
    **{"_attn_implementation_autoset": True, "output_past": True, "finetuning_task": "mnli", "a_new_gate": 3},
    **{"unsloth_version": "2024.9", "auto_map": {"AutoConfig": "configuration_x.X"}, "save_step": 9},
    "task_specific_params": {"summarization": {"num_beams": 4}},
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **json.loads(json.dumps(CASES[family])), **changes}


def native_model(config: dict[str, Any]) -> Any:
    """A fresh model of transformers' own class, the same for every call."""
    name = next(iter(families()[config["model_type"]].architectures.values()))
    torch.manual_seed(0)
    return getattr(transformers, name)(AutoConfig.for_model(**config)).eval()


@torch.no_grad()
def run(model: PreTrainedModel) -> torch.Tensor:
    ids = text(2, 9) % 40
    two = {"decoder_input_ids": ids[:, :5]} if model.config.is_encoder_decoder else {}
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **two)
    return output["logits"] if "logits" in output else output["last_hidden_state"]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The names of all attributes of configs that transformers reads meanwhile, each by its name: a validator and a
    loop over all fields read them by none."""
    names: set[str] = set()
    plain = PreTrainedConfig.__getattribute__

    def read(self: PreTrainedConfig, name: str) -> Any:
        code = sys._getframe(1).f_code
        if "/transformers/" in code.co_filename and name in (*code.co_names, *code.co_consts):
            names.add(name)
        return plain(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedConfig, "__getattribute__", read)
        yield names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_native_model_reads_as_it_runs_is_found_in_its_code(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model(**config_of(family))
    found = keys_read(type(config), families()[family].architectures.values())
    assert found is not None
    with recorded(monkeypatch) as names:
        run(native_model(config_of(family)))
    keys = {name for name in config.to_dict() if name in names}
    assert {"vocab_size", "initializer_range", "tie_word_embeddings"} & keys
    assert keys <= found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_transformers_never_reads_are_kept(family: str, tmp_path: Path) -> None:
    native_model(config_of(family)).save_pretrained(tmp_path)
    saved = open_checkpoint(tmp_path)
    plain, odd = (plan({**saved.config, **more}, saved.shapes) for more in ({}, UNREAD))
    assert [(step.theirs, step.ours) for step in odd.steps] == [(step.theirs, step.ours) for step in plain.steps]
    assert export_plan(odd.config).foreign_config == {**saved.config, **UNREAD}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, UNREAD) for family in ("llama", "bert", "gpt2", "t5", "bart")),
        ("gpt_oss", {"hidden_act": "gelu"}),
        ("mpt", {"expansion_ratio": 3, "learned_pos_emb": False, "verbose": 1}),
        ("bloom", {"masked_softmax_fusion": False, "offset_alibi": 100}),
        ("qwen3_moe", {"max_window_layers": 1}),
        ("deepseek_v3", {"ep_size": 8, "aux_loss_alpha": 0.1}),
    ],
)
def test_they_do_not_change_native_numbers_either(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    plain, odd = (native_model(config_of(family, **more)) for more in ({}, changes))
    assert torch.equal(run(plain), run(odd))
    odd.save_pretrained(tmp_path)
    saved = open_checkpoint(tmp_path)
    assert {name: saved.config[name] for name in changes} == changes
    plan(saved.config, saved.shapes)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"quantization_config": {"bits": 4}}),
        ("bert", {"add_cross_attention": True}),
        ("gpt2", {"add_cross_attention": True}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("olmoe", {"clip_qkv": 3.0}),
    ],
)
def test_keys_that_transformers_reads_stay_errors(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField, match=next(iter(changes))):
        plan(config_of(family, **changes), [])


def test_no_list_repeats_what_the_code_tells() -> None:
    """A key in a list that no class reads would be a fact kept twice."""
    configs = {name: type(AutoConfig.for_model(name)) for name in FAMILIES}
    models = {name: families()[name].architectures.values() for name in FAMILIES}
    read = {name: keys_read(configs[name], models[name]) or frozenset() for name in FAMILIES}
    assert not [key for key in INERT if not any(key in keys for keys in read.values())]
    assert not {name: idle for name in FAMILIES if (idle := [k for k in families()[name].inert if k not in read[name]])}

"""TRL's trainers on tiny models: their first loss is what a formula says, and it falls.

TRL trains through a head of its own, which reads `lm_head`, `logit_scale` and `final_logit_softcapping` from ours. Its
balance loss is Mixtral's, `router_aux_loss_scope="model"`, whatever the config says.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from hf_llmarch import LlmArchForCausalLM, LlmArchForSequenceClassification
from tests.tiny import MLA, MOE, redraw, tiny_config, tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
disable_progress_bar()

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"attention_type": "mha", "num_key_value_heads": 6, "lm_head_bias": True},
    "grouped, scaled and capped": {
        **{"logit_scale": 0.5, "final_logit_softcapping": 1.5, "attn_logit_softcapping": 2.0},
        **{"embedding_scale": 3.0, "tie_word_embeddings": True},
    },
    "latent": MLA,
    "experts": {**MOE, "router_aux_loss_coef": 0.3, "router_aux_loss_scope": "model"},
}
each_model = pytest.mark.parametrize("switches", MODELS.values(), ids=MODELS)

WORDS = [f"w{i}" for i in range(90)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a word."""
    vocabulary = {word: i for i, word in enumerate(("<pad>", "<s>", "</s>", *WORDS))}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<pad>")


def sentence(length: int, seed: int) -> str:
    picks = torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in picks.tolist())


LENGTHS = (9, 4, 12, 7)
TEXTS = [sentence(length, seed) for seed, length in enumerate(LENGTHS)]
PAIRS = [{"prompt": sentence(3 + i, 10 + i), "completion": " " + sentence(6 - i, 20 + i)} for i in range(4)]
PREFERRED = [
    {**pair, "chosen": pair["completion"], "rejected": " " + sentence(2 + i, 30 + i)} for i, pair in enumerate(PAIRS)
]


def settings(folder: Path, **given: Any) -> dict[str, Any]:
    return {
        **{"output_dir": str(folder), "max_steps": 4, "logging_steps": 1, "learning_rate": 0.01, "report_to": []},
        **{"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant"},
        # All examples at once: their order is no matter. TRL's defaults are bf16 and gradient checkpoints.
        **{"per_device_train_batch_size": 4, "bf16": False, "gradient_checkpointing": False, **given},
    }


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def token_losses(model: Any, ids: list[int], begin: int = 1) -> torch.Tensor:
    """-log p of each token from `begin` on, in double precision from our own logits, `(length - begin,)`."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
    return -logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[begin - 1 :, 0]


def batched_balance(model: Any, texts: list[list[int]], padded: bool) -> float:
    """Mixtral's balance loss of one batch of texts, weighted."""
    if not model.config.num_experts:
        return 0.0
    if not padded:  # one row, without padding
        logits = [model(torch.tensor([ids]), output_router_logits=True, use_cache=False).router_logits for ids in texts]
        together = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
        mask = None
    else:
        longest = max(map(len, texts))
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in texts])
        rows = torch.tensor([ids + [0] * (longest - len(ids)) for ids in texts])
        together = model(rows, mask, output_router_logits=True, use_cache=False).router_logits
    config = model.config
    loss = load_balancing_loss_func(together, config.num_experts, config.num_experts_per_tok, mask)
    return config.router_aux_loss_coef * loss.item()


FORMS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding-free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "packing_strategy": "bfd", "max_length": 64, "per_device_train_batch_size": 1},
}


@pytest.mark.shows("Training", "TRL SFT: padded, padding-free and packed, with the loss of separate texts", "trl")
@each_model
@pytest.mark.parametrize("form", FORMS)
def test_sft(form: str, switches: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model(**switches)
    texts = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    parts = torch.cat([token_losses(model, ids) for ids in texts])
    expected = parts.mean().item() + batched_balance(model, texts, padded=form == "padded")
    trainer = SFTTrainer(
        model,
        args=SFTConfig(**settings(tmp_path, **FORMS[form])),
        train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
        processing_class=tokenizer,
    )
    found = losses(trainer)
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0] - 0.1


@pytest.mark.shows("Training", "TRL SFT on completions alone", "trl")
@each_model
def test_sft_on_completions(switches: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model(**switches)
    parts, texts = [], []
    for pair in PAIRS:
        prompt, completion = (tokenizer(pair[name])["input_ids"] for name in ("prompt", "completion"))
        texts.append([*prompt, *completion, tokenizer.eos_token_id])
        parts.append(token_losses(model, texts[-1], begin=len(prompt)))
    expected = torch.cat(parts).mean().item() + batched_balance(model, texts, padded=True)
    trainer = SFTTrainer(
        model, args=SFTConfig(**settings(tmp_path)), train_dataset=Dataset.from_list(PAIRS), processing_class=tokenizer
    )
    found = losses(trainer)
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0] - 0.1


@pytest.mark.shows("Training", "TRL DPO against a reference model that is read from its path", "trl")
@each_model
def test_dpo(switches: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    redraw(LlmArchForCausalLM(tiny_config(**switches))).save_pretrained(tmp_path / "model")
    model = LlmArchForCausalLM.from_pretrained(tmp_path / "model").eval()
    reference = LlmArchForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * parameter.roll(1, 0))
    rows, texts = [], []
    for pair in PREFERRED:
        prompt, *answers = (tokenizer(pair[name])["input_ids"] for name in ("prompt", "chosen", "rejected"))
        ratios = []
        for answer in answers:
            texts.append([*prompt, *answer, tokenizer.eos_token_id])
            ours, theirs = (-token_losses(m, texts[-1], begin=len(prompt)).sum() for m in (model, reference))
            ratios.append(ours - theirs)
        rows.append(-torch.nn.functional.logsigmoid(0.7 * (ratios[0] - ratios[1])))
    expected = torch.stack(rows).mean().item() + batched_balance(model, texts[::2] + texts[1::2], padded=True)
    trainer = DPOTrainer(
        model,  # without a reference: TRL reads one from where the model came
        args=DPOConfig(**settings(tmp_path, beta=0.7)),
        train_dataset=Dataset.from_list([{k: v for k, v in row.items() if k != "completion"} for row in PREFERRED]),
        processing_class=tokenizer,
    )
    assert trainer.ref_model is not None
    found = losses(trainer)
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0] - 0.1


@pytest.mark.shows("Training", "TRL reward modelling", "trl")
@each_model
def test_reward(switches: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    switches = {**switches, "lm_head_bias": False, "tie_word_embeddings": False, "router_aux_loss_coef": 0.0}
    switches = {k: v for k, v in switches.items() if k in MOE or "router" not in k}
    model = redraw(LlmArchForSequenceClassification(tiny_config(**switches, num_labels=1, pad_token_id=0))).eval()

    def reward(pair: dict[str, str], name: str) -> torch.Tensor:
        ids = [*tokenizer(pair["prompt"])["input_ids"], *tokenizer(pair[name])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, 0].double()

    margins = torch.stack([reward(pair, "chosen") - reward(pair, "rejected") for pair in PREFERRED])
    trainer = RewardTrainer(
        model,
        args=RewardConfig(**settings(tmp_path)),
        train_dataset=Dataset.from_list([{k: v for k, v in row.items() if k != "completion"} for row in PREFERRED]),
        processing_class=tokenizer,
    )
    found = losses(trainer)
    assert found[0] == pytest.approx(-torch.nn.functional.logsigmoid(margins).mean().item(), rel=1e-4)
    assert found[-1] < found[0] - 0.1


@pytest.mark.shows("Training", "TRL GRPO on a toy reward", "trl")
@each_model
def test_grpo(switches: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    """More words with a low number, please."""
    seen: list[tuple[list[list[int]], list[float]]] = []

    def low(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        rewards = [sum(i < 33 for i in ids) / 5 for ids in completion_ids]
        seen.append((completion_ids, rewards))
        return rewards

    torch.manual_seed(0)
    model = LlmArchForCausalLM(tiny_config(**{**switches, "norm_eps": 1e-6, "router_aux_loss_coef": 0.0}))
    trainer = GRPOTrainer(
        model,
        reward_funcs=low,
        args=GRPOConfig(
            **settings(tmp_path, max_steps=12, per_device_train_batch_size=16, num_generations=8, learning_rate=0.02),
            max_completion_length=5,
        ),
        train_dataset=Dataset.from_list([{"prompt": pair["prompt"]} for pair in PAIRS]),
        processing_class=tokenizer,
    )
    scored: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    compare = trainer._get_per_token_logps_and_entropies

    def record(model: Any, input_ids: torch.Tensor, mask: torch.Tensor, kept: int, *args: Any, **kwargs: Any) -> Any:
        result = compare(model, input_ids, mask, kept, *args, **kwargs)
        if not scored:
            with torch.no_grad():
                logits = model(input_ids, mask, use_cache=False).logits[:, :-1].double()
            exact = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[:, -kept:, 0]
            scored.append((result[0].detach(), exact, mask[:, -kept:].bool()))
        return result

    trainer._get_per_token_logps_and_entropies = record
    trainer.train()
    found, exact, real = scored[0]
    torch.testing.assert_close(found.double()[real], exact[real], atol=1e-5, rtol=1e-5)
    means = [sum(rewards) / len(rewards) for _, rewards in seen]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1

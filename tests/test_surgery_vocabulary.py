"""A vocabulary that is trimmed to a corpus: the tokenizer says the same words, under new ids."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_llmarch import LlmArchForCausalLM
from hf_llmarch.surgery import SurgeryError, operate_on_folder
from tiny import tiny_model

BOOK = "the cat sat on the mat and the rat ran at the cat; a thousand other animals watched them attentively. " * 3
CORPUS = "the cat ran and the rat sat at a mat."


def trained(kind: str) -> Tokenizer:
    """A tokenizer of one kind, with a start token that its post-processor puts before each text."""
    special = ["<unk>", "<s>", "</s>"]
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>")
    tokenizer.train_from_iterator([BOOK], trainer)
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return tokenizer


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_a_corpus_becomes_the_same_tokens(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(kind)
    size = tokenizer.get_vocab_size()
    original = tiny_model(vocab_size=size, bos_token_id=1, eos_token_id=2)
    original.save_pretrained(tmp_path / "a")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.save_pretrained(tmp_path / "a")
    (tmp_path / "corpus.txt").write_text(CORPUS)
    operate_on_folder(tmp_path / "a", tmp_path / "b", [{"trim_vocabulary": {"corpus": str(tmp_path / "corpus.txt")}}])
    before, after = (AutoTokenizer.from_pretrained(tmp_path / folder) for folder in "ab")
    changed = LlmArchForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert len(after) == changed.config.vocab_size < size
    assert after.convert_ids_to_tokens(after(CORPUS).input_ids) == before.convert_ids_to_tokens(
        before(CORPUS).input_ids
    )
    assert after.decode(after(CORPUS).input_ids) == before.decode(before(CORPUS).input_ids)
    assert changed.config.eos_token_id == after.eos_token_id
    assert changed.generation_config.bos_token_id == after.bos_token_id == after(CORPUS).input_ids[0]
    # The logits are those of the tokens that are left.
    names = after.convert_ids_to_tokens(list(range(len(after))))
    old = original(torch.tensor([before(CORPUS).input_ids])).logits[..., before.convert_tokens_to_ids(names)]
    new = changed(torch.tensor([after(CORPUS).input_ids])).logits
    assert (new - old).abs().max() <= 1e-5 * (old.max() - old.min())
    if kind == "bpe":  # every byte has a token, so any text can still be written
        assert after.decode(after("Zürich?").input_ids[1:]) == "Zürich?"


def test_tokenizers_that_cannot_follow(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "a")
    (tmp_path / "a/tokenizer.model").write_bytes(b"")
    with pytest.raises(SurgeryError, match=r"tokenizer\.model, which cannot be trimmed"):
        operate_on_folder(tmp_path / "a", tmp_path / "b", [{"trim_vocabulary": {"tokens": [1, 2, 3]}}])
    assert not (tmp_path / "b").exists()
    # More rows leave a tokenizer as it is.
    operate_on_folder(tmp_path / "a", tmp_path / "c", [{"grow_vocabulary": {"vocab_size": 120}}])
    assert (tmp_path / "c/tokenizer.model").exists()
    assert json.loads((tmp_path / "c/config.json").read_text())["vocab_size"] == 120

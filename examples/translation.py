"""Translate or summarise: what the pipelines `translation` and `summarization` did before transformers 5 dropped them.

    python examples/translation.py Helsinki-NLP/opus-mt-en-de "The cat sat on the mat."
    python examples/translation.py google-t5/t5-small --prefix "translate English to German: " "The cat sat on the mat."
    python examples/translation.py google-t5/t5-small --prefix "summarize: " < article.txt
    python examples/translation.py facebook/nllb-200-distilled-600M --source eng_Latn --target deu_Latn "Good morning."

The model is a Hub id or a folder, of any encoder-decoder family or already converted. Without texts, each line of the
standard input is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerBase

import hf_llmarch  # noqa: F401 - registers our models with transformers' Auto classes
from hf_llmarch.conversion import load


def open_model(source: str) -> Any:
    """A model of ours as it is, anything else converted as it is read."""
    if AutoConfig.from_pretrained(source).model_type == "llmarch":
        return AutoModelForSeq2SeqLM.from_pretrained(source)
    return load(source)


@torch.no_grad()
def say(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    prefix: str = "",
    target: str | None = None,
    beams: int = 4,
    length: int = 128,
) -> list[str]:
    """What the model says of each text.

    Args:
        prefix: the task in words, put before each text (T5).
        target: the language's own token, which a translator into many is made to begin with (mBART, M2M-100, NLLB).
        beams: how many ways of saying it are followed at a time; 1: greedy.
        length: most new tokens.

    Raises:
        ValueError: the tokenizer has no such language.
    """
    options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": length}
    if target is not None:
        options["forced_bos_token_id"] = tokenizer.convert_tokens_to_ids(target)
        if options["forced_bos_token_id"] in (None, tokenizer.unk_token_id):
            raise ValueError(f"{target!r} is not in the vocabulary: give the language as the tokenizer spells it.")
    inputs = tokenizer([prefix + text for text in texts], padding=True, truncation=True, return_tensors="pt")
    written = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
    return list(tokenizer.batch_decode(written, skip_special_tokens=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hub id or a folder")
    parser.add_argument("texts", nargs="*", help="what to translate or summarise")
    parser.add_argument("--prefix", default="", help="put before each text")
    parser.add_argument("--source", help="the language of the texts, as the tokenizer spells it")
    parser.add_argument("--target", help="the language to translate into, as the tokenizer spells it")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="most new tokens")
    chosen = parser.parse_args(arguments)

    languages = {"src_lang": chosen.source} if chosen.source else {}
    tokenizer = AutoTokenizer.from_pretrained(chosen.model, **languages)
    model = open_model(chosen.model)
    options = {"prefix": chosen.prefix, "target": chosen.target, "beams": chosen.beams, "length": chosen.length}
    texts = chosen.texts or [line.strip() for line in sys.stdin if line.strip()]
    print(*say(model, tokenizer, texts, **options), sep="\n")


if __name__ == "__main__":
    main()

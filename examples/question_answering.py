"""Find the answer in a text: what the pipeline `question-answering` did before transformers 5 dropped it.

    python examples/question_answering.py distilbert/distilbert-base-cased-distilled-squad \\
        "Where does the cat sit?" "The cat sits on the mat. The dog lies under the table."

The model is a Hub id or a folder, of any family with such a head or already converted. A text that is longer than the
model reads at once is read in windows that overlap.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer, PreTrainedTokenizerBase

import hf_llmarch  # noqa: F401 - registers our models with transformers' Auto classes
from hf_llmarch.conversion import load


@dataclass(frozen=True)
class Answer:
    """A part of the text.

    Attributes:
        start, end: of its characters.
        score: its probability among all parts that could be an answer, over all windows.
    """

    text: str
    start: int
    end: int
    score: float


def open_model(source: str) -> Any:
    """A model of ours as it is, anything else converted as it is read."""
    if AutoConfig.from_pretrained(source).model_type == "llmarch":
        return AutoModelForQuestionAnswering.from_pretrained(source)
    return load(source)


@torch.no_grad()
def answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    text: str,
    *,
    longest: int = 15,
    window: int = 384,
    overlap: int = 128,
) -> Answer:
    """The best part of `text`.

    Args:
        longest: most tokens in an answer.
        window: tokens that are read at once, the question included.
        overlap: of the text's tokens in a window, how many come again in the next; at most half.

    Raises:
        ValueError: the question alone fills a window.
    """
    window = min(window, model.config.max_position_embeddings)
    asked = len(tokenizer.tokenize(question)) + tokenizer.num_special_tokens_to_add(pair=True)
    if asked >= window:
        raise ValueError(f"The question takes {asked} tokens of the {window} that are read at once: make it shorter.")
    inputs = tokenizer(
        question,
        text,
        truncation="only_second",
        max_length=window,
        stride=min(overlap, (window - asked) // 2),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding=True,
        return_tensors="pt",
    )
    output = model(**{name: inputs[name] for name in tokenizer.model_input_names})
    rows = len(inputs["input_ids"])
    in_text = torch.tensor([[part == 1 for part in inputs.sequence_ids(row)] for row in range(rows)])
    starts = output.start_logits.masked_fill(~in_text, -torch.inf)
    ends = output.end_logits.masked_fill(~in_text, -torch.inf)
    scores = starts[:, :, None] + ends[:, None, :]  # (windows, start, end)
    in_order = torch.ones_like(scores[0], dtype=torch.bool).triu().tril(longest - 1)
    probabilities = scores.masked_fill(~in_order, -torch.inf).flatten().softmax(0)
    row, first, last = (int(i) for i in torch.unravel_index(probabilities.argmax(), scores.shape))
    start, end = int(inputs["offset_mapping"][row, first, 0]), int(inputs["offset_mapping"][row, last, 1])
    return Answer(text[start:end], start, end, float(probabilities.max()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hub id or a folder")
    parser.add_argument("question")
    parser.add_argument("text")
    chosen = parser.parse_args(arguments)
    found = answer(open_model(chosen.model), AutoTokenizer.from_pretrained(chosen.model), chosen.question, chosen.text)
    print(f"{found.text}  ({found.score:.0%}, characters {found.start} to {found.end})")


if __name__ == "__main__":
    main()

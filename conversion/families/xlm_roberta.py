"""XLM-RoBERTa: RoBERTa in a hundred languages. arXiv 1911.02116."""

from .roberta import family

FAMILY = family("xlm-roberta", "XLMRoberta")

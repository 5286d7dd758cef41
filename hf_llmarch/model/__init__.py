"""The model: the files that travel with a pushed one, flat, and nothing else.

They import each other, torch, transformers and the standard library.
"""

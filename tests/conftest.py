"""Settings for every test: no network, and one thread a worker when the tests run in parallel."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

"""What holds for every test: no network, few threads, fixed seeds, the same examples on each run."""

import os

# Read once, when torch and huggingface_hub are imported: before any import below.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

# One thread: sums are taken in the same order on every machine, and processes of pytest-xdist do not compete.
torch.set_num_threads(1)

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)

"""Shared by all tests: small threads, quiet Lightning, no network."""

from __future__ import annotations

import gc
import logging
import os
import tempfile

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # one for all workers of a run, which leaves nothing behind
    _cache = tempfile.TemporaryDirectory(prefix="memsave-inductor-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache.name
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ["OMP_NUM_THREADS"] = "1"  # for the programs that tests start, of which two workers run some at a time

import pytest
import torch
from hypothesis import settings
from lightning_utilities.core import rank_zero

from lightning_memsave.saved_tensors import deferred_logits

settings.register_profile("shared machines", deadline=None, derandomize=True)
settings.load_profile("shared machines")

for _name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    for _logger in (_name, f"{_name}.utilities.rank_zero"):
        logging.getLogger(_logger).setLevel(logging.ERROR)


torch.set_num_threads(1)  # for fixtures of modules and sessions, which are made before any test's own


def pytest_collection_finish():
    """Leave what was imported and collected out of full collections, of which recoveries and trials make many."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed(monkeypatch):
    from lightning_memsave.prediction import after_fit

    monkeypatch.setattr(after_fit, "LEAST_SECONDS", 0.0)  # summaries of fits predict nothing, but where that is tested
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def info(caplog):
    """Records of Lightning's log, also of what is for information; of the namespace that was imported last."""
    caplog.set_level(logging.INFO, rank_zero.log.name)
    return caplog


@pytest.fixture
def lines(monkeypatch):
    """What is told to people."""
    from lightning_memsave.loops import recovery
    from lightning_memsave.strategies import memsave_mixin

    told = []
    monkeypatch.setattr(memsave_mixin, "rank_zero_info", told.append)
    monkeypatch.setattr(recovery, "_tell", told.append)
    return told


@pytest.fixture
def products(monkeypatch):
    """One entry for each time that a head's whole output was computed after all."""
    seen, product = [], deferred_logits.HeadCall.product

    def counted(self):
        seen.append(tuple(self.rows.shape))
        return product(self)

    monkeypatch.setattr(deferred_logits.HeadCall, "product", counted)
    return seen

"""Leaks: what is told, what is not, and the line that is named."""

from __future__ import annotations

import pickle

import torch
from torch import nn

from lightning_memsave.measuring.leak_detection import NUM_HELD_FIGURES, NUM_PEAK_FIGURES, GrowthWatch
from lightning_memsave.measuring.ledger import Ledger, Measurement

N = 64


class Run:
    """A training whose every step is measured."""

    def __init__(self):
        self.model = nn.Linear(N, N)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.watch = GrowthWatch()
        self.kept = []
        self.forward(torch.randn(8, N)).sum().backward()  # the first step makes gradients and state
        self.optimizer.step()

    def forward(self, x):
        return self.model(x)

    def step(self, keep=None, num_samples=8):
        with Ledger().watching(self.model, [self.optimizer]) as ledger:
            self.optimizer.zero_grad()
            y = self.forward(torch.randn(num_samples, N))
            y.square().mean().backward()
            self.optimizer.step()
            if keep is not None:
                keep(y)
        return self.watch.observe(ledger.measurement)


def test_what_is_appended_is_found_once_with_shape_type_count_and_line():
    run = Run()
    found = [run.step(run.kept.append) for _ in range(12)]
    (growth,) = [each for each in found if each]
    assert found.index(growth) == NUM_HELD_FIGURES - 1
    size = 8 * N * 4
    assert growth.what == "held"
    assert growth.figures_bytes == (0, size, 2 * size, 3 * size)
    (tensors,) = growth.tensors
    assert (tensors.count, tensors.num_bytes) == (4, 4 * size)
    assert (tensors.shape, tensors.dtype) == ((8, N), torch.float32)
    line = Run.forward.__code__.co_firstlineno + 1
    assert tensors.line == f"measuring/test_leak_detection.py:{line} forward"


def test_what_is_replaced_is_no_growth_however_its_size_changes():
    run = Run()

    def replace(y):
        run.kept = [y]

    assert [run.step(replace, num_samples=8 * (1 + step)) for step in range(NUM_PEAK_FIGURES - 1)] == [None] * 7


def test_an_ordinary_training_has_no_growth():
    run = Run()
    average = [p.detach().clone() for p in run.model.parameters()]

    def follow(y):
        for old, new in zip(average, run.model.parameters(), strict=True):
            old.lerp_(new.detach(), 0.1)

    assert [run.step(follow) for _ in range(20)] == [None] * 20


def test_what_is_let_go_in_between_is_no_growth():
    run = Run()

    def keep_three(y):
        run.kept = [*run.kept[-2:], y]

    assert [run.step(keep_three) for _ in range(20)] == [None] * 20


def test_a_few_bytes_are_no_growth():
    run = Run()
    assert [run.step(lambda y: run.kept.append(y.detach().mean())) for _ in range(20)] == [None] * 20
    assert len(run.kept) == 20


def test_a_growing_peak_is_found_with_its_lines():
    run = Run()
    found = [run.step(num_samples=64 * (1 + step)) for step in range(2 * NUM_PEAK_FIGURES)]
    (growth,) = [each for each in found if each]
    assert growth.what == "peak"
    assert found.index(growth) == NUM_PEAK_FIGURES - 1
    assert list(growth.figures_bytes) == sorted(set(growth.figures_bytes))
    lines = dict(growth.by_line)
    batch = next(line for line in lines if line.endswith(" step"))
    assert lines[batch] >= (NUM_PEAK_FIGURES - 1) * 64 * N * 4


def test_a_peak_that_goes_up_and_down_is_no_growth():
    watch = GrowthWatch()
    figures = [100, 200, 300, 400, 500, 600, 700, 650] * 10
    assert [watch.observe(Measurement(peak_bytes=figure)) for figure in figures] == [None] * 80


def test_a_watch_can_be_sent_to_another_process():
    run = Run()
    for _ in range(NUM_HELD_FIGURES - 1):
        run.step(run.kept.append)
    again = pickle.loads(pickle.dumps(run.watch))
    assert again._kept == []
    assert run.step(run.kept.append) is not None


def test_nothing_that_is_kept_is_kept_by_the_watch():
    import gc
    import weakref

    run = Run()
    run.step(run.kept.append)
    storage = weakref.ref(run.kept[0].untyped_storage())
    assert storage() is not None
    run.kept.clear()
    gc.collect()
    assert storage() is None

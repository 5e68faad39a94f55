"""Planning that says how far it is, and that ends after its time or with Ctrl-C."""

from __future__ import annotations

import io
import logging
import os
import signal

import pytest
from lightning_utilities.core import rank_zero

from lightning_memsave import MemSave, plan_training
from lightning_memsave.prediction import planning_watch
from lightning_memsave.prediction.peek_batch import estimated_batches
from lightning_memsave.prediction.planning_watch import PlanningWatch
from tests.prediction.budget_runs import Net, data, train


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when a test says so."""
    now = [100.0]
    monkeypatch.setattr(planning_watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rank_zero, "log", logging.getLogger("told"))
    rank_zero.log.setLevel(logging.INFO)
    return now


def test_a_terminal_has_one_line_that_changes_and_goes(clock):
    stream = Terminal()
    watch = PlanningWatch(60, plain_bytes=100 * 2**20, stream=stream)
    with watch.interruptible():
        watch.tell(1, 50 * 2**20)
        assert stream.getvalue() == "", "what is over at once says nothing"
        clock[0] += 7
        watch.tell(3, 42 * 2**20)
        line = "memsave: planning: 3 predictions in 7 of 60 s, least 42.0 MiB (0.42x)"
        assert stream.getvalue() == f"\r\x1b[2K{line}"
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_a_log_has_a_line_now_and_then(clock, monkeypatch):
    told = []
    monkeypatch.setattr(planning_watch, "rank_zero_info", told.append)
    watch = PlanningWatch(60, plain_bytes=1000, stream=io.StringIO())
    for number in range(1, 26):
        clock[0] += 1
        watch.tell(number, None)
    assert [line.split(":")[2] for line in told] == [
        " 10 predictions in 10 of 60 s",
        " 20 predictions in 20 of 60 s",
    ]


def test_where_the_log_is_silent_nothing_is_said(clock):
    rank_zero.log.setLevel(logging.ERROR)
    stream = Terminal()
    watch = PlanningWatch(60, plain_bytes=1000, stream=stream)
    clock[0] += 30
    watch.tell(1, 10)
    assert stream.getvalue() == ""


def test_time_ends_a_search_that_has_a_plan(clock):
    watch = PlanningWatch(60, plain_bytes=1000)
    assert watch.why_over(True) == ""
    clock[0] += 61
    assert watch.why_over(True) == "after the 60 s that it may take (`planning_seconds`)"
    assert watch.why_over(False) == ""


def test_ctrl_c_ends_a_search_and_the_run_where_nothing_fits_or_it_comes_twice(request):
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # which parallel tests ignore
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, outside))
    before = signal.getsignal(signal.SIGINT)
    stream = io.StringIO()
    watch = PlanningWatch(60, plain_bytes=1000, stream=stream)
    with watch.interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.why_over(True) == "by Ctrl-C"
        with pytest.raises(KeyboardInterrupt):
            watch.why_over(False)
        assert "Ctrl-C once more ends the run" in stream.getvalue()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_plan_that_was_cut_short_fits_and_says_so():
    memsave = MemSave(budget="0.6x", planning_seconds=1e-6)
    plan = plan_training(Net(), next(iter(data())), memsave)
    assert plan.needed_bytes <= plan.budget_bytes
    assert any("the search ended after the 0 s that it may take (`planning_seconds`)" in flag for flag in plan.flags)
    assert "planning_seconds=1e-06" in repr(memsave)


def test_refused_settings():
    with pytest.raises(ValueError, match=r"`planning_seconds` must be a positive number, got 0\."):
        MemSave(budget="0.5x", planning_seconds=0)
    with pytest.raises(ValueError, match=r"`planning_seconds` must be a positive number, got True\."):
        MemSave(budget="0.5x", planning_seconds=True)
    with pytest.raises(ValueError, match=r"`planning_seconds` needs a `budget`"):
        MemSave(planning_seconds=10)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_epochs": 3}, 12),
        ({"max_epochs": 3, "max_steps": 2}, 2),
        ({"max_epochs": 5, "limit_train_batches": 0.5}, 10),
        ({"max_epochs": 4, "limit_train_batches": 1}, 4),
        ({"max_epochs": -1, "max_steps": 2, "accumulate_grad_batches": 3}, 6),
    ],
)
def test_the_length_of_a_fit_is_estimated(options, expected, monkeypatch):
    seen = []

    def decide(self, trainer):
        seen.append(estimated_batches(trainer))
        raise StopIteration

    monkeypatch.setattr("lightning_memsave.prediction.budgeted_run.BudgetedRun.decide", decide)
    with pytest.raises((StopIteration, RuntimeError)):
        train(MemSave(budget="0.9x"), loader=data(shuffle=False), **options)
    assert seen == [expected]

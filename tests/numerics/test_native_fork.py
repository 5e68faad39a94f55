"""The threads of the C kernels after a fork (`ddp_fork`, `ddp_notebook`)."""

import os

import pytest

from lightning_memsave.numerics.kernels import native


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    assert native._pool(2).submit(int).result(10) == 0
    if (child := os.fork()) == 0:
        is_done = False
        try:
            is_done = native._pool(2).submit(int).result(10) == 0
        finally:
            os._exit(0 if is_done else 1)
    assert os.waitpid(child, 0)[1] == 0

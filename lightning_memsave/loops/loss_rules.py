"""Rules that the losses of a run have obeyed so far, and when the LightningModule is asked again.

A loss may change in the middle of a run: a term that sets in after a warm-up, another epoch, a batch of another
structure, labels that are ragged for the first time. So it is asked again in the fourth batch that is cut, the eighth,
the sixteenth and so on; when an epoch begins, in the first and then in every second, fourth and so on; for a batch of a
structure that is new; after a batch whose loss came from other operations than any before; and whenever the rules that
have held so far would weigh the parts of a batch differently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from lightning_memsave.lightning_compat import Batch
from lightning_memsave.loops.loss_reduction import Answer
from lightning_memsave.techniques.microbatching import UnsplittableBatchError, batch_size
from lightning_memsave.techniques.microbatching.reduction import ReductionRule
from lightning_memsave.techniques.microbatching.split import are_equal

_SAME = 1e-9  # relative: weights that differ by less are equal
_MUCH = 0.02  # of the first epoch
_LEAST_SECONDS = 1.0  # that are worth a line
_SECOND = 4  # the second and the third step are measured, which asking would add to
_NUM_NODES = 48  # of the graph, from the loss on
_MOST_IN_VAIN = 32  # batches that ask because of another one


class LossRules:
    """The rules that have held in every batch that was looked at."""

    def __init__(self) -> None:
        self.known: tuple[ReductionRule, ...] = ()
        self.seconds = 0.0
        """Spent on asking."""
        self.watch: AbstractContextManager[Any] = nullcontext()
        """Entered while it is asked."""
        self._start: float | None = None  # of the first batch that is cut; `None` once the first epoch's cost was told
        self._num_cut = 0
        self._next_epoch = self._next_batch = 1
        self._structures: set[Any] = set()
        self._paths: set[int] = set()
        self._unasked: set[int] = set()
        """Paths of losses of batches that were not asked."""
        self._num_in_vain = 0
        self._is_due = self._is_noted = self._is_asked = self._hold_here_alone = False

    def ask_next(self) -> None:
        """Let the next batch that is cut ask, whether that is due or not."""
        self._is_due = True

    def is_due(self, batch: Batch, epoch: int) -> bool:
        """Return whether to ask, now that another batch is to be cut.

        Args:
            batch: it.
            epoch: of the run, from 0 on.
        """
        if not self._num_cut:
            self._start = time.perf_counter()
        self._num_cut += 1
        structure = _structure(batch)
        is_new = structure not in self._structures or self._is_due or bool(self._unasked)
        self._structures.add(structure)
        self._is_due = self._is_noted = self._is_asked = False
        due = not self.known or is_new or (self._hold_here_alone and not _are_equal(batch))
        if self._num_cut >= self._next_batch:
            due, self._next_batch = True, max(_SECOND, 2 * self._num_cut)
        if epoch >= self._next_epoch:
            due, self._next_epoch = True, 2 * epoch
        return due

    def cost_of_first_epoch(self) -> str | None:
        """Return a line on what asking has taken of the time since the first batch, where that is much; once."""
        start, self._start = self._start, None
        elapsed = math.inf if start is None else time.perf_counter() - start
        if self.seconds < _LEAST_SECONDS or self.seconds <= _MUCH * elapsed:
            return None
        return (
            f"memsave: finding out how the loss depends on the batch took {self.seconds:.1f} s, "
            f"{self.seconds / elapsed:.0%} of the first epoch; later epochs ask less and less often."
        )

    def ask(self, asked: Callable[[], Answer]) -> Answer:
        """Return what is found now; the rules that hold in this batch as well stay."""
        start, self._is_asked = time.perf_counter(), True
        with self.watch:
            answer = asked()
        self.seconds += time.perf_counter() - start
        if answer.is_of_this_batch:
            if not set(self.known).isdisjoint(answer.explained_by):
                return Answer()  # nothing counts in one of the parts, as the rules have it
            self.known = ()  # the next batch is asked
        if answer.rules:
            was_alone, self._hold_here_alone = self._hold_here_alone, answer.holds_here_alone
            if was_alone:
                self.known = answer.rules
            self.known = tuple(rule for rule in self.known if rule in answer.rules) or answer.rules
        return answer

    def weights(self, parts: Sequence[tuple[Any, float]]) -> list[float] | None:
        """Return the weights of the parts of a batch; `None` where no rule is known, or they do not agree."""
        found = [rule.weights(parts) for rule in self.known]
        if not found:
            return None
        first = found[0]
        agree = all(abs(a - b) <= _SAME * abs(b) for others in found[1:] for a, b in zip(first, others, strict=True))
        return first if agree else None

    def note(self, loss: Tensor) -> None:
        """Note the loss of a part: where that of the first comes from operations that are new, batches ask.

        They do until one with such a loss has asked, as the next one may be of the old kind; or too many have in vain.
        """
        if not self.known or self._is_noted:
            return
        self._is_noted, path = True, _path(loss)
        if self._is_asked or not self._paths:
            self._paths.add(path)
            self._unasked.discard(path)
            self._num_in_vain += 1 if self._unasked else -self._num_in_vain
        elif path not in self._paths:
            self._unasked.add(path)
        if self._num_in_vain > _MOST_IN_VAIN:
            self._paths |= self._unasked
            self._unasked.clear()


def _are_equal(batch: Batch) -> bool:
    try:
        return are_equal(batch, batch_size(batch))
    except UnsplittableBatchError:
        return False


def _structure(batch: Batch) -> Any:
    """Return what a batch is made of, without its sizes."""
    leaves, tree = tree_flatten(batch)
    kinds = tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
    return str(tree), kinds


def _path(loss: Tensor) -> int:
    """Return a hash of the last operations behind a loss."""
    names: list[str] = []
    todo = [loss.grad_fn]
    while todo and len(names) < _NUM_NODES:
        node = todo.pop(0)
        if node is not None:
            names.append(node.name())
            todo.extend(following for following, _ in node.next_functions)
    return hash(tuple(names))

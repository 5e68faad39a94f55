"""Embeddings whose table is also the weight of a head: its two gradients become one in place.

torch keeps the head's gradient until the embedding's backward has made another table, and adds both to a third, since
the head's is a view of a product. Here the head leaves its gradient to the embedding (`linear_cross_entropy.py`), and a
hook of that one's node adds what it made to it: two tables are alive, and one remains.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_memsave.torch_internals.autograd_graph import Node, inputs_of, running_pass, will_run


class Lookup:
    """An embedding, and what its backward takes along of the gradient of its table."""

    def __init__(self, node: Node) -> None:
        self.node, self._waiting = node, _Waiting()
        node.register_hook(self._waiting.add_to)

    def is_of(self, weight: Tensor) -> bool:
        """Return whether `weight` is the table."""
        return getattr(inputs_of(self.node)[0][0], "variable", None) is weight

    def left(self, gradient: Tensor) -> Tensor | None:
        """Return `gradient`, which is of the table; `None` where it is left to the embedding."""
        waiting, now = self._waiting, running_pass()
        if waiting.over_in == now or not will_run(self.node):
            return gradient
        if waiting.total is None or waiting.began_in != now:  # or left by a pass that has failed
            waiting.total, waiting.began_in = gradient, now
        else:
            waiting.total.add_(gradient)
        return None


class _Waiting:
    """Gradients of a table, in one backward pass. It does not know the node whose hook it is: that would be a cycle."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.began_in = self.over_in = -1

    def add_to(self, gradients: Sequence[Tensor | None], _: object) -> tuple[Tensor] | None:
        """Return what the embedding's backward returns, with what waits."""
        self.over_in = running_pass()
        total, self.total = self.total, None
        if total is None or self.began_in != self.over_in:
            return None
        (own,) = gradients
        if own is None:  # torch lets no hook return a gradient where there is none
            raise RuntimeError(
                'activations: "linear-cross-entropy" leaves the gradient of a tied weight to its embedding, to which '
                'no gradient came. Leave "linear-cross-entropy" out.'
            )
        return (total.add_(own),)

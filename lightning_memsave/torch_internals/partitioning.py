"""How the compiler divides a traced step into forward and backward, and the way to have a say in it.

`torch.compile` traces forward and backward into one *joint* graph. A partitioner cuts it in two: what the forward
returns besides its results is what is kept for backward. Inductor asks the one in its settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from lightning_memsave.core.errors import setting_error
from lightning_memsave.torch_internals.private_names import find

Partitioner = find("torch._inductor.custom_graph_pass.CustomPartitionerFn")
"""What Inductor wants a partitioner to be."""
_settings = find("torch._inductor.config")
_min_cut = find("torch._functorch.partitioners.min_cut_rematerialization_partition")
_NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"
"""A node's mark: autograd does not watch this tensor for changes. Those that have it come last."""


def min_cut(
    joint: fx.GraphModule, inputs: Any, of_forward: Sequence[fx.Node] = (), **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward as torch's own partitioner divides them, with the fewest bytes between them.

    Args:
        joint: the graph of both.
        inputs: its arguments.
        of_forward: nodes that none of the results needs, and that the forward is to compute for backward all the same.
        options: as torch passes them.
    """
    num_results: int = options["num_fwd_outputs"]
    _change_results(joint.graph, num_results, num_results, of_forward)  # what is no result belongs to backward
    options["num_fwd_outputs"] = num_results + len(of_forward)
    forward, backward = _min_cut(joint, inputs, **options)
    _change_results(forward.graph, num_results, num_results + len(of_forward), ())
    return forward, backward


def _change_results(graph: fx.Graph, start: int, end: int, nodes: Sequence[fx.Node]) -> None:
    """Put nodes in place of a graph's outputs from number `start` to `end`."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    outputs: Any = output.args[0]
    output.args = ((*outputs[:start], *nodes, *outputs[end:]),)
    for name in ("desc", "output_stack_traces"):
        if (notes := output.meta.get(name)) is not None:
            output.meta[name] = [*notes[:start], *[None] * len(nodes), *notes[end:]]


def puts_channels_last(joint: fx.GraphModule) -> bool:
    """Return whether Inductor will lay out images with their channels last; its convolutions want that."""
    decide = find("torch._inductor.graph.GraphLowering.decide_layout_opt")
    with contextlib.suppress(Exception):  # private, and its arguments have changed before
        return bool(decide(joint, is_inference=False))
    return False


@contextmanager
def partitioned_by(partitioner: Any) -> Iterator[None]:
    """Let `partitioner` divide what is compiled inside.

    Raises:
        ValueError: there is another one already.
    """
    if (other := _settings.custom_partitioner_fn) not in (None, partitioner):
        raise setting_error(
            "activations",
            "needs `torch._inductor.config.custom_partitioner_fn`, which another one has",
            type(other).__name__,
            "Set it to None, or leave `activations` out.",
        )
    if _latest and _latest[0] is not partitioner:  # two models of one class share their compiled code
        compile_anew()
    _latest[:] = [partitioner]
    _settings.custom_partitioner_fn = partitioner
    try:
        yield
    finally:
        _settings.custom_partitioner_fn = other


def compile_anew() -> None:
    """Forget compiled code, which does not know that a partitioner has changed: it is compiled when it is called."""
    torch.compiler.reset()
    _latest.clear()


_latest: list[Any] = []  # the partitioner under which code was compiled


class KeptNodes:
    """What the forward returns for backward, and the way to replace it.

    Args:
        forward: the graph of the forward.
        backward: that of the backward; it has an input of the same name for each node that the forward keeps.
        num_results: how many of the forward's outputs are its results.
    """

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, num_results: int) -> None:
        self._forward, self._backward, self._num_results = forward, backward, num_results
        self._output = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
        self._inputs = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
        outputs: Any = self._output.args[0]
        self.results: set[fx.Node] = {node for node in outputs[:num_results] if isinstance(node, fx.Node)}
        """The forward's results, which somebody outside may hold."""
        self._kept: list[tuple[Any, ...]] = [(node,) for node in outputs[num_results:]]

    def pairs(self) -> Iterator[tuple[int, fx.Node, fx.Node]]:
        """Yield the place of each tensor that is kept, its node in the forward, and its input of the backward."""
        for place, (node, *_) in enumerate(self._kept):
            is_tensor = isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
            if is_tensor and node.name in self._inputs:  # states of random numbers have another name there
                yield place, node, self._inputs[node.name]

    def replace(self, place: int, nodes: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """Keep `nodes` at `place` instead; returns their inputs of the backward, in front of the one that was."""
        (old,) = self._kept[place]
        self._kept[place] = nodes
        made = []
        for number, node in enumerate(nodes):
            if _NO_VERSION_CHECK in old.meta:
                node.meta[_NO_VERSION_CHECK] = old.meta[_NO_VERSION_CHECK]
            # Nothing in either graph has this name: an input would otherwise be mistaken for another node.
            node._rename(f"memsave_{place}_{number}")
            with self._backward.graph.inserting_before(self._inputs[old.name]):
                made.append(self._backward.graph.placeholder(node.name))
            made[-1].meta.update(node.meta)
        return tuple(made)

    def drop(self, place: int) -> None:
        """Keep nothing at `place`."""
        self._kept[place] = ()

    def finish(self) -> None:
        """Write the new outputs, and compile both graphs' code again."""
        outputs: Any = self._output.args[0]
        kept = [node for nodes in self._kept for node in nodes]
        self._output.args = ((*outputs[: self._num_results], *kept),)
        if (before := self._output.meta.get("desc")) is not None:
            of_results, of_kept = before[: self._num_results], before[self._num_results :]
            kinds = [type(each) for each, nodes in zip(of_kept, self._kept, strict=True) for _ in nodes]
            self._output.meta["desc"] = [*of_results, *(kind(number) for number, kind in enumerate(kinds))]
        if "output_stack_traces" in self._output.meta:
            self._output.meta["output_stack_traces"] = [None] * (self._num_results + len(kept))
        for module in (self._forward, self._backward):
            module.graph.lint()
            module.recompile()

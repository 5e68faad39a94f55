"""Recomputation: tensors that follow from what is kept anyway, read off the graph at the moment they are kept.

A convolution keeps y = relu(batch_norm(x)); batch_norm keeps x. So y's bytes may go: when backward asks for it, it is
computed from x. `Derivation` walks from a tensor up its graph, over operations that cost little (`recompute_rules`),
until every path ends in an entry of the store or in a parameter. No module is touched and no call is rewritten; and
because only entries count that somebody else keeps, a recomputation never costs memory.

Source: Chen et al., 2016 (https://arxiv.org/abs/1604.06174), section 4.2, proposes to recompute normalisation and
activation and keep convolutions. Here it is done per tensor instead of per segment, from the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from lightning_memsave.saved_tensors.encodings import Fidelity, IntCodes
from lightning_memsave.saved_tensors.function_mode import CallTracker
from lightning_memsave.saved_tensors.recompute_rules import RULES, Rule
from lightning_memsave.saved_tensors.saved_storage import Passed, SavedStorage, SavedTensor, codes_of
from lightning_memsave.torch_internals.autograd_graph import (
    Edge,
    Kept,
    Node,
    UnreadableError,
    Values,
    check_version,
    inputs_of,
    packed,
    sequence_nr_of,
    storage_key,
    version_of,
)
from lightning_memsave.torch_internals.sharded_parameters import gather_again

LEAST_CURVED = Fidelity.INT4
"""Codes of which an activation is computed again, at least: what its own backward pass reads is not corrected."""
MAX_DEPTH = 6
"""How many operations a recomputation may chain: bounds its time, as recomputations may build on each other."""


@dataclass(frozen=True, slots=True)
class Source:
    """A way to a value: how to get it, how faithful it is, what it holds on to, how many operations it takes."""

    values: Values
    fidelity: Fidelity
    needs: tuple[object, ...] = ()
    depth: int = 0


Storages = Set[int]
"""Storages that no source may be in."""
Handles = Mapping[Edge, "weakref.ref[SavedTensor]"]


def kept_of(handles: Handles, edge: Edge) -> SavedTensor | None:
    """Return what autograd holds of a result; `None` when it is not kept, or no longer."""
    reference = handles.get(edge)
    return None if reference is None else reference()


class Derivation:
    """Looks for recomputations in the graph of one forward pass.

    Args:
        handles: what autograd holds of results, as long as it does.
        calls: what the graph does not show.
    """

    def __init__(self, handles: Handles, calls: CallTracker) -> None:
        self._handles, self._operands, self._calls = handles, calls.operands, calls

    def of(self, tensor: Tensor, wanted: Fidelity) -> Source | None:
        """Return how to compute `tensor` again at least as faithfully as `wanted`, from other storages than its own."""
        node = tensor.grad_fn
        if node is None or self._calls.has_changed_itself(tensor):
            return None
        excluded = {storage_key(tensor), *self._calls.edited}  # the latter will be others when the call has ended
        found = self._repeat(node, tensor.output_nr, excluded, MAX_DEPTH)
        return found if found is not None and found.fidelity >= wanted and found.needs else None

    def _behind(self, node: Node | None, output_nr: int, excluded: Storages, budget: int) -> Source | None:
        """Return a source for one output of `node`: kept by somebody, a parameter, or repeatable."""
        if node is None:
            return None
        if (leaf := getattr(node, "variable", None)) is not None:
            return _parameter(leaf)
        if self._calls.has_changed(node, output_nr):  # what is kept of it may be from before or after
            return None
        handle = kept_of(self._handles, Edge(sequence_nr_of(node), output_nr))
        if handle is not None and handle.producer != node.name():  # the same number in another thread
            handle = None
        return _kept(handle, excluded, budget) or self._repeat(node, output_nr, excluded, budget)

    def _repeat(self, node: Node, output_nr: int, excluded: Storages, budget: int) -> Source | None:
        make_rule = RULES.get(node.name())
        if make_rule is None or budget <= 0 or self._calls.has_changed(node, output_nr):
            return None
        try:
            rule = make_rule(node, output_nr, self._operands)
            return None if rule is None else self._follow(node, rule, excluded, budget)
        except UnreadableError:
            return None

    def _follow(self, node: Node, rule: Rule, excluded: Storages, budget: int) -> Source | None:
        edges = inputs_of(node)
        sources = []
        for index in rule.inputs:
            producer, producer_nr = edges[index]
            if producer is None and rule.kept is not None:
                source = _kept(packed(node, rule.kept), excluded, budget - 1)
            else:
                source = self._behind(producer, producer_nr, excluded, budget - 1)
            if source is None:
                return None
            if source.fidelity < Fidelity.EXACT and not rule.is_linear:
                return _curved(source, rule)
            sources.append(source)
        fidelity = min((s.fidelity for s in sources), default=Fidelity.EXACT)
        if fidelity < Fidelity.EXACT and not rule.is_additive and _share_noise(sources):
            return None  # the mean of a product of two noisy values is not the product of their means
        function = rule.exactly if rule.exactly is not None and fidelity == Fidelity.EXACT else rule.function
        versions = [(tensor, version_of(tensor)) for tensor in rule.reads if tensor is not None]

        def values() -> Tensor:
            for tensor, version in versions:
                gather_again(tensor)
                check_version(tensor, version, tensor.shape)
            return function(*(source.values() for source in sources))

        return Source(
            values,
            fidelity,
            tuple(need for source in sources for need in source.needs),
            1 + max((s.depth for s in sources), default=0),
        )


def _curved(source: Source, rule: Rule) -> Source | None:
    """Return a smooth function of one code, corrected for its noise; `None` where that is not possible."""
    handle = source.needs[0] if len(source.needs) == 1 and source.depth == 0 else None
    function, curvature = rule.function, rule.curvature
    if curvature is None or not isinstance(handle, SavedTensor) or source.fidelity < LEAST_CURVED:
        return None

    def values() -> Tensor:
        encoding = handle.entry.encoding
        if not isinstance(encoding, IntCodes):
            return function(handle.get())
        handle.entry.check(handle.size)
        return encoding.mapped(function, curvature).as_strided(handle.size, handle.stride, handle.offset)

    return Source(values, source.fidelity, source.needs, 1)


def _share_noise(sources: Sequence[Source]) -> bool:
    """Return whether two lossy sources come from the same code."""
    found: set[SavedStorage | IntCodes] = set()
    for source in sources:
        codes = codes_of(source.needs) if source.fidelity < Fidelity.EXACT else set()
        if found & codes:
            return True
        found |= codes
    return False


def _kept(handle: Kept | Tensor | None, excluded: Storages, budget: int) -> Source | None:
    """Return a source for what somebody else keeps; `None` where it cannot serve as one."""
    if isinstance(handle, Passed):
        return Source(handle.get, Fidelity.EXACT)
    if isinstance(handle, Tensor):  # a number, which torch keeps without hooks
        return Source(lambda: handle, Fidelity.EXACT)
    if not isinstance(handle, SavedTensor) or handle.entry.storage_key in excluded or not handle.entry.is_unchanged:
        return None
    entry = handle.entry
    depth = getattr(entry.encoding, "depth", 0)
    if entry.need_of_values < Fidelity.INT2 or depth > budget:  # a mask would have to be kept for us: no gain
        return None
    return Source(handle.get, min(entry.need_of_values, entry.encoding.fidelity), (handle,), depth)


def _parameter(leaf: Tensor) -> Source:
    version = version_of(leaf)

    def values() -> Tensor:
        gather_again(leaf)
        check_version(leaf, version, leaf.shape)
        return leaf.detach()

    return Source(values, Fidelity.EXACT)

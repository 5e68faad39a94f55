"""A test of whether a call treats the entries of a dimension independently, so that it may be made in slices.

Some entries of the real arguments are given to the module, whole and in slices. The slices must have the outputs of the
whole, its gradients of the input, and, added up, its gradients of the weights; what slices may differ by is rounding.
Mixing that is too small for that, or depends on a value, is looked for by NaN, infinite and huge values in one entry,
which may not change another one, and by other masks and whole numbers. No value may be read (`item()`, a branch on a
maximum); no buffer and no attribute may change, as a call in slices would change it several times. Outputs are compared
once more for all entries and the slices that are meant (`differs_at_full_size`).

What the test does is undone: buffers, attributes, containers that the module fills, and random generators.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_memsave.measuring.allocator import free_memory
from lightning_memsave.saved_tensors.buffers import Buffers
from lightning_memsave.saved_tensors.kept_noise import Draw, KeptNoise, in_tile
from lightning_memsave.saved_tensors.module_state import Attributes, CallParameters
from lightning_memsave.saved_tensors.object_state import is_object
from lightning_memsave.saved_tensors.randomness import Randomness, generators_in
from lightning_memsave.saved_tensors.region_inputs import inputs_as_they_are
from lightning_memsave.saved_tensors.tiles import are_cut, extent_of, memory_order
from lightning_memsave.techniques.tiling.call_watch import CallWatch, Drawn, ReadsInPython, Still, hooked_inside
from lightning_memsave.techniques.tiling.kept_state import put_back, python_noise
from lightning_memsave.techniques.tiling.reasons import DependsError, FailsError, as_reason, is_about_memory
from lightning_memsave.torch_internals.autograd_graph import storage_key, version_of

_NUM_SAMPLES, _NUM_POSITIONS = 3, 8
_FEWEST_SLICES = 2  # that are compared with one call
_ROUNDING = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 2e-2  # 16 bits, and products in TF32


@dataclass(frozen=True, kw_only=True)
class Independence:
    """What a test of a call has found."""

    why_not: str = ""
    """Why it cannot be made in slices; empty where it can."""
    draws: tuple[Draw, ...] | None = ()
    """Random numbers that it draws; `None` where those of slices cannot be those of the whole."""
    orders: tuple[tuple[int, ...], ...] = ()
    """Orders of dimensions in memory, one for each tensor that it returns."""
    inside_bytes: float = 0.0
    """Bytes per entry that autograd keeps of what the call computes, weights left out."""
    edge_bytes: float = 0.0
    """Bytes per entry of what it is given and returns."""


def test_of(function: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, dim: int) -> Independence:
    """Test whether a call may be made in slices along a dimension.

    Args:
        function: the forward of `module`.
        module: its state is as before, afterwards.
        args: of the call; they are not changed.
        kwargs: the same.
        dim: of the first tensor among the arguments, and of all others that have its extent there.
    """
    leaves, tree = tree_flatten((args, kwargs))
    if extent_of(leaves, dim) < 2:
        return Independence(why_not=f"no argument has several entries in dimension {dim}")
    opaque = next((leaf for leaf in leaves if not isinstance(leaf, Tensor) and is_object(leaf)), None)
    if opaque is not None:
        return Independence(why_not=f"it takes a {type(opaque).__name__}, which cannot be cut")
    if (hooked := hooked_inside(module)) is not None:
        return Independence(why_not=f"a hook of `{hooked}` in it would see slices")
    trial = _Trial(function, module, leaves, tree, dim)
    with _apart(trial):
        try:
            return trial.judge()
        except DependsError as reason:
            return Independence(why_not=str(reason))


def differs_at_full_size(
    function: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, dim: int, lengths: Sequence[int]
) -> str:
    """Return why the outputs of a whole call differ from those of its slices; empty where they do not.

    Where there is no memory for the whole, its halves are compared with their slices, then its quarters, and so on.

    Args:
        function: the forward of `module`.
        module: its state is as before, afterwards.
        args: of the call.
        kwargs: the same.
        dim: that is cut.
        lengths: of the slices.
    """
    leaves, tree = tree_flatten((args, kwargs))
    trial, num_slices = _Trial(function, module, leaves, tree, dim, has_all=True), len(lengths)
    with _apart(trial):
        while True:
            try:
                trial.compare_outputs(lengths, num_slices)
                return ""
            except DependsError as reason:
                return f"with all of its entries {reason}"
            except Exception as error:
                if not is_about_memory(error) or num_slices <= _FEWEST_SLICES:
                    raise
            free_memory()
            num_slices = max(_FEWEST_SLICES, -(-num_slices // 2))


def sizes_of(function: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, dim: int) -> Independence:
    """Return what a call keeps, without a test; for fake tensors, which have no values to compare."""
    leaves, tree = tree_flatten((args, kwargs))
    trial = _Trial(function, module, leaves, tree, dim)
    with _apart(trial):
        return trial.shapes()


@contextlib.contextmanager
def _apart(trial: _Trial) -> Iterator[None]:
    """Run calls of a test, which leave no trace."""
    with in_tile(), inputs_as_they_are(), put_back(trial.module, trial.devices):
        yield


class _Result(NamedTuple):
    """One call, whole or of a slice."""

    outputs: Sequence[Tensor]
    of_inputs: Sequence[Tensor | None]
    """Gradients of the arguments that are cut."""
    of_weights: Sequence[Tensor | None]
    """Gradients of the weights, and of other arguments."""


class _Trial:
    def __init__(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        leaves: list[Any],
        tree: Any,
        dim: int,
        has_all: bool = False,
    ) -> None:
        self._function, self.module, self._tree, self._dim = function, module, tree, dim
        self._is_cut = are_cut(leaves, dim)
        extent = extent_of(leaves, dim)
        self._num = extent if has_all else min(extent, _NUM_SAMPLES if dim == 0 else _NUM_POSITIONS)
        self._first = max(1, self._num * 2 // 5)
        """Entries of the first of two slices."""
        rows = [] if has_all else [round(n * (extent - 1) / (self._num - 1)) for n in range(self._num)]
        self._weights = [p for p in module.parameters() if p.requires_grad]
        with torch.no_grad():
            self._leaves = [self._some(leaf, cut, rows) for leaf, cut in zip(leaves, self._is_cut, strict=True)]
        self._needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        self.devices = {t.device for t in (*self._leaves, *module.parameters()) if isinstance(t, Tensor)}
        self._start = Randomness(self.devices, generators_in(*module.modules()))
        self._cotangents: list[Tensor] = []
        self._given: set[int] = set()
        """Storages of the latest call's arguments."""
        self._draws: list[Drawn] = []
        self.found = Independence()

    def _some(self, leaf: Any, is_cut: bool, rows: list[int]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        some = leaf.detach()
        if rows:  # else of all entries, which are copied for each call
            some = some.index_select(self._dim, torch.tensor(rows, device=leaf.device)) if is_cut else some.clone()
        is_narrow = some.is_floating_point() and some.dtype.itemsize == 2
        return some.float() if is_narrow and self._computes_in_32_bits() else some

    def _computes_in_32_bits(self) -> bool:
        """Return whether autocast alone is what makes 16-bit numbers, so that the test can do without."""
        floating = [p.dtype for p in self.module.parameters() if p.is_floating_point()]
        return bool(floating) and all(dtype.itemsize >= 4 for dtype in floating)

    # ------------------------------------------------------------------------------------ calls
    def judge(self) -> Independence:
        """Return what holds.

        Raises:
            DependsError: the call cannot be made in slices.
        """
        with self._without_autocast():
            whole = self.run_whole()
            try:
                draws: tuple[Draw, ...] | None = self._compare_slices(whole, with_noise=True)
            except DependsError:
                if not self._draws:
                    raise
                with Still():  # is it the noise alone?
                    self._compare_slices(self._call(0, self._num), with_noise=False)
                draws = None
            self._poison(whole)
            self._change_masks()
        return replace(self.found, draws=draws)

    def shapes(self) -> Independence:
        """Return what shapes tell."""
        with self._without_autocast():
            self.run_whole()
            try:
                return replace(self.found, draws=self._draws_per_entry(self._first) if self._draws else ())
            except DependsError:
                return replace(self.found, draws=None)

    @contextlib.contextmanager
    def _without_autocast(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind in {device.type for device in self.devices} if self._computes_in_32_bits() else ():
                if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    def run_whole(self) -> _Result:
        """Call with all entries.

        Raises:
            DependsError: values are read, or something of the module changes that would change in every slice.
        """
        owners = list(self.module.named_modules())
        buffers, parameters, before = Buffers(owners, None), CallParameters(owners, is_checked=True), python_noise()
        watch = CallWatch()
        whole = self._call(0, self._num, watch, ReadsInPython(watch.reads))
        if watch.reads:
            raise DependsError(f"it reads values (`{watch.reads[0].removeprefix('aten::')}`)")
        if changed := {*parameters.edited(), *parameters.replaced()}:
            raise DependsError(f"it changes its parameter `{min(changed)}`")
        if changed := buffers.changed():
            raise DependsError(f"it changes its buffer `{min(changed).removeprefix('.')}`")
        if python_noise() != before:
            raise DependsError("it draws numbers from Python's or numpy's generator")
        if (hooked := hooked_inside(self.module)) is not None:
            raise DependsError(f"it hooks `{hooked}` in it, and the hook would see slices")
        self._draws = watch.draws
        held = (*whole.outputs, *self.module.parameters(), *self.module.buffers())
        inside = watch.kept_bytes(self._given | _storages(held))
        edge = sum(t.numel() * t.element_size() for t in (*self._tensors(), *whole.outputs))
        orders = tuple(map(memory_order, whole.outputs))
        self.found = Independence(orders=orders, inside_bytes=inside / self._num, edge_bytes=edge / self._num)
        return whole

    def _tensors(self) -> Iterator[Tensor]:
        return (leaf for leaf, is_cut in zip(self._leaves, self._is_cut, strict=True) if is_cut)

    def _call(self, start: int, length: int, watch: CallWatch | None = None, mode: Any = None) -> _Result:
        """Call with some entries, and backward."""
        self._start.restore()
        given: list[Any] = []
        cut: list[Tensor] = []
        others: list[Tensor] = []
        for leaf, is_cut, needs in zip(self._leaves, self._is_cut, self._needs, strict=True):
            some = leaf.narrow(self._dim, start, length).contiguous() if is_cut else leaf
            if isinstance(some, Tensor):
                some = some.detach().clone().requires_grad_(needs)
                if needs:
                    (cut if is_cut else others).append(some)
                some = some.clone() if needs else some  # a leaf may not be edited in place
            given.append(some)
        self._given = _storages(given)
        versions = [version_of(t) for t in given if isinstance(t, Tensor)]
        args, kwargs = tree_unflatten(given, self._tree)
        attributes = Attributes(list(self.module.named_modules())) if start else None
        pack = _as_it_is if watch is None else watch.keep
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is),
            watch or contextlib.nullcontext(),
            mode or contextlib.nullcontext(),
        ):
            outputs = self._outputs(functools.partial(self._function, *args, **kwargs), length)
        if versions != [version_of(t) for t in given if isinstance(t, Tensor)]:
            raise DependsError("it edits its input in place")
        if attributes is not None and (changed := attributes.differences()):
            raise DependsError(f"it changes its attribute `{changed[0]}`")
        return self._backward(outputs, cut, others, start, length)

    def _outputs(self, call: Callable[[], Any], length: int) -> list[Tensor]:
        with as_reason(length):
            outputs = [leaf for leaf in tree_flatten(call())[0] if isinstance(leaf, Tensor)]
        for output in outputs:
            if output.dim() <= self._dim or output.shape[self._dim] != length:
                raise DependsError(f"for {length} entries it returns a tensor {list(output.shape)}")
        if not outputs:
            raise DependsError("it returns no tensor")
        return outputs

    def _backward(
        self, outputs: list[Tensor], cut: list[Tensor], others: list[Tensor], start: int, length: int
    ) -> _Result:
        floating = [output for output in outputs if output.requires_grad]
        if not self._cotangents:
            self._cotangents = [torch.randn_like(output) for output in floating]
        wanted = [*cut, *others, *self._weights]
        if not floating or not wanted:
            return _Result([output.detach() for output in outputs], [], [])
        cotangents = [each.narrow(self._dim, start, length) for each in self._cotangents]
        if [each.shape for each in cotangents] != [output.shape for output in floating]:
            shapes = ", ".join(str(list(output.shape)) for output in floating)
            raise DependsError(f"for {length} entries it returns a tensor {shapes}")
        with as_reason(length):
            gradients = torch.autograd.grad(floating, wanted, cotangents, allow_unused=True)
        return _Result([output.detach() for output in outputs], gradients[: len(cut)], gradients[len(cut) :])

    # ------------------------------------------------------------------------------------ comparisons
    def _compare_slices(self, whole: _Result, *, with_noise: bool) -> tuple[Draw, ...]:
        """Compare slices with the whole, and return what they draw.

        Raises:
            DependsError: they differ.
        """
        first = self._first
        lengths = [first, self._num - first]
        draws = self._draws_per_entry(first) if with_noise and self._draws else ()
        noise = KeptNoise(draws, self._dim, lengths)
        modes = [noise.of_tile(number) if draws else None for number in range(2)]
        slices = [self._call(0, first, mode=modes[0]), self._call(first, lengths[1], mode=modes[1])]
        for number, output in enumerate(whole.outputs):
            self._check([part.outputs[number] for part in slices], output, "outputs")
        for number, gradient in enumerate(whole.of_inputs):
            parts = [part.of_inputs[number] for part in slices]
            if gradient is not None or any(part is not None for part in parts):
                self._check(parts, gradient, "gradients of the input")
        largest = max((float(g.abs().max()) for g in whole.of_weights if g is not None and g.numel()), default=0.0)
        for number, gradient in enumerate(whole.of_weights):
            found = [part.of_weights[number] for part in slices]
            total = sum(part for part in found if part is not None)
            expected = torch.zeros((), device="cpu") if gradient is None else gradient
            fraction = self._rounding(expected)
            if not _are_near(torch.as_tensor(total).to(expected.device), expected, fraction, largest):
                raise DependsError("slices have other gradients of the weights")
        return draws

    def _check(self, parts: Sequence[Tensor | None], whole: Tensor | None, what: str) -> None:
        there = [part for part in parts if part is not None]
        if whole is None or len(there) < len(parts):
            raise DependsError(f"slices have other {what}")
        if not _are_near(torch.cat(there, self._dim), whole, self._rounding(whole)):
            raise DependsError(f"slices have other {what}")

    def _rounding(self, tensor: Tensor) -> float:
        """Return by what fraction of the largest element rounding may change a tensor that the call computes."""
        used = [t for t in (*self._leaves, *self.module.parameters(), tensor) if isinstance(t, Tensor)]
        is_narrow = any(t.is_floating_point() and t.dtype.itemsize <= 2 for t in used)
        kinds = {device.type for device in self.devices if torch.amp.is_autocast_available(device.type)}
        is_narrow |= any(map(torch.is_autocast_enabled, kinds))
        allowed = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        return _COARSE if is_narrow or (tensor.is_cuda and allowed) else _ROUNDING.get(tensor.dtype, _COARSE)

    def _draws_per_entry(self, length: int) -> tuple[Draw, ...]:
        """Return how many entries of each draw belong to an entry of the input: what a slice draws tells.

        Raises:
            DependsError: a slice draws in another way.
        """
        watch = CallWatch()
        self._call(0, length, watch)
        if len(watch.draws) != len(self._draws):
            raise DependsError("slices draw more or fewer numbers than the whole")
        return tuple(
            Draw(self._entries(of_slice.shape, of_whole.shape, length), of_whole.order)
            for of_slice, of_whole in zip(watch.draws, self._draws, strict=True)
        )

    def _entries(self, of_slice: tuple[int, ...] | None, of_whole: tuple[int, ...] | None, length: int) -> int:
        if of_slice is None or of_whole is None:
            raise DependsError("it draws numbers by an operation, or with probabilities, that cannot be cut")
        if of_slice == of_whole:
            return 0
        dim = self._dim
        if len(of_slice) > dim:
            times = of_slice[dim] // length
            scaled = (*of_slice[:dim], times * self._num, *of_slice[dim + 1 :])
            if scaled == of_whole and (times == 1 or dim == 0):
                return times
        raise DependsError(f"it draws {list(of_whole)} numbers, of which an entry has no share")

    def compare_outputs(self, lengths: Sequence[int], num_slices: int | None = None) -> None:
        """Compare the outputs of slices with those of the whole, without noise and gradients.

        Args:
            lengths: of the slices.
            num_slices: that are compared with one call of all their entries; by default all.

        Raises:
            DependsError: they differ.
        """
        needs, self._needs = self._needs, [False] * len(self._needs)
        start, num_slices = 0, num_slices or len(lengths)
        try:
            with self._without_autocast(), torch.no_grad(), Still():
                for number in range(0, len(lengths), num_slices):
                    group = lengths[number : number + num_slices]
                    self._compare_group(start, group)
                    start += sum(group)
        finally:
            self._needs = needs

    def _compare_group(self, first: int, lengths: Sequence[int]) -> None:
        whole, start = self._call(first, sum(lengths)).outputs, 0
        for length in lengths:
            for found, output in zip(self._call(first + start, length).outputs, whole, strict=True):
                expected = output.narrow(self._dim, start, length)
                if not _are_near(found, expected, self._rounding(output)):
                    raise DependsError("slices have other outputs")
            start += length

    def _change_masks(self) -> None:
        """Compare again with other masks and whole numbers among the arguments, which may decide what mixes.

        Raises:
            DependsError: slices have other outputs then.
        """
        before = self._leaves
        try:
            for changed in self._with_other_masks(before):
                self._leaves = changed
                with contextlib.suppress(FailsError):  # it may not bear them
                    self.compare_outputs([self._first, self._num - self._first])
        finally:
            self._leaves = before

    def _with_other_masks(self, leaves: list[Any]) -> Iterator[list[Any]]:
        are_masks = [isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in leaves]
        are_numbers = [
            isinstance(leaf, Tensor) and is_cut and not (leaf.is_floating_point() or leaf.is_complex())
            for leaf, is_cut in zip(leaves, self._is_cut, strict=True)
        ]
        for value in (True, False) if any(are_masks) else ():
            yield [
                torch.full_like(leaf, value) if is_mask else leaf
                for leaf, is_mask in zip(leaves, are_masks, strict=True)
            ]
        if any(are_numbers):
            yield [
                torch.zeros_like(leaf).index_fill_(self._dim, torch.zeros(1, dtype=torch.long, device=leaf.device), 1)
                if is_number
                else leaf
                for leaf, is_number in zip(leaves, are_numbers, strict=True)
            ]

    def _poison(self, whole: _Result) -> None:
        """Look whether values that are not finite, or huge, in one entry reach others.

        Raises:
            DependsError: they do.
        """
        place = self._num // 2
        others = [number for number in range(self._num) if number != place]
        before, needs = self._leaves, self._needs
        if not any(leaf.is_floating_point() for leaf in self._tensors()):
            return
        self._needs = [False] * len(needs)
        try:
            for value in (math.nan, math.inf, -math.inf, 1e30, -1e30):
                self._leaves = [
                    leaf.clone() if is_cut and leaf.is_floating_point() else leaf
                    for leaf, is_cut in zip(before, self._is_cut, strict=True)
                ]
                for leaf in self._tensors():
                    if leaf.is_floating_point():
                        most = torch.finfo(leaf.dtype).max
                        fitting = max(-most, min(most, value)) if math.isfinite(value) else value
                        leaf.select(self._dim, place).fill_(fitting)
                with torch.no_grad():
                    outputs = self._call(0, self._num).outputs
                for output, plain in zip(outputs, whole.outputs, strict=True):
                    index = torch.tensor(others, device=output.device)
                    found, expected = (each.index_select(self._dim, index) for each in (output, plain))
                    if not _are_near(found, expected, self._rounding(plain)):
                        what = "NaN" if math.isnan(value) else "large value"
                        raise DependsError(f"a {what} in one entry reaches others")
        finally:
            self._leaves, self._needs = before, needs


def _storages(values: Iterable[Any]) -> set[int]:
    return {storage_key(t) for t in values if isinstance(t, Tensor) and t.layout is torch.strided}


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _are_near(found: Tensor, expected: Tensor, fraction: float, largest: float | None = None) -> bool:
    """Return whether two tensors differ by rounding at most, relative to the largest element."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return bool((found == expected).all())
    if largest is None:
        largest = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max()) if expected.numel() else 0.0
    return torch.allclose(found.to(expected.dtype), expected, rtol=fraction, atol=fraction * largest, equal_nan=True)

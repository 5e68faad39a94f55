"""Cross-entropy on the output of a Linear: its gradient is computed class by class, so that no log-probability is kept.

`cross_entropy(linear(h, W, b), target)` keeps one log-probability per class and sample, and its backward makes as many
gradients: for a language model more than all else. Here a call of `cross_entropy` whose logits z come from a Linear is
answered by a function that keeps h, which the Linear keeps anyway, and lse = log(sum(exp(z))) of each sample. Backward
takes some classes at a time, computes their logits again, and their probabilities exp(z - lse), and with these their
rows of W's gradient, which are written once, and their share of h's.

The logits of a large vocabulary are not even computed where the head is called (`deferred_logits.py`): forward then
makes some classes at a time as well. Where somebody has read them, they are recognised whole or sliced by positions
(`logits[:, :-1]`), as they are, cast to float32, or of autocast; with class weights and label smoothing. Those die with
the caller's own reference. Equal up to rounding, which is that of the Linear's dtype; the loss itself has
the digits of float32. The price: the Linear is computed twice, and its weight must stay as it is until backward also
where it is all that is trained. A gradient of the gradient goes through the plain loss. Nobody finds a gradient of the
logits themselves, unless by a hook that is there before the loss.

Where an embedding shares the head's weight, the head's gradient is left to it (`tied_embedding.py`).

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024 (https://arxiv.org/abs/2411.09009).
Different: chunks of classes with torch's products instead of a kernel; the model's own head and loss are called; no
gradient is skipped. `torch.nn.functional.linear_cross_entropy` (2.13) takes chunks of samples, has both
gradients from the forward pass on, takes no label smoothing, and a second backward only when told before the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memsave.saved_tensors.call_site import Call
from lightning_memsave.saved_tensors.deferred_logits import DeferredLogits
from lightning_memsave.saved_tensors.function_mode import CallTracker
from lightning_memsave.saved_tensors.lm_head import Head, head_of
from lightning_memsave.saved_tensors.logits_form import Form
from lightning_memsave.saved_tensors.tied_embedding import Lookup
from lightning_memsave.torch_internals.autograd_graph import UnreadableError, has_hooks, is_asked_for
from lightning_memsave.torch_internals.fake_tensors import is_fake

CHUNK_NUMEL = {"cpu": 2**18}
"""Logits that backward computes at a time, by type of device."""
_CHUNK_NUMEL_ELSEWHERE = 2**23


class Options(NamedTuple):
    """Options of `cross_entropy`."""

    weight: Tensor | None  # [C]
    ignore_index: int
    reduction: str
    label_smoothing: float


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of `logits`, [N, C], which are those of a `Head`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # [N, D]
        weight: Tensor,  # [C, D]
        bias: Tensor | None,  # [C]
        logits: Tensor | Form,  # [N, C], or how those that were not computed follow from the Linear's output
        target: Tensor,  # [N]
        options: Options,
        lookup: Lookup | None = None,
    ) -> Tensor:
        """Return the loss in the logits' dtype; under autocast, in float32."""
        dtype = logits.dtype
        with torch.autocast(rows.device.type, enabled=False):
            wide = torch.promote_types(dtype, torch.float32)
            counted = target != options.ignore_index
            _check_targets(target, counted, len(weight))
            index = target.where(counted, 0)
            by_class = None if options.weight is None else options.weight.to(wide)
            head, smoothing = Head(rows, weight, bias), options.label_smoothing
            if isinstance(logits, Tensor):
                losses, lse = _losses_of_rows(logits, index, by_class, smoothing)
            else:
                losses, lse = _losses_by_class(head, logits, index, by_class, smoothing)
            losses = losses.where(counted, 0)
            divisor = None
            if options.reduction == "mean":
                divisor = (counted if by_class is None else by_class[index].where(counted, 0)).sum().to(wide)
                losses = losses.sum() / divisor
            elif options.reduction == "sum":
                losses = losses.sum()
        ctx.save_for_backward(rows, weight, bias, target, lse, divisor, options.weight)
        ctx.options = options._replace(weight=None)
        ctx.form = Form(1, dtype) if isinstance(logits, Tensor) else logits
        ctx.lookup = lookup
        return losses.to(_dtype_of_loss(dtype, rows.device.type))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weight and bias."""
        rows, weight, bias, target, lse, divisor, by_class = ctx.saved_tensors
        options = ctx.options._replace(weight=by_class)
        asked = zip((rows, weight, bias), ctx.needs_input_grad[:3], strict=True)
        wanted = tuple(needs and (not each.is_leaf or is_asked_for(each)) for each, needs in asked)
        if torch.is_grad_enabled():
            head = Head(rows, weight, bias)
            return *_differentiable(head, ctx.form, target, options, gradient, wanted), *_NO_GRADIENT
        with torch.autocast(rows.device.type, enabled=False):
            gradient = gradient.to(lse.dtype) if divisor is None else gradient.to(lse.dtype) / divisor
            head = Head(rows, weight, bias)
            of_rows, of_weight, of_bias = _gradients(head, ctx.form, target, lse, options, gradient, wanted)
        if of_weight is not None and ctx.lookup is not None:
            of_weight = ctx.lookup.left(of_weight)
        return of_rows, of_weight, of_bias, *_NO_GRADIENT


_NO_GRADIENT = (None, None, None, None)
"""Gradients of the arguments that have none: logits, target, options and lookup."""


def _check_targets(target: Tensor, counted: Tensor, num_classes: int) -> None:
    """Refuse targets that are no class, as torch does."""
    wrong = counted & ((target < 0) | (target >= num_classes))
    if target.device.type != "cpu":
        torch._assert_async(~wrong.any(), "target out of bounds")  # without waiting
    elif wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")


def _dtype_of_loss(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype of the loss as in torch: that of the logits; under autocast, float32 at least."""
    return torch.promote_types(dtype, torch.float32) if torch.is_autocast_enabled(device) else dtype


def _chunk_numel(like: Tensor) -> int:
    return CHUNK_NUMEL.get(like.device.type, _CHUNK_NUMEL_ELSEWHERE)


def _losses_of_rows(logits: Tensor, index: Tensor, by_class: Tensor | None, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return losses of rows of logits, [N, C], those that do not count among them, and log(sum(exp(z))), [N]."""
    num_rows, wide = max(1, _chunk_numel(logits) // logits.shape[1]), torch.promote_types(logits.dtype, torch.float32)
    found = []
    for part, t in zip(logits.split(num_rows), index.split(num_rows), strict=True):
        z = part.to(wide)
        own, even = z.gather(1, t[:, None]).squeeze(1), _even_sum(z, by_class) if smoothing else None
        lse = z.logsumexp(1)
        found.append((_losses(lse, own, even, t, by_class, smoothing, z.shape[1]), lse))
    losses, sums = (torch.cat(each) for each in zip(*found, strict=True))
    return losses, sums


def _losses_by_class(
    head: Head, form: Form, index: Tensor, by_class: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the same of a head's logits, which are made of some classes at a time."""
    num_classes, wide = len(head.weight), torch.promote_types(form.dtype, torch.float32)
    lse = index.new_full(index.shape, -torch.inf, dtype=wide)
    own, even = torch.zeros_like(lse), torch.zeros_like(lse) if smoothing else None
    for some in _chunks(head, form):
        z = form.mapped(_output_of(head, some), some).to(wide)  # [N, c]
        lse = torch.logaddexp(lse, z.logsumexp(1))
        place, is_here = _place_in(some, index)
        own += z.gather(1, place[:, None]).squeeze(1).where(is_here, 0)
        if even is not None:
            even += _even_sum(z, None if by_class is None else by_class[some])
    return _losses(lse, own, even, index, by_class, smoothing, num_classes), lse


def _chunks(head: Head, form: Form) -> Iterator[slice]:
    """Yield the classes that are computed at a time; of tensors without values, the first few, which take as much.

    Half as many where their gradient needs a graph of its own.
    """
    numel = _chunk_numel(head.input) // (1 + form.changes_gradient)
    num_classes, size = len(head.weight), max(1, numel // max(1, *head.input.shape))
    starts = range(0, num_classes, size)
    for start in starts[:_ENOUGH] if is_fake(head.input) else starts:
        yield slice(start, min(start + size, num_classes))


_ENOUGH = 3
"""Rounds of a loop after which the tensors of one replace those of the round before."""


def _output_of(head: Head, some: slice) -> Tensor:
    """Return the Linear's output for some classes."""
    rows, weight, bias = head
    return F.linear(rows, weight[some].to(rows.dtype), None if bias is None else bias[some].to(rows.dtype))


def _logits_of(form: Form, output: Tensor, some: slice) -> Tensor:
    """Return the logits of some classes, with a graph where their gradient is not that of the Linear's output."""
    with torch.set_grad_enabled(form.changes_gradient):
        return form.mapped(output.requires_grad_(form.changes_gradient), some)


def _place_in(some: slice, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of some classes the target is, and whether it is one of them; elsewhere the first."""
    place = index - some.start
    is_here = (place >= 0) & (place < some.stop - some.start)
    return place.where(is_here, 0), is_here


def _even_sum(z: Tensor, by_class: Tensor | None) -> Tensor:
    return z.sum(1) if by_class is None else z @ by_class


def _losses(
    lse: Tensor,
    own: Tensor,
    even: Tensor | None,
    index: Tensor,
    by_class: Tensor | None,
    smoothing: float,
    num_classes: int,
) -> Tensor:
    """Return the loss of each row, from log(sum(exp(z))), the target's logit, and the weighted sum of all."""
    losses = lse - own
    if by_class is not None:
        losses = losses * by_class[index]
    if even is not None:
        total = num_classes if by_class is None else by_class.sum()
        losses = (1 - smoothing) * losses + smoothing / num_classes * (total * lse - even)
    return losses


def _gradients(
    head: Head,
    form: Form,
    target: Tensor,
    lse: Tensor,
    options: Options,
    gradient: Tensor,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Return the gradients that are `wanted` of `head`; `gradient` is of each row's loss, [N] or [].

    With probabilities p and a smoothing of s, a row's loss has d loss / d z = (1 - s) w[t] (p - onehot(t)) + s / C (W p
    - w), where w are the classes' weights and W is their sum.
    """
    rows, weight, bias = head
    num_classes, wide = len(weight), lse.dtype
    counted = target != options.ignore_index
    index = target.where(counted, 0)
    each = gradient.expand(len(rows)).where(counted, 0)
    even = each * (options.label_smoothing / num_classes)
    own = each * (1 - options.label_smoothing)
    by_class = options.weight
    if by_class is not None:
        by_class = by_class.to(wide)
        own = own * by_class[index]
    total = own + even * (num_classes if by_class is None else by_class.sum())
    of_rows = torch.zeros_like(rows, dtype=wide) if wanted[0] else None
    of_weight = torch.empty_like(weight) if wanted[1] else None
    of_bias = torch.empty_like(bias) if bias is not None and wanted[2] else None
    seen = torch.zeros_like(lse) if _is_reproducible(rows) else None
    for some in _chunks(head, form):
        output = _output_of(head, some)  # [N, D] @ [D, c]
        logits = _logits_of(form, output, some)
        z = logits.detach().to(wide, copy=form.changes_gradient)
        z.sub_(lse[:, None]).exp_()
        if seen is not None:
            seen += z.sum(1)
        z.mul_(total[:, None])
        if options.label_smoothing:
            z.addr_(even, z.new_ones(z.shape[1]) if by_class is None else by_class[some], alpha=-1)
        place, is_here = _place_in(some, index)
        z.scatter_add_(1, place[:, None], own.where(is_here, 0).neg()[:, None])
        if form.changes_gradient:
            (z,) = torch.autograd.grad(logits, output, z.to(logits.dtype))
        z = z.to(rows.dtype)
        if of_weight is not None:
            of_weight[some] = z.T @ rows  # [c, N] @ [N, D]
        if of_bias is not None:
            of_bias[some] = z.sum(0)
        if of_rows is not None:
            of_rows += z @ weight[some].to(rows.dtype)  # [N, c] @ [c, D]
    if seen is not None and not is_fake(rows):
        _check_probabilities(seen, lse, counted)
    return [None if of_rows is None else of_rows.to(rows.dtype), of_weight, of_bias]


def _is_reproducible(rows: Tensor) -> bool:
    """Return whether a product in parts differs from the whole by the rounding of 32 bits at most."""
    is_wide = rows.device.type == "cpu" and rows.dtype.itemsize > 2
    return is_wide and torch.get_float32_matmul_precision() == "highest"


def _check_probabilities(seen: Tensor, lse: Tensor, counted: Tensor) -> None:
    """Refuse a weight that was written to since the loss was computed where versions do not show it.

    Args:
        seen: the sum of the probabilities of each row, [N]: 1, up to rounding, of the weight as it was.
        lse: log(sum(exp(z))) of each row, as it was, [N].
        counted: the rows that count, [N].

    Raises:
        RuntimeError: there was such a write.
    """
    if (counted & ((seen - 1).abs() > _MOST_OFF * lse.abs().clamp(min=1))).any():
        raise RuntimeError(
            'activations: "linear-cross-entropy" needs the weight of its Linear as it was when the loss was computed, '
            "and somebody has written to it since through `.data`. Write to it after backward, or leave the codec out."
        )


_MOST_OFF = 1e-4
"""What rounding may do to a sum of probabilities of logits of order 1; it grows with them. NaN is within it."""


def _differentiable(
    head: Head, form: Form, target: Tensor, options: Options, gradient: Tensor, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """Return the same gradients so that they can be differentiated again: those of the plain loss."""
    # Others than themselves: h may be made of the weight.
    rows, weight = (each.view_as(each) for each in head[:2])
    bias = None if head.bias is None else head.bias.view_as(head.bias)
    head = Head(rows, weight, bias)
    logits = form.mapped(F.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)))
    wide = logits.to(torch.promote_types(logits.dtype, gradient.dtype))
    loss = F.cross_entropy(
        wide,
        target,
        options.weight if options.weight is None else options.weight.to(wide.dtype),
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    inputs = [each for each, is_wanted in zip(head, wanted, strict=True) if is_wanted and each is not None]
    found = iter(torch.autograd.grad(loss, inputs, gradient.to(loss.dtype), create_graph=True))
    return [
        next(found) if is_wanted and each is not None else None for each, is_wanted in zip(head, wanted, strict=True)
    ]


def linear_cross_entropy(call: Call, calls: CallTracker) -> Tensor | None:
    """Return the loss that `call` asks for; `None` where it is better computed as it stands.

    Args:
        call: of `cross_entropy`; of `nll_loss`, if its log-probabilities were not computed.
        calls: what the graph does not show.
    """
    logits = call.argument(0, "input")
    if isinstance(logits, DeferredLogits):
        return _of_deferred(logits, call, calls)
    is_recognised = (
        call.name == "cross_entropy"
        and isinstance(logits, Tensor)
        and logits.dim() == 2
        and logits.grad_fn is not None
        and torch.is_grad_enabled()
        and logits._version == 0
        and not has_hooks(logits)
    )
    options = _options_of(call, logits) if is_recognised else None
    try:
        head = None if options is None else head_of(logits, calls)
    except (UnreadableError, RuntimeError):  # the Linear's input was changed in place, which is backward's to tell
        return None
    if head is None or logits.shape[1] <= 2 * head.input.shape[1]:  # what is kept instead is as much
        return None
    target, lookup = call.argument(1, "target"), calls.lookup_of(head.weight)
    return _LinearCrossEntropy.apply(*head, logits.detach(), target, options, lookup)  # type: ignore[no-any-return, no-untyped-call]


def _of_deferred(logits: DeferredLogits, call: Call, calls: CallTracker) -> Tensor | None:
    """Return the loss of logits that nobody has computed; `None` where they must be."""
    of_head, is_log = logits.call, call.name == "nll_loss"
    if not (logits.is_pending and of_head.is_unchanged and logits.form.is_log == is_log):
        return None
    if not of_head.is_as_where_called:
        return None
    options = _options_of(call, logits) if logits.form.class_dim == 1 else None
    if options is None:
        return None
    of_head.note_loss()
    target, rows = call.argument(1, "target"), logits.rows.movedim(1, -1).flatten(0, -2)  # [N, D]
    head, lookup = Head(rows, of_head.weight, of_head.bias), calls.lookup_of(of_head.weight)
    loss: Tensor = _LinearCrossEntropy.apply(*head, logits.form, target.flatten(), options, lookup)  # type: ignore[no-untyped-call]
    return loss.view(target.shape) if options.reduction == "none" else loss


def _options_of(call: Call, logits: Tensor) -> Options | None:
    """Return the options of a loss of `logits`, [N, C, ...]; `None` where these or the targets are others than ours."""
    target, weight = call.argument(1, "target"), call.argument(2, "weight")
    reduction, ignore_index = call.argument(6, "reduction", "mean"), call.argument(4, "ignore_index", -100)
    smoothing = call.argument(7, "label_smoothing", 0.0)
    is_known = (
        isinstance(target, Tensor)
        and target.dtype == torch.int64
        and target.device == logits.device
        and target.shape == (*logits.shape[:1], *logits.shape[2:])
        and (weight is None or (weight.shape == logits.shape[1:2] and not weight.requires_grad))
        and (weight is None or weight.dtype == _dtype_of_loss(logits.dtype, logits.device.type))
        and reduction in ("mean", "sum", "none")
        and 0 <= smoothing <= 1
        and call.argument(3, "size_average") is None
        and call.argument(5, "reduce") is None
    )
    return Options(weight, ignore_index, reduction, smoothing) if is_known else None

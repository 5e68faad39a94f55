"""Activations such as GELU in compiled code: their derivative is computed in the forward, and a code of it is kept.

For y = f(x) with the gradient g of y, the compiler's backward computes g * f'(x) out of x. A code of x goes through f',
which is not linear: its noise biases the gradient, and so x takes 8 bits at least. A code of f'(x) is multiplied by g
alone, and 4 bits of it are right on average. So what makes up f'(x) is moved from the backward to the forward, right
behind x, before the compiler decides what is kept; it then keeps f'(x), and `compiled_partitioner` codes it. Eager code
keeps the same (`activation_derivatives`).

| what the trace has for g * f'(x)                | f'(x)                      |
|-------------------------------------------------|----------------------------|
| GELU and Mish: g * d                            | d                          |
| SiLU: (g * sigmoid(x)) * d                      | sigmoid(x) * d             |
| below float32: casts before and behind          | rounded to the dtype of g  |

Other activations keep their input: the derivatives of Softplus and ELU are chosen by a condition, and that of ReLU is
the sign.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

from lightning_memsave.saved_tensors.compiled_policy import is_backward, operation_of

_BACKWARD = frozenset({"gelu_backward", "silu_backward", "mish_backward"})
_MARK = "memsave_derivative"
_MUL, _CAST = torch.ops.aten.mul.Tensor, torch.ops.prims.convert_element_type.default


def is_derivative(node: fx.Node) -> bool:
    """Return whether a node is an activation's derivative that was moved to the forward."""
    return _MARK in node.meta


def move_derivatives(
    joint: fx.Graph, gradients: set[fx.Node], is_wanted: Callable[[fx.Node, Tensor, set[fx.Node]], bool]
) -> list[fx.Node]:
    """Compute derivatives of activations in the forward, for backward to multiply gradients by.

    Args:
        joint: the graph of forward and backward; is changed.
        gradients: its nodes that depend on gradients of the results.
        is_wanted: returns whether the derivative, of which a node of the backward is a part, is to be moved. Its
            second argument has the shape and dtype of the derivative, its third are the nodes that it is made of.

    Returns:
        The derivatives, on which no result of the forward depends.
    """
    moved = []
    for node in list(joint.nodes):
        if node in gradients and _is_part(node) and not any(map(_is_part, _gradients_of(node, gradients))):
            chain = _chain(node, gradients)
            if chain is not None and is_wanted(
                node, chain[-1].meta["val"], _sources(_parts(_factors(chain, gradients)))
            ):
                moved += _move(joint, chain, gradients)
    return moved


def _is_part(node: fx.Node) -> bool:
    return node.op == "call_function" and is_backward(node) and operation_of(node) in _BACKWARD


def _gradients_of(node: fx.Node, gradients: set[fx.Node]) -> list[fx.Node]:
    return [each for each in node.all_input_nodes if each in gradients]


def _chain(first: fx.Node, gradients: set[fx.Node]) -> list[fx.Node] | None:
    """Return the products and casts that lead from a gradient to the next one; `None` if there is anything else."""
    chain = [first]
    while True:
        node = chain[-1]
        is_product = node.target is _MUL and all(isinstance(each, fx.Node) for each in node.args)
        if not (is_product or node.target is _CAST) or len(_gradients_of(node, gradients)) != 1:
            return None
        following = [user for user in node.users if _is_part(user)]
        if not following:
            return chain
        if len(node.users) > 1:
            return None
        chain.append(following[0])


def _move(joint: fx.Graph, chain: list[fx.Node], gradients: set[fx.Node]) -> list[fx.Node]:
    """Return the derivative, once the products and casts of `chain` are one product with it; nothing if they cannot."""
    (gradient,) = _gradients_of(chain[0], gradients)
    result = chain[-1]
    factors = _factors(chain, gradients)
    if not factors or gradient.meta["val"].shape != result.meta["val"].shape:
        return []
    order = {node: number for number, node in enumerate(joint.nodes)}
    parts = sorted(_parts(factors), key=order.__getitem__)
    place = max(_sources(parts), key=order.__getitem__)
    for part in parts:
        place.append(part)
        place = part
        _put_into_forward(part)
    derivative = factors[0]
    for factor in factors[1:]:
        derivative = place = _call(place, _MUL, (derivative, factor), factors[0].meta)
    dtype = gradient.meta["val"].dtype
    if derivative.meta["val"].dtype != dtype:
        derivative = _call(place, _CAST, (derivative, dtype), factors[0].meta)
    derivative.meta[_MARK] = True
    product = _call(result, _MUL, (gradient, derivative), result.meta)
    gradients.add(product)
    result.replace_all_uses_with(product)
    for node in reversed(chain):
        joint.erase_node(node)
    return [derivative]


def _factors(chain: list[fx.Node], gradients: set[fx.Node]) -> list[fx.Node]:
    """Return what a chain multiplies a gradient by."""
    return [each for node in chain for each in node.all_input_nodes if each not in gradients]


def _sources(parts: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes of the forward that parts are computed from."""
    return {each for part in parts for each in part.all_input_nodes if each not in parts}


def _parts(factors: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes of the backward that factors are computed by."""
    found: set[fx.Node] = set()
    waiting = list(factors)
    while waiting:
        node = waiting.pop()
        if node not in found and _is_part(node):
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _put_into_forward(node: fx.Node) -> None:
    node.meta.pop("autograd_backward", None)
    node.meta.pop("partitioner_tag", None)
    for key in ("source_fn_stack", "nn_module_stack"):
        if (stack := node.meta.get(f"fwd_{key}")) is not None:
            node.meta[key] = stack


def _call(place: fx.Node, target: Any, arguments: tuple[Any, ...], meta: dict[str, Any]) -> fx.Node:
    """Return a new node behind `place`, with the notes of another."""
    with place.graph.inserting_after(place):
        node = place.graph.call_function(target, arguments)
    node.meta = {**meta, "val": target(*fx.node.map_arg(arguments, lambda each: each.meta["val"]))}
    return node

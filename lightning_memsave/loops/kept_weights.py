"""Weights as they were before a technique changed them: a fit that is refused leaves the module as it was.

Layers change, and weights are lowered, before optimizers exist, and some of these are refused. Until the first step the
tensors that were there are kept. No copy is made; where Lightning moves the model to a device afterwards, they are in
host memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memsave.torch_internals.sharded_parameters import is_sharded


class KeptWeights:
    """The weights of a module, by name.

    Args:
        module: whose.
        copies: whether they are copied, as for Lightning's tuner: it trains, and puts back what it has saved, but saves
            weights after they have changed.
    """

    def __init__(self, module: nn.Module, *, copies: bool = False) -> None:
        self._module, self.are_copies = module, copies
        made = ((name, p) for name, p in module.named_parameters() if not (is_lazy(p) or p.is_meta or is_sharded(p)))
        self._weights: dict[str, Tensor] = {name: p.detach().clone() if copies else p.detach() for name, p in made}

    @torch.no_grad()
    def put_back(self) -> None:
        """Give each parameter of the same name and shape its values again, in the dtype that it has now."""
        for name, p in self._module.named_parameters():
            before = self._weights.get(name)
            if before is not None and before.shape == p.shape and not is_sharded(p):
                p.copy_(before)

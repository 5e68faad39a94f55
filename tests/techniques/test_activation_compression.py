from __future__ import annotations

from lightning_memsave import ActivationCompression
from tests.contracts.spec import Spec

SPEC = Spec(config=ActivationCompression(), loss_class="exact", bit_equal=True, shrinks="activations")

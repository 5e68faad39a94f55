from __future__ import annotations

from lightning_memsave import LowPrecision
from tests.contracts.spec import Spec

SPEC = Spec(
    config=LowPrecision(), loss_class="changed", trainer_precision="32-true", tips_by=1e-2, shrinks="weights"
)

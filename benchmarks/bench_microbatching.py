"""Peak, time and gradient difference against the size of the microbatch: WideResNet-28-2, batch 100."""

from __future__ import annotations

from harness import compare
from models import eval_batchnorm, gradients, relative_difference, wide_resnet

subjects = [wide_resnet("batch 100")]
subjects += [wide_resnet(f"microbatch {size}", microbatch=size) for size in (50, 20, 10, 5, 2, 1)]


def quality(subject):
    """With frozen BatchNorm, where microbatches are exact: how far gradients are from the whole batch's."""
    size = None if subject.setting == "batch 100" else int(subject.setting.split()[1])
    results = []
    for microbatch in (size, None):
        twin = wide_resnet("twin", microbatch=microbatch)
        eval_batchnorm(twin.model)
        results.append(gradients(twin))
    return "relative gradient difference (BatchNorm frozen, float32)", relative_difference(*results)


if __name__ == "__main__":
    compare("microbatching", "WideResNet-28-2, batch 100, SGD momentum", subjects, quality)

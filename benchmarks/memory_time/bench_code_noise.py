"""Codecs chosen module by module for a bound of the gradient's noise, beside one codec for all modules.

`kept_bytes` is what the store keeps of the whole batch; `predicted` is the noise that the measurement on a few samples
foretells, and `quality_value` that of the whole batch's gradient, over several draws. "like int4" has the least noise
in at most the bytes of int4 everywhere (and a thousandth), "bound 0.05" the fewest bytes with at most that noise.
`measuring_steps` is the CPU time of the measurement, in plain steps. Rows that are there are kept; names of models as
arguments run only these.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.measurement import environment, put_row, read_rows
from benchmarks.memory_time.bench_planner import Step, classify, language
from benchmarks.models.subjects import Subject, llama, plain_gpt, relative_difference, vit, wide_resnet
from lightning_memsave import ActivationCompression
from lightning_memsave.planner.codec_choice import Codecs, in_words
from lightning_memsave.prediction.code_noise import BoundedCodes, CodeNoise, classes_in
from lightning_memsave.techniques.activation_compression import open_store

NAME, KEY = "code_noise", ("model", "setting")
NUM_DRAWS = 4
ROOM = 1.001
"""Of the bytes of one codec: the search rounds up."""
UNIFORM, BOUNDS = ("int8", "int4", "int2"), (0.01, 0.03, 0.05, 0.1)
MODELS: dict[str, tuple[str, Callable[[str], Subject], Callable[..., Tensor]]] = {
    "wrn": ("WideResNet-28-2, batch 100", wide_resnet, classify),
    "gpt": ("GPT of plain modules, 6 layers, width 256, batch 8 x 256, dropout 0.1", plain_gpt, language),
    "llama": ("Llama, 4 layers, width 256, batch 8 x 128", llama, language),
    "vit": ("ViT, 4 layers, width 192, batch 32", vit, classify),
}


def gradients(
    module: Step, batch: Any, config: ActivationCompression | None, draw: int = 0
) -> tuple[list[Tensor], int]:
    """Gradients of the whole batch, and the bytes that the store keeps for them."""
    module.zero_grad()
    torch.manual_seed(1)
    if config is None:
        module.training_step(batch, 0).backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None], 0
    store, applied = open_store(module, config)
    store.draw_for(draw)
    with store.scope():
        loss = module.training_step(batch, 0)
    loss.backward()
    applied.undo()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None], store.tally.held_bytes


def measure(name: str) -> None:
    title, make, loss = MODELS[name]
    subject = make("plain")
    module = Step(subject.model, loss).train()
    plain = [time.thread_time()]
    exact, _ = gradients(module, subject.batch, None)
    plain += [time.thread_time()]
    start = time.thread_time()
    noise = CodeNoise(module, subject.batch, ActivationCompression(codecs=("exact", "int2")))
    sites = noise.sites
    steps = (time.thread_time() - start) / (plain[1] - plain[0])
    one: dict[str, Codecs] = {codec: (codec,) * len(sites.sites) for codec in UNIFORM}
    likes = {f"like {codec}": sites.least_noise(int(ROOM * sites.bytes_of(each))) for codec, each in one.items()}
    settings = {
        setting: BoundedCodes(
            sites.as_config(codecs, ActivationCompression(), classes_in(module)),
            sites.noise_of(codecs),
            in_words(codecs),
        )
        for setting, codecs in (one | likes).items()
    }
    settings |= {f"bound {bound:g}": noise.within(bound) for bound in BOUNDS}
    for setting, (config, predicted, words) in settings.items():
        draws = [gradients(module, subject.batch, config, draw) for draw in range(NUM_DRAWS)]
        errors = torch.tensor([relative_difference(found, exact) for found, _ in draws])
        row = {"benchmark": NAME, "model": title, "setting": setting, "plan": words}
        row |= {"kept_bytes": draws[0][1], "predicted": predicted}
        row |= {"quality": "noise of a gradient over its norm", "quality_value": float(errors.square().mean().sqrt())}
        put_row(NAME, {**row, "measuring_steps": steps, **environment()}, KEY)
        print(title, setting, row["kept_bytes"], row["predicted"], row["quality_value"], words)


def main() -> None:
    torch.set_num_threads(1)
    there = {row["model"] for row in read_rows(NAME)}
    for name in sys.argv[1:] or MODELS:
        if sys.argv[1:] or MODELS[name][0] not in there:
            measure(name)


if __name__ == "__main__":
    main()

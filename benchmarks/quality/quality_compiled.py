"""Training compiled code with codes to the same loss: a GPT on Python's source, three seeds.

A seed gives the weights, the batches and the noise; all settings of one see the same. A run that has a row is not made
again, so the study can be stopped and goes on where it was. About 25 minutes on 1 core.
"""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.harness.measurement import environment, put_row, read_rows
from benchmarks.models.subjects import PlainGPT, next_token_loss
from benchmarks.quality.quality_activation_compression import NUM_VALIDATION_BATCHES, SHAPE, draw_batches, source_text
from lightning_memsave import ActivationCompression, apply_activation_compression

NAME, SEEDS, NUM_STEPS = "compiled_quality", (0, 1, 2), 300
CODECS = {"eager": None, "compiled": None, "compiled, int8": "int8", "compiled, int4": "int4"}


def validation_loss(setting: str, seed: int) -> float:
    """Train, and return the loss on files that were not seen, in nats per byte."""
    train, validation = source_text()
    torch.manual_seed(seed)
    model = PlainGPT(SHAPE["num_layers"], SHAPE["width"], 4, SHAPE["context"], dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    torch.compiler.reset()
    function = model if setting == "eager" else torch.compile(model)
    if codec := CODECS[setting]:
        apply_activation_compression(function, ActivationCompression(codecs=(codec,), seed=seed))
    for step, ids in enumerate(draw_batches(train, NUM_STEPS, 1 + 10 * seed)):
        if codec:
            vars(function)["_activation_store"].store.draw_for(step)  # as each step of Lightning's loop does
        next_token_loss(function(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        unseen = draw_batches(validation, NUM_VALIDATION_BATCHES, 2)
        return statistics.mean(float(next_token_loss(model(ids), ids)) for ids in unseen)


def main() -> None:
    torch.set_num_threads(1)
    known = {(row["setting"], row["seed"]) for row in read_rows(NAME)}
    for seed in SEEDS:
        for setting in CODECS:
            if (setting, str(seed)) in known:
                continue
            start = time.process_time()
            loss = validation_loss(setting, seed)
            row = {
                "benchmark": NAME,
                "model": f"GPT, 4 layers, width 128, batch 16 x 128, AdamW, {NUM_STEPS} steps",
                "setting": setting,
                "seed": seed,
                "cpu_seconds_run": time.process_time() - start,
                "quality": "validation loss, nats per byte of unseen files of Python's standard library",
                "quality_value": loss,
                **environment(),
            }
            put_row(NAME, row, ("setting", "seed"))
            print(seed, setting, loss, flush=True)


if __name__ == "__main__":
    main()

"""Others' headline rows on the same shapes, with their figure beside ours.

Each row is a prediction of a whole step at the paper's batch, in float32 where nothing else is said: forward, backward
and update, by the code that trains, on fake tensors. The largest batch is the one that fits into what the plain step
takes at the paper's baseline batch. A real step of few samples says how far off predictions are (column `check`).

Their figures are their GPU's and their framework's; ours are tracked bytes on CPU. Names of cases as arguments run
only these.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.harness.measurement import environment, put_row
from benchmarks.models.papers.unrolled_lstm import Chunk, UnrolledLSTM
from lightning_memsave import ActivationCompression, Checkpointing, MemSave, OptimizerState, Prediction
from lightning_memsave.prediction.predictor import Predictor, largest_batch
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME

NAME = "papers"


class Step(L.LightningModule):
    """A model, its loss, and the paper's optimizer."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], optimizer: str) -> None:
        super().__init__()
        self.model, self.loss, self.optimizer = model, loss, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        return torch.optim.AdamW(self.parameters())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A paper's model, and what the paper says of it."""

    paper: str
    model: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    samples: Callable[[int], Any]
    batch: int
    """At which the paper's baseline runs."""
    optimizer: str
    settings: dict[str, Callable[[], MemSave]]
    theirs: str
    quantity: str
    """What of ours is to be compared: a column."""
    check: int | None = 2
    """Samples of a step that is taken for real; `None` for none, as of models that are too large."""


def codecs(*names: str, **slots: Any) -> Callable[[], MemSave]:
    return lambda: MemSave("measure", activations=ActivationCompression(codecs=names), **slots)


PLAIN = {"plain": lambda: MemSave("measure")}
EXACT = {"exact": codecs("exact")}
INT8 = {"int8": codecs("int8"), "exact, int8": codecs("exact", "int8")}
INT4 = {"exact, int4": codecs("exact", "int4")}
CHAIN = {"int4-chain": codecs("int4-chain")}
BLOCKS = {
    "blocks": lambda: MemSave("measure", checkpointing="blocks"),
    "blocks + exact, int4": codecs("exact", "int4", checkpointing="blocks"),
}
RELEASED, RELEASED_4BIT = (OptimizerState(**BY_NAME[bits], gradients="release") for bits in ("8bit", "4bit"))
STEPWISE = {
    "linear-cross-entropy": codecs("linear-cross-entropy"),
    "+ blocks": codecs("linear-cross-entropy", checkpointing="blocks"),
    "+ 8-bit state": codecs("linear-cross-entropy", checkpointing="blocks", optimizer_state="8bit"),
    "+ released gradients": codecs("linear-cross-entropy", checkpointing="blocks", optimizer_state=RELEASED),
    "+ 4-bit state": codecs("linear-cross-entropy", checkpointing="blocks", optimizer_state=RELEASED_4BIT),
}


# ---------------------------------------------------------------------------------------------------- models
def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1])


def images(num_samples: int) -> Any:
    return torch.randn(num_samples, 3, 224, 224), torch.randint(0, 1000, (num_samples,))


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


def resnet101() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=[3, 4, 23, 3], num_labels=1000))


def swin_tiny() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    return SwinForImageClassification(SwinConfig(num_labels=1000))


def deit(width: int, heads: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads}
    return ViTForImageClassification(ViTConfig(**shape, num_labels=1000))


def bert_large() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
    return BertForSequenceClassification(BertConfig(**shape, attn_implementation="eager"))


def bert_base(position_embeddings: int = 512, **shape: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**shape, max_position_embeddings=position_embeddings, attn_implementation="eager")
    return BertForSequenceClassification(config)


def t5_base() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    return T5ForConditionalGeneration(T5Config(**shape, use_cache=False))


def translate(model: nn.Module, batch: Any) -> Tensor:
    logits = model(input_ids=batch[0], decoder_input_ids=batch[1]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def sentences(length: int, num_samples: int) -> Any:
    return torch.randint(0, 30_000, (num_samples, length)), torch.randint(0, 2, (num_samples,))


def llama_3b() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24}
    config = LlamaConfig(**shape, num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=True, use_cache=False)
    return LlamaForCausalLM(config).bfloat16()


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits  # those of the last token are not needed
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


CASES = {
    "chen-lstm": Case(
        paper="Chen et al., 2016",
        model="LSTM, 4 x 1024, 64 steps",
        make=UnrolledLSTM,
        loss=lambda model, tokens: model(tokens),
        samples=lambda n: torch.randint(0, 1000, (n, 65)),
        batch=64,
        optimizer="SGD",
        settings={
            **PLAIN,
            "chunks of 8 steps": lambda: MemSave("measure", checkpointing=Checkpointing(modules=Chunk)),
            **EXACT,
        },
        theirs="> 4x less",
        quantity="factor_beyond_lasting",
    ),
    "tempo-bert": Case(
        paper="Tempo, 2022",
        model="BERT-large, length 384",
        make=bert_large,
        loss=classify,
        samples=functools.partial(sentences, 384),
        batch=8,
        optimizer="AdamW",
        settings={**PLAIN, **EXACT, **INT4},
        theirs="batch 8 -> 13 (1.6x; up to 2x)",
        quantity="batch_ratio",
        check=1,
    ),
    "gact-bert": Case(
        paper="GACT, 2022",
        model="BERT-large, length 128",
        make=bert_large,
        loss=classify,
        samples=functools.partial(sentences, 128),
        batch=24,
        optimizer="AdamW",
        settings={**PLAIN, **INT4, **BLOCKS},
        theirs="batch 24 -> 592 (24.7x, with checkpointing)",
        quantity="batch_ratio",
        check=1,
    ),
    "gact-resnet": Case(
        paper="ActNN, 2021; GACT, 2022",
        model="ResNet-50, 224x224",
        make=resnet50,
        loss=classify,
        samples=images,
        batch=160,
        optimizer="SGD",
        settings={**PLAIN, **EXACT, **INT4, **CHAIN},
        theirs="batch 160 -> 1056 (6.6x, 2 bits); 688 (4.3x, 4 bits)",
        quantity="batch_ratio",
    ),
    "inplace-abn-resnet": Case(
        paper="InPlace-ABN, 2018; its model is ResNeXt-101",
        model="ResNet-101, 224x224",
        make=resnet101,
        loss=classify,
        samples=images,
        batch=256,
        optimizer="SGD",
        settings={**PLAIN, **EXACT, **CHAIN},
        theirs="batch 256 -> 512 (2x; up to 50 % less)",
        quantity="batch_ratio",
    ),
    "gact-swin": Case(
        paper="GACT, 2022",
        model="Swin-T, 224x224",
        make=swin_tiny,
        loss=classify,
        samples=images,
        batch=112,
        optimizer="AdamW",
        settings={**PLAIN, **EXACT, **INT4},
        theirs="batch 112 -> 632 (5.6x)",
        quantity="batch_ratio",
    ),
    **{
        f"mesa-{name.lower()}": Case(
            paper="Mesa, 2021",
            model=f"{name}, 224x224",
            make=make,
            loss=classify,
            samples=images,
            batch=128,
            optimizer="AdamW",
            settings={**PLAIN, **EXACT, **INT8, **INT4},
            theirs=theirs,
            quantity="factor",
        )
        for name, make, theirs in (
            ("DeiT-Ti", functools.partial(deit, 192, 3), "4171 -> 1858 MB (2.2x)"),
            ("DeiT-S", functools.partial(deit, 384, 6), "8459 -> 3840 MB (2.2x)"),
            ("Swin-Ti", swin_tiny, "11812 -> 5371 MB (2.2x)"),
        )
    },
    "fewbit-roberta": Case(
        paper="Few-Bit Backward, 2022; 128 tokens are ours",
        model="RoBERTa-base, length 128",
        make=functools.partial(bert_base, 514, vocab_size=50_265),
        loss=classify,
        samples=functools.partial(sentences, 128),
        batch=128,
        optimizer="AdamW",
        settings={**PLAIN, "fewbit-3": codecs("fewbit-3"), **EXACT, **INT4},
        theirs="11.30 -> 9.75 GiB (13.8 % less), GELU in 3 bits",
        quantity="saved",
        check=None,
    ),
    "inverted-bert": Case(
        paper="Inverted Activations, 2024",
        model="BERT-base, length 512",
        make=bert_base,
        loss=classify,
        samples=functools.partial(sentences, 512),
        batch=16,
        optimizer="AdamW",
        settings={**PLAIN, "inverted": codecs("inverted"), **INT8, **INT4},
        theirs="5.12 -> 4.03 GB behind the forward pass (23.1 % less of activations)",
        quantity="saved",
        check=1,
    ),
    "dropit-deit-s": Case(
        paper="DropIT, 2022; model and batch are ours",
        model="DeiT-S, 224x224",
        make=functools.partial(deit, 384, 6),
        loss=classify,
        samples=images,
        batch=128,
        optimizer="SGD",
        settings={**PLAIN, "dropit": codecs("dropit"), "exact, dropit": codecs("exact", "dropit"), **EXACT, **INT4},
        theirs="20 % less, nine tenths dropped",
        quantity="saved",
    ),
    "wta-crs-t5": Case(
        paper="WTA-CRS, 2023; batch and length are ours",
        model="T5-base, length 128",
        make=t5_base,
        loss=translate,
        samples=lambda n: (torch.randint(0, 32_000, (n, 128)), torch.randint(0, 32_000, (n, 32))),
        batch=64,
        optimizer="AdamW",
        settings={
            **PLAIN,
            "rows-0.3": codecs("rows-0.3"),
            "exact, rows-0.3": codecs("exact", "rows-0.3"),
            **INT4,
        },
        theirs="17.66 -> 8.44 GB (2.1x); 6.50 GB (2.7x) with LoRA",
        quantity="factor",
        check=None,
    ),
    "torchtune-llama": Case(
        paper="torchtune's README; batch and length are ours",
        model="Llama 3.2 3B, bfloat16, length 2048",
        make=llama_3b,
        loss=next_token,
        samples=lambda n: torch.randint(0, 128_256, (n, 2048)),
        batch=2,
        optimizer="AdamW",
        settings={**PLAIN, **STEPWISE},
        theirs="81.9 % less, step by step",
        quantity="saved",
        check=None,
    ),
}


# ---------------------------------------------------------------------------------------------------- rows
def measured(case: Case, memsave: MemSave, num_samples: int) -> int:
    """The peak of real steps."""
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    step = Step(case.make().train(), case.loss, case.optimizer)
    trainer.fit(step, DataLoader([case.samples(num_samples)] * 3, batch_size=None))
    report = memsave.report
    assert report is not None
    return report.peak_bytes


def _beyond_lasting(found: Prediction) -> int:
    """Bytes of the peak beside weights and optimizer state."""
    return found.peak_bytes - found.by_category["weights"] - found.by_category["optimizer_state"]


def run(name: str) -> None:
    case = CASES[name]
    predictor = Predictor(
        lambda: Step(case.make().train(), case.loss, case.optimizer), lambda: case.samples(case.batch)
    )
    plain: Any = None
    for setting, memsave in case.settings.items():
        recipe = memsave().recipe
        found = predictor(recipe)
        plain = plain or found
        is_asked = case.quantity == "batch_ratio" and found is not plain
        largest = largest_batch(predictor, plain.peak_bytes, recipe) if is_asked else case.batch
        check: float | str = ""
        if case.check is not None:
            few = predictor(recipe, num_samples=case.check).peak_bytes
            check = few / measured(case, memsave(), case.check) - 1
        row = {
            "benchmark": NAME,
            "case": name,
            "paper": case.paper,
            "model": case.model,
            "setting": setting,
            "batch": case.batch,
            "peak_bytes": found.peak_bytes,
            "activations_bytes": found.by_category["activations"],
            "check": check,
            "factor": plain.peak_bytes / found.peak_bytes,
            "saved": 1 - found.peak_bytes / plain.peak_bytes,
            "factor_beyond_lasting": _beyond_lasting(plain) / _beyond_lasting(found),
            **({"largest_batch": largest, "batch_ratio": largest / case.batch} if is_asked else {}),
            "quantity": case.quantity,
            "theirs": case.theirs,
            "baseline": "predicted",
            "source": found.source,
            "seed": 0,
            **environment(),
        }
        put_row(NAME, row, ("case", "setting"))
        print(f"{name}, {setting}: {row.get(case.quantity, 1):.3f} (check {check}), theirs {case.theirs}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for wanted in sys.argv[1:] or CASES:
        run(wanted)

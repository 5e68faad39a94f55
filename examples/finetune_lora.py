"""Fine-tune a causal language model of Hugging Face with LoRA: python examples/finetune_lora.py.

Without arguments it trains a small Llama with random weights on random words, so that nothing is downloaded;
`--model NAME` takes one from the hub. Needs `pip install '.[peft]'`.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_memsave import MemSave


class FineTuned(L.LightningModule):
    def __init__(self, name: str | None) -> None:
        super().__init__()
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
        small = LlamaConfig(vocab_size=1000, **size)
        model = LlamaForCausalLM(small) if name is None else AutoModelForCausalLM.from_pretrained(name)
        self.model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss  # [B, T]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 2e-4)


def train(memsave: MemSave, name: str | None) -> MemSave:
    L.seed_everything(0, verbose=False)
    module = FineTuned(name)
    words = torch.randint(module.model.config.vocab_size, (16, 128))
    L.Trainer(max_epochs=1, callbacks=[memsave], logger=False, enable_checkpointing=False).fit(
        module, DataLoader(words, batch_size=8)
    )
    return memsave


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="of the Hugging Face hub")
    name = parser.parse_args().model
    plain = train(MemSave("measure"), name).report
    ours = train(MemSave(microbatch=2, checkpointing="blocks", optimizer_state="8bit").compare_to(plain), name).report
    print(f"factor {ours.factor:.1f}, loss class {ours.loss_class}: {', '.join(a.technique for a in ours.applied)}")

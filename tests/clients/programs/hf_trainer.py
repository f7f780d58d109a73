"""The Trainer of transformers, which uses the process group that it finds."""

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def texts(rows):
    tokens = torch.randint(0, 64, (rows, 16), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in tokens]


def run(backend, size):
    dist.init_process_group(backend)
    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output_dir=backend,
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=4,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=texts(32), eval_dataset=texts(7))
    trainer.train()
    assert trainer.args.world_size == size
    kept = ("loss", "grad_norm", "eval_loss", "train_loss")
    return [{name: entry[name] for name in kept if name in entry} for entry in trainer.state.log_history]

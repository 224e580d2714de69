"""Train the demo model on the rows that `prepare` wrote, and write it as a Hugging Face folder.

    python -m examples.demo_model.train --data .demo --out plugins/models/demo --minutes 6

The number of steps follows from the pace of the first ones, so that the learning rate reaches zero in the time
given; `--steps` fixes it instead.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from .llama import Llama, Shape, checkpoint
from .prepare import read_rows
from .tokens import BEGIN, COUNTED, END, END_OF_TEXT, PAD, special_ids

WARM_UP_STEPS = 300
PACE_STEPS = 200  # the pace is taken over this many steps, after as many more

Loss = Callable[[Tensor], Tensor]


def split_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and labels [rows, length] of packed rows; a label is -100 where the loss does not count it."""
    rows = rows.long()
    ids = rows & (COUNTED - 1)
    following = F.pad(rows[:, 1:], (0, 1))
    return ids, torch.where(following >= COUNTED, following & (COUNTED - 1), -100)


def make_loss(model: Llama, begin: int, autocast: bool) -> Loss:
    """Mean cross entropy over the counted tokens of packed rows."""

    def loss(rows: Tensor) -> Tensor:
        ids, labels = split_rows(rows)
        with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=autocast):
            logits = model(ids, begin)
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)

    return loss


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < WARM_UP_STEPS:
        return peak * (step + 1) / WARM_UP_STEPS
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def make_optimizer(model: Llama, peak: float, fused: bool) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), eps=1e-9, fused=fused)


def write_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """config.json, generation_config.json and model.safetensors as transformers reads them."""
    shape = model.shape
    begin, end, end_of_text, pad = (special_ids(tokenizer)[token] for token in (BEGIN, END, END_OF_TEXT, PAD))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": begin,
        "eos_token_id": [end, end_of_text],
        "pad_token_id": pad,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_length,
        "mlp_bias": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }
    generation = {
        "bos_token_id": begin,
        "eos_token_id": [end, end_of_text],
        "pad_token_id": pad,
        "do_sample": True,
        "temperature": 0.3,
        "top_p": 0.9,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    save_file(checkpoint(model), folder / "model.safetensors", metadata={"format": "pt"})


def held_out_loss(loss: Loss, rows: Tensor, batch: int) -> float:
    """Mean over the counted tokens of all held-out rows."""
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            counted = int((part[:, 1:] >= COUNTED).sum())
            total, count = total + float(loss(part)) * counted, count + counted
    return total / count


def batches(rows: Tensor, size: int) -> Iterator[Tensor]:
    """Rows in random order, again and again."""
    while True:
        order = torch.randperm(len(rows), device=rows.device)
        for start in range(0, len(rows) - size + 1, size):
            yield rows[order[start : start + size]]


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    rows, held_out = (
        torch.from_numpy(read_rows(options.data / name).astype("int32")).to(device)
        for name in ("rows.xz", "held_out.xz")
    )
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    model = Llama(Shape(vocab_size=tokenizer.get_vocab_size())).to(device)
    plain_loss = make_loss(model, special_ids(tokenizer)[BEGIN], device.type == "cuda")
    loss: Loss = torch.compile(plain_loss) if device.type == "cuda" and not options.eager else plain_loss
    optimizer = make_optimizer(model, options.peak, device.type == "cuda")
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(rows)} rows, on {device}", flush=True)

    steps, started, paced = options.steps or 10**9, time.monotonic(), 0.0
    for step, batch in enumerate(batches(rows, options.batch), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, steps, options.peak)
        value = loss(batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == PACE_STEPS:
            paced = value.item() and time.monotonic()
        if step == 2 * PACE_STEPS and not options.steps:
            pace = (value.item() and time.monotonic() - paced) / PACE_STEPS
            steps = step + int((started + 60 * options.minutes - time.monotonic()) / pace)
            print(f"{pace * 1e3:.2f} ms a step of {options.batch} rows: {steps} steps", flush=True)
        if step % options.report == 0 or step == steps:
            elapsed = time.monotonic() - started
            other = held_out_loss(plain_loss, held_out, 32)
            print(f"step {step}: loss {value.item():.4f}, held out {other:.4f}, {elapsed:.0f} s", flush=True)
            write_model(model, tokenizer, options.out)
        if step == steps:
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".demo"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="time for training, the compilation included")
    parser.add_argument("--steps", type=int, default=0, help="number of steps, instead of --minutes")
    parser.add_argument("--batch", type=int, default=48, help="rows of 1024 tokens a step")
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--report", type=int, default=2000, help="steps between reports and checkpoints")
    train(parser.parse_args())


if __name__ == "__main__":
    main()

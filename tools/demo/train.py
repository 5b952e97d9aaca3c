"""Train the demonstration model or its draft on generated reports, on a CPU.

    python -m tools.demo.train --out DIR              # the target
    python -m tools.demo.train --out DIR --layers 1   # the draft

The loss is mostly on the summary. Reports without filler sentences come first, because distractors at the start delay
learning to copy names by hours. One example in ten is a chat. Two single-threaded workers train data-parallel: on busy
cores, two threads of one process wait for each other at every operation, but two workers only once a step.
"""

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.demo.reports import HARD_FROM, Report, make_report
from tools.demo.measure import chat_text, load, measure
from tools.demo.tokenizer import BOS, EOS, IM_END, MAX_TOKENS, PAD, train_tokenizer

PROMPT_WEIGHT = 0.1
CHAT_SHARE = 0.1
PEAK_LR = 1e-3
WARMUP_STEPS = 100
POOL = 512

WORKER_STRIDE = 1_000_000

Example = tuple[list[int], int]  # token ids, length of the prompt


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of a training run, whose progress from `from_progress` to 1 sets learning rate and share of fillers."""

    out: Path
    num_layers: int
    num_steps: int
    minutes: float
    tokens_per_step: int
    eval_every_s: float
    num_workers: int
    seed: int
    tokenizer: Path | None
    resume: Path | None
    from_progress: float


def build_model(tokenizer: PreTrainedTokenizerFast, num_layers: int) -> LlamaForCausalLM:
    """Build a new Llama model. Every `in_features` is a multiple of 128, the group size of the int4 format."""
    vocab = tokenizer.get_vocab()
    stop = [vocab[EOS], vocab[IM_END]]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=vocab[BOS],
        eos_token_id=stop,
        pad_token_id=vocab[PAD],
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # faster than sdpa for these short sequences on a CPU
    model.generation_config = GenerationConfig(
        bos_token_id=vocab[BOS],
        eos_token_id=stop,
        pad_token_id=vocab[PAD],
        do_sample=False,
    )
    return model


def encode(tokenizer: PreTrainedTokenizerFast, report: Report, *, chat: bool) -> Example:
    """Return the token ids of prompt and summary, and the length of the prompt."""
    if chat:
        prompt_ids = tokenizer.encode(chat_text(tokenizer, report.prompt), add_special_tokens=False)
        answer_ids = tokenizer.encode(report.summary + IM_END, add_special_tokens=False)
    else:
        prompt_ids = tokenizer.encode(report.prompt)
        answer_ids = tokenizer.encode(f" {report.summary}{EOS}", add_special_tokens=False)
    return prompt_ids + answer_ids, len(prompt_ids)


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: Random, *, fillers: bool, start: int, tokens_per_step: int
) -> Iterator[list[Example]]:
    """Yield endless batches of examples of similar lengths, to avoid padding.

    start: number of the first training report. Every report is used once.
    """
    while True:
        reports = (make_report("train", index, fillers=fillers) for index in range(start, start + POOL))
        examples = [encode(tokenizer, report, chat=rng.random() < CHAT_SHARE) for report in reports]
        start += POOL
        examples.sort(key=lambda example: len(example[0]))
        pool: list[list[Example]] = [[]]
        for example in examples:
            if (len(pool[-1]) + 1) * len(example[0]) > tokens_per_step and pool[-1]:
                pool.append([])
            pool[-1].append(example)
        rng.shuffle(pool)
        yield from pool


def loss_of(model: LlamaForCausalLM, batch: list[Example], prompt_weight: float) -> torch.Tensor:
    """Return the weighted mean cross entropy, where summary tokens have weight 1.

    Padding is on the right, where a causal model ignores it.
    """
    length = max(len(ids) for ids, _ in batch)
    ids_BT = torch.zeros(len(batch), length, dtype=torch.long)
    weight_BT = torch.zeros(len(batch), length)
    for row, (ids, num_prompt) in enumerate(batch):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        weight_BT[row, :num_prompt] = prompt_weight
        weight_BT[row, num_prompt : len(ids)] = 1.0
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
    loss_BT = cross_entropy(logits_BTV.transpose(1, 2), ids_BT[:, 1:], reduction="none")
    return (loss_BT * weight_BT[:, 1:]).sum() / weight_BT[:, 1:].sum()


def learning_rate(step: int, progress: float) -> float:
    """Return the learning rate: linear warm-up, and cosine decay over `progress` (0 to 1) to 2% of the peak."""
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + cos(pi * progress)))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model folder in bf16, without changing the model in memory."""
    half = copy.deepcopy(model).bfloat16()
    half.config.dtype = torch.bfloat16
    half.save_pretrained(out)
    tokenizer.save_pretrained(out)
    tokenizer_config = out / "tokenizer_config.json"
    content = json.loads(tokenizer_config.read_text())
    for key in ("backend", "is_local", "local_files_only"):  # local details that other machines do not need
        content.pop(key, None)
    content["tokenizer_class"] = "PreTrainedTokenizerFast"  # every release of transformers knows this name
    tokenizer_config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def train(worker: int, recipe: Recipe, rendezvous: str) -> None:
    """Train for `num_steps` or `minutes`, whichever ends first. Worker 0 logs, evaluates and writes the model folder.

    The folder is also written after each evaluation on held-out reports.
    """
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    dist.init_process_group("gloo", init_method=rendezvous, rank=worker, world_size=recipe.num_workers)
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer) if recipe.tokenizer else train_tokenizer()
    model = load(recipe.resume)[0] if recipe.resume else build_model(tokenizer, recipe.num_layers)
    model.set_attn_implementation("eager")  # faster than sdpa for these short sequences on a CPU
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    num_tokens_each = recipe.tokens_per_step // recipe.num_workers
    rng = Random(recipe.seed)  # the same in every worker, so that all use batches of similar lengths
    first = round(recipe.from_progress * WORKER_STRIDE / 2) + worker * WORKER_STRIDE
    easy = batches(tokenizer, rng, fillers=False, start=first, tokens_per_step=num_tokens_each)
    hard = batches(tokenizer, rng, fillers=True, start=HARD_FROM + first, tokens_per_step=num_tokens_each)
    started = last_eval = time.monotonic()
    step, progress, num_tokens, mean_loss = 0, recipe.from_progress, 0, 0.0
    while progress < 1:
        # Fillers are introduced gradually around the middle, up to three of four batches.
        share_hard = min(0.75, max(0.0, (progress - 0.45) / 0.1))
        batch = next(hard if rng.random() < share_hard else easy)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, batch, PROMPT_WEIGHT * max(0.0, 1 - 2 * progress))
        loss.backward()
        step += 1
        done = max(step / recipe.num_steps, (time.monotonic() - started) / 60 / recipe.minutes)
        loss_now, done = average(model, torch.tensor([loss.item(), done]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress = recipe.from_progress + (1 - recipe.from_progress) * done
        num_tokens += recipe.num_workers * sum(len(ids) for ids, _ in batch)
        mean_loss = loss_now if step == 1 else 0.95 * mean_loss + 0.05 * loss_now
        elapsed_s = time.monotonic() - started
        if worker == 0 and step % 20 == 0:
            print(
                f"step {step}  progress {progress:.1%}  loss {mean_loss:.4f}  "
                f"{num_tokens / elapsed_s:,.0f} tokens/s  {elapsed_s / 60:.1f} min  "
                f"ETA {elapsed_s / 60 * (1 / done - 1):.1f} min",
                flush=True,
            )
        if worker == 0 and (time.monotonic() - last_eval > recipe.eval_every_s or progress >= 1):
            model.eval()
            result = measure(model, tokenizer, num_reports=96, fillers=share_hard > 0)
            print(f"  held out: {result}", flush=True)
            model.train()
            save(model, tokenizer, recipe.out)
            last_eval = time.monotonic()
    dist.destroy_process_group()


def average(model: LlamaForCausalLM, values: torch.Tensor) -> tuple[float, float]:
    """Replace each gradient by its mean over all workers, and return the means of the two `values`.

    The workers' progress is averaged with the gradients, so that all workers stop at the same step.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([values, *(gradient.flatten() for gradient in gradients)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = len(values)
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()
    return flat[0].item(), flat[1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demonstration model on two cores.")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--layers", type=int, default=4, help="4 for the target, 1 for the draft")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--minutes", type=float, default=120.0, help="end of the schedule")
    parser.add_argument("--tokens-per-step", type=int, default=3072)
    parser.add_argument("--eval-every-s", type=float, default=240.0)
    parser.add_argument("--workers", type=int, default=2, help="number of single-threaded processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, help="use the tokenizer of this folder instead of training one")
    parser.add_argument("--resume", type=Path, help="resume from the weights of this folder")
    parser.add_argument("--from-progress", type=float, default=0.0, help="share of the schedule already done")
    options = parser.parse_args()
    recipe = Recipe(
        out=options.out,
        num_layers=options.layers,
        num_steps=options.steps,
        minutes=options.minutes,
        tokens_per_step=options.tokens_per_step,
        eval_every_s=options.eval_every_s,
        num_workers=options.workers,
        seed=options.seed,
        tokenizer=options.tokenizer or options.resume,
        resume=options.resume,
        from_progress=options.from_progress,
    )
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, (recipe, f"file://{folder}/rendezvous"), nprocs=recipe.num_workers)


if __name__ == "__main__":
    main()

"""Train the demonstration model or its draft on generated reports, on a CPU.

Owns the training recipe: the loss lies mostly on the summary; reports without filler sentences come first,
because distractors from the start delay the copying of names by hours; one example in ten is a chat.

    python -m pipeline.demo.train --out DIR              # the target
    python -m pipeline.demo.train --out DIR --layers 1   # the draft
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator
from math import cos, pi
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.demo.measure import chat_text, measure
from pipeline.demo.reports import Report, make_report
from pipeline.demo.tokenizer import BOS, EOS, IM_END, MAX_TOKENS, PAD, train_tokenizer

PROMPT_WEIGHT = 0.1
CHAT_SHARE = 0.1
PEAK_LR = 1e-3
WARMUP_STEPS = 100
POOL = 512

Example = tuple[list[int], int]  # token ids, and how many of them are prompt


def build_model(tokenizer: PreTrainedTokenizerFast, num_layers: int) -> LlamaForCausalLM:
    """A fresh Llama model; every `in_features` is a multiple of 128, the group of the int4 format."""
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
    """Token ids of prompt and summary, and the length of the prompt."""
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
    """Endless batches of examples of like length, so that little of a batch is padding.

    `start` is the number of the first training report; every report is used once.
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


def loss_of(model: LlamaForCausalLM, batch: list[Example]) -> torch.Tensor:
    """Weighted mean cross entropy; padding is on the right, where a causal model does not see it."""
    length = max(len(ids) for ids, _ in batch)
    ids_BT = torch.zeros(len(batch), length, dtype=torch.long)
    weight_BT = torch.zeros(len(batch), length)
    for row, (ids, num_prompt) in enumerate(batch):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        weight_BT[row, :num_prompt] = PROMPT_WEIGHT
        weight_BT[row, num_prompt : len(ids)] = 1.0
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
    loss_BT = cross_entropy(logits_BTV.transpose(1, 2), ids_BT[:, 1:], reduction="none")
    return (loss_BT * weight_BT[:, 1:]).sum() / weight_BT[:, 1:].sum()


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up over the first steps, and a cosine over `progress` (0 to 1) to 2% of the peak."""
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + cos(pi * progress)))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the bf16 model folder; the model in memory is not changed."""
    half = copy.deepcopy(model).bfloat16()
    half.config.dtype = torch.bfloat16
    half.save_pretrained(out)
    tokenizer.save_pretrained(out)
    tokenizer_config = out / "tokenizer_config.json"
    content = json.loads(tokenizer_config.read_text())
    content.pop("backend", None)
    content["tokenizer_class"] = (
        "PreTrainedTokenizerFast"  # the name that every release of transformers knows
    )
    tokenizer_config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def train(
    out: Path,
    *,
    num_layers: int,
    num_steps: int,
    minutes: float,
    tokens_per_step: int,
    eval_every_s: float,
    seed: int,
) -> None:
    """Train for `num_steps`, or for as many as `minutes` allow, and write the model folder to `out`.

    The folder is also written on the way, after every look at held-out reports.
    """
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    model = build_model(tokenizer, num_layers)
    print(
        f"parameters {sum(p.numel() for p in model.parameters()):,}  vocabulary {len(tokenizer)}", flush=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    rng = Random(seed)
    easy = batches(tokenizer, rng, fillers=False, start=0, tokens_per_step=tokens_per_step)
    hard = batches(tokenizer, rng, fillers=True, start=10_000_000, tokens_per_step=tokens_per_step)
    started, last_eval, num_tokens, mean_loss = time.monotonic(), time.monotonic(), 0, 0.0
    step, progress = 0, 0.0
    while progress < 1:
        # Fillers come in gradually around the middle, and are in three batches of four to the end.
        share_hard = min(0.75, max(0.0, (progress - 0.45) / 0.1))
        batch = next(hard if rng.random() < share_hard else easy)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress)
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_tokens += sum(len(ids) for ids, _ in batch)
        mean_loss = loss.item() if step == 0 else 0.95 * mean_loss + 0.05 * loss.item()
        now = time.monotonic()
        step += 1
        progress = max(step / num_steps, (now - started) / 60 / minutes)
        if step % 20 == 0:
            elapsed_s = now - started
            print(
                f"step {step}/{num_steps}  loss {mean_loss:.4f}  {num_tokens / elapsed_s:,.0f} tokens/s  "
                f"{elapsed_s / 60:.1f} min  ETA {elapsed_s / 60 * (1 / progress - 1):.1f} min",
                flush=True,
            )
        if now - last_eval > eval_every_s or progress >= 1:
            model.eval()
            print(
                f"  held out: {measure(model, tokenizer, num_reports=100, fillers=share_hard > 0)}",
                flush=True,
            )
            model.train()
            save(model, tokenizer, out)
            last_eval = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the demonstration model (about an hour on two cores)."
    )
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--layers", type=int, default=4, help="4 for the target, 1 for the draft")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument(
        "--minutes", type=float, default=120.0, help="end the schedule by then, with fewer steps"
    )
    parser.add_argument("--tokens-per-step", type=int, default=3072)
    parser.add_argument("--eval-every-s", type=float, default=240.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(
        options.out,
        num_layers=options.layers,
        num_steps=options.steps,
        minutes=options.minutes,
        tokens_per_step=options.tokens_per_step,
        eval_every_s=options.eval_every_s,
        seed=options.seed,
    )


if __name__ == "__main__":
    main()

"""Train LoRA adapters of the demonstration model: sentences with some of the facts. On a CPU, a few minutes each.

    python -m tools.demo.adapters --out pipeline/demo/adapters
    python -m tools.demo.adapters --measure 200       # those that ship, by our engine on the int4 model

An adapter changes every linear, with rank 4, and is written in PEFT's layout. It is trained on the 16-bit model, with
loss on the summary only.
"""

import argparse
import json
import time
from math import cos, pi
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear

from pipeline import Engine, EngineConfig, SamplingParams
from pipeline.checkpoints.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from pipeline.demo import ADAPTERS, demo_model
from pipeline.demo.reports import FACT_NAMES, HARD_FROM, Report, make_report
from tools.demo.measure import load
from tools.demo.tokenizer import EOS
from tools.demo.train import POOL, loss_of

FORMS = {
    "invoice": "On {date} at {site}, {technician} logged {hours} hours for {cost}.",
    "short": "At {site}, {technician} serviced {device} for {fault}.",
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8
PEAK_LR = 4e-3
TOKENS_PER_STEP = 3072
SEED = 5
assert set(FORMS) == set(ADAPTERS)


class LoraLinear(nn.Module):
    """A frozen linear with a trained update of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a_RK = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b_NR = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.base(x_TK) + ALPHA / RANK * linear(linear(x_TK, self.a_RK), self.b_NR)


def summary(report: Report, name: str) -> str:
    """Return the summary of a report in the form of an adapter."""
    return FORMS[name].format(**{fact: getattr(report.facts, fact) for fact in FACT_NAMES})


def train(name: str, out: Path, num_steps: int) -> None:
    """Train one adapter and write its folder."""
    torch.manual_seed(SEED)
    model, tokenizer = load(demo_model("target"))
    model.requires_grad_(False).train()
    model.set_attn_implementation("eager")  # faster than sdpa for these short sequences on a CPU
    adapted: dict[str, LoraLinear] = {}
    for path, module in list(model.named_modules()):
        if path.endswith(TARGETS):
            parent, _, child = path.rpartition(".")
            adapted[path] = LoraLinear(module)  # pyright: ignore[reportArgumentType]  # the names of linears
            setattr(model.get_submodule(parent), child, adapted[path])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], betas=(0.9, 0.98))
    started, mean_loss, batches, rng, first = time.monotonic(), 0.0, [], Random(SEED), HARD_FROM
    for step in range(num_steps):
        if not batches:
            reports = [make_report("train", index) for index in range(first, first + POOL)]
            first += POOL
            batches = _batches(tokenizer, reports, name, rng)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / 10) * 0.5 * (1 + cos(pi * step / num_steps))
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, batches.pop(), prompt_weight=0.0)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean_loss = loss.item() if step == 0 else 0.9 * mean_loss + 0.1 * loss.item()
        if (step + 1) % 20 == 0:
            print(f"{name}: step {step + 1}, loss {mean_loss:.4f}, {time.monotonic() - started:.0f} s", flush=True)
    _save(adapted, out / name)


def _batches(tokenizer, reports: list[Report], name: str, rng: Random) -> list[list[tuple[list[int], int]]]:
    """Return batches of token ids and lengths of prompts, each of similar lengths, in random order."""
    examples = []
    for report in reports:
        prompt = tokenizer.encode(report.prompt)
        examples.append(
            (prompt + tokenizer.encode(f" {summary(report, name)}{EOS}", add_special_tokens=False), len(prompt))
        )
    batches = [[]]
    for example in sorted(examples, key=lambda example: len(example[0])):
        if (len(batches[-1]) + 1) * len(example[0]) > TOKENS_PER_STEP and batches[-1]:
            batches.append([])
        batches[-1].append(example)
    rng.shuffle(batches)
    return batches


def _save(adapted: dict[str, LoraLinear], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = {}
    for path, module in adapted.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = module.a_RK.detach().bfloat16()
        tensors[f"base_model.model.{path}.lora_B.weight"] = module.b_NR.detach().bfloat16()
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def measure(folders: dict[str, str], model: str, num_reports: int) -> dict[str, float]:
    """Return the share of held-out reports whose summary is exactly right, by adapter, computed by our engine."""
    reports = [make_report("heldout", index) for index in range(num_reports)]
    prompts, names = [report.prompt for report in reports], list(folders)
    with Engine(EngineConfig(model=model, device="cpu", dtype="float32", adapters=folders)) as engine:
        params = SamplingParams(max_tokens=96)
        done = engine.generate(prompts * len(names), params, adapter=[name for name in names for _ in reports])
    texts = [completion.text.strip() for completion in done]
    right = dict.fromkeys(names, 0)
    for i, text in enumerate(texts):
        name = names[i // num_reports]
        right[name] += text == summary(reports[i % num_reports], name)
    return {name: count / num_reports for name, count in right.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the adapters of the demonstration model, or measure them.")
    parser.add_argument("--out", type=Path, help="folder to write the adapters to")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--measure", type=int, metavar="REPORTS", help="measure the adapters that ship")
    parser.add_argument("--model", default="demo:target-awq", help="model to measure them on")
    options = parser.parse_args()
    if options.out is not None:
        for name in FORMS:
            train(name, options.out, options.steps)
    if options.measure:
        for name, share in measure({name: f"demo:{name}" for name in FORMS}, options.model, options.measure).items():
            print(f"{name}: {share:.1%} of {options.measure} summaries are exactly right")


if __name__ == "__main__":
    main()

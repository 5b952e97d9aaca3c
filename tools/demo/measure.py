"""Measure the share of reports that a model summarizes correctly in every fact, with greedy decoding by transformers.

    python -m tools.demo.measure --model pipeline/demo/models/target-awq --reports 1000

The README's figures come from this script, independently of our engine. AWQ weights are dequantized to fp32 first, so
that the result depends on the quantized weights and not on an int4 kernel.
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from pipeline.demo.check import wrong_facts
from pipeline.demo.reports import Report, make_report
from pipeline.demo.words import SPLITS, Split

MAX_NEW_TOKENS = 96
AWQ_NIBBLE_COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)  # output column, of eight, in nibble i of an int32


@dataclass(frozen=True, slots=True)
class Score:
    """Counts of rows, of rows with every fact correct, and of errors by fact."""

    num_rows: int
    num_right: int
    wrong: Counter[str]

    @property
    def share(self) -> float:
        return self.num_right / self.num_rows

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {count}" for name, count in self.wrong.most_common()) or "none"
        return f"{self.num_right} of {self.num_rows} correct in every fact ({self.share:.2%}); errors: {errors}"


def unpack_awq(packed_KN8: torch.Tensor) -> torch.Tensor:
    """Unpack the int32 words `[K, N / 8]` of AutoAWQ's GEMM layout to unsigned 4-bit values `[K, N]`."""
    nibbles_KN8 = [(packed_KN8 >> (4 * nibble)) & 0xF for nibble in range(8)]
    column_of = sorted(range(8), key=lambda nibble: AWQ_NIBBLE_COLUMN[nibble])
    return torch.stack([nibbles_KN8[nibble] for nibble in column_of], dim=-1).flatten(1)


def dequantize_awq(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an AWQ state dict as a plain fp32 one: `weight[n, k] = (q[k, n] - zero[g, n]) * scale[g, n]`."""
    plain = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
    for name in [name for name in tensors if name.endswith(".qweight")]:
        layer = name.removesuffix(".qweight")
        q_KN, zero_GN = unpack_awq(tensors[name]), unpack_awq(tensors[f"{layer}.qzeros"])
        scale_GN = plain.pop(f"{layer}.scales")
        group = q_KN.shape[0] // scale_GN.shape[0]
        weight_KN = (q_KN - zero_GN.repeat_interleave(group, 0)) * scale_GN.repeat_interleave(group, 0)
        plain[f"{layer}.weight"] = weight_KN.T.contiguous()
    return plain


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load a folder's model, 16 bit or AWQ, in fp32, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if "quantization_config" not in config:
        return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer
    del config["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig.from_dict(config)).float()
    weights = dequantize_awq(load_file(folder / "model.safetensors"))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval(), tokenizer


def summarize(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], batch_size: int = 64
) -> list[str]:
    """Return greedy completions in the order of `prompts`, from static left-padded batches of similar lengths.

    Pads itself, since a padding call would change the tokenizer's settings, which a later save would write.
    """
    prompt_ids = [tokenizer.encode(prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompt_ids[index]))
    outputs = [""] * len(prompts)
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        length = max(len(prompt_ids[row]) for row in rows)
        padding = [length - len(prompt_ids[row]) for row in rows]
        ids_BT = torch.tensor(
            [[tokenizer.pad_token_id] * pad + prompt_ids[row] for row, pad in zip(rows, padding, strict=True)]
        )
        mask_BT = torch.tensor([[0] * pad + [1] * (length - pad) for pad in padding])
        with torch.inference_mode():
            out_BT = model.generate(  # pyright: ignore[reportAttributeAccessIssue]  # a mixin's, by decorator
                input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
            )
        texts = tokenizer.batch_decode(out_BT[:, length:], skip_special_tokens=True)
        for row, text in zip(rows, texts, strict=True):
            outputs[row] = text
    return outputs


def score(reports: list[Report], summaries: list[str]) -> Score:
    """Check `summaries` against `reports`, in the same order."""
    wrong = [wrong_facts(report.text, text) for report, text in zip(reports, summaries, strict=True)]
    num_right = sum(not names for names in wrong)
    return Score(len(wrong), num_right, Counter(name for names in wrong for name in names))


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_reports: int,
    fillers: bool = True,
    split: Split = "heldout",
    chat: bool = False,
) -> Score:
    """Summarize the first `num_reports` reports of `split` and check the summaries."""
    reports = [make_report(split, index, fillers=fillers) for index in range(num_reports)]
    prompts = [report.prompt for report in reports]
    if chat:
        bos = str(tokenizer.bos_token)  # both the template and the post-processor add one
        prompts = [chat_text(tokenizer, prompt).removeprefix(bos) for prompt in prompts]
    return score(reports, summarize(model, tokenizer, prompts))


def chat_text(tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """Render `prompt` as the only user message of a chat, with the generation prompt."""
    message = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a model folder on generated reports.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--reports", type=int, default=1000)
    parser.add_argument("--split", choices=SPLITS, default="heldout")
    parser.add_argument("--chat", action="store_true", help="send prompts through the chat template")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.monotonic()
    result = measure(*load(options.model), num_reports=options.reports, split=options.split, chat=options.chat)
    print(f"{options.model.name} on {options.split}: {result}  ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()

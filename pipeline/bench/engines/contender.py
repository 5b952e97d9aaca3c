"""What `bench engine` compares in this process: this engine with a record of its steps, and `transformers.generate` in
static batches. Each completes a list of requests and says how long it took. Other environments' are `peer.Peer`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.bench.request_sets import BenchRequest, run_requests
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.forward.runner import Runner
from pipeline.engine.schedule.step_plan import StepInput


@dataclass(frozen=True)
class StepTime:
    """One step of the engine. kv_tokens: the contexts of the sequences that computed a single token, added up.

    wall_s is the whole step, model_s what of it the model took.
    """

    num_sequences: int
    num_tokens: int
    num_logit_rows: int
    kv_tokens: int
    wall_s: float
    model_s: float

    @property
    def decodes_only(self) -> bool:
        return self.num_tokens == self.num_sequences


@dataclass(frozen=True)
class Ran:
    """The requests' tokens in their order, and the time from the first request to the last token.

    cpu_s: processor time of all threads, waiting in a spin included; None where it is another process's.
    """

    wall_s: float
    token_ids: list[list[int]]
    cpu_s: float | None = None
    steps: list[StepTime] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(len(tokens) for tokens in self.token_ids) / self.wall_s


class _RecordingRunner:
    """Passes steps on to the engine's runner and notes their sizes and the model's time."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.vocab_size, self.is_asynchronous = runner, runner.vocab_size, runner.is_asynchronous
        self.has_graphs = runner.has_graphs
        self.greedy, self.sample, self.zero_blocks = runner.greedy, runner.sample, runner.zero_blocks
        self.hidden_size, self.has_vocabulary_head = runner.hidden_size, runner.has_vocabulary_head
        self.class_head_CH, self.logits = runner.class_head_CH, runner.logits
        self.execute_and_read = runner.execute_and_read  # of no request set here
        self.last: tuple[StepInput, float] | None = None

    def execute(self, step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        start = time.perf_counter()
        logits = self.runner.execute(step, future)
        self.last = (step, time.perf_counter() - start)
        return logits

    def take(self, wall_s: float) -> StepTime | None:
        if self.last is None:
            return None
        step, model_s = self.last
        self.last = None
        single_S = np.diff(step.query_start_S1) == 1
        return StepTime(
            len(step.context_len_S),
            len(step.token_id_T),
            len(step.logit_row_R),
            int(step.context_len_S[single_S].sum()),
            wall_s,
            model_s,
        )


class ThisEngine:
    """All requests are added at once; the engine's scheduler does the rest.

    shared_prefixes: whether prompts may be found in the prefix cache; of random ones it would mean that a round was
    not fresh.
    """

    name = "this engine"

    def __init__(self, engine: Engine, shared_prefixes: bool = False) -> None:
        self.engine, self.shared_prefixes = engine, shared_prefixes
        self._recording = _RecordingRunner(engine.runner)
        engine.runner = self._recording

    def run(self, requests: Sequence[BenchRequest]) -> Ran:
        steps: list[StepTime] = []

        def note(wall_s: float) -> None:
            if (step := self._recording.take(wall_s)) is not None:
                steps.append(step)

        start, start_cpu = time.perf_counter(), time.process_time()
        token_ids = run_requests(self.engine, requests, self.shared_prefixes, note)
        return Ran(time.perf_counter() - start, token_ids, time.process_time() - start_cpu, steps)


class GenerateModel:
    """A checkpoint loaded by transformers, for static batches of several sizes."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str, eos_token_ids: frozenset[int]) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig, logging

        logging.disable_progress_bar()
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.model.eval().to(device)
        self.device, self.eos_token_ids = device, eos_token_ids
        # A new one: what the folder's says of EOS would end rows early.
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    @torch.inference_mode()
    def next_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits (vocabulary) of the token after `token_ids`."""
        return self.model(torch.tensor([token_ids], device=self.device), logits_to_keep=1).logits[0, -1].float()

    @torch.inference_mode()
    def generate(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        """One batch, padded on the left; it runs until its last row has all tokens or, where that counts, EOS."""
        ignore_eos = requests[0].ignore_eos
        assert all(request.ignore_eos == ignore_eos for request in requests)
        length = max(len(r.prompt_token_ids) for r in requests)
        padding = [length - len(r.prompt_token_ids) for r in requests]
        ids_BT = torch.tensor([[0] * pad + r.prompt_token_ids for pad, r in zip(padding, requests)])
        mask_BT = torch.tensor([[0] * pad + [1] * (length - pad) for pad in padding])
        most = max(r.max_tokens for r in requests)
        out_BT = self.model.generate(
            input_ids=ids_BT.to(self.device),
            attention_mask=mask_BT.to(self.device),
            max_new_tokens=most,
            eos_token_id=None if ignore_eos else sorted(self.eos_token_ids),
        )
        rows = [row[length : length + r.max_tokens].tolist() for row, r in zip(out_BT, requests)]
        return rows if ignore_eos else [self._until_eos(row) for row in rows]

    def _until_eos(self, tokens: list[int]) -> list[int]:
        end = next((at for at, token in enumerate(tokens) if token in self.eos_token_ids), len(tokens))
        return tokens[: end + 1]


class StaticBatches:
    """`transformers.generate` over batches of `batch_size` requests, sorted by the prompts' lengths."""

    def __init__(self, model: GenerateModel, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size
        self.name = f"transformers.generate, {batch_size} at once"

    def run(self, requests: Sequence[BenchRequest]) -> Ran:
        token_ids: list[list[int]] = [[] for _ in requests]
        start, start_cpu = time.perf_counter(), time.process_time()
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_token_ids))
        for first in range(0, len(order), self.batch_size):
            rows = order[first : first + self.batch_size]
            for row, tokens in zip(rows, self.model.generate([requests[row] for row in rows])):
                token_ids[row] = tokens
        return Ran(time.perf_counter() - start, token_ids, time.process_time() - start_cpu)

"""Engines that `benchmarks.engine` compares, and the check that two engines computed the same tokens.

This engine and `transformers.generate` in static batches run in this process. Engines of other environments run in a
process each, which reads names of request sets line by line (`peers/serve.py` defines the protocol). It loads its model
once and keeps running, so that rounds can alternate between engines; while it waits it uses memory but no CPU.
"""

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from benchmarks.request_sets import BenchRequest, run_requests
from pipeline.engine.engine import Engine
from pipeline.errors import ConfigError, EnvironmentFailed, PipelineError

NextLogits = Callable[[list[int]], torch.Tensor]
"""Token ids -> logits (vocab_size) of the next token."""

TIE = 1e-4  # in float32, the order of two logits closer than this may differ between engines
PEERS = Path(__file__).parent / "peers"
DRIVERS = {"vllm": "vllm_driver", "llama.cpp": "llama_cpp_driver"}
LOAD_S, RUN_S = 1800.0, 3600.0
MAX_LOG_CHARS = 2000  # of a failed peer's log, shown in the error


@dataclass(frozen=True)
class Ran:
    """Tokens of each request, in order, and the seconds from the first request to the last token.

    cpu_s: CPU time of all threads, including spinning; None for an engine in another process. computed_tokens: prompt
    and generated tokens that this engine computed; 0 for other engines.
    """

    wall_s: float
    token_ids: list[list[int]]
    cpu_s: float | None = None
    computed_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(len(tokens) for tokens in self.token_ids) / self.wall_s


class ThisEngine:
    """This engine, with all requests added at once.

    shares_prefixes: whether prompts may hit the prefix cache. A hit by a random prompt would mean a stale round.
    """

    name = "this engine"

    def __init__(self, engine: Engine, shares_prefixes: bool) -> None:
        self.engine, self.shares_prefixes = engine, shares_prefixes

    def run(self, requests: Sequence[BenchRequest]) -> Ran:
        before = self._num_computed()
        start, start_cpu = time.perf_counter(), time.process_time()
        token_ids = run_requests(self.engine, requests, self.shares_prefixes)
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
        # The last token of a request is sampled, but is no model input.
        return Ran(wall_s, token_ids, cpu_s, self._num_computed() - before - len(requests))

    def _num_computed(self) -> int:
        done = self.engine.stats
        known = done.prompt_tokens - done.cached_tokens + done.generated_tokens
        return known + done.recomputed_tokens + done.rejected_drafts


class GenerateModel:
    """Checkpoint loaded by transformers, for static batches of several sizes."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str, eos_token_ids: frozenset[int]) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig, logging

        logging.disable_progress_bar()
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.model.eval().to(device)
        self.device, self.eos_token_ids = device, eos_token_ids
        # The checkpoint's own generation config would stop rows at EOS.
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    @torch.inference_mode()
    def next_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return the logits (vocab_size) of the token after `token_ids`."""
        return self.model(torch.tensor([token_ids], device=self.device), logits_to_keep=1).logits[0, -1].float()

    @torch.inference_mode()
    def generate(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        """Run one left-padded batch until its last row has all its tokens, or EOS unless it is ignored."""
        ignore_eos = requests[0].ignore_eos
        assert all(request.ignore_eos == ignore_eos for request in requests)
        length = max(len(r.prompt_token_ids) for r in requests)
        padding = [length - len(r.prompt_token_ids) for r in requests]
        ids_BT = torch.tensor([[0] * pad + r.prompt_token_ids for pad, r in zip(padding, requests)])
        mask_BT = torch.tensor([[0] * pad + [1] * (length - pad) for pad in padding])
        out_BT = self.model.generate(
            input_ids=ids_BT.to(self.device),
            attention_mask=mask_BT.to(self.device),
            max_new_tokens=max(r.max_tokens for r in requests),
            eos_token_id=None if ignore_eos else sorted(self.eos_token_ids),
        )
        rows = [row[length : length + r.max_tokens].tolist() for row, r in zip(out_BT, requests)]
        return rows if ignore_eos else [self._until_eos(row) for row in rows]

    def _until_eos(self, tokens: list[int]) -> list[int]:
        end = next((at for at, token in enumerate(tokens) if token in self.eos_token_ids), len(tokens))
        return tokens[: end + 1]


class StaticBatches:
    """`transformers.generate` over batches of `batch_size` requests, sorted by prompt length."""

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


@dataclass(frozen=True)
class PeerTask:
    """Task of every peer.

    dense_model: folder with unquantized weights; equals `model` unless that is AWQ. work_folder: for the peer's own
    conversions of the checkpoint. max_num_seqs: None uses the peer's default. shared_prefixes: whether prompts share a
    prefix, so that a prefix cache helps. eos_token_ids: stop requests that do not ignore EOS. device: cpu, cuda or
    cuda:N. options: of vLLM's `LLM`.
    """

    model: str
    dense_model: str
    quantized: bool
    dtype: str
    threads: int
    max_model_len: int
    work_folder: str
    shared_prefixes: bool
    sets: Mapping[str, Sequence[BenchRequest]]
    device: str
    max_num_seqs: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def parse_peer(text: str) -> tuple[str, str]:
    """Split `vllm=/path` into name and path. Raises ConfigError for an unknown name or a missing path."""
    name, _, path = text.partition("=")
    if name not in DRIVERS or not path:
        raise ConfigError(f"--peer {text}: expected NAME=PATH, where NAME is one of {', '.join(DRIVERS)}")
    if not Path(path).exists():
        raise ConfigError(f"--peer {text}: no such file or folder")
    return name, path


class Peer:
    """Process of one peer. `python` is the interpreter of its environment."""

    def __init__(self, name: str, python: str, task: PeerTask) -> None:
        """Start the process and wait until its model is loaded and warmed up.

        Raises EnvironmentFailed with the end of its log when it exits before.
        """
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the process)
        self._folder = tempfile.TemporaryDirectory(prefix="bench-peer-")
        path = Path(self._folder.name) / "task.json"
        request: dict[str, Any] = {key: value for key, value in vars(task).items() if key != "sets"}
        request["sets"] = {key: [asdict(each) for each in requests] for key, requests in task.sets.items()}
        path.write_text(json.dumps(request))
        environment = os.environ | {"OMP_NUM_THREADS": str(task.threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [python, str(PEERS / "serve.py"), DRIVERS[name], str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,  # so that its children can be killed with it
        )
        self.settings: dict[str, str] = self._answer("ready", LOAD_S)["ready"]

    def run_set(self, name: str) -> Ran:
        """Run the request set `name` of the task."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        answer = self._answer("set", RUN_S)
        return Ran(answer["wall_s"], answer["token_ids"])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _answer(self, key: str, timeout_s: float) -> dict[str, Any]:
        """Return the next line, an object with `key`. Each request gets one line, so no line is left in a buffer."""
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise self._failed(f"no response within {timeout_s:.0f} s")
        line = stdout.readline()
        if not line:
            raise self._failed()
        answer = json.loads(line)
        assert key in answer, line[:200]
        return answer

    def _failed(self, reason: str | None = None) -> EnvironmentFailed:
        if reason is None:
            reason = f"its process exited with code {self._process.wait()}"
        self._log.flush()
        self._log.seek(0)
        log_end = self._log.read().strip()[-MAX_LOG_CHARS:]
        self.close()
        return EnvironmentFailed(f"peer {self.name}: {reason}\n{log_end}")


@dataclass(frozen=True)
class Agreement:
    """Counts of equal tokens over requests. Tokens after a request's first difference are not compared."""

    requests: int = 0
    equal_requests: int = 0
    compared_tokens: int = 0
    near_ties: int = 0

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other))))

    def to_text(self) -> str:
        text = f"{self.equal_requests} of {self.requests} completions equal, {self.compared_tokens:,} tokens"
        return text + (f", {self.near_ties} diverging at a near-tie" if self.near_ties else "")


def compare(
    requests: Sequence[BenchRequest],
    ours: Sequence[list[int]],
    theirs: Sequence[list[int]],
    next_logits: NextLogits | None = None,
) -> Agreement:
    """Compare completions of the same requests.

    With `next_logits`, a first difference must be a near-tie. Without it (16 bit, other weights), differences are only
    counted. Raises PipelineError for lengths other than requested and for a difference that is not a near-tie.
    """
    found = Agreement()
    for index, (request, mine, other) in enumerate(zip(requests, ours, theirs, strict=True)):
        first = next((at for at, (a, b) in enumerate(zip(mine, other)) if a != b), None)
        wanted = {request.max_tokens} if request.ignore_eos else range(1, request.max_tokens + 1)
        if len(mine) not in wanted or len(other) not in wanted or (first is None and len(mine) != len(other)):
            raise PipelineError(
                f"request {index}: requested {request.max_tokens} tokens, this engine generated {len(mine)} and the "
                f"other engine {len(other)}: unequal work cannot be compared"
            )
        if first is None:
            found += Agreement(1, 1, len(mine))
            continue
        if next_logits is not None:
            logits = next_logits(request.prompt_token_ids + mine[:first])
            gap = float(logits[other[first]] - logits[mine[first]])
            if abs(gap) >= TIE:
                raise PipelineError(
                    f"request {index}: token {first} is {mine[first]} in this engine and {other[first]} in the other, "
                    f"whose logit is {gap:.2e} higher: they do not compute the same model, so times cannot be compared"
                )
        found += Agreement(1, 0, first + 1, int(next_logits is not None))
    return found

"""An engine and a tokenizer without a model: tokens follow from the prompt and the row's seed alone.

The section "fake" in the model folder's config.json configures the engine: step_s, max_num_seqs, load_s, prints (a
text), slow (a text) and slow_s (duration of steps with that text; with slow_until only until that number of engines
has loaded, by the files that they leave in the folder loaded_in), max_model_len (longer prompts are refused), cached
(tokens at the head of every prompt but the first, from cache), kinds (number of different answers, of one token
each), computed (a file that gets a line for each computed request), fail_load (a class of `pipeline.errors`, or a
built-in one), and texts that, in a running prompt, end the process (kill, segfault), hang it (hang) or raise (crash,
out_of_memory, unusable). A `once` file path limits the fault to the first time; a file at `cured_by` ends it.
resolved_in: a file with more resolved settings. stops_once: the first process, which creates this file, stops as soon
as it is ready.
"""

import builtins
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline import errors
from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.engine.request import Request
from pipeline.engine.samples import ParentRequest, sample_seed
from pipeline.engine.stats import EngineStats
from pipeline.engine.tasks import (
    Choice,
    ChoiceResult,
    Classify,
    Embed,
    Score,
    ScoreResult,
    Task,
    TaskResult,
    TokenLogprobs,
    VectorResult,
)

HIDDEN_SIZE = 8


class FakeTokenizer:
    digest = "fake"
    end_token_id = 0
    control_texts = ("<|end|>", "<|start|>")

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def encode_template(self, pieces: list[str]) -> list[int]:
        return list("".join(pieces).encode())

    def continuation(self, ids: Sequence[int], text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages, system=None, *_: object, **options: object) -> list[int]:
        text = f"[{system}]" if system else ""
        return list((text + "".join(f"<{m['role']}>{m['content']}" for m in messages)).encode())


def load_tokenizer(folder: str, chat_template: str | None = None) -> FakeTokenizer:
    return FakeTokenizer()


def answer(prompt_token_ids: list[int], seed: int | None, max_tokens: int) -> list[int]:
    digest = hashlib.sha256(f"{prompt_token_ids} {seed}".encode()).digest()
    length = 1 + digest[0] % max_tokens
    return [digest[i % 32] for i in range(length)]


def result_of(prompt_token_ids: list[int], task: Task) -> TaskResult:
    """Return the task's result: numbers that follow from the request alone, exact in float32. A vector has `dimensions`
    or HIDDEN_SIZE of them, or one for each of the three labels of `classify`."""
    digest = hashlib.sha256(f"{prompt_token_ids} {task}".encode()).digest()
    match task:
        case Score(first=first, top=top):
            scored = prompt_token_ids[first:]
            return ScoreResult(-0.5 * len(scored), len(scored), None if top is None else tuple(_each(scored, top)))
        case Choice(labels=labels):
            return ChoiceResult(tuple(-digest[i % 32] / 64 for i in range(len(labels))))
        case Embed(dimensions=dimensions):
            values = [digest[i % 32] / 64 for i in range(dimensions or HIDDEN_SIZE)]
            return VectorResult(np.array(values, dtype=np.float32))
        case Classify():
            return VectorResult(np.array([digest[i] / 64 for i in range(3)], dtype=np.float32))


def text_of(token_ids: list[int]) -> str:
    return " ".join(map(str, token_ids))


def _logprobs(token_ids: list[int], top: int | None) -> list[TokenLogprobs] | None:
    return None if top is None else _each(token_ids, top)


def _each(token_ids: list[int], top: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5, tuple((token + i, -0.5 - i) for i in range(top))) for token in token_ids]


class FakeEngine:
    def __init__(self, config: EngineConfig, log: Callable[[str], None]) -> None:
        self.log = log
        log("reading weights")
        fake = json.loads((Path(config.model) / "config.json").read_text()).get("fake", {})
        self.fake = fake
        if "prints" in fake:
            print(fake["prints"], flush=True)
        if "fail_load" in fake:
            kind = getattr(errors, fake["fail_load"], None) or getattr(builtins, fake["fail_load"])
            raise kind(f"{config.model}: fake failure")
        if fake.get("die_loading"):
            os._exit(9)
        time.sleep(fake.get("load_s", 0))
        if "loaded_in" in fake:
            (Path(fake["loaded_in"]) / str(os.getpid())).touch()
        self.resolved = {"device": "fake", "max_num_seqs": fake.get("max_num_seqs", 8)}
        if "resolved_in" in fake:
            self.resolved |= json.loads(Path(fake["resolved_in"]).read_text())
        self.max_model_len = config.max_model_len or fake.get("max_model_len", 10**9)
        self.stats = EngineStats()
        self.waiting: list[Request] = []
        self.running: dict[object, tuple[Request, list[int], int]] = {}
        self.cached: dict[object, int] = {}
        self.queued_us: dict[object, int] = {}
        self.first_token_us: dict[object, int] = {}
        self.groups: dict[object, tuple[ParentRequest, object, int]] = {}  # sample key -> parent, row, index

    def warm_up(self) -> None:
        self.log("warming up")

    def counters(self) -> dict[str, int]:
        return self.stats.flat()

    @property
    def has_unfinished(self) -> bool:
        if "stops_once" in self.fake and not Path(self.fake["stops_once"]).exists():
            Path(self.fake["stops_once"]).touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        params, group = request.params, ParentRequest(request.params.n)
        for index in range(params.n):
            sample = request
            if params.n > 1:
                own = replace(params, n=1, seed=sample_seed(params.seed or 0, index))
                sample = replace(request, row_id=(request.row_id, index), params=own)
                self.groups[sample.row_id] = group, request.row_id, index
            self.waiting.append(sample)
            self.queued_us[sample.row_id] = time.monotonic_ns() // 1000

    def drain(self) -> None:
        begun = {self.groups[key][1] for key in self.running if key in self.groups}
        self.waiting = [r for r in self.waiting if r.row_id in self.groups and self.groups[r.row_id][1] in begun]

    def _whole(self, completions: list[Completion]) -> list[Completion]:
        """Return completions of whole requests: those of several samples once all their samples have finished."""
        whole: list[Completion | None] = []
        for completion in completions:
            if completion.row_id not in self.groups:
                whole.append(completion)
                continue
            group, row_id, index = self.groups.pop(completion.row_id)
            whole.append(group.end(index, replace(completion, row_id=row_id)))
        return [completion for completion in whole if completion is not None]

    def step(self) -> list[Completion]:
        started = time.monotonic_ns() // 1000
        refused: list[Completion] = []
        while self.waiting and len(self.running) < self.fake.get("max_num_seqs", 8):
            request = self.waiting.pop(0)
            length = len(request.prompt_token_ids)
            if length >= self.max_model_len:
                refused.append(Completion(request.row_id, [], "", "error", length, error="prompt_too_long"))
                continue
            ids = answer(request.prompt_token_ids, request.params.seed, request.params.max_tokens)
            if "kinds" in self.fake:
                ids = [ids[0] % self.fake["kinds"]]
            self.running[request.row_id] = (request, ids, 0)
            self.cached[request.row_id] = self.fake.get("cached", 0) if self.stats.prompt_tokens else 0
            self.stats.prompt_tokens += len(request.prompt_token_ids)
            self.stats.cached_tokens += self.cached[request.row_id]
        prefilled = time.monotonic_ns() // 1000
        step_s = self.fake.get("step_s", 0.0)
        for request, _, _ in self.running.values():
            text = bytes(
                token for token in request.prompt_token_ids if token < 256
            )  # of a real tokenizer: only the first ids
            self._maybe_fail(text.decode(errors="replace"))
            if self.fake.get("slow", "\0") in text.decode(errors="replace") and self._is_slow():
                step_s = self.fake["slow_s"]
        time.sleep(step_s)
        finished = []
        for key, (request, ids, num_done) in list(self.running.items()):
            self.stats.generated_tokens += request.task is None
            self.running[key] = (request, ids, num_done + 1)
            now = time.monotonic_ns() // 1000
            self.first_token_us.setdefault(key, now)
            if request.task is not None or num_done + 1 == len(ids):
                del self.running[key]
                finished.append(self._completion(key, request, ids, now))
                if "computed" in self.fake:
                    text = f"{request.prompt_token_ids} {request.params.seed} {request.task}"
                    with open(self.fake["computed"], "a") as file:
                        file.write(hashlib.sha256(text.encode()).hexdigest() + "\n")
        self.stats.num_steps += 1
        self.stats.prefill_us += prefilled - started
        self.stats.decode_us += time.monotonic_ns() // 1000 - prefilled
        return self._whole(refused + finished)

    def _completion(self, key: object, request: Request, ids: list[int], now: int) -> Completion:
        prompt, params = request.prompt_token_ids, request.params
        done = Completion(
            request.row_id,
            [],
            "",
            "stop",
            len(prompt),
            self.cached.pop(key),
            queued_us=self.queued_us.pop(key),
            first_token_us=self.first_token_us.pop(key),
            last_token_us=now,
        )
        if request.task is not None:
            return replace(done, result=result_of(prompt, request.task))
        return replace(
            done,
            token_ids=ids,
            text=text_of(ids),
            finish_reason="length" if len(ids) == params.max_tokens else "stop",
            logprobs=_logprobs(ids, params.logprobs),
            prompt_logprobs=_logprobs(prompt[1:], params.prompt_logprobs),
        )

    def _is_slow(self) -> bool:
        if "slow_until" not in self.fake:
            return True
        return len(os.listdir(self.fake["loaded_in"])) < self.fake["slow_until"]

    def _maybe_fail(self, prompt: str) -> None:
        kinds = ("kill", "segfault", "hang", "crash", "out_of_memory", "unusable")
        fault = next((kind for kind in kinds if self.fake.get(kind, "\0") in prompt), None)
        if fault is None or os.path.exists(self.fake.get("cured_by", "")):
            return
        once = self.fake.get("once")
        if once is not None:
            try:
                Path(once).touch(exist_ok=False)
            except FileExistsError:
                return
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "hang":
            time.sleep(1000)
        if fault == "unusable":
            raise errors.EngineUnusable("a fake failure that no restart heals")
        raise MemoryError("fake") if fault == "out_of_memory" else RuntimeError("a fake step failed")

"""An engine and a tokenizer without a model, as fast as Python: an answer is a hash of the row's text alone.

`seconds_per_step` in the model folder's config.json slows the engine down, which answers MAX_RUNNING rows per step.
"""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.engine.request import Request
from pipeline.engine.stats import EngineStats
from pipeline.job.actor.backends import OwnEngine

MAX_RUNNING = 64


def answer(text: str) -> str:
    """Return the answer to a prompt."""
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of the text."""

    control_texts = ()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


def load_tokenizer(folder: str, chat_template: str | None) -> ByteTokenizer:
    return ByteTokenizer()


class HashEngine:
    """Engine that generates one token for each row, and the row's hash as text."""

    def __init__(self, config: EngineConfig, log: Callable[[str], None]) -> None:
        self.resolved: dict[str, str | int] = {"device": "fake", "max_num_seqs": MAX_RUNNING}
        self.max_model_len = 1 << 20
        self.stats = EngineStats()
        self._step_s = json.loads((Path(config.model) / "config.json").read_text())["seconds_per_step"]
        self._waiting: list[tuple[Request, int]] = []

    def warm_up(self) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return self.stats.flat()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Any) -> None:
        self._waiting.append((request, time.monotonic_ns() // 1000))

    def step(self) -> list[Completion]:
        began_us = time.monotonic_ns() // 1000
        time.sleep(self._step_s)
        running, self._waiting = self._waiting[:MAX_RUNNING], self._waiting[MAX_RUNNING:]
        now_us = time.monotonic_ns() // 1000
        done = [
            Completion(
                request.row_id,
                [len(request.prompt_token_ids) % 256],
                answer(bytes(request.prompt_token_ids).decode()),
                "stop",
                len(request.prompt_token_ids),
                queued_us=queued_us,
                first_token_us=now_us,
                last_token_us=now_us,
            )
            for request, queued_us in running
        ]
        self.stats.prompt_tokens += sum(row.num_prompt_tokens for row in done)
        self.stats.generated_tokens += len(done)
        self.stats.num_steps += 1
        self.stats.decode_us += time.monotonic_ns() // 1000 - began_us
        return done


HASHES = OwnEngine("tests.faults.fakes:HashEngine", "tests.faults.fakes:load_tokenizer")

"""Turn a unit's prompts into requests for the engine: chat template, tokenizer, each row's own options and seed.

A row that cannot be sent becomes a completion with an error. Jobs, `pipeline generate` and samples all render rows
here.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.data.units import Unit
from pipeline.engine.completion import Completion
from pipeline.engine.grammar.structured_outputs import of_response_format
from pipeline.engine.request import QualitySample, Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import ConfigError, RowError
from pipeline.job.actor.control_tokens import AuthorTexts, ControlTokenCounter
from pipeline.job.actor.tasks import JobTask, RowRefused
from pipeline.tokenization.chat_messages import ChatTemplateError

if TYPE_CHECKING:
    from pipeline.config.sections.prompt import PromptSection
    from pipeline.config.sections.task import TaskType
    from pipeline.tokenization.tokenizer import Tokenizer


T = TypeVar("T")


@dataclass(frozen=True)
class Chat:
    """Settings that turn a prompt into a chat. With `from_messages` the unit's prompts are messages as JSON. `now`: the
    date for the chat template."""

    from_messages: bool = False
    system: str | None = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = True
    now: datetime | None = None


# As in vLLM's pooling requests: vector and classes belong to the chat, without the start of an assistant message.
_WITHOUT_ASSISTANT = ("embed", "classify")


def chat_of(prompt: "PromptSection", task: "TaskType", now: datetime | None) -> Chat | None:
    """Return the chat settings, or None if prompts are sent as they are. `now`: the date, if the job file has none."""
    given = prompt.chat
    if given is None:
        return None
    return Chat(
        prompt.messages is not None or bool(prompt.images),
        given.system,
        task not in _WITHOUT_ASSISTANT,
        given.chat_template_kwargs,
        given.continue_final_message,
        now if given.date is None else datetime.fromisoformat(given.date),
    )


def row_seed(job_seed: int, source_file: str, source_row: int) -> int:
    """Return a row's 63-bit seed. It depends only on the job's seed and the row's origin."""
    return _hash_of(f"{job_seed}\0{source_file}\0{source_row}")


def step_seed(job_seed: int, source_file: str, source_row: int, step: str, attempt: int) -> int:
    """Return the 63-bit seed of a row's request for a step after the first prompt. attempt: from 0."""
    return _hash_of(f"{job_seed}\0{source_file}\0{source_row}\0{step}\0{attempt}")


def is_sampled(share: float, job_seed: int, source_file: str, source_row: int) -> bool:
    """Return whether a row is compared with a reference model. The choice is the same in every run, and a larger share
    adds rows without dropping any."""
    return share > 0 and _hash_of(f"quality\0{job_seed}\0{source_file}\0{source_row}") < share * 2**63


def _hash_of(text: str) -> int:
    """Return a 63-bit hash."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def read_rows(
    unit: Unit, params: SamplingParams, seed: int
) -> tuple[list[tuple[int, str, SamplingParams]], list[Completion]]:
    """Return the index, prompt and parameters of a unit's rows, and the completions of rows that already failed.
    Dropped rows have neither. params: defaults. seed: the job's."""
    accepted: list[tuple[int, str, SamplingParams]] = []
    failed: list[Completion] = []
    columns = [
        unit.own(name).to_pylist()
        for name in ("_prompt", "_error", "_error_message", "_params", "source_file", "source_row", "_dropped")
    ]
    for i, (prompt, error, message, own, file, row, is_dropped) in enumerate(zip(*columns, strict=True)):
        if is_dropped:
            continue
        if error is not None:
            failed.append(failed_row(i, error, message or ""))
            continue
        try:
            values = _nested(json.loads(own)) if own else {}
            accepted.append((i, prompt, replace(params, **{"seed": row_seed(seed, file, row), **values})))
        except (ConfigError, TypeError) as refused:
            failed.append(failed_row(i, RowError.INVALID_SAMPLING, str(refused)))
    return accepted, failed


class Tokenize:
    """Turn a unit's prompts into requests. A request's row_id is the row's index in the unit."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        params: SamplingParams,
        seed: int,
        chat: Chat | None,
        quality_sample: float = 0.0,
        task: JobTask | None = None,
        author: AuthorTexts | None = None,
    ) -> None:
        """quality_sample: share of rows to compare with a reference model. task: replaces completions."""
        self._to_request = None if task is None else task.asker(tokenizer)
        self._tokenizer = tokenizer
        self._quality_sample = quality_sample
        self._params = params
        self._seed = seed
        self._chat = chat
        author = author or AuthorTexts()
        self.control_tokens = ControlTokenCounter(tokenizer.control_texts, author)
        self._in_pieces = author.parses_control_tokens
        self._chat_lock = threading.Lock()  # one process renders the template for all threads

    def __call__(self, unit: Unit) -> tuple[list[Request], list[Completion]]:
        """Return the requests, and the completions of rows that already failed."""
        accepted, failed = read_rows(unit, self._params, self._seed)
        sampled: dict[int, QualitySample] = {}
        if self._quality_sample > 0:
            columns = (unit.own(name).to_pylist() for name in ("source_file", "source_row", "_expected"))
            for i, (file, row, expected) in enumerate(zip(*columns, strict=True)):
                if is_sampled(self._quality_sample, self._seed, file, row):
                    sampled[i] = QualitySample(expected)
        adapters = unit.own("_adapter").to_pylist()
        if self._chat is None:
            if self._in_pieces:
                encoded = [self._tokenizer.encode_template(json.loads(prompt)) for _, prompt, _ in accepted]
            else:
                encoded = self._tokenizer.encode_batch([prompt for _, prompt, _ in accepted])
            pairs = zip(accepted, encoded, strict=True)
            requests = [Request(i, ids, params, sampled.get(i), adapter=adapters[i]) for (i, _, params), ids in pairs]
            return self._with_tasks(unit, requests, failed)
        requests = []
        for i, prompt, params in accepted:
            try:
                ids = self._through_template(self._tokenizer.encode_chat, prompt, self._chat)
                requests.append(Request(i, ids, params, sampled.get(i), adapter=adapters[i]))
            except ChatTemplateError as refused:
                failed.append(failed_row(i, RowError.INVALID_MESSAGES, str(refused)))
        return self._with_tasks(unit, requests, failed)

    def _with_tasks(
        self, unit: Unit, requests: list[Request], failed: list[Completion]
    ) -> tuple[list[Request], list[Completion]]:
        """Return the requests with the job's task; rows that the task rejects fail."""
        if self._to_request is None:
            return requests, failed
        texts, with_tasks = unit.own("_texts").to_pylist(), []
        for request in requests:
            prompt, i = request.prompt_token_ids, request.row_id
            assert isinstance(i, int)
            try:
                ids, task = self._to_request(prompt, texts[i])
                with_tasks.append(replace(request, prompt_token_ids=ids, task=task))
            except RowRefused as refused:
                failed.append(failed_row(i, refused.code, str(refused), len(prompt)))
        return with_tasks, failed

    def shown(self, prompt: str) -> str:
        """Return a unit's prompt as the model receives it, as text. Raises ChatTemplateError."""
        if self._in_pieces:
            return "".join(json.loads(prompt))
        return prompt if self._chat is None else self._through_template(self._tokenizer.render_chat, prompt, self._chat)

    def _through_template(self, render: Callable[..., T], prompt: str, chat: Chat) -> T:
        messages = json.loads(prompt) if chat.from_messages else [{"role": "user", "content": prompt}]
        with self._chat_lock:
            return render(
                messages,
                chat.system,
                chat.add_generation_prompt,
                chat.template_kwargs,
                chat.continue_final_message,
                chat.now,
            )


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Convert a row's own options to the mapping that SamplingParams takes: `structured_outputs.json` and the like, or
    OpenAI's `response_format` as JSON. Raises ConfigError."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        if name == "response_format":
            nested["structured_outputs"] = of_response_format(json.loads(str(value)))
            continue
        option, _, kind = name.partition(".")
        nested[option] = {kind: value} if kind else value
    return nested


def failed_row(row_id: object, error: str, message: str, num_prompt_tokens: int = 0) -> Completion:
    """Return the completion of a row that never reached the engine."""
    return Completion(
        row_id=row_id,
        token_ids=[],
        text="",
        finish_reason="error",
        num_prompt_tokens=num_prompt_tokens,
        error=str(error),
        error_message=message,
    )

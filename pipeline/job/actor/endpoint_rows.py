"""Turn a unit's rows into requests for a server, which renders chats and tokenizes itself.

A prompt that is no chat is sent as tokens too, if the job names the tokenizer (`model.path`) and the server accepts
tokens. In other texts a server parses control tokens, so rows whose own text holds some are marked.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.data.units import Unit
from pipeline.endpoint.body import chat_body, completion_body, embedding_body
from pipeline.endpoint.spec import EndpointRequest, Route
from pipeline.engine.completion import Completion
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import RowError
from pipeline.job.actor.control_tokens import AuthorTexts, ControlTokenCounter
from pipeline.job.actor.tasks import EmbedTask, JobTask
from pipeline.job.actor.tokenize import Chat, failed_row, read_rows
from pipeline.report.record.data_warnings import ControlTokenRows

if TYPE_CHECKING:
    from pipeline.tokenization.tokenizer import Tokenizer


class EndpointRows:
    """Reader of a unit's rows. A request's row_id is the row's index in the unit. Thread-safe."""

    def __init__(
        self,
        route: Route,
        tokenizer: "Tokenizer | None",
        params: SamplingParams,
        seed: int,
        chat: Chat | None,
        task: JobTask | None,
        author: AuthorTexts,
    ) -> None:
        """tokenizer: None: control tokens are unknown, and prompts are sent as text."""
        self._route, self._tokenizer, self._params, self._seed, self._chat = route, tokenizer, params, seed, chat
        self._in_pieces = author.parses_control_tokens
        self._dimensions = task.length if isinstance(task, EmbedTask) else 0
        self._counter = ControlTokenCounter(() if tokenizer is None else tokenizer.control_texts, author)

    def __call__(self, unit: Unit) -> tuple[list[EndpointRequest], list[Completion]]:
        """Return the requests, and the completions of rows that already failed."""
        accepted, failed = read_rows(unit, self._params, self._seed)
        ids = self._tokens([prompt for _, prompt, _ in accepted])
        images = unit.own("_images").to_pylist()
        requests: list[EndpointRequest] = []
        for (i, prompt, params), row_ids in zip(accepted, ids, strict=True):
            if params.prompt_logprobs is not None:
                reason = "prompt_logprobs is not supported with a server"
                failed.append(failed_row(i, RowError.INVALID_SAMPLING, reason))
                continue
            try:
                body = self._body(prompt, params)
            except ValueError as error:
                failed.append(failed_row(i, RowError.INVALID_MESSAGES, str(error)))
                continue
            control_token = self._counter.first_in_row(prompt)
            found = tuple(image["content"] or image["name"] for image in images[i] or ())
            requests.append(EndpointRequest(i, body, params, tuple(row_ids), control_token, found))
        return requests, failed

    def control_tokens(self, unit: Unit) -> ControlTokenRows:
        return self._counter(unit)

    def shown(self, prompt: str) -> str:
        return "".join(json.loads(prompt)) if self._in_pieces else prompt

    def _tokens(self, prompts: list[str]) -> Sequence[Sequence[int]]:
        if self._tokenizer is None or self._route == "chat":
            return [()] * len(prompts)
        if self._in_pieces:
            return [self._tokenizer.encode_template(json.loads(prompt)) for prompt in prompts]
        return self._tokenizer.encode_batch(prompts)

    def _body(self, prompt: str, params: SamplingParams) -> Mapping[str, Any]:
        if self._route == "embedding":
            return embedding_body(self.shown(prompt), self._dimensions)
        if self._chat is None:
            return completion_body(self.shown(prompt), params)
        messages = json.loads(prompt) if self._chat.from_messages else [{"role": "user", "content": prompt}]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError("expected a list of messages, each with role and content")
        if self._chat.system is not None and not any(message.get("role") == "system" for message in messages):
            messages = [{"role": "system", "content": self._chat.system}, *messages]
        options: dict[str, Any] = {}
        if self._chat.template_kwargs:
            options["chat_template_kwargs"] = dict(self._chat.template_kwargs)
        if self._chat.continue_final_message and messages and messages[-1].get("role") == "assistant":
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        return chat_body(messages, params, options)

"""Child process that runs a chat template. Started by `chat.py` as a script; imports only jinja2.

The protocol is lines of JSON. The first input line contains the template and the limits, each following one the
variables of a conversation and its time; each is answered by one line, {"text": ...} or {"error": ...}. The kernel
kills the process if a conversation takes too much CPU time, so that even a single endless operation ends.

The environment is that of transformers' `apply_chat_template` (utils/chat_template_utils.py): same sandbox, block
trimming, filters and globals. In addition, the rendered text depends only on the template, the variables and the time:
the clock is not read, the random generator is seeded for each conversation, and values that print a memory address are
rejected.
"""

import json
import random
import re
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ADDRESS = re.compile(r"<.* at 0x[0-9a-f]+>", re.DOTALL)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training. Here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads a plain set)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(now: str | None) -> Callable[[str], str]:
    """Return the function that templates call for the date. `now` None: the caller provides no date."""

    def strftime_now(form: str) -> str:
        if now is None:
            raise jinja2.TemplateError("it needs the date, but none was given")
        return datetime.fromisoformat(now).strftime(form)

    return strftime_now


def _printable(value: Any) -> Any:
    """Check a value that a template prints. The text of a function or generator is its address, which varies."""
    if not isinstance(value, str | int | float | list | dict) and _ADDRESS.fullmatch(str(value)):
        raise jinja2.TemplateError(f"it prints a {type(value).__name__}, not a value (are parentheses missing?)")
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols], finalize=_printable
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _render(template: jinja2.Template, message: dict[str, Any], limit: int) -> str:
    pieces: list[str] = []
    length = 0
    random.seed(0)  # for `lipsum` and the filter `random`
    for piece in template.generate({"strftime_now": _strftime_now(message["now"])} | message["variables"]):
        pieces.append(piece)
        length += len(piece)
        if length > limit:
            raise jinja2.TemplateError(f"the rendered text is longer than {limit} characters")
    return "".join(pieces)


def _error_answer(error: BaseException) -> dict[str, str]:
    if isinstance(error, MemoryError):
        return {"error": "rendering took too much memory"}
    text = str(error) or type(error).__name__
    prefix = "" if type(error) is jinja2.TemplateError else f"{type(error).__name__}: "
    return {"error": (prefix + text)[:2000]}


def main() -> None:
    # The parent handles signals; this process exits at the end of its input, or when its time is up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    template: jinja2.Template | None = None
    hello: dict[str, Any] = {}
    for line in sys.stdin.buffer:
        message = json.loads(line)
        answer: dict[str, str]
        try:
            if template is None:
                hello = message
                memory = int(hello["memory_limit_bytes"])
                resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
                signal.setitimer(signal.ITIMER_PROF, hello["cpu_limit_s"])
                template = make_environment().from_string(hello["template"])
                answer = {"text": ""}
            else:
                signal.setitimer(signal.ITIMER_PROF, hello["cpu_limit_s"])
                answer = {"text": _render(template, message, hello["rendered_limit_chars"])}
        except Exception as error:  # untrusted code may raise anything
            answer = _error_answer(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode("ascii") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

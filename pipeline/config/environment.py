"""`${NAME}` and `${NAME:-default}` in a job file: environment variables, in the values of paths and nowhere else.

Prompts, templates and stop strings are never looked at: `${price}` in them is text.
"""

import re
from collections.abc import Mapping

from pipeline.config.jobfile import Document, JobFileError, KeyPath, Mistake, Value, dotted, merge

PLACES: tuple[tuple[str, ...], ...] = (
    ("input", "path"),
    ("output", "path"),
    ("model", "path"),
    ("model", "draft"),
    ("prompt", "chat", "template"),
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^{}]*))?\}")


def expanded(document: Document, environ: Mapping[str, str]) -> Document:
    """`document` with the variables of its paths filled in. A variable that is empty counts as not set, as in a shell.

    Raises JobFileError with every variable that is neither set nor has a default.
    """
    mistakes: list[Mistake] = []
    for place in PLACES:
        text = _value(document, place)
        if not isinstance(text, str) or "${" not in text:
            continue
        where, key = document.where(place), dotted(place)
        missing = [name for name, default, _ in _VARIABLE.findall(text) if not default and not environ.get(name)]
        hint = "Set it, or give a default: ${NAME:-default}."
        mistakes += [Mistake(where, key, f"the environment variable {name} is not set", hint) for name in missing]
        if "${" in _VARIABLE.sub("", text):
            mistakes.append(Mistake(where, key, "expected ${NAME} or ${NAME:-default}", "Close the brace."))
        filled = _VARIABLE.sub(lambda found: environ.get(found[1]) or found[3] or "", text)
        data: Value = filled
        for step in reversed(place):
            data = {step: data}
        assert isinstance(data, dict)
        origins: dict[KeyPath, str] = {place[:n]: document.where(place[:n]) for n in range(1, len(place) + 1)}
        document = merge(document, Document(data, origins))
    if mistakes:
        raise JobFileError(mistakes)
    return document


def _value(document: Document, place: tuple[str, ...]) -> object:
    value: object = document.data
    for step in place:
        value = value.get(step) if isinstance(value, dict) else None
    return value

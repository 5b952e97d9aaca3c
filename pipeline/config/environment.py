"""`${NAME}` and `${NAME:-default}` in a job file: environment variables, in the values of paths and nowhere else.

In the paths of input and output a name that the job declares in `vars` is that variable.

Prompts, templates and stop strings are never looked at: `${price}` in them is text.
"""

import re
from collections.abc import Mapping

from pipeline.config.jobfile import Document, JobFileError, KeyPath, Mistake, Value, dotted, merge
from pipeline.config.variables import Now, values_of

PLACES: tuple[tuple[str, ...], ...] = (
    ("input", "path"),
    ("output", "path"),
    ("model", "path"),
    ("speculation", "model"),
    ("quality", "model"),
    ("prompt", "chat", "template"),
    ("sampling", "structured_outputs", "json_file"),
)
VARIABLE_PLACES = (("input", "path"), ("output", "path"))
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^{}]*))?\}")


def expanded(document: Document, environ: Mapping[str, str], given: Mapping[str, str], now: Now) -> Document:
    """`document` with the variables of its paths filled in. A variable that is empty counts as not set, as in a shell.
    `given`: values of the job's variables. `now`: returns the time in a zone.

    Raises JobFileError with every variable that is neither set nor has a default, and each mistake in `vars`.
    """
    declared, mistakes = values_of(document, given, now)
    wrong = {mistake.key.removeprefix("vars.") for mistake in mistakes}
    unused = {*declared}
    environ = {**environ, **declared}
    for place in PLACES:
        text = _value(document, place)
        if not isinstance(text, str) or "${" not in text:
            continue
        names = {name for name, _, _ in _REFERENCE.findall(text)}
        if wrong & names:
            continue  # reported already
        if place in VARIABLE_PLACES:
            unused -= names
        elif names & declared.keys():
            what = f"the variable {min(names & declared.keys())} cannot stand here"
            mistakes.append(Mistake(document.where(place), dotted(place), what, "Only in input.path and output.path."))
            continue
        where, key = document.where(place), dotted(place)
        missing = [name for name, default, _ in _REFERENCE.findall(text) if not default and not environ.get(name)]
        hint = "Set it, or give a default: ${NAME:-default}."
        mistakes += [Mistake(where, key, f"the environment variable {name} is not set", hint) for name in missing]
        if "${" in _REFERENCE.sub("", text):
            mistakes.append(Mistake(where, key, "expected ${NAME} or ${NAME:-default}", "Close the brace."))
        filled = _REFERENCE.sub(lambda found: environ.get(found[1]) or found[3] or "", text)
        data: Value = filled
        for step in reversed(place):
            data = {step: data}
        assert isinstance(data, dict)
        origins: dict[KeyPath, str] = {place[:n]: document.where(place[:n]) for n in range(1, len(place) + 1)}
        document = merge(document, Document(data, origins))
    for name in sorted(unused):
        where, hint = document.where(("vars", name)), f"Write ${{{name}}} in input.path or output.path."
        mistakes.append(Mistake(where, f"vars.{name}", "is not used", hint))
    if mistakes:
        raise JobFileError(mistakes)
    return document


def _value(document: Document, place: tuple[str, ...]) -> object:
    value: object = document.data
    for step in place:
        value = value.get(step) if isinstance(value, dict) else None
    return value

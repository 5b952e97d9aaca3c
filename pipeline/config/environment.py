"""Environment variables in the paths, urls and keys of a job file: `${NAME}` and `${NAME:-default}`.

In the paths of input and output, `vars` of the job take precedence. Other values, such as prompts, are not expanded:
`${price}` in them is text.
"""

import re
from collections.abc import Mapping

from pipeline.config.jobfile import Document, KeyPath, Mistake, Value, dotted, merge
from pipeline.config.variables import Now, values_of

PATH_KEYS: tuple[tuple[str, ...], ...] = (
    ("input", "path"),
    ("output", "path"),
    ("model", "path"),
    ("server", "url"),
    ("server", "api_key"),
    ("speculation", "model"),
    ("quality", "model"),
    ("prompt", "chat", "template"),
    ("sampling", "structured_outputs", "json_file"),
)
VARIABLE_KEYS = (("input", "path"), ("output", "path"))
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(:-([^{}]*))?\}")


def expanded(
    document: Document, environ: Mapping[str, str], given: Mapping[str, str], now: Now
) -> tuple[Document, list[Mistake]]:
    """Return `document` with the variables of its paths expanded, and every mistake: variables that are not set and
    have no default, and those in `vars`. An empty variable counts as not set, as in a shell. given: values of the job's
    variables. now: returns the time in a zone.
    """
    declared, mistakes = values_of(document, given, now)
    wrong = {mistake.key.removeprefix("vars.") for mistake in mistakes}
    unused = {*declared}
    environ = {**environ, **declared}
    for key_path in PATH_KEYS:
        text = _value(document, key_path)
        if not isinstance(text, str) or "${" not in text:
            continue
        names = {name for name, _, _ in _REFERENCE.findall(text)}
        if wrong & names:
            continue  # reported already
        if key_path in VARIABLE_KEYS:
            unused -= names
        elif names & declared.keys():
            problem = f"the variable {min(names & declared.keys())} is not allowed here"
            mistakes.append(
                Mistake(document.location(key_path), dotted(key_path), problem, "Only in input.path and output.path.")
            )
            continue
        line, key = document.location(key_path), dotted(key_path)
        missing = [name for name, default, _ in _REFERENCE.findall(text) if not default and not environ.get(name)]
        hint = "Set it, or give a default: ${NAME:-default}."
        mistakes += [Mistake(line, key, f"the environment variable {name} is not set", hint) for name in missing]
        if "${" in _REFERENCE.sub("", text):
            mistakes.append(Mistake(line, key, "expected ${NAME} or ${NAME:-default}", "Close the brace."))
        filled = _REFERENCE.sub(lambda found: environ.get(found[1]) or found[3] or "", text)
        data: Value = filled
        for step in reversed(key_path):
            data = {step: data}
        assert isinstance(data, dict)
        origins: dict[KeyPath, str] = {
            key_path[:n]: document.location(key_path[:n]) for n in range(1, len(key_path) + 1)
        }
        document = merge(document, Document(data, origins))
    for name in sorted(unused):
        line, hint = document.location(("vars", name)), f"Write ${{{name}}} in input.path or output.path."
        mistakes.append(Mistake(line, f"vars.{name}", "is not used", hint))
    return document, mistakes


def _value(document: Document, key_path: tuple[str, ...]) -> object:
    value: object = document.data
    for step in key_path:
        value = value.get(step) if isinstance(value, dict) else None
    return value

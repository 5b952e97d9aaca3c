"""Write the table of the job file's keys into `docs/job-file.md`, and create the site's page of commands.

python -m tools.reference

Text outside the two markers of the page is kept. The page of commands is not in git: `--help` prints the same text, and
`tools/site.py` adds the page when the site is built.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from pipeline.cli.main import cli
from pipeline.config.schema import job_schema

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- generated: python -m tools.reference -->\n", "<!-- end of generated -->"
WHOLE, STEPS = "The whole file", "steps"
SHARED = ("prompt", "task", "sampling")  # sections of a step that are the job's too
WIDTH = 88  # characters of a line of help


def keys() -> Iterator[str]:
    """Yield a heading and a table of keys for each section of the job file."""
    schema = job_schema()
    definitions = schema["$defs"]
    yield from _table(WHOLE, schema, definitions)
    for name, key in schema["properties"].items():
        for section in _sections(key, definitions):
            yield from _section(name, section, definitions)


def _sections(key: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the mappings with their own keys that a key accepts, alone or in a list, except `{column: name}`."""
    for option in [key, key.get("items", {}), *key.get("anyOf", ()), *key.get("oneOf", ())]:
        found = definitions.get(option.get("$ref", "").rpartition("/")[2], {})
        if found.get("properties", {}).keys() - {"column"}:
            yield found


def _section(path: str, section: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    yield from _table(path, section, definitions)
    for name, key in section["properties"].items():
        for inner in () if path == STEPS and name in SHARED else _sections(key, definitions):
            yield from _section(f"{path}.{name}", inner, definitions)


def _table(heading: str, section: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    yield f"### {heading}\n"
    yield "| key | value | default | what it is | example | class |"
    yield "|---|---|---|---|---|---|"
    for name, key in section["properties"].items():
        unless = [rule.get("else", {}) for rule in (section, *section.get("allOf", ()))]
        required = any(name in rule.get("required", ()) for rule in (section, *unless))
        default = "required" if required else "" if key.get("default") in (None, "") else _code(key["default"])
        example = _code(key["examples"][0]) if "$ref" not in key else ""  # its own keys have examples
        is_section = "$ref" in key or (heading == WHOLE and any(_sections(key, definitions)))
        anchor = name if heading == WHOLE or (heading == STEPS and name in SHARED) else f"{heading}{name}"
        kind = f"[section](#{anchor})" if is_section else _kind(key, definitions)
        resume = {"identity": "identity", "numerics": "numerics"}.get(key.get("resume", ""), "")
        description = key["description"].replace("{{", "`{{`").replace("}}", "`}}`").replace("|", "\\|")
        yield f"| `{name}` | {kind} | {default} | {description} | {example} | {resume} |"
    yield ""


def _code(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"`{text}`".replace("|", "\\|").replace("\n", "\\n")


def _kind(key: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Return the kinds of values that a key accepts."""
    kinds = [_one_kind(option, definitions) for option in _options(key, definitions)]
    return " or ".join(dict.fromkeys(kind for kind in kinds if kind))


def _options(key: dict[str, Any], definitions: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the alternatives of a key's schema, with nested unions flattened."""
    for option in key.get("anyOf") or key.get("oneOf") or [key]:
        found = definitions[option["$ref"].rpartition("/")[2]] if "$ref" in option else option
        yield from _options(found, definitions) if found.keys() & {"anyOf", "oneOf"} else [found]


def _one_kind(option: dict[str, Any], definitions: dict[str, Any]) -> str:
    if "enum" in option:
        return ", ".join(f"`{value}`" for value in option["enum"])
    kind = option.get("type", "")
    if isinstance(kind, list):
        kind = next(name for name in kind if name != "null")
    if kind == "null" or option.get("const") is False:
        return ""
    if "const" in option:
        return f"`{option['const']}`"
    if kind == "object":
        return "`{column: name}`" if option.get("properties", {}).keys() == {"column"} else "mapping"
    if kind == "array":
        return f"list of {_one_kind(option.get('items', {}), definitions) or 'values'}"
    if kind == "string" and "pattern" in option and "[kKmMgGtT]" in option["pattern"]:
        return "size"
    if kind == "string" and "s|min|m|h|d" in option.get("pattern", ""):
        return "duration"
    if kind == "string" and option.get("pattern", "").startswith("^([oO][nN]"):
        return ""  # on and off are synonyms of true and false
    return {"string": "text", "boolean": "true or false"}.get(kind, kind)


def commands(command: click.Command = cli, parent: click.Context | None = None) -> Iterator[str]:
    """Yield the help of every command, as `--help` prints it in a terminal of WIDTH characters."""
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, parent, info_name=command.name if parent else "pipeline", **settings)
    yield f"### {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, context)


PAGE = DOCS / "job-file.md"


def command_page() -> str:
    """Return the site's page of all commands, as Markdown."""
    return "# Command line\n\n`pipeline COMMAND --help` prints the same in a terminal.\n\n" + "\n".join(commands())


def written(page: str) -> str:
    """Return the page with the current keys between the two markers."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n" + "\n".join(keys()) + f"\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""Measure the JSON Schema coverage of structured outputs: schemas compiled or refused, and texts allowed or ruled out.

    python -m tools.schema_coverage FOLDER [--wrong]

Reads the files of the JSON Schema Test Suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite, a list of
{schema, tests} for each keyword), of MaskBench ({schema, tests}) and of JSONSchemaBench (bare schemas), and counts by
keyword or folder. Texts are instances without whitespace and with properties in the schema's order, as the engine
writes them.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoints.locate import locate_model
from pipeline.engine.grammar.compiler import GrammarCompiler
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.errors import ConfigError
from pipeline.tokenization.tokenizer import Tokenizer

HEADINGS = ("", "schemas", "refused", "invalid ruled out", "invalid let through", "valid allowed", "valid ruled out")


@dataclass
class Counts:
    """Counts of schemas, and of the instances of accepted schemas."""

    schemas: int = 0
    refused: int = 0
    invalid_ruled_out: int = 0
    invalid_let_through: int = 0
    valid_allowed: int = 0
    valid_ruled_out: int = 0

    def add(self, is_valid: bool, is_allowed: bool) -> None:
        self.valid_allowed += is_valid and is_allowed
        self.valid_ruled_out += is_valid and not is_allowed
        self.invalid_let_through += not is_valid and is_allowed
        self.invalid_ruled_out += not is_valid and not is_allowed

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class GrammarChecker:
    """Compiler and matcher of the engine's grammars, to check schemas and texts."""

    def __init__(self, model: str = "demo") -> None:
        self._tokenizer = Tokenizer.from_folder(str(locate_model(model)))
        self._compiler = GrammarCompiler(self._tokenizer, self._tokenizer.vocab_size)
        self._ends = sorted(self._tokenizer.eos_token_ids)

    def compile(self, schema: Any) -> StructuredOutputs:
        """Compile a schema. Raises ConfigError if it is not supported."""
        wanted = StructuredOutputs.from_config({"json": schema})
        assert wanted is not None
        self._compiler.check(wanted)
        return wanted

    def allows(self, wanted: StructuredOutputs, text: str) -> bool:
        """Return whether a completion may be this text."""
        matcher, is_whole = self._compiler.matcher(wanted), False
        for token in self._tokenizer.continuation([], text):
            if not matcher.accepts(token):
                return False
            is_whole = matcher.advance(token)
        return is_whole or any(matcher.accepts(token) for token in self._ends)


def cases(folder: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yield keyword or folder, schema, and its instances, each with `data` and `valid`."""
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, list):
            yield from ((path.stem, case["schema"], case["tests"]) for case in content)
        elif isinstance(content, dict) and "tests" in content:
            yield path.parent.name, content["schema"], content["tests"]
        else:
            yield path.parent.name, content, []


def in_order(data: Any, schema: Any) -> Any:
    """Return the instance with its properties in the schema's order, as in completions."""
    if isinstance(data, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [in_order(each, items) for each in data]
    if not isinstance(data, dict):
        return data
    own = schema.get("properties") if isinstance(schema, dict) else None
    own = own if isinstance(own, dict) else {}
    names = [*(name for name in own if name in data), *(name for name in data if name not in own)]
    return {name: in_order(data[name], own.get(name)) for name in names}


def measure(folder: Path, checker: GrammarChecker) -> tuple[dict[str, Counts], list[str]]:
    """Return counts by keyword, and a line for each refused schema and misjudged instance."""
    found: dict[str, Counts] = {}
    wrong = []
    for keyword, schema, instances in cases(folder):
        counts = found.setdefault(keyword, Counts())
        counts.schemas += 1
        try:
            wanted = checker.compile(schema)
        except ConfigError as refused:
            counts.refused += 1
            wrong.append(f"{keyword}: refused: {json.dumps(schema)[:200]}: {refused}")
            continue
        for each in instances:
            text = json.dumps(in_order(each["data"], schema), ensure_ascii=False, separators=(",", ":"))
            is_allowed = checker.allows(wanted, text)
            counts.add(each["valid"], is_allowed)
            if each["valid"] != is_allowed:
                wrong.append(
                    f"{keyword}: {'let through' if is_allowed else 'ruled out'}: {text} of {json.dumps(schema)}"
                )
    return found, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wrong", action="store_true", help="also list each refused schema and misjudged instance")
    options = parser.parse_args()
    by_keyword, problems = measure(options.folder, GrammarChecker())
    rows = [*by_keyword.items(), ("all", sum(by_keyword.values(), Counts()))]
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    for name, counted in rows:
        print("| " + " | ".join([name, *map(str, astuple(counted))]) + " |")
    if options.wrong:
        print("\n".join(problems))

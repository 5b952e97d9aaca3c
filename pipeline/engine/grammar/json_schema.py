"""Preparation of JSON Schemas for compilation: rejects unsatisfiable ones, and drops keywords without an effect.

The grammar compiler rejects some keywords by name whatever their value, stores numbers as float64, and accepts schemas
that require themselves endlessly. Subschemas are identified by their path of keys from the root ().
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

from pipeline.errors import ConfigError

Path = tuple[str | int, ...]

MAX_EXACT = 1 << 53  # float64 represents every integer up to this
MAX_STATES = 20_000  # conjunctions of subschemas that are examined; larger schemas are not checked for endlessness
_ANNOTATIONS = frozenset(
    ("$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
)
_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")
_DEFINITIONS = ("$defs", "definitions")
_SCALARS = frozenset(("string", "number", "integer", "boolean", "null"))
_TYPES = _SCALARS | {"object", "array"}


def prepared(text: str) -> dict[str, Any]:
    """Return the schema as it is compiled, and as finished rows are validated.

    Raises ConfigError for an unsatisfiable one: with a constant that float64 cannot represent, or a subschema that
    refers to itself directly or requires itself endlessly; and for forms of older drafts without a `$schema`.
    """
    schema = json.loads(text)
    draft = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    everywhere = [(path, node) for path, node in _walk(schema, _DEFINITIONS) if isinstance(node, dict)]
    for path, node in everywhere:
        for keyword in ("$id", "$schema"):
            if not isinstance(node.get(keyword, ""), str):
                raise _refused((*path, keyword), f"= {node[keyword]!r:.60}: expected a text")
        _check_numbers(path, node)
        _check_draft(path, node, draft)
    for _, node in reversed(everywhere):  # inner nodes first
        _drop_without_effect(node)
    if '"$ref"' in text:
        _Recursion(schema).check()
    return schema


def shown(path: Path) -> str:
    """Return a path as it appears in messages: `properties.a.enum[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the schema"


def _refused(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"sampling.structured_outputs.json: {shown(path)} {problem}")


def _walk(schema: Any, definitions: tuple[str, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each subschema with its path, outer ones first, including those under `definitions`."""
    waiting: list[tuple[Path, Any]] = [((), schema)]
    for path, node in waiting:
        yield path, node
        waiting += [((*path, *key), child) for key, child in _children(node, definitions)]


def _children(node: Any, definitions: tuple[str, ...] = ()) -> Iterator[tuple[Path, Any]]:
    if not isinstance(node, dict):
        return
    for keyword, value in node.items():
        inner: Iterable[tuple[Any, Any]] = ()
        if keyword in _MANY and isinstance(value, list):
            inner = enumerate(value)
        elif keyword in _ONE and isinstance(value, dict | bool):
            yield (keyword,), value
        elif (keyword in _NAMED or keyword in definitions) and isinstance(value, dict):
            inner = value.items()
        yield from (((keyword, key), child) for key, child in inner if isinstance(child, dict | bool))


# -- unsatisfiable schemas


def _check_numbers(path: Path, node: dict[str, Any]) -> None:
    """Reject numbers of `enum` and `const` that are not generated exactly: every row with one would be invalid."""
    waiting = [((*path, name), node[name]) for name in ("enum", "const") if name in node]
    for at, value in waiting:
        if isinstance(value, dict | list):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*at, name), each) for name, each in inner]
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > MAX_EXACT:
            raise _refused(at, f"= {value}: a number beyond 2^53 cannot be represented exactly; write it as a string")


def _check_draft(path: Path, node: dict[str, Any], draft: str) -> None:
    """Reject forms whose meaning depends on an older draft, by which the final check would interpret them."""
    if isinstance(node.get("items"), list) and not any(year in draft for year in ("draft-0", "2019-09")):
        problem = "is a list, as in older drafts; expected prefixItems, or a `$schema` of such a draft"
        raise _refused((*path, "items"), problem)
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(node.get(keyword), bool) and "draft-03" not in draft and "draft-04" not in draft:
            problem = "is true or false, as in older drafts; expected a number, or a `$schema` of such a draft"
            raise _refused((*path, keyword), problem)


class _Recursion:
    """Checks that the subschemas of a schema have finite values, by a fixed point over conjunctions of subschemas."""

    def __init__(self, schema: Any) -> None:
        self._nodes: dict[Path, Any] = dict(_walk(schema, _DEFINITIONS))
        self._anchors = {node["$anchor"]: path for path, node in self._nodes.items() if _has(node, "$anchor", str)}
        self._has_parts = any(path and _has(node, "$id", str) for path, node in self._nodes.items())
        self._own_id = schema["$id"].rstrip("#") if _has(schema, "$id", str) else ""

    def check(self) -> None:
        """Raise ConfigError for a subschema without a finite value, with its path. References into parts with their own
        `$id` are not followed."""
        reachable = self._reachable()
        if self._has_parts or len(reachable) > MAX_STATES:
            return
        self._check_loops(reachable)
        starts = [frozenset({path}) for path in reachable]
        ends, may_be_endless = self._solve(starts, False), self._solve(starts, True)
        if not may_be_endless.get(starts[0], True):
            raise _refused((), "allows no value")
        for path, start in zip(reachable, starts):
            if may_be_endless.get(start) and not ends.get(start, True):
                raise _refused(path, "requires itself without end, so no value can be valid; make the recursive "
                               "property optional")  # fmt: skip

    def _reachable(self) -> list[Path]:
        found: dict[Path, None] = {(): None}
        waiting: list[Path] = [()]
        for path in waiting:
            node = self._nodes[path]
            after = [(*path, *key) for key, _ in _children(node)]
            target = self._target(node)
            for each in after if target is None else [*after, target]:
                if each not in found:
                    found[each] = None
                    waiting.append(each)
        return list(found)

    def _target(self, node: Any) -> Path | None:
        """Return the path that `$ref` refers to; None without one, or if it is not in this schema."""
        ref = node.get("$ref") if isinstance(node, dict) else None
        if not isinstance(ref, str):
            return None
        if self._own_id and ref.startswith(self._own_id):
            ref = ref[len(self._own_id) :]
        if ref in ("", "#"):
            return ()
        if ref.startswith("#/"):
            parts = [unquote(part).replace("~1", "/").replace("~0", "~") for part in ref[2:].split("/")]
            path: Path = ()
            for part in parts:  # numbers are list indices unless they are names
                path = (*path, int(part)) if part.isdecimal() and path and path[-1] in _MANY else (*path, part)
            return path if path in self._nodes else None
        return self._anchors.get(ref[1:]) if ref.startswith("#") else None

    def _check_loops(self, reachable: list[Path]) -> None:
        """Reject subschemas that refer to themselves with no object or array in between."""
        edges = {}
        for path in reachable:
            node = self._nodes[path]
            edges[path] = [(*path, *key) for key, _ in _children(node) if key[0] in ("allOf", "anyOf", "oneOf")]
            if (target := self._target(node)) is not None:
                edges[path].append(target)
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            first = min(error.args[1], key=reachable.index)
            raise _refused(first, "refers to itself without a property or an item in between") from None

    def _solve(self, starts: list[frozenset[Path]], first: bool) -> dict[frozenset[Path], bool]:
        """Return which conjunctions of subschemas have a value. first: assumption for each until it is known: False
        finds finite values, True also endless ones. Empty if the schema is too large."""
        has_value = dict.fromkeys(starts, first)

        def known(state: frozenset[Path]) -> bool:
            return has_value.setdefault(state, first)

        is_changing = True
        while is_changing:
            is_changing, size = False, len(has_value)
            for state in reversed(list(has_value)):
                if has_value[state] == first and self._has_value(state, known) != first:
                    has_value[state] = not first
                    is_changing = True
            if len(has_value) > MAX_STATES:
                return {}
            is_changing |= len(has_value) > size
        return has_value

    def _has_value(self, state: frozenset[Path], known: Callable[[frozenset[Path]], bool]) -> bool:
        """Return whether a value may be valid by all of these subschemas; True when in doubt."""
        nodes = self._conjunction(state)
        if any(node is False for node in nodes.values()):
            return False
        types, is_listed = _TYPES, False
        for path, node in nodes.items():
            types &= _types(node)
            is_listed |= "const" in node or bool(node.get("enum"))
            if node.get("enum") == []:
                return False
            for keyword in ("anyOf", "oneOf"):
                branches = node.get(keyword)
                if isinstance(branches, list) and not any(
                    known(frozenset({(*path, keyword, index)})) for index in range(len(branches))
                ):
                    return False
        if is_listed or types & _SCALARS:
            return True
        return ("object" in types and self._has_object(nodes, known)) or (
            "array" in types and self._has_array(nodes, known)
        )

    def _conjunction(self, state: frozenset[Path]) -> dict[Path, Any]:
        """Return the subschemas of `state`, those that they refer to, and those in their `allOf`, but no trivially true
        ones."""
        found: dict[Path, Any] = {}
        waiting = sorted(state, key=str)
        for path in waiting:
            if path in found:
                continue
            node = found[path] = self._nodes[path]
            if isinstance(node, dict):
                waiting += [(*path, *key) for key, _ in _children(node) if key[0] == "allOf"]
                if (target := self._target(node)) is not None:
                    waiting.append(target)
        return {path: node for path, node in found.items() if node is not True}

    def _has_object(self, nodes: dict[Path, Any], known: Callable[[frozenset[Path]], bool]) -> bool:
        def of_name(name: str) -> frozenset[Path]:
            found = []
            for path, node in nodes.items():
                if name in _mapping(node, "properties"):
                    found.append((*path, "properties", name))
                elif not _mapping(node, "patternProperties") and "additionalProperties" in node:
                    found.append((*path, "additionalProperties"))
            return frozenset(key for key in found if key in self._nodes)

        names = dict.fromkeys(
            name for node in nodes.values() for name in _list(node, "required") if isinstance(name, str)
        )
        if not all(known(of_name(name)) for name in names):
            return False
        for path, node in nodes.items():
            needs_others = bool(names.keys() - _mapping(node, "properties")) if names else _count(node, "minProperties")
            if needs_others and "additionalProperties" in node:
                of_others = ("patternProperties", "additionalProperties", "" if names else "properties")
                branches = [(*path, *key) for key, _ in _children(node) if key[0] in of_others]
                if not any(known(frozenset({way})) for way in branches):
                    return False
        return True

    def _has_array(self, nodes: dict[Path, Any], known: Callable[[frozenset[Path]], bool]) -> bool:
        def of_index(index: int) -> frozenset[Path]:
            found = []
            for path, node in nodes.items():
                listed = "items" if isinstance(node.get("items"), list) else "prefixItems"
                rest = "additionalItems" if listed == "items" else "items"
                is_listed = index < len(_list(node, listed))
                found.append((*path, listed, index) if is_listed else (*path, rest))
            return frozenset(key for key in found if key in self._nodes)

        num_listed = max(len(_list(node, name)) for node in nodes.values() for name in ("items", "prefixItems"))
        num_items = max(_count(node, "minItems") for node in nodes.values())
        return all(known(of_index(index)) for index in range(min(num_items, num_listed + 1)))


def _has(node: Any, keyword: str, kind: type) -> bool:
    return isinstance(node, dict) and isinstance(node.get(keyword), kind)


def _mapping(node: dict[str, Any], keyword: str) -> dict[str, Any]:
    value = node.get(keyword)
    return value if isinstance(value, dict) else {}


def _list(node: dict[str, Any], keyword: str) -> list[Any]:
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def _count(node: dict[str, Any], keyword: str) -> int:
    value = node.get(keyword)
    return math.ceil(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _types(node: dict[str, Any]) -> frozenset[str]:
    given = node.get("type")
    names = frozenset(name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str))
    return names | ({"integer"} if "number" in names else set()) if names else _TYPES


# -- keywords without an effect


def _drop_without_effect(node: dict[str, Any]) -> None:
    """Remove keywords whose value allows everything, because the compiler would reject them by name."""
    if _allows_all(node.get("then")):
        node.pop("then", None)
    if _allows_all(node.get("else")):
        node.pop("else", None)
    has_branches = "if" in node and ("then" in node or "else" in node)
    has_contains = "contains" in node and (node.get("minContains") != 0 or "maxContains" in node)
    num_required = len({name for name in _list(node, "required") if isinstance(name, str)})
    is_closed = node.get("additionalProperties") is False and not _mapping(node, "patternProperties")
    without_effect: dict[str, Callable[[Any], bool]] = {
        "uniqueItems": lambda value: value is False,
        "not": lambda value: value is False,
        "contains": lambda _: not has_contains,
        "minContains": lambda _: not has_contains,
        "maxContains": lambda _: not has_contains,
        "if": lambda _: not has_branches,
        "then": lambda _: not has_branches,
        "else": lambda _: not has_branches,
        "propertyNames": _allows_all,
        "unevaluatedItems": _allows_all,
        "unevaluatedProperties": _allows_all,
        "additionalItems": lambda _: not isinstance(node.get("items"), list),
        "dependentRequired": lambda value: isinstance(value, dict) and not any(value.values()),
        "dependentSchemas": lambda value: isinstance(value, dict) and all(map(_allows_all, value.values())),
        "minProperties": lambda value: type(value) is int and 0 <= value <= num_required,
        "maxProperties": lambda value: type(value) is int and is_closed and len(_mapping(node, "properties")) <= value,
    }
    for keyword in [name for name in node if name in without_effect and without_effect[name](node[name])]:
        del node[keyword]


def _allows_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not set(schema) - _ANNOTATIONS)

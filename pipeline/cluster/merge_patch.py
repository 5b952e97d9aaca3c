"""JSON merge patch (RFC 7386), with one exception: lists of named objects merge by name instead of being replaced."""

from typing import Any

NAMES = ("name", "groupName")  # containers, volumes, ports, variables; worker groups


def merged(target: Any, patch: Any) -> Any:
    """Return `target` with `patch` applied; neither is changed. In a list whose items all have a name, an item of the
    patch changes the target's first item of that name, or is appended."""
    if isinstance(patch, dict):
        result = dict(target) if isinstance(target, dict) else {}
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(result.get(key), value)
        return result
    if isinstance(patch, list) and (key := _name_key(patch)) is not None:
        items = list(target) if isinstance(target, list) and _name_key(target) == key else []
        known = {item[key]: index for index, item in reversed(list(enumerate(items)))}
        for item in patch:
            if item[key] in known:
                items[known[item[key]]] = merged(items[known[item[key]]], item)
            else:
                items.append(merged(None, item))
        return items
    return patch


def _name_key(items: list[Any]) -> str | None:
    """The key that names every item; None where one has no name."""
    return next((key for key in NAMES if items and all(isinstance(i, dict) and i.get(key) for i in items)), None)

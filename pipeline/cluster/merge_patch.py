"""JSON merge patch (RFC 7386), with one exception: lists of named objects merge by name instead of being replaced."""

from typing import Any

NAMES = ("name", "groupName")  # of containers, volumes, ports and variables; of worker groups


def merged(target: Any, patch: Any) -> Any:
    """Return `target` with `patch` applied, without changing either.

    If all items of a list have names, an item of the patch is merged into the target's first item of that name, or
    appended.
    """
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
    """Return the key that names every item, or None if an item has no name."""
    return next((key for key in NAMES if items and all(isinstance(i, dict) and i.get(key) for i in items)), None)

"""Assignment of a window's rows to units, as pure functions of prompt bytes and budgets, so every run cuts the same.

Rows that share a long prefix go into one unit, because units go to different engines and each engine computes a prefix
once. The prefix that all rows of the window share (the template's instructions) is ignored in the comparison. Other
rows are ordered longest first, so that the last ones to run are short. Adapters follow each other: a step with one
adapter is the fastest.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

BYTES_PER_TOKEN = 4  # for English text and a large vocabulary; affects only the sizes of units
SHARED_BYTES = 256  # min shared prefix of a group: a few blocks of the KV cache
_MAX_LEVEL = 8  # max recursion depth of splitting groups; deeper groups are in byte order


def estimate_tokens(num_bytes: int) -> int:
    """Return the approximate number of tokens of `num_bytes` of prompt; at least 1 unless there are no bytes."""
    return -(-num_bytes // BYTES_PER_TOKEN)


def cut_units(
    prompts_bytes: list[bytes],
    budgets: np.ndarray,
    unit_tokens: int,
    unit_rows: int,
    adapters: Sequence[str | None] | None = None,
) -> list[np.ndarray]:
    """Return the row indices of each unit; every row is in exactly one.

    prompts_bytes: the rendered prompts, b"" for a row without a prompt. budgets: max new tokens of each row. adapters:
    of each row; rows with the same one are consecutive. A unit has at most `unit_rows` rows and an estimated
    `unit_tokens` of prompt and new tokens, or a single larger row. A group of rows with a shared prefix is split only
    if it does not fit into one unit.
    """
    assert len(prompts_bytes) == len(budgets)
    assert min(unit_tokens, unit_rows) >= 1
    costs = [estimate_tokens(len(p)) + int(b) for p, b in zip(prompts_bytes, budgets, strict=True)]
    by_adapter: defaultdict[str, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts_bytes):
        if prompt:
            by_adapter["" if adapters is None else adapters[i] or ""].append(i)
    groups: list[list[int]] = []
    for adapter in sorted(by_adapter):
        groups += _group_rows(by_adapter[adapter], prompts_bytes, costs, unit_tokens, unit_rows)
    groups += [[i] for i, p in enumerate(prompts_bytes) if not p]
    units: list[list[int]] = []
    room_tokens = room_rows = 0
    for group in groups:
        tokens = sum(costs[i] for i in group)
        if len(group) > 1 and (tokens > room_tokens or len(group) > room_rows):
            units.append([])
            room_tokens, room_rows = unit_tokens, unit_rows
        for i in group:
            if not units or (units[-1] and (costs[i] > room_tokens or room_rows == 0)):
                units.append([])
                room_tokens, room_rows = unit_tokens, unit_rows
            units[-1].append(i)
            room_tokens -= costs[i]
            room_rows -= 1
    return [np.array(unit, dtype=np.int64) for unit in units]


def _bucket(cost: int) -> int:
    """Return the cost on a logarithmic scale with four steps per doubling, in integers, so that all machines agree."""
    bits = cost.bit_length()
    return 4 * bits + ((cost << 2 >> (bits - 1)) & 3) if cost > 0 else -1


def _group_rows(
    rows: list[int], prompts: list[bytes], costs: list[int], unit_tokens: int, unit_rows: int, level: int = 0
) -> list[list[int]]:
    """Return `rows` in the order in which units are filled: groups to keep together, then single rows.

    Rows form a group if they share SHARED_BYTES after the prefix that all of `rows` share. A group too large for one
    unit is split recursively after its own shared prefix, and stays contiguous.
    """
    start = _common_prefix([prompts[i] for i in rows])
    by_prefix: defaultdict[bytes, list[int]] = defaultdict(list)
    single: list[int] = []
    for i in rows:
        prefix = prompts[i][start : start + SHARED_BYTES]
        if len(prefix) == SHARED_BYTES:
            by_prefix[prefix].append(i)
        else:
            single.append(i)
    groups = [g for g in by_prefix.values() if len(g) > 1]
    single += [g[0] for g in by_prefix.values() if len(g) == 1]
    groups.sort(key=lambda g: (-max(_bucket(costs[i]) for i in g), g[0]))
    single.sort(key=lambda i: (-_bucket(costs[i]), i))
    out: list[list[int]] = []
    for group in groups:
        fits = len(group) <= unit_rows and sum(costs[i] for i in group) <= unit_tokens
        if fits or level == _MAX_LEVEL:
            # byte order puts rows with a longer shared prefix next to each other
            out.append(sorted(group, key=lambda i: (prompts[i], i)))
        else:
            out += _group_rows(group, prompts, costs, unit_tokens, unit_rows, level + 1)
    return out + [[i] for i in single]


def _common_prefix(prompts: Iterable[bytes]) -> int:
    """Return the length of the prefix that all prompts share: that of the smallest and the largest in byte order."""
    low, high = min(prompts, default=b""), max(prompts, default=b"")
    n = min(len(low), len(high))
    a, b = np.frombuffer(low[:n], np.uint8), np.frombuffer(high[:n], np.uint8)
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else n

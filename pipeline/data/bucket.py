"""Which rows of a window make a unit: pure functions of the prompts' bytes and budgets, so every run cuts the
same.

Two things are wanted. Rows that share a long prefix lie in one unit, since units go to different engines and
a prefix is computed once per engine; what all rows of the window share (the template's instructions) says
nothing and is left out of the comparison. Other rows go longest first, so that what runs last is short.
"""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

BYTES_PER_TOKEN = 4  # of English text with a large vocabulary; only sizes of units depend on it
SHARED_BYTES = 256  # a shared prefix worth keeping together: some blocks of the KV cache
_BUCKETS_PER_OCTAVE = 4  # lengths within 19 % count as equal and keep the input's order


def estimate_tokens(num_bytes: int) -> int:
    """Tokens of a prompt of so many bytes, roughly; at least 1 unless there are no bytes."""
    return -(-num_bytes // BYTES_PER_TOKEN)


def cut_units(
    prompts_bytes: list[bytes], budgets: np.ndarray, unit_tokens: int, unit_rows: int
) -> list[np.ndarray]:
    """Row indices of each unit; every row is in exactly one.

    prompts_bytes: the rendered prompts, b"" for a row that has none. budgets: the new tokens each row may
    take. A unit has at most `unit_rows` rows and an estimated `unit_tokens` prompt and new tokens, or one row
    that is larger. A group of rows with a shared prefix is split only when it does not fit into a unit.
    """
    assert len(prompts_bytes) == len(budgets)
    assert min(unit_tokens, unit_rows) >= 1
    costs = [estimate_tokens(len(p)) + int(b) for p, b in zip(prompts_bytes, budgets, strict=True)]
    with_prompt = [i for i, p in enumerate(prompts_bytes) if p]
    groups, alone = _group(with_prompt, prompts_bytes, costs, unit_tokens, unit_rows)
    alone += [i for i, p in enumerate(prompts_bytes) if not p]
    alone.sort(key=lambda i: (-_bucket(costs[i]), i))
    units: list[list[int]] = []
    room_tokens = room_rows = 0
    for clump in [*groups, *([i] for i in alone)]:
        tokens = sum(costs[i] for i in clump)
        if len(clump) > 1 and (tokens > room_tokens or len(clump) > room_rows):
            units.append([])
            room_tokens, room_rows = unit_tokens, unit_rows
        for i in clump:
            if not units or (units[-1] and (costs[i] > room_tokens or room_rows == 0)):
                units.append([])
                room_tokens, room_rows = unit_tokens, unit_rows
            units[-1].append(i)
            room_tokens -= costs[i]
            room_rows -= 1
    return [np.array(unit, dtype=np.int64) for unit in units]


def _bucket(cost: int) -> int:
    return int(np.log2(cost) * _BUCKETS_PER_OCTAVE) if cost > 0 else -1


def _group(
    rows: list[int], prompts: list[bytes], costs: list[int], unit_tokens: int, unit_rows: int
) -> tuple[list[list[int]], list[int]]:
    """Groups of rows that share SHARED_BYTES beyond what all of `rows` share, and the rows that share with
    nobody.

    A group too large for one unit is split in the same way along its longer prefixes; each round looks at
    least SHARED_BYTES further, so it ends.
    """
    groups: list[list[int]] = []
    alone: list[int] = []
    waiting = [rows]
    while waiting:
        rows = waiting.pop()
        depth = _common_prefix([prompts[i] for i in rows]) + SHARED_BYTES
        by_prefix: defaultdict[bytes, list[int]] = defaultdict(list)
        rest: list[int] = []
        for i in rows:
            if len(prompts[i]) >= depth:
                by_prefix[prompts[i][:depth]].append(i)
            else:
                rest.append(i)
        for members in by_prefix.values():
            if len(members) == 1:
                rest += members
            elif len(members) > unit_rows or sum(costs[i] for i in members) > unit_tokens:
                waiting.append(members)
            else:
                groups.append(members)
        alone += rest
    groups.sort(key=lambda g: (-max(_bucket(costs[i]) for i in g), g[0]))
    # inside a group, deeper shared prefixes lie side by side
    return [sorted(g, key=lambda i: (prompts[i], i)) for g in groups], alone


def _common_prefix(prompts: Iterable[bytes]) -> int:
    """Length of the prefix that all share: that of the smallest and the largest in byte order."""
    low, high = min(prompts, default=b""), max(prompts, default=b"")
    n = min(len(low), len(high))
    a, b = np.frombuffer(low[:n], np.uint8), np.frombuffer(high[:n], np.uint8)
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else n

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
_MAX_LEVEL = 8  # how far groups are taken apart; below it, byte order


def estimate_tokens(num_bytes: int) -> int:
    """Tokens of a prompt of so many bytes, roughly; at least 1 unless there are no bytes."""
    return -(-num_bytes // BYTES_PER_TOKEN)


def cut_units(prompts_bytes: list[bytes], budgets: np.ndarray, unit_tokens: int, unit_rows: int) -> list[np.ndarray]:
    """Row indices of each unit; every row is in exactly one.

    prompts_bytes: the rendered prompts, b"" for a row that has none. budgets: the new tokens each row may
    take. A unit has at most `unit_rows` rows and an estimated `unit_tokens` prompt and new tokens, or one row
    that is larger. A group of rows with a shared prefix is split only when it does not fit into a unit.
    """
    assert len(prompts_bytes) == len(budgets)
    assert min(unit_tokens, unit_rows) >= 1
    costs = [estimate_tokens(len(p)) + int(b) for p, b in zip(prompts_bytes, budgets, strict=True)]
    asked = [i for i, p in enumerate(prompts_bytes) if p]
    clumps = _clumps(asked, prompts_bytes, costs, unit_tokens, unit_rows)
    clumps += [[i] for i, p in enumerate(prompts_bytes) if not p]
    units: list[list[int]] = []
    room_tokens = room_rows = 0
    for clump in clumps:
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
    """The cost on a logarithmic scale, four steps to a doubling, in integers: every machine agrees."""
    bits = cost.bit_length()
    return 4 * bits + ((cost << 2 >> (bits - 1)) & 3) if cost > 0 else -1


def _clumps(
    rows: list[int], prompts: list[bytes], costs: list[int], unit_tokens: int, unit_rows: int, level: int = 0
) -> list[list[int]]:
    """`rows` in the order in which units are filled: lists of rows to keep together, then single rows.

    Rows belong together when they share SHARED_BYTES beyond what all of `rows` share. A group too large for
    one unit is arranged in the same way by what follows its own shared prefix, and stays in one stretch.
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
            # in byte order, so that rows with a longer shared prefix lie side by side
            out.append(sorted(group, key=lambda i: (prompts[i], i)))
        else:
            out += _clumps(group, prompts, costs, unit_tokens, unit_rows, level + 1)
    return out + [[i] for i in single]


def _common_prefix(prompts: Iterable[bytes]) -> int:
    """Length of the prefix that all share: that of the smallest and the largest in byte order."""
    low, high = min(prompts, default=b""), max(prompts, default=b"")
    n = min(len(low), len(high))
    a, b = np.frombuffer(low[:n], np.uint8), np.frombuffer(high[:n], np.uint8)
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else n

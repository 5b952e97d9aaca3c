"""Numerics that engines resolve on their own devices: the types of activations and of the KV cache.

The first engine of an output records its types before any row is computed. All engines of this and later runs must
resolve the same ones.
"""

import json
from collections.abc import Mapping

from pipeline.data.output.parts import PartStore
from pipeline.errors import FingerprintError

RESOLVED = "_pipeline/resolved-numerics.json"
KEYS = ("activation_dtype", "kv_cache_dtype")


def agree(store: PartStore, resolved: Mapping[str, str | int]) -> None:
    """Record an engine's resolved types, or compare them with those of the output's first engine. resolved: of
    `Engine.resolved`; an engine without the keys, such as the client of a server, has nothing to agree on.

    Raises FingerprintError if they differ.
    """
    if not set(KEYS) <= resolved.keys():
        return
    ours = {key: resolved[key] for key in KEYS} | {"device": resolved.get("device_name", resolved.get("device"))}
    raw = store.folder.read(RESOLVED)
    if raw is None and store.folder.create(RESOLVED, json.dumps(ours).encode()):
        return
    theirs = json.loads(raw or store.folder.read(RESOLVED) or b"{}")
    differing = [
        f"engine.{key} is {ours[key]} on this engine ({ours['device']}), and was {theirs.get(key)} on the first one "
        f"({theirs.get('device')})"
        for key in KEYS
        if ours[key] != theirs.get(key)
    ]
    if differing:
        raise FingerprintError(
            f"output.path {store.path}: {'; '.join(differing)}. Tokens would depend on the engine that computes a row. "
            "Use machines of the same kind, set the key to a value that all of them support (none), or add "
            "--accept-numerics to compute the remaining rows with the new types"
        )

"""Records of damaged row groups: `_pipeline/damaged/w00012.json` for window 12.

The cut of a window depends on its damage, so the first run that cuts a damaged window records the damage, create-only
and before any part of the window is written. Later runs cut by this record, even if the file was repaired since.
"""

import json
from dataclasses import asdict

from pipeline.data.output.parts import PartStore
from pipeline.data.source import DamagedGroup

FOLDER = "_pipeline/damaged"
FORMAT = 1


def record_name(window: int) -> str:
    """Return the name of a window's record."""
    return f"{FOLDER}/w{window:05d}.json"


def load_damage(store: PartStore, window: int) -> tuple[DamagedGroup, ...] | None:
    """Return the recorded damage of a window; None if there is no record. Raises OutputError if it was edited."""
    return store.read_record(
        record_name(window), FORMAT, lambda record: tuple(DamagedGroup(**group) for group in record["damaged"])
    )


def record_damage(store: PartStore, window: int, damage: tuple[DamagedGroup, ...]) -> tuple[DamagedGroup, ...]:
    """Record the damage of a window, unless another run recorded it first. Return the recorded damage."""
    body = {"format": FORMAT, "window": window, "damaged": [asdict(group) for group in damage]}
    if store.folder.create(record_name(window), json.dumps(body, indent=1).encode()):
        return damage
    recorded = load_damage(store, window)
    assert recorded is not None
    return recorded

"""Finished rows of unfinished units, from a stopped run or a sample, kept in `_pipeline/partial/` for the next run.

They save work and decide nothing: a unit is done when its part exists, and lost rows are computed again.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from pipeline.data.output.parts import PartStore
from pipeline.data.units import Unit
from pipeline.engine.completion import Completion, RowQuality
from pipeline.job.actor.steps import RowOfSteps, StepRun
from pipeline.job.actor.tasks import of_plain, to_plain, token_logprobs

FOLDER = "_pipeline/partial"
FORMAT = 1


class PartialUnits:
    """Finished rows of unfinished units in one job's output. A row is identified by its origin."""

    def __init__(self, store: PartStore, fingerprint: str, note: Callable[[str], None]) -> None:
        """note: logs each file that cannot be used."""
        self._store, self._fingerprint, self._note = store, fingerprint, note

    def save(self, unit: Unit, completions: Iterable[Completion]) -> None:
        """Save these rows of the unit, in addition to those saved before."""
        row_ids = unit.row_ids()
        kept = {tuple(row["row_id"]): row for row in self._kept(unit)}
        for done in completions:
            row_id = row_ids[done.row_id]  # type: ignore[index]
            kept[row_id] = {**_raw(done), "row_id": row_id}
        body = {"format": FORMAT, "rows": list(kept.values())}
        self._store.folder.replace(self._name(unit), json.dumps(body).encode())

    def load(self, unit: Unit) -> list[Completion]:
        """Return the saved rows of the unit. Their row_id is the index in the unit."""
        index = {row_id: i for i, row_id in enumerate(unit.row_ids())}
        found = ((row, index.get(tuple(row["row_id"]))) for row in self._kept(unit))
        return [_completion(row, i) for row, i in found if i is not None]

    def _kept(self, unit: Unit) -> list[dict[str, Any]]:
        """Return the saved rows as they are in the file; none if another version wrote it, or it was edited."""
        raw = self._store.folder.read(self._name(unit))
        if raw is None:
            return []
        try:
            saved = json.loads(raw)
            if saved["format"] != FORMAT:
                raise ValueError(f"format {saved['format']!r}, expected {FORMAT}")
            for row in saved["rows"]:
                tuple(row["row_id"])
                _completion(row, 0)
            return saved["rows"]
        except Exception as error:  # whatever it holds: its rows are computed again
            name = self._store.folder.shown(self._name(unit))
            self._note(f"{name} is not used, its rows are computed again: {type(error).__name__}: {error}")
            return []

    def remove(self, unit: Unit) -> None:
        self._store.folder.remove(self._name(unit))

    def _name(self, unit: Unit) -> str:
        return f"{FOLDER}/{self._fingerprint}-w{unit.window:05d}-u{unit.index:04d}of{unit.num_units:04d}.json"


def remove_all(store: PartStore) -> None:
    """Remove all saved rows of a finished job."""
    for name in store.folder.names(FOLDER):
        store.folder.remove(f"{FOLDER}/{name}")


def _raw(done: Completion) -> dict[str, Any]:
    if isinstance(done, RowOfSteps):  # its other fields follow from its requests
        return {"runs": [{**vars(run), "completion": _raw(run.completion)} for run in done.runs], "error": done.error}
    return {**asdict(done), "result": to_plain(done.result)}


def _completion(raw: dict[str, Any], row_id: int) -> Completion:
    if "runs" in raw:
        runs = [StepRun(**{**run, "completion": _completion(run["completion"], row_id)}) for run in raw["runs"]]
        return RowOfSteps.of_runs(row_id, runs, error=raw.get("error"))
    quality, samples = raw.get("quality"), raw.get("samples", ())
    logprobs, of_prompt = (
        None if found is None else [token_logprobs(t) for t in found]
        for found in (raw["logprobs"], raw.get("prompt_logprobs"))
    )
    found = None if quality is None else RowQuality(**quality)
    each, result = tuple(_completion(sample, row_id) for sample in samples), of_plain(raw.get("result"))
    own = {"row_id": row_id, "logprobs": logprobs, "prompt_logprobs": of_prompt, "quality": found, "samples": each}
    return Completion(**{**raw, **own, "result": result})

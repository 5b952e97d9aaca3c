"""Follow a run from its output, on a disk or in a store, until it ends.

Decides when to read the output again, and when the run is over: by its status, or because its process died.
"""

import time

from pipeline.data.output.parts import PartStore
from pipeline.errors import EnvironmentFailed, Interrupted, OutputError, TooManyRowErrors
from pipeline.job.output.read_output import staleness, status_of
from pipeline.job.telemetry.run_log import load_run
from pipeline.job.telemetry.status import Status
from pipeline.report.record.run_record import RunRecord
from pipeline.stores.local_folder import LocalFolder

LOOK_S = 1.0
STORE_LOOK_S = 5.0  # in an object store, where each refresh costs several requests
_EXIT_CODES = {
    "finished": 0,
    "sampled": 0,
    "stopped": TooManyRowErrors.exit_code,
    "interrupted": Interrupted.exit_code,
}


class RunFollower:
    """Last observed `status`, `run` (its record) and `staleness` (why the status is stale)."""

    def __init__(self, store: PartStore, run_id: str | None = None) -> None:
        """`run_id`: the run to follow; by default the last one. Reads the output at once."""
        self._store, self._run_id = store, run_id
        self._every_s = LOOK_S if isinstance(store.folder, LocalFolder) else STORE_LOOK_S
        self.look()

    def look(self) -> None:
        self.status: Status = status_of(self._store)
        self.run: RunRecord | None = load_run(self._store, self._run_id or self.status.run_id)
        is_last = self._run_id in (None, self.status.run_id)
        self.staleness: str | None = staleness(self._store, self.status, self.run) if is_last else None
        outcome = self.status.outcome if is_last or self.run is None else self.run.outcome
        self.is_over = outcome != "running" or not is_last or self.staleness is not None
        self.exit_code = (
            OutputError.exit_code if self.staleness else _EXIT_CODES.get(outcome, EnvironmentFailed.exit_code)
        )
        if self.staleness and outcome == "running":
            self.exit_code = EnvironmentFailed.exit_code

    def wait(self) -> None:
        """Wait until something may have changed, then read the output again."""
        time.sleep(self._every_s)
        self.look()

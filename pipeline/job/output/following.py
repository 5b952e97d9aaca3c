"""A run as somebody sees it who looks at its output now and then, on a disk or in a store, until it ends.

Owns when to look, and when the run is over: by its own word, or because its process is gone.
"""

import time

from pipeline.data.output.parts import PartStore
from pipeline.errors import EnvironmentFailed, Interrupted, OutputError, TooManyRowErrors
from pipeline.job.output.read_output import doubt_of, status_of
from pipeline.job.telemetry.run_log import load_run
from pipeline.job.telemetry.status import Status
from pipeline.report.record.run_record import RunRecord
from pipeline.stores.local_folder import LocalFolder

LOOK_S = 1.0
STORE_LOOK_S = 5.0  # in an object store, where each look is some requests
_EXIT_CODES = {
    "finished": 0,
    "sampled": 0,
    "stopped": TooManyRowErrors.exit_code,
    "interrupted": Interrupted.exit_code,
}


class Following:
    """What was seen last is in `status`, `run` (its record) and `doubt` (why the status is not to be believed)."""

    def __init__(self, store: PartStore, run_id: str | None = None) -> None:
        """`run_id`: the run to follow; whichever is the last when left out. Looks at once."""
        self._store, self._run_id = store, run_id
        self._every_s = LOOK_S if isinstance(store.folder, LocalFolder) else STORE_LOOK_S
        self.look()

    def look(self) -> None:
        self.status: Status = status_of(self._store)
        self.run: RunRecord | None = load_run(self._store, self._run_id or self.status.run_id)
        is_last = self._run_id in (None, self.status.run_id)
        self.doubt: str | None = doubt_of(self._store, self.status, self.run) if is_last else None
        outcome = self.status.outcome if is_last or self.run is None else self.run.outcome
        self.is_over = outcome != "running" or not is_last or self.doubt is not None
        self.exit_code = OutputError.exit_code if self.doubt else _EXIT_CODES.get(outcome, EnvironmentFailed.exit_code)
        if self.doubt and outcome == "running":
            self.exit_code = EnvironmentFailed.exit_code

    def wait(self) -> None:
        """Until something may have changed; then look again."""
        time.sleep(self._every_s)
        self.look()

"""The `pipeline` command with the engine of `fakes`, and changes of the code as an upgrade or a machine makes them.

Run it as `python -m tests.faults.driver run JOB.yaml ...`. CAMPAIGN_PATCHES is a JSON object: `cut` names one of CUTS,
`clock` is the seed of a wall clock that jumps by up to ten years at each reading, and `ray` is false for jobs that use
threads whatever the number of their windows.
"""

import functools
import json
import os
import random
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from typing import Any

from pipeline.__main__ import main
from pipeline.machine import signals

TEN_YEARS_S = 10 * 365 * 86_400


def cut_by_shorter_prefixes() -> None:
    """Group rows that share 12 bytes. The number of units changes too."""
    from pipeline.data import bucket

    bucket.SHARED_BYTES = 12


def cut_in_another_order() -> None:
    """Sort rows by their exact length. The units have other rows, but their number and sizes stay the same."""
    from pipeline.data import bucket

    bucket._bucket = lambda cost: cost


def cut_of_another_version() -> None:
    """Raise the version of the cut, as a release does that changes it on purpose."""
    from pipeline.data import units

    units.CUT_VERSION += 1


CUTS: dict[str, Callable[[], None]] = {
    "shorter prefixes": cut_by_shorter_prefixes,
    "another order": cut_in_another_order,
    "another version": cut_of_another_version,
}


def jumping_clock(seed: int) -> None:
    from pipeline.machine import host

    draw, read_s = random.Random(seed), time.time

    def jump_s() -> float:
        return draw.uniform(-TEN_YEARS_S, TEN_YEARS_S)

    def wall_time() -> datetime:
        return datetime.now().replace(microsecond=0) + timedelta(seconds=round(jump_s()))

    def zone_time(zone: tzinfo) -> datetime:
        return datetime.now(zone) + timedelta(seconds=round(jump_s()))

    host.wall_time, host.zone_time = wall_time, zone_time
    time.time = lambda: read_s() + jump_s()


def with_fakes(run: Callable[..., Any], config: Any, **options: Any) -> Any:
    from tests.faults.fakes import HASHES

    return run(config, backend=HASHES if config.server is None else None, **options)


def patch(cut: str | None = None, clock: int | None = None, ray: bool = True) -> None:
    if cut is not None:
        CUTS[cut]()
    if clock is not None:
        jumping_clock(clock)
    if not ray:
        from pipeline.job.dataflow.spec import FlowSpec

        FlowSpec.needs_ray = False  # type: ignore[assignment]
    from pipeline.job.running import run

    run.run_job = functools.partial(with_fakes, run.run_job)


if __name__ == "__main__":
    signals.install(signals.leave)  # as `main` does, but before the imports of `patch`
    patch(**json.loads(os.environ.get("CAMPAIGN_PATCHES", "{}")))
    main()

"""The end of a job: all rows are counted, and `_SUCCESS` says that the output is complete.

`verify` here is the count that every run ends with, by names and footers; `pipeline verify` is `audit.py`.
"""

import json
from collections.abc import Callable
from contextlib import closing

from pipeline.data.columns import empty_table
from pipeline.data.output.inventory import Inventory, read_counts
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import SUCCESS, PartName, PartStore
from pipeline.errors import Interrupted, OutputError, PipelineError
from pipeline.job.planning.appended import num_appended
from pipeline.job.planning.plan import JobPlan, what_is_left

# As PartTotals has them.
_TOKENS = ("num_input_tokens", "num_cached_tokens", "num_generated_tokens", "num_error_input_tokens")


def write_empty_part(plan: JobPlan, store: PartStore, metadata: dict[str, str]) -> None:
    """An input of no rows has an output too: one part of no rows, with all columns."""
    store.write(PartName(plan.fingerprint.short, 0, 0, 1, 0), empty_table(plan.schema), metadata)


def verify(plan: JobPlan, store: PartStore, say: Callable[[int, int], None] | None = None) -> PartTotals:
    """What the output holds, from one listing and every part's footer. Raises where it is not exactly the input's
    rows.

    `say` is called for each part with how many are read and how many there are; what it raises ends the count.
    """
    progress = store.list(plan.fingerprint.short)
    left = what_is_left(plan, progress)
    if left:
        raise PipelineError(
            f"{store.path}: window {left[0].window.index} and {len(left) - 1} more are not complete "
            "though all units are done; run again to do them"
        )
    totals = PartTotals()
    with closing(store.parts(progress)) as parts:
        for _, part in parts:
            totals += part
            if say is not None:
                say(totals.units, progress.num_units)
    if totals.rows != plan.num_rows or progress.num_rows != plan.num_rows:
        raise OutputError(
            f"{store.path}: the parts hold {totals.rows} rows by their footers and {progress.num_rows} by "
            f"their names, the input has {plan.num_rows}; were parts added or removed by hand?"
        )
    return totals


def read_success(store: PartStore) -> PartTotals | None:
    """What `_SUCCESS` says the output holds; None where there is none, or one that says something else."""
    counts = read_counts(store)
    if counts is None:
        return None
    try:
        rows = counts["completed_rows"] + counts["error_rows"]
        return PartTotals(
            rows=rows,
            units=counts["parts"],
            error_rows=dict(counts["errors"]),
            further_samples=counts["output_rows"] - rows,
            **{name: counts[name] for name in _TOKENS},
        )
    except (ValueError, KeyError, TypeError):  # edited, or another program's
        return None


def write_success(plan: JobPlan, store: PartStore, totals: PartTotals) -> None:
    """The last thing a job does. Raises Interrupted, and leaves no `_SUCCESS`, where files were appended meanwhile."""
    check_none_appended(plan, store)
    skipped = plan.source.skipped
    there = Inventory.of(store)
    counts = {
        "job": plan.job.config.name,
        "fingerprint": plan.fingerprint.digest,
        "input_rows": plan.num_rows,
        "appended_batches": plan.batches.count,
        "output_rows": totals.output_rows,
        "completed_rows": totals.rows - totals.num_error_rows,
        "error_rows": totals.num_error_rows,
        "errors": dict(totals.error_rows),
        "parts": totals.units,
        "parts_bytes": there.parts_bytes,
        "parts_digest": there.parts_digest,
        **{name: getattr(totals, name) for name in _TOKENS},
        "num_skipped_files": len(skipped),
        "skipped_files": [{"file": f.relative, "bytes": f.size, "reason": f.reason} for f in skipped],
    }
    store.folder.replace(SUCCESS, json.dumps(counts, indent=1).encode())
    try:
        check_none_appended(plan, store)  # the record may have come between the look above and `_SUCCESS`
    except Interrupted:
        if (read_counts(store) or {}).get("appended_batches") == plan.batches.count:  # not the other run's
            store.folder.remove(SUCCESS)
        raise


def check_none_appended(plan: JobPlan, store: PartStore) -> None:
    """Raise Interrupted where another run has appended files since this one planned: it does not count their rows."""
    if num_appended(store) > plan.batches.count:
        raise Interrupted(
            f"{store.path}: another run has appended input files while this one ran. What is written is whole; the "
            "same command goes on with them."
        )

"""Publication of a job: count all rows, and mark the output as complete with `_SUCCESS`.

`count_rows` counts at the end of every run, by names and footers; `pipeline verify` is `audit.py`.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing

from pipeline.data.columns import empty_table
from pipeline.data.output.inventory import Inventory, counted_rows, read_counts
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import SUCCESS, PartName, PartStore
from pipeline.data.row_checksum import MODULUS
from pipeline.data.source import window_checksums
from pipeline.errors import Interrupted, OutputError, PipelineError
from pipeline.formatting import counted
from pipeline.job.planning.appended import num_appended
from pipeline.job.planning.plan import JobPlan, remaining_windows

# Fields of PartTotals
_TOKENS = ("num_input_tokens", "num_cached_tokens", "num_generated_tokens", "num_error_input_tokens")


def write_empty_part(plan: JobPlan, store: PartStore, metadata: dict[str, str]) -> None:
    """Write the output of an input without rows: one empty part with all columns."""
    store.write(PartName(plan.fingerprint.short, 0, 0, 1, 0), empty_table(plan.schema), metadata)


def count_rows(plan: JobPlan, store: PartStore, log: Callable[[int, int], None] | None = None) -> PartTotals:
    """Count the output from one listing and every part's footer, and compare the rows of each window with those of the
    input by their checksums. Raises if it does not match the input's rows exactly.

    `log` is called for each part with the numbers of counted parts and of all parts; what it raises ends the count.
    """
    progress = store.list(plan.fingerprint.short)
    left = remaining_windows(plan, progress)
    if left:
        raise PipelineError(
            f"{store.path}: incomplete windows: {len(left)} (the first is {left[0].window.index}), though all "
            "units are done; run again to compute them"
        )
    totals, checksums = PartTotals(), defaultdict[int, int](int)
    with closing(store.parts(progress)) as parts:
        for name, part in parts:
            totals += part
            checksums[name.window] += part.rows_checksum
            if log is not None:
                log(totals.units, progress.num_units)
    if totals.rows != plan.num_rows or progress.num_rows != plan.num_rows:
        raise OutputError(
            f"{store.path}: the parts hold {totals.rows} rows by their footers and {progress.num_rows} by "
            f"their names, the input has {plan.num_rows}; were parts added or removed by hand?"
        )
    for window, checksum in window_checksums(plan.source, plan.windows).items():
        if checksums[window] % MODULUS != checksum:
            first = next(name for name in progress.parts() if name.window == window)
            raise OutputError(
                f"{store.path}: the {counted(first.num_units, 'part')} of window {window}, {first.of_window}, do not "
                "hold each of its rows once: they were cut differently, as if the input's values had changed between "
                f"two runs, or a part is a copy of another one. Remove {first.of_window} and run again"
            )
    return totals


def read_success(store: PartStore) -> PartTotals | None:
    """Return the totals in `_SUCCESS`; None if it is missing or has another format."""
    counts = read_counts(store)
    if counts is None:
        return None
    try:
        rows = counted_rows(counts)
        return PartTotals(
            rows=rows,
            units=counts["parts"],
            error_rows=dict(counts["errors"]),
            further_samples=counts["output_rows"] - rows,
            rows_checksum=int(counts["rows_checksum"], 16),
            dropped_rows=dict(counts.get("dropped_rows", {})),
            **{name: counts[name] for name in _TOKENS},
        )
    except (ValueError, KeyError, TypeError):  # edited, or from another program
        return None


def write_success(plan: JobPlan, store: PartStore, totals: PartTotals) -> None:
    """Publish the output. Raises Interrupted, and leaves no `_SUCCESS`, if files were appended in the meantime."""
    check_none_appended(plan, store)
    skipped = plan.source.skipped
    inventory = Inventory.from_store(store)
    counts = {
        "job": plan.job.config.name,
        "fingerprint": plan.fingerprint.digest,
        "input_rows": plan.num_rows,
        "appended_batches": plan.batches.count,
        "output_rows": totals.output_rows,
        "completed_rows": totals.num_completed_rows,
        "error_rows": totals.num_error_rows,
        "errors": dict(totals.error_rows),
        "dropped_rows": dict(totals.dropped_rows),
        "parts": totals.units,
        "parts_bytes": inventory.parts_bytes,
        "parts_digest": inventory.parts_digest,
        "rows_checksum": totals.checksum_hex,
        **{name: getattr(totals, name) for name in _TOKENS},
        "num_skipped_files": len(skipped),
        "skipped_files": [{"file": f.relative, "bytes": f.size, "reason": f.reason} for f in skipped],
    }
    store.folder.replace(SUCCESS, json.dumps(counts, indent=1).encode())
    try:
        check_none_appended(plan, store)  # files may be appended between the check above and `_SUCCESS`
    except Interrupted:
        if (read_counts(store) or {}).get("appended_batches") == plan.batches.count:  # not if the other run wrote it
            store.folder.remove(SUCCESS)
        raise


def check_none_appended(plan: JobPlan, store: PartStore) -> None:
    """Raise Interrupted if another run has appended files since this one was planned: their rows are not counted."""
    if num_appended(store) > plan.batches.count:
        raise Interrupted(
            f"{store.path}: another run has appended input files while this one ran. The written output is consistent; "
            "run the same command to compute the new files."
        )

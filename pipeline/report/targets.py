"""Report figures with a limit in the job file's section `targets`."""

from collections.abc import Callable, Mapping

from pipeline.report.run_report import RunReport, Target


def _row_p95_s(report: RunReport) -> float | None:
    p95 = report.latency["row_us"].p95 if "row_us" in report.latency else None
    return None if p95 is None else p95 / 1e6


# A function returns None if the figure is unknown.
FIGURES: Mapping[str, Callable[[RunReport], float | None]] = {
    "max_usd_per_1m_generated": lambda report: report.cost.per_1m_generated_usd,
    "min_generated_per_s": lambda report: report.generated_tokens_per_s,
    "min_batch_efficiency": lambda report: report.batch_efficiency if report.machine_us else None,
    "max_row_p95": _row_p95_s,
}


def targets_of(report: RunReport, limits: Mapping[str, float | None]) -> tuple[Target, ...]:
    """Return the targets of a report. limits: the values of the section; keys that are not in FIGURES are ignored."""
    found = ((key, limits.get(key), figure) for key, figure in FIGURES.items())
    return tuple(Target(key, limit, figure(report)) for key, limit, figure in found if limit is not None)

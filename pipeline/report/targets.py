"""Whether a job kept to its targets (the job file's section `targets`)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """actual: None where it is not known, which is a miss too."""

    key: str
    limit: float
    actual: float | None

    @property
    def is_missed(self) -> bool:
        if self.actual is None:
            return True
        return self.actual < self.limit if self.key.startswith("min_") else self.actual > self.limit


def targets_of(actuals: Mapping[str, float | None], limits: Mapping[str, float | None]) -> tuple[Target, ...]:
    """Both by the keys of the section. limits: None where the job has none."""
    return tuple(Target(key, limit, actuals[key]) for key, limit in limits.items() if limit is not None)

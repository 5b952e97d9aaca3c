"""How far what was served is from a reference model, by the rows of a sample (`quality.sample`): sums and figures.

The sums are whole numbers that add up over units, actors and runs. An alarm is raised only for a drop that is certain:
a small sample tells of large drops alone. Tokens of one row depend on each other, so the error of the agreement is that
of a ratio over rows (Cochran, Sampling Techniques, chapter 6), and at least that of independent tokens. Right answers
of both models are compared row by row, so that only rows count that one of them alone has right, as in McNemar's test.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import sqrt

from pipeline.formatting import percent

CERTAIN = 2.0  # standard errors that a drop has to be above the limit


@dataclass(frozen=True)
class QualityStats:
    """Of any number of rows. agreed: of `tokens`; same_texts: of `rows`; sums of squares and products are over rows.
    expected_rows have a right answer; only_served and only_reference are those that one of the models alone has right.
    unmeasured: rows of the sample without figures, by reason."""

    rows: int = 0
    tokens: int = 0
    agreed: int = 0
    kl_nanonats: int = 0
    same_texts: int = 0
    agreed_squared: int = 0
    agreed_times_tokens: int = 0
    tokens_squared: int = 0
    expected_rows: int = 0
    served_right: int = 0
    reference_right: int = 0
    only_served: int = 0
    only_reference: int = 0
    unmeasured: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_row(
        cls,
        tokens: int,
        agreed: int,
        kl_nanonats: int,
        same_text: bool,
        served_right: bool | None = None,
        reference_right: bool | None = None,
    ) -> "QualityStats":
        """served_right, reference_right: None where no right answer is known."""
        served, reference = bool(served_right), bool(reference_right)
        return cls(
            rows=1,
            tokens=tokens,
            agreed=agreed,
            kl_nanonats=kl_nanonats,
            same_texts=int(same_text),
            agreed_squared=agreed * agreed,
            agreed_times_tokens=agreed * tokens,
            tokens_squared=tokens * tokens,
            expected_rows=int(served_right is not None),
            served_right=int(served),
            reference_right=int(reference),
            only_served=int(served and not reference),
            only_reference=int(reference and not served),
        )

    def __add__(self, other: "QualityStats") -> "QualityStats":
        names = [f.name for f in fields(self) if f.name != "unmeasured"]
        mine, theirs = self.unmeasured, other.unmeasured
        unmeasured = {why: mine.get(why, 0) + theirs.get(why, 0) for why in sorted({*mine, *theirs})}
        return QualityStats(**{n: getattr(self, n) + getattr(other, n) for n in names}, unmeasured=unmeasured)

    @property
    def agreement(self) -> float | None:
        """The share of tokens that agree; None without any."""
        return self.agreed / self.tokens if self.tokens else None

    @property
    def agreement_error(self) -> float:
        """Its standard error."""
        if not self.tokens:
            return 0.0
        p, n = self.agreed / self.tokens, self.tokens
        between = self.agreed_squared - 2 * p * self.agreed_times_tokens + p * p * self.tokens_squared
        clustered = sqrt(max(between, 0.0) * self.rows / max(self.rows - 1, 1)) / n
        return max(clustered, sqrt(p * (1 - p) / n))

    @property
    def right_drop(self) -> float:
        """How many fewer answers are right than the reference's, as a share."""
        return (self.reference_right - self.served_right) / max(self.expected_rows, 1)

    @property
    def right_error(self) -> float:
        """Its standard error."""
        n, differ = max(self.expected_rows, 1), self.only_served + self.only_reference
        return sqrt(max(differ - n * self.right_drop**2, 0.0)) / n

    def drops(self, max_drop: float) -> dict[str, float]:
        """What has certainly dropped by more, and by how much: `agreement`, `right_answers`."""
        found = {}
        if self.agreement is not None and (1 - self.agreement) - CERTAIN * self.agreement_error > max_drop:
            found["agreement"] = 1 - self.agreement
        if self.right_drop - CERTAIN * self.right_error > max_drop:
            found["right_answers"] = self.right_drop
        return found

    def to_text(self) -> str:
        """Return a line; empty where nothing was compared."""
        if self.agreement is None:
            return ""
        parts = [
            f"{self.agreement:.2%} (± {self.agreement_error:.2%}) of {self.tokens:,} tokens agree with "
            "the reference model",
            f"KL {self.kl_nanonats / 1e9 / self.tokens:.3g} nats a token",
            f"{self.same_texts:,} of {self.rows:,} texts the same",
        ]
        if self.expected_rows:
            served, reference = (percent(n / self.expected_rows) for n in (self.served_right, self.reference_right))
            parts.append(f"right of {self.expected_rows:,} answers: {served}, the reference's {reference}")
        return "; ".join(parts)

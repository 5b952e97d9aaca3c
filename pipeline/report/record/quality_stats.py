"""Statistics of the difference between the served model and a reference, over a sample of rows (`quality.sample`).

The sums are integers that add up over units, actors and runs. An alarm is raised only for a significant drop, so a
small sample detects only large drops. Tokens of one row depend on each other, so the error of the agreement is that of
a ratio over rows (Cochran, Sampling Techniques, chapter 6), and at least that of independent tokens. Correct answers of
both models are compared row by row: only rows that exactly one of them answers correctly count, as in McNemar's test.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import sqrt

from pipeline.formatting import percent

CERTAIN = 2.0  # standard errors by which a drop must exceed the limit


@dataclass(frozen=True)
class QualityStats:
    """Sums over sampled rows.

    agreed: agreeing tokens among `tokens`. same_texts: among `rows`. Sums of squares and products are over rows.
    expected_rows: rows with an expected answer. only_served, only_reference: rows that only this model answered
    correctly. unmeasured: sampled rows without figures, by reason.
    """

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
        """Return the sums of one row. served_right, reference_right: None without an expected answer."""
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
        unmeasured = {reason: mine.get(reason, 0) + theirs.get(reason, 0) for reason in sorted({*mine, *theirs})}
        return QualityStats(**{n: getattr(self, n) + getattr(other, n) for n in names}, unmeasured=unmeasured)

    @property
    def agreement(self) -> float | None:
        """Share of agreeing tokens; None without tokens."""
        return self.agreed / self.tokens if self.tokens else None

    @property
    def agreement_error(self) -> float:
        """Standard error of `agreement`."""
        if not self.tokens:
            return 0.0
        p, n = self.agreed / self.tokens, self.tokens
        between = self.agreed_squared - 2 * p * self.agreed_times_tokens + p * p * self.tokens_squared
        clustered = sqrt(max(between, 0.0) * self.rows / max(self.rows - 1, 1)) / n
        return max(clustered, sqrt(p * (1 - p) / n))

    @property
    def right_drop(self) -> float:
        """Share of correct answers of the reference minus that of the served model."""
        return (self.reference_right - self.served_right) / max(self.expected_rows, 1)

    @property
    def right_error(self) -> float:
        """Standard error of `right_drop`."""
        n, differ = max(self.expected_rows, 1), self.only_served + self.only_reference
        return sqrt(max(differ - n * self.right_drop**2, 0.0)) / n

    def drops(self, max_drop: float) -> dict[str, float]:
        """Return the significant drops above `max_drop`, of `agreement` and `right_answers`."""
        found = {}
        if self.agreement is not None and (1 - self.agreement) - CERTAIN * self.agreement_error > max_drop:
            found["agreement"] = 1 - self.agreement
        if self.right_drop - CERTAIN * self.right_error > max_drop:
            found["right_answers"] = self.right_drop
        return found

    def to_text(self) -> str:
        """Return one line; empty if nothing was compared."""
        if self.agreement is None:
            return ""
        parts = [
            f"{self.agreement:.2%} (± {self.agreement_error:.2%}) of {self.tokens:,} tokens agree with "
            "the reference model",
            f"KL {self.kl_nanonats / 1e9 / self.tokens:.3g} nats per token",
            f"{self.same_texts:,} of {self.rows:,} texts identical",
        ]
        if self.expected_rows:
            served, reference = (percent(n / self.expected_rows) for n in (self.served_right, self.reference_right))
            parts.append(f"{served} of {self.expected_rows:,} answers correct, reference {reference}")
        return "; ".join(parts)

"""What speculation may lose against plain decoding: an account in seconds that drafting has to stay above zero.

Acceptance can be wrongly estimated and texts can change, even against us; this account bounds what either can cost. It
starts with a few plain steps' time and earns a small share of all time. Every step that drafts is charged what it lost
against the plain steps that would have given the same tokens, or credited what it gained. Drafts are only made while
half of the account can pay for all of them being rejected, at the time that such a step is expected to take. What is
gained is kept up to a cap, so that a good hour does not pay for a bad one.

    losses charged - gains <= grant + EARNED_SHARE of the time + excess (what steps lost beyond what each might lose)

The grant is GRANT_STEPS plain steps or SMALL_GRANT_S. There is an excess where a step takes longer than expected. The
controller charges what a step took, but at most `TIME_TRUST` times what was expected, and beside prompts what was
expected: one disturbed step says little of drafts. So a clock may find a larger loss than was charged. The steps after
it are expected to take longer (cost.py). A debt over the grant is forgiven, so that one wild step does not end drafting
for good.
"""

GRANT_STEPS = 4.0  # plain steps' time at the start;
SMALL_GRANT_STEPS = 10.0  # of a small model, since what a try takes the host does not shrink with it,
SMALL_GRANT_S = (10e-3, 30e-3)  # but from here to here
EARNED_SHARE = 0.003  # of all time
CAP_STEPS = 20.0  # plain steps' time that the account holds at most
RISKED_SHARE = 0.5  # of the account that one step may lose


class LossBudget:
    """The account. Times in seconds."""

    def __init__(self) -> None:
        self.balance_s = self._granted_s = 0.0
        self.is_open = False

    def open(self, plain_s: float) -> None:
        """Grant the first balance, once a plain step's time is known."""
        assert not self.is_open, "one grant"
        self.is_open = True
        least_s, most_s = SMALL_GRANT_S
        small_s = min(max(SMALL_GRANT_STEPS * plain_s, least_s), most_s)
        self.balance_s = self._granted_s = max(GRANT_STEPS * plain_s, small_s)

    @property
    def affordable_s(self) -> float:
        """What one step may lose at most."""
        return max(RISKED_SHARE * self.balance_s, 0.0)

    @property
    def has_earned(self) -> bool:
        """Whether what was granted is left whatever a step loses."""
        return (1.0 - RISKED_SHARE) * self.balance_s > self._granted_s

    def settle(self, elapsed_s: float, gained_s: float, plain_s: float) -> None:
        """A step took `elapsed_s` and is credited or (below 0) charged so much; `plain_s` is a plain step's time at
        present."""
        # One wild step cannot end drafting for good: it owes at most what it was granted, the rest is forgiven.
        balance_s = max(self.balance_s + EARNED_SHARE * elapsed_s + gained_s, -self._granted_s)
        # A shorter plain step lowers the cap; it takes nothing away that was there before.
        self.balance_s = min(balance_s, max(CAP_STEPS * plain_s, self.balance_s))

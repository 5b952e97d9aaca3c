"""What measuring may cost: an account in seconds. No torch.

It is granted a few plain steps and earns a small share of all time. Steps that are run to learn are charged what they
really took beyond what the best known choice takes for as many tokens. Drafts that turn out slower than plain steps are
charged, too. Nothing is measured while the account is empty, and no debt is forgiven. So

    seconds lost <= grant + EARNED_SHARE of all seconds + what the last measurement overdrew
"""

GRANT_STEPS = 5.0  # plain steps' time at the start
CAP_STEPS = 24.0  # what it holds at most
PRICE_STEPS = 4.0  # what a measurement is expected to lose
EARNED_SHARE = 0.005  # of all time


class Account:
    """Times in seconds."""

    def __init__(self) -> None:
        self.balance_s = self._price_s = self._least_s = 0.0
        self.is_open = False

    def open(self, plain_step_s: float) -> None:
        """Once a plain step's time is known."""
        self.is_open = True
        self.balance_s += GRANT_STEPS * plain_step_s

    def settle(self, elapsed_s: float, lost_s: float, plain_step_s: float) -> None:
        """So much time went by, of which so much was lost."""
        balance_s = self.balance_s + EARNED_SHARE * elapsed_s - lost_s
        self.balance_s = min(balance_s, max(CAP_STEPS * plain_step_s, self.balance_s))
        self._price_s = PRICE_STEPS * plain_step_s

    @property
    def is_in_debt(self) -> bool:
        return self.balance_s < 0.0

    @property
    def can_pay(self) -> bool:
        """Whether there is enough for another measurement."""
        return self.is_open and self.balance_s >= self._price_s

    def take(self, on_credit: bool) -> bool:
        """Whether there is enough for a measurement that begins now. on_credit: it may use up the grant once more."""
        self._least_s = -GRANT_STEPS / PRICE_STEPS * self._price_s if on_credit else 0.0
        return self.can_pay or (on_credit and self.is_open and self.can_go_on)

    @property
    def can_go_on(self) -> bool:
        """Whether there is enough for another step of the last measurement."""
        return self.balance_s >= self._least_s

"""What an engine counts of its work: tokens and times, as whole numbers that add up over steps, engines and runs."""

from dataclasses import astuple, dataclass

DRAFT_PLACES = 8  # places of drafts after the known tokens that are counted apart; the last one counts all from there
STEP_TIMES = ("prefill_us", "decode_us", "drafts_us", "preempted_us", "retried_us", "quality_us")  # of EngineStats


@dataclass
class EngineStats:
    """Running totals of one engine, all integers so that sums are exact. Times in microseconds.

    prompt_tokens and generated_tokens count every finished or running request once; recomputed_tokens is work done
    again after a preemption. The time of all steps is the sum of STEP_TIMES: a step's is divided in proportion to its
    tokens, of which rejected drafts take drafts_us, those computed again preempted_us, labels that are read prefill_us,
    and texts that are read to compare models (`HiddenStates`) quality_us; a step that did not fit the memory is
    retried_us. batch_sum adds the sequences of each step, kv_used_ppm_sum the used share of the KV cache of each step
    (parts per million).

    plain_steps to plain_rows_us are sums over the plain steps, which generated one token for each of their rows and did
    nothing else: 1, rows, rows**2, microseconds, rows * microseconds. A line of time by rows is
    fitted to them (`pipeline.estimate.measured`).

    num_draft_steps are the steps that computed drafts; drafted_1 counts drafts in the first place after the known
    tokens and accepted_1 those of them that the model confirmed, and so on. One number for each place, because these
    totals travel and add up as plain integers. rejected_drafts are those of all places that it did not confirm.

    masked_tokens counts the rows of logits whose token a grammar had to allow, those after drafts too. Most of these
    need no mask; filled_masks counts those that were filled, and mask_us is the time of filling them, a part of the
    steps' time. forced_tokens are generated tokens that a grammar left no choice of, taken without logits of their own.
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_out_of_memory: int = 0  # steps that were undone because they did not fit the memory
    prefill_us: int = 0
    decode_us: int = 0
    drafts_us: int = 0
    preempted_us: int = 0
    retried_us: int = 0
    quality_us: int = 0
    batch_sum: int = 0
    kv_used_ppm_sum: int = 0
    plain_steps: int = 0
    plain_rows: int = 0
    plain_rows_squared: int = 0
    plain_us: int = 0
    plain_rows_us: int = 0
    num_draft_steps: int = 0
    rejected_drafts: int = 0
    masked_tokens: int = 0
    forced_tokens: int = 0
    filled_masks: int = 0
    mask_us: int = 0
    drafted_1: int = 0
    drafted_2: int = 0
    drafted_3: int = 0
    drafted_4: int = 0
    drafted_5: int = 0
    drafted_6: int = 0
    drafted_7: int = 0
    drafted_8: int = 0
    accepted_1: int = 0
    accepted_2: int = 0
    accepted_3: int = 0
    accepted_4: int = 0
    accepted_5: int = 0
    accepted_6: int = 0
    accepted_7: int = 0
    accepted_8: int = 0

    def since(self, before: "EngineStats") -> "EngineStats":
        """What the totals grew by after `before`, a copy of them."""
        return EngineStats(*(now - then for now, then in zip(astuple(self), astuple(before))))

    @property
    def step_us(self) -> int:
        """The time of all steps."""
        return sum(getattr(self, name) for name in STEP_TIMES)

    @property
    def drafted_by_place(self) -> list[int]:
        return [getattr(self, f"drafted_{place}") for place in range(1, DRAFT_PLACES + 1)]

    @property
    def accepted_by_place(self) -> list[int]:
        return [getattr(self, f"accepted_{place}") for place in range(1, DRAFT_PLACES + 1)]

"""Several samples of one request (`SamplingParams.n`): their seeds, and the one completion that they become."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from pipeline.engine.params import Completion


def sample_seed(seed: int, index: int) -> int:
    """The seed of a request's sample `index`, from 0: the first one keeps the request's own, the others get 63 bits of
    BLAKE2b of both. A request with this seed and n = 1 gives the same tokens as the sample."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\0sample\0{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def with_samples(samples: Sequence[Completion]) -> Completion:
    """The completion of a request with these samples. One that failed makes it an error, with the message of the first
    that did: an output row is whole or it is an error row, which `--retry-failed` computes again."""
    errors = [(index, sample) for index, sample in enumerate(samples) if sample.error is not None]
    if not errors:
        return replace(
            samples[0],
            first_token_us=min(sample.first_token_us for sample in samples),
            last_token_us=max(sample.last_token_us for sample in samples),
            samples=tuple(samples),
        )
    index, first = errors[0]
    fine = [sample for sample in samples if sample.error is None]
    which = f"sample {index} of {len(samples)}: " if fine else ""  # else it is the prompt's error
    return replace(
        first,
        error_message=f"{which}{first.error_message}",
        num_lost_prompt_tokens=sum(sample.num_lost_prompt_tokens for sample in samples)
        + sum(sample.num_prompt_tokens - sample.num_cached_tokens for sample in fine),
        num_lost_generated_tokens=sum(sample.num_lost_generated_tokens for sample in samples)
        + sum(len(sample.token_ids) for sample in fine),
    )


class Group:
    """The sequences of one request that became several. Their completions become one when the last has ended: none is
    aborted because another failed. It is never part-way: they are queued together, and aborted together. Compared by
    identity."""

    def __init__(self, size: int) -> None:
        self._ended: dict[int, Completion] = {}  # by place
        self._size = size

    def end(self, place: int, completion: Completion) -> Completion | None:
        """The sequence in this place has ended. The request's completion, if it was the last one."""
        self._ended[place] = completion
        if len(self._ended) < self._size:
            return None
        return with_samples([self._ended[place] for place in range(self._size)])

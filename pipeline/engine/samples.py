"""Several samples of one request (`SamplingParams.n`): their seeds, and how they become one completion."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from pipeline.engine.completion import Completion


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of a request's sample `index`: sample 0 keeps the request's seed, the others use 63 bits of
    BLAKE2b of both. A request with this seed and n = 1 gives the same tokens as the sample."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\0sample\0{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def with_samples(samples: Sequence[Completion]) -> Completion:
    """Return the completion of a request with these samples. If one failed it is an error, with the message of the
    first that did: an output row is complete, or it is an error row that `--retry-failed` computes again."""
    errors = [(index, sample) for index, sample in enumerate(samples) if sample.error is not None]
    if not errors:
        return replace(
            samples[0],
            first_token_us=min(sample.first_token_us for sample in samples),
            last_token_us=max(sample.last_token_us for sample in samples),
            samples=tuple(samples),
        )
    index, first = errors[0]
    succeeded = [sample for sample in samples if sample.error is None]
    prefix = f"sample {index} of {len(samples)}: " if succeeded else ""  # if all failed, the prompt caused it
    return replace(
        first,
        error_message=f"{prefix}{first.error_message}",
        num_lost_prompt_tokens=sum(sample.num_lost_prompt_tokens for sample in samples)
        + sum(sample.num_prompt_tokens - sample.num_cached_tokens for sample in succeeded),
        num_lost_generated_tokens=sum(sample.num_lost_generated_tokens for sample in samples)
        + sum(sample.num_tokens for sample in succeeded),
    )


class ParentRequest:
    """Sequences of one request with several samples. Their completions become one when the last has ended: a failed one
    does not abort the others. They are queued together and aborted together. Compared by identity."""

    def __init__(self, size: int) -> None:
        self._ended: dict[int, Completion] = {}  # by index of the sample
        self._size = size

    def end(self, index: int, completion: Completion) -> Completion | None:
        """Record the completion of sample `index`. Return the request's completion if it was the last one."""
        self._ended[index] = completion
        if len(self._ended) < self._size:
            return None
        return with_samples([self._ended[index] for index in range(self._size)])

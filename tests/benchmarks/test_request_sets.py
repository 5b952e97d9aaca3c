"""The request sets have the sizes and lengths that they claim, and never change."""

import hashlib
import json

import pytest

from benchmarks.request_sets import FIRST_TOKEN, REQUEST_SETS, Lengths, workload
from pipeline.errors import ConfigError

WORK = workload(48, 120, (16, 128))
# requests, prompt min and max, output min and max, digest of the lengths: figures compare while it is unchanged
CLAIMS = {
    "summaries": (1024, 64, 4096, 32, 256, "191deac3"),
    "mixed": (512, 100, 1024, 100, 1024, "78be65d4"),
    "generation": (1024, 32, 128, 256, 768, "6c35f882"),
    "shared": (1024, 2048 + 32, 2048 + 128, 32, 128, "37144fda"),
    "classification": (2048, 100, 1600, 1, 4, "1a7e675b"),
    "single": (1, 512, 512, 256, 256, "7c1705e8"),
}


@pytest.mark.parametrize("name", REQUEST_SETS)
def test_counts_and_ranges(name):
    count, prompt_low, prompt_high, output_low, output_high, digest = CLAIMS[name]
    lengths = REQUEST_SETS[name].lengths()
    prompts, outputs = [n.prompt for n in lengths], [n.output for n in lengths]
    assert len(lengths) == count
    assert prompt_low <= min(prompts) <= max(prompts) <= prompt_high
    assert output_low <= min(outputs) <= max(outputs) <= output_high
    found = hashlib.sha256(json.dumps(list(zip(prompts, outputs))).encode()).hexdigest()[:8]
    assert found == digest


def test_a_round_has_the_lengths_and_its_own_prompts():
    for work in (*(REQUEST_SETS[name].smaller(64, 8) for name in ("shared", "classification")), WORK):
        one, again, other = (work.round(r, 1000) for r in ("1", "1", "2"))
        assert one == again
        assert [(len(r.prompt_token_ids), r.max_tokens) for r in one] == [(n.prompt, n.output) for n in work.lengths()]
        assert all(r.ignore_eos for r in one)
        assert not any(a.prompt_token_ids[:8] == b.prompt_token_ids[:8] for a, b in zip(one, other))
        tokens = [token for r in one for token in r.prompt_token_ids]
        assert FIRST_TOKEN <= min(tokens) < max(tokens) < 1000
        starts, ends = ({tuple(r.prompt_token_ids[part]) for r in one} for part in (slice(256), slice(256, None)))
        assert len(starts) == (len(one) if not work.shared_prefix else 1)
        assert not work.shared_prefix or len(ends) == len(one)
        alone = work.one("1", 5, 1000)
        assert alone == work.one("1", 5, 1000) != work.one("2", 5, 1000)
        assert (len(alone.prompt_token_ids), alone.max_tokens) == (work.prompt.median or work.prompt.high, 5)


def test_a_workload_is_ragged_around_its_options():
    lengths = WORK.lengths()
    prompts = sorted(n.prompt for n in lengths)
    assert 90 < prompts[24] < 160
    assert prompts[-1] > 2 * prompts[24]
    assert 16 <= min(n.output for n in lengths) < 30
    assert 115 < max(n.output for n in lengths) <= 128
    for wrong in ((0, (1, 1)), (1, (2, 1)), (1, (0, 1))):
        with pytest.raises(ConfigError, match="expected LOW-HIGH"):
            workload(1, *wrong)


def test_smaller_sets_keep_their_shape():
    small = REQUEST_SETS["shared"].smaller(100, 16)
    assert (small.count, small.shared_prefix, small.prompt, small.output) == (10, 128, Lengths(2, 8), Lengths(2, 8))
    assert REQUEST_SETS["single"].smaller(100, 1000).lengths()[0].output == 1
    assert small.longest == max(n.prompt + n.output for n in small.lengths())
    text = REQUEST_SETS["summaries"].to_text()
    assert "1,024 requests, 64 to 4,096, around 735 prompt tokens, 32 to 256 output tokens" in text
    assert "2,048 shared and 32 to 128 prompt tokens" in REQUEST_SETS["shared"].to_text()

"""Memory and work of a model by its sizes, against sums done by hand."""

from dataclasses import replace

import numpy as np

from benchmarks.shape_costs import Moment, job_bytes, job_flops, kv_room, resident_bytes, tail_seconds
from pipeline.roofline.cost_model import AWQ, DENSE, Ceilings, DecoderSize, ExpertSize, Weights
from pipeline.roofline.job_simulation import Batching, RequestTokens, simulate_job
from pipeline.roofline.kv_pages import KVPages

SIZE = DecoderSize(256, 512, 2, 4, 2, 64, 1000)
CARD = Ceilings("a card", 1e9, 1e12, 1e9)
RAGGED = [RequestTokens(int(p), int(o)) for p, o in np.random.default_rng(3).integers(1, 90, (40, 2))]


def test_room_is_what_the_weights_leave():
    weights = resident_bytes(DENSE, SIZE)
    assert weights == 2 * (SIZE.linear_parameters + 2 * SIZE.head_parameters)
    assert kv_room(SIZE, DENSE, CARD, 1e6) == int((0.9e9 - 1e6 - weights) // SIZE.kv_bytes_per_token())
    scratch = Weights(packed_bits=4, cached=False)
    assert resident_bytes(scratch, SIZE) < weights < resident_bytes(AWQ, SIZE)
    assert kv_room(SIZE, DENSE, Ceilings("small", 1e9, 1e12, 1e6)) == 0
    two = replace(CARD, num_cards=2)
    assert kv_room(SIZE, DENSE, two) == int((0.9e9 - weights / 2) // (SIZE.kv_bytes_per_token() / 2))
    routed = replace(SIZE, experts=ExpertSize(layers=1, num_experts=4, top_k=1, width=128))
    packed = replace(DENSE, expert_bytes=0.5)
    assert resident_bytes(DENSE, routed) - resident_bytes(packed, routed) == 4 * 3 * 256 * 128 * 1.5


def test_the_tail_is_when_fewer_than_half_are_left():
    moments = [
        Moment(1.0, 9, 4),
        Moment(2.0, 5, 4),
        Moment(4.0, 2, 4),
        Moment(7.0, 1, 2),
        Moment(9.0, 0, 1),
    ]
    assert tail_seconds(moments) == 5.0
    assert tail_seconds([Moment(2.0, 0, 1)]) == 2.0


def test_a_jobs_work_is_its_steps_work():
    requests = [RequestTokens(5, 3), RequestTokens(2, 1)]
    tokens, rows, keys = 5 + 2 + 2, 4, sum(range(1, 8)) + 1 + 2
    assert job_flops(requests, SIZE) == (
        2 * SIZE.linear_parameters * tokens + 2 * SIZE.head_parameters * rows + 4 * 2 * 4 * 64 * keys
    )
    less = job_flops(requests, SIZE) - job_flops(requests, SIZE, cached_tokens=2)  # one of each request
    assert less == 2 * SIZE.linear_parameters * 2 + 4 * 2 * 4 * 64 * 2
    read = 3 * 2 * (SIZE.linear_parameters + SIZE.head_parameters) + SIZE.kv_bytes_per_token() * (6 + 7)
    assert job_bytes(requests, SIZE, DENSE, num_steps=3) == read
    assert job_bytes(requests, SIZE, AWQ, 3) < read
    alike = [RequestTokens(50, 5)] * 4
    apart, shared = (job_bytes(alike, SIZE, DENSE, 6, shared_prefix=prefix) for prefix in (0, 32))
    assert apart - shared == 32 * (4 * 4 - 6) * SIZE.kv_bytes_per_token()  # read in 6 steps, not for 16 tokens
    assert job_bytes(alike, SIZE, DENSE, 99, shared_prefix=32) == job_bytes(alike, SIZE, DENSE, 99)
    found = simulate_job(RAGGED, SIZE, DENSE, CARD, Batching(64, 4096, 1000, KVPages(16, 0)))
    assert found.wall_s >= job_flops(RAGGED, SIZE) / CARD.flops_per_s
    assert found.wall_s >= job_bytes(RAGGED, SIZE, DENSE, found.num_steps) / CARD.bytes_per_s

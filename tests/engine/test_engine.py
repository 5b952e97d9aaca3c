"""The engine's public contract on a tiny random model: order, ends, logprobs, seeds, stop strings, poisoned blocks."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Engine, EngineConfig, Request, SamplingParams
from pipeline.engine.completion import Completion
from pipeline.engine.sampling_params import RepetitionDetectionParams
from pipeline.errors import ConfigError
from tests.model_folders import Family, load_reference, make_family
from tests.parity.harness import float32_engine, greedy, reference_logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("engine"), Family("llama3", "llama"), seed=8)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 255, int(rng.integers(1, 60))).tolist() for _ in range(count)]


def test_strings_are_encoded_and_text_is_decoded(folder: Path) -> None:
    with float32_engine(folder) as engine:
        from_text = engine.generate("hello", greedy(5))[0]
        from_ids = engine.generate([engine.tokenizer.encode("hello")], greedy(5))[0]
        assert from_text.token_ids == from_ids.token_ids
        assert from_text.text == engine.tokenizer.decode(from_text.token_ids)
        with pytest.raises(ConfigError, match="2 prompts with 3"):
            engine.generate(["a", "b"], [greedy(1)] * 3)


def test_eos_ends_a_sequence_and_is_the_last_token_but_not_text(folder: Path) -> None:
    with float32_engine(folder) as engine:
        prompt = prompts_of(1)[0]
        free = engine.generate([prompt], greedy(30))[0].token_ids
        engine.loop.output_processor.is_eos[:] = np.arange(len(engine.loop.output_processor.is_eos)) == free[9]
        first = free.index(free[9])
        ended = engine.generate([prompt], SamplingParams(max_tokens=30))[0]
        assert (ended.finish_reason, ended.token_ids) == ("stop", free[: first + 1])
        by_id = engine.generate([prompt], SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(free[9],)))[0]
        assert by_id.token_ids == free[: first + 1]
        assert by_id.text == engine.tokenizer.decode(free[:first])
        late = engine.generate(
            [prompt], SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(free[9],), min_tokens=20)
        )[0]
        assert len(late.token_ids) >= 20
        assert free[9] not in late.token_ids[:20]


def test_a_stop_string_cuts_the_text_where_it_starts(folder: Path) -> None:
    with float32_engine(folder) as engine:
        prompts = prompts_of(12, seed=3)
        done = engine.generate(prompts, greedy(40))
        # Two characters behind at least two others; bytes that are no text are decoded to a mark of their own.
        matches = [re.search("(?s)(?<=..)[^\ufffd]{2}", completion.text) for completion in done]
        row, stop = next((row, match[0]) for row, match in enumerate(matches) if match)
        cut = engine.generate([prompts[row]], SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,)))[0]
    assert (cut.finish_reason, cut.text) == ("stop", done[row].text[: done[row].text.index(stop)])
    assert done[row].token_ids[: len(cut.token_ids)] == cut.token_ids


def test_stop_strings_survive_preemption(folder: Path) -> None:
    with float32_engine(folder) as engine:
        prompts = prompts_of(6, seed=4)
        texts = [c.text.replace("\ufffd", "") for c in engine.generate(prompts, greedy(50))]
        params = [SamplingParams(max_tokens=50, ignore_eos=True, stop=(t[-2:] or "x",)) for t in texts]
        roomy = engine.generate(prompts, params)
    with float32_engine(folder, kv_cache_memory_bytes=_kv_bytes(folder, 140), max_model_len=128) as engine:
        engine.scheduler.admission.expected_output = 1
        tight = engine.generate(prompts, params)
        assert engine.stats.num_preemptions > 0
    assert [c.text for c in tight] == [c.text for c in roomy]
    assert [c.finish_reason for c in tight] == [c.finish_reason for c in roomy]


KINDS = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 40},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"logprobs": 3},
    {"temperature": 0.7, "repetition_penalty": 1.2, "min_p": 0.02, "logprobs": 0},
    {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": (5, 7, 11)},
]


def test_rows_of_all_kinds_in_one_batch_give_the_tokens_they_give_alone(folder: Path) -> None:
    prompts = prompts_of(24, seed=21)
    params = [
        SamplingParams(**{"max_tokens": 10 + row % 7, "ignore_eos": True, "seed": row} | KINDS[row % len(KINDS)])
        for row in range(24)
    ]
    with float32_engine(folder, enable_prefix_caching=False) as engine:
        together = engine.generate(prompts, params)
        for row in range(len(KINDS)):
            alone = engine.generate([prompts[row]], params[row])[0]
            assert alone.token_ids == together[row].token_ids
            assert (together[row].finish_reason == "length") == (len(alone.token_ids) == params[row].max_tokens)
            assert (alone.logprobs is None) == (together[row].logprobs is None) == (params[row].logprobs is None)
            for ours, theirs in zip(alone.logprobs or [], together[row].logprobs or []):
                assert ours.token_id == theirs.token_id
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def _kv_bytes(folder: Path, tokens: int) -> int:
    with float32_engine(folder) as engine:
        return tokens * engine.runner.decoder.config.kv_bytes_per_token(torch.float32)


def test_logprobs_are_those_of_the_reference(folder: Path) -> None:
    model = load_reference(folder)
    prompt = prompts_of(1, seed=5)[0]
    with float32_engine(folder) as engine:
        done = engine.generate([prompt], SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3))[0]
    expected = reference_logits(model, prompt + done.token_ids).log_softmax(-1)[len(prompt) - 1 : -1]
    assert done.logprobs is not None
    assert len(done.logprobs) == 6
    for position, entry in enumerate(done.logprobs):
        assert entry.token_id == done.token_ids[position]
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-4)
        best = expected[position].topk(3)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_blocks_handed_out_again_may_hold_anything(folder: Path) -> None:
    prompts = [p + [1, 2, 3] * 9 for p in prompts_of(14, seed=9)]
    with float32_engine(folder) as engine:
        clean = engine.generate(prompts, greedy(24))
    with float32_engine(folder, kv_cache_memory_bytes=_kv_bytes(folder, 400), max_model_len=200) as engine:
        allocate = engine.pool.allocate

        def allocate_poisoned(count: int) -> list[int]:
            blocks = allocate(count)
            if blocks:
                engine.runner.kv.fill(blocks, float("nan"))
            return blocks

        engine.pool.allocate = allocate_poisoned  # type: ignore[method-assign]
        engine.scheduler.admission.expected_output = 1
        poisoned = engine.generate(prompts, greedy(24))
        assert engine.stats.num_preemptions > 0
    assert [c.token_ids for c in poisoned] == [c.token_ids for c in clean]


NAN_TOKEN = 300  # the tokenizer never makes it; its embedding is poisoned


def test_a_row_of_nan_logits_is_an_error_row_and_its_mates_are_unchanged(folder: Path) -> None:
    """Tokens are equal; log-probabilities to the last bit or two, as in two undisturbed runs: BLAS rounds by where its
    buffers happen to lie."""
    common = prompts_of(1, seed=11)[0][:20] + [7] * 20
    prompts = [common + own for own in ([1], [2, 3], [4] * 9)] + prompts_of(4, seed=10)
    bad = [*common, *[9] * 5, NAN_TOKEN, *[9] * 12]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)] * len(prompts)
    one_token = SamplingParams(max_tokens=1, ignore_eos=True)

    def run(poison: float | None) -> tuple[Completion, list[Completion]]:
        with float32_engine(folder) as engine:
            if poison is not None:
                engine.runner.decoder.embedding.weight_NK[NAN_TOKEN] = poison
            zero, kv = engine.runner.zero_pages, engine.runner.kv
            zeroed = []

            def zero_and_look(blocks: list[int]) -> None:
                assert not all(part.float().isfinite().all() for layer in kv.layers for part in layer.tensors)
                zero(blocks)
                assert all(part.float().isfinite().all() for layer in kv.layers for part in layer.tensors)
                zeroed.extend(blocks)

            engine.runner.zero_pages = zero_and_look  # type: ignore[method-assign]
            # The bad prompt ends with its first token in both runs, so that every step has the same shapes.
            done = engine.generate([*prompts[:2], bad, *prompts[2:]], [*params[:2], one_token, *params[2:]])
            if poison is not None:
                assert zeroed
                again = engine.generate([bad, [*common, 5]], one_token)
                assert again[0].error == "non_finite_logits"
                assert again[0].num_cached_tokens <= len(common), "no block behind the poison is shared"
                assert again[1].error is None
                engine.pool.check()
            return done[2], done[:2] + done[3:]

    sound_bad, sound_mates = run(poison=None)
    assert sound_bad.error is None
    assert any(mate.num_cached_tokens for mate in sound_mates), "some share the bad row's prefix"
    for poison in (float("nan"), float("inf")):
        rejected, mates = run(poison)
        assert rejected.error == "non_finite_logits"
        assert (rejected.finish_reason, rejected.token_ids, rejected.text) == ("error", [], "")
        assert "0 generated tokens" in (rejected.error_message or "")
        assert [mate.token_ids for mate in mates] == [mate.token_ids for mate in sound_mates]
        assert [mate.num_cached_tokens for mate in mates] == [mate.num_cached_tokens for mate in sound_mates]
        ours, theirs = ([t.logprob for mate in side for t in mate.logprobs or []] for side in (mates, sound_mates))
        assert ours == pytest.approx(theirs, abs=2e-6)


def test_a_model_that_never_ends_is_ended_by_its_budget_or_the_context(folder: Path) -> None:
    with float32_engine(folder, max_model_len=64) as engine:
        engine.loop.output_processor.is_eos[:] = False  # no token of this model ends anything
        budget, context = engine.generate(
            [[1, 2, 3], [4] * 10], [SamplingParams(max_tokens=9), SamplingParams(max_tokens=10**9)]
        )
        assert (budget.finish_reason, len(budget.token_ids), budget.error) == ("length", 9, None)
        assert (context.finish_reason, len(context.token_ids), context.error) == ("length", 54, None)
        assert not engine.has_unfinished


def test_a_prompt_longer_than_the_context_is_an_error_row_and_never_cut(folder: Path) -> None:
    with float32_engine(folder, max_model_len=64) as engine:
        fits, full, longer = engine.generate([[5] * 63, [5] * 64, [5] * 1000], greedy(4))
    assert (fits.finish_reason, len(fits.token_ids)) == ("length", 1)
    for completion, length in ((full, 64), (longer, 1000)):
        assert completion.error == "prompt_too_long"
        assert (completion.num_prompt_tokens, completion.token_ids) == (length, [])
        assert f"{length} tokens; with max_model_len = 64 at most 63" in (completion.error_message or "")


def test_what_is_forgotten_is_computed_again(folder: Path) -> None:
    with float32_engine(folder) as engine:
        prompt, params = list(range(1, 60)), SamplingParams(max_tokens=2, ignore_eos=True)
        first, second = (engine.generate(prompt, params)[0] for _ in range(2))
        engine.scheduler.admission.expected_output = 2
        engine.forget()
        assert engine.scheduler.admission.expected_output is None, "lengths of outputs are forgotten too"
        third = engine.generate(prompt, params)[0]
        assert second.num_cached_tokens > first.num_cached_tokens == third.num_cached_tokens == 0
        assert first.token_ids == second.token_ids == third.token_ids


def test_time_is_split_exactly_and_the_warm_up_is_not_counted(folder: Path) -> None:
    messages: list[str] = []
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_model_len=128)
    with Engine(config, messages.append) as engine:
        engine.warm_up()
        assert [message.split()[0] for message in messages] == ["reading", "warming", "warming"]
        assert engine.stats.num_steps == 0
        engine.generate(prompts_of(10), greedy(8))
        stats = engine.stats
        assert stats.prefill_us > 0
        assert stats.decode_us > 0
        assert stats.generated_tokens == 80
        assert stats.batch_sum >= stats.num_steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"max_model_len": 100_000}, "at most 512 positions"),
        ({"kv_cache_memory_bytes": 64}, "KV cache"),
        ({"num_threads": 0}, "num_threads = 0"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "int8"}, "dtype"),
        ({"speculation": {"method": "draft_model"}}, "speculation.model: required by method draft_model"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"activation_dtype": "fp16"}, "expected auto, none, fp8, int8"),
        ({"activation_dtype": "fp8"}, "not supported by 16- or 32-bit weights"),
        ({"activation_dtype": "int8", "quantization": "nf4"}, "not supported by .*nf4"),
        ({"activation_dtype": "int8", "quantization": "int4-rtn", "deterministic": True}, "remove one of the two"),
        ({"cpu_offload_gb": 1}, "engine.cpu_offload_gb = 1: needs a GPU"),
        ({"deterministic": True, "dtype": "bfloat16"}, "set engine.dtype: float32"),
        ({"deterministic": True, "kernels": "reference"}, "not with engine.kernels = 'reference'"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "no CUDA device")]),
    ],
)
def test_options_that_cannot_be_met_are_refused(folder: Path, options: dict, message: str) -> None:
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8} | options
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(str(folder), **settings))


ENGINE_OPTIONS = {
    "model": (5, "a folder"),
    "device": (None, "auto, cpu"),
    "gpu_memory_utilization": ("0.9", "a number"),
    "kv_cache_memory_bytes": (1e6, "an integer of bytes"),
    "cpu_offload_gb": (-1, "a number of at least 0"),
    "seed": (1.5, "an integer"),
    "num_threads": ("2", "an integer"),
    "deterministic": ("no", "true or false"),
    "enable_prefix_caching": (None, "true or false"),
}
SAMPLING_OPTIONS: dict[str, tuple] = {
    "n": (0, True, 2000, 8),  # 8 equal texts of a greedy row
    "seed": (1.5, "7", np.int64(3)),
    "temperature": ("0.5", 10**400, True),
    "top_p": (None, "0.5"),
    "min_p": (None, "0.5"),
    "repetition_penalty": (10**400, "0.5"),
    "presence_penalty": (None, "0.5"),
    "frequency_penalty": ("a",),
    "stop": (None,),
    "stop_token_ids": (5,),
    "ignore_eos": ("no",),
    "repetition_detection": ({"max_pattern_size": 3},),
}
REPETITION_OPTIONS = {
    "max_pattern_size = 0": {"max_pattern_size": 0},
    "max_pattern_size = 2000": {"max_pattern_size": 2000},
    "min_count = 1": {"min_count": 1},
    "min_count = True": {"min_count": True},
    "min_pattern_size = 5": {"min_pattern_size": 5},
}


def test_options_of_another_type_or_out_of_range_are_refused_by_name(folder: Path) -> None:
    for name, (value, expected) in ENGINE_OPTIONS.items():
        with pytest.raises(ConfigError, match=rf"engine.{name} = {value!r}: expected {expected}"):
            EngineConfig(**{"model": "demo"} | {name: value})
    for name, values in SAMPLING_OPTIONS.items():
        for value in values:
            with pytest.raises(ConfigError, match=rf"sampling.{name} = .*: expected "):
                SamplingParams(**{name: value})
    for message, options in REPETITION_OPTIONS.items():
        with pytest.raises(ConfigError, match=rf"sampling.repetition_detection.{message}: expected "):
            RepetitionDetectionParams(**{"max_pattern_size": 4, "min_count": 2} | options)
    with pytest.raises(ConfigError, match=r"Engine\('demo'\): expected an EngineConfig"):
        Engine("demo")  # type: ignore[arg-type]
    assert EngineConfig(folder) == EngineConfig(str(folder))  # type: ignore[arg-type]


def test_a_closed_engine_says_so(folder: Path) -> None:
    engine = float32_engine(folder)
    engine.close()
    with pytest.raises(ConfigError, match="closed"):
        engine.add(Request(0, [1], greedy(1)))


@pytest.mark.parametrize("value", [None, "x", b"", [], {}, object, "\ud800", math.nan])
def test_parameters_of_another_type_are_refused_by_name(value: Any) -> None:
    for name in ("max_tokens", "min_tokens", "temperature", "n"):
        with pytest.raises(ConfigError, match=rf"sampling\.{name} = .*: expected "):
            SamplingParams(**{name: value})
    for name in ("max_pattern_size", "min_pattern_size", "min_count"):
        with pytest.raises(ConfigError, match=rf"sampling\.repetition_detection\.{name} = .*: expected "):
            RepetitionDetectionParams(**{"max_pattern_size": 4, "min_count": 2, name: value})


def test_what_is_no_prompt_or_no_params_is_refused_before_anything_is_computed(folder: Path) -> None:
    fine = greedy(1)
    with float32_engine(folder) as engine:
        with pytest.raises(ConfigError, match=r"lone surrogate at character 2 of the text 'ok\\ud800'"):
            engine.generate(["fine", "ok\ud800"], fine)
        with pytest.raises(ConfigError, match="lone surrogate at character 1"):
            engine.choose(["fine"], labels=["no", "x\ud800"])
        with pytest.raises(ConfigError, match="lone surrogate at character 1"):
            engine.score(["fine"], completions=["x\ud800"])
        for prompts in ([b"Hello"], [bytearray(b"Hello")], [None], 3):
            with pytest.raises(ConfigError, match="expected a string or the ids"):
                engine.generate(prompts, fine)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="labels = 'yes': expected a list of texts"):
            engine.choose(["fine"], labels="yes")
        with pytest.raises(ConfigError, match="completions = 'y': expected a list of texts"):
            engine.score(["fine"], completions="y")
        for params in ({"max_tokens": 1}, [{"max_tokens": 1}]):
            with pytest.raises(ConfigError, match=r"params: expected SamplingParams, .* found \{'max_tokens': 1\}"):
                engine.generate(["fine"], params)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"ids of its tokens \(integers\), found 'Hello'"):
            next(engine.stream([Request(0, "Hello", fine)]))  # type: ignore[arg-type]
        assert not engine.has_unfinished
        assert engine.generate("fine", fine)[0].error is None


@pytest.mark.parametrize("num_tokens", [2000, 200])  # of the KV cache; the smaller one preempts
def test_after_a_drain_requests_that_have_begun_finish_and_no_other_begins(folder: Path, num_tokens: int) -> None:
    prompts = prompts_of(14, seed=5)
    params = [greedy(40)] * 12 + [SamplingParams(n=2, temperature=1.0, max_tokens=40, ignore_eos=True)] * 2
    requests = [Request(row, prompt, own) for row, (prompt, own) in enumerate(zip(prompts, params, strict=True))][::-1]
    with float32_engine(folder, max_num_seqs=5) as engine:
        whole = {done.row_id: done for done in engine.stream(requests)}
    cache = _kv_bytes(folder, num_tokens)
    with float32_engine(folder, max_num_seqs=5, kv_cache_memory_bytes=cache, max_model_len=128) as engine:
        engine.scheduler.admission.expected_output = 1
        done: list[Completion] = []
        for request in requests:
            engine.add(request)
        while len(done) < 2 or (num_tokens < 1000 and not engine.stats.num_preemptions):
            done += engine.step()
        num_waiting = len(engine.scheduler.waiting)
        engine.drain()
        assert len(engine.scheduler.waiting) < num_waiting
        while engine.has_unfinished:
            done += engine.step()
        assert 2 < len(done) < len(prompts)
        for completion in done:
            assert completion.token_ids == whole[completion.row_id].token_ids

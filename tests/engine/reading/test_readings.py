"""Scores, choices, embeddings and classes of known texts against transformers in float32, even if cut or preempted."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from pipeline import Engine, Request, SamplingParams
from pipeline.engine.completion import Completion
from pipeline.engine.reading.label_tree import LabelTree
from pipeline.engine.reading.step_reading import token_logprobs
from pipeline.engine.tasks import Choice, Classify, Embed, Score
from pipeline.errors import ConfigError
from tests.engine.schedule.test_scheduler import run
from tests.model_folders import Family, load_reference, make_family, small_config, write_tokenizer
from tests.parity.harness import float32_engine, greedy

PARAMS = SamplingParams()
FAMILIES = [Family("llama3", "llama"), Family("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True})]
TIGHT = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "block_size": 8, "max_model_len": 128}


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("reading"), request.param, seed=8)


def texts_of(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 255, 20).tolist()
    texts = [rng.integers(0, 255, int(rng.integers(2, longest))).tolist() for _ in range(count)]
    return [shared + text if row % 3 == 0 else text for row, text in enumerate(texts)]


def completions_of(engine: Engine, texts: list[list[int]], tasks: list) -> list[Completion]:
    requests = [Request(row, text, PARAMS, task=task) for row, (text, task) in enumerate(zip(texts, tasks))]
    done = {completion.row_id: completion for completion in engine.stream(requests)}
    return [done[row] for row in range(len(texts))]


def preempt(engine: Engine) -> None:
    for slot in engine.scheduler.running.tolist():
        engine.scheduler.admission.put_back(engine.scheduler.drop(slot))


@torch.inference_mode()
def reference_logprobs(folder: Path, text: list[int]) -> torch.Tensor:
    return load_reference(folder)(torch.tensor([text])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("options", [{}, TIGHT, {**TIGHT, "kv_cache_memory_bytes": 1 << 17}], ids=["", "cut", "tight"])
def test_scores_are_those_of_transformers(folder: Path, options: dict) -> None:
    texts = texts_of(18)
    firsts = [1 + row % (len(text) - 1) for row, text in enumerate(texts)]
    with float32_engine(folder, **options) as engine:
        done = completions_of(engine, texts, [Score(first, top=3) for first in firsts])
        assert engine.stats.generated_tokens == 0
        assert engine.pool.num_held == 0
    for text, first, completion in zip(texts, firsts, done):
        expected = reference_logprobs(folder, text)
        result = completion.result
        each = [float(expected[i - 1, text[i]]) for i in range(first, len(text))]
        assert result.num_tokens == len(text) - first
        assert [token.logprob for token in result.tokens] == pytest.approx(each, abs=2e-4)
        assert result.logprob == pytest.approx(sum(each), abs=1e-3)
        assert result.perplexity == pytest.approx(np.exp(-sum(each) / len(each)), rel=1e-3)
        for i, token in zip(range(first, len(text)), result.tokens):
            best = expected[i - 1].topk(3)
            assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert (completion.finish_reason, completion.text, completion.token_ids) == ("stop", "", [])
        assert completion.num_prompt_tokens == len(text)


def test_preempted_texts_are_read_anew(folder: Path) -> None:
    texts = [text * 3 for text in texts_of(3, seed=5, longest=20)]
    tasks = [Embed("mean"), Score(), Embed("last")]
    with float32_engine(folder, **TIGHT) as engine:
        expected = completions_of(engine, texts, tasks)
    with float32_engine(folder, **TIGHT, enable_prefix_caching=False) as engine:
        for row, (text, task) in enumerate(zip(texts, tasks)):
            engine.add(Request(row, text, PARAMS, task=task))
        engine.step()
        assert 0 < engine.table.num_computed[engine.scheduler.running[0]] < len(texts[0])
        preempt(engine)
        done = run(engine, [])
    assert done[1].result.logprob == pytest.approx(expected[1].result.logprob, abs=1e-4)
    for row in (0, 2):
        np.testing.assert_allclose(done[row].result.values, expected[row].result.values, atol=1e-5)


LABELS = [
    ((5,), (9,), (200,)),
    ((5, 6, 7), (5, 6, 8, 9), (5, 40), (9,)),
    ((5, 6), (5, 6, 7), (5, 8)),
]


@pytest.mark.parametrize("labels", LABELS, ids=["tokens", "tree", "beginnings"])
@pytest.mark.parametrize("options", [{}, TIGHT], ids=["", "cut"])
def test_choices_are_the_products_of_their_tokens(folder: Path, labels: tuple, options: dict) -> None:
    prompts = texts_of(7, seed=6, longest=40)
    with float32_engine(folder, **options) as engine:
        done = completions_of(engine, prompts, [Choice(labels)] * 7)
        steps, tokens = engine.stats.num_steps, engine.stats.prompt_tokens
        assert engine.pool.num_held == 0
    for prompt, completion in zip(prompts, done):
        expected = []
        for label in labels:
            logprobs = reference_logprobs(folder, [*prompt, *label])
            expected.append(sum(float(logprobs[len(prompt) - 1 + n, token]) for n, token in enumerate(label)))
        assert completion.result.logprobs == pytest.approx(expected, abs=1e-3)
        shares = np.exp(expected) / np.exp(expected).sum()
        assert completion.result.probabilities == pytest.approx(shares, abs=1e-4)
        assert completion.result.best == int(np.argmax(expected))
    if all(len(label) == 1 for label in labels):
        assert tokens == sum(map(len, prompts)), "one text a row: nothing is computed for the labels"
        assert options or steps <= 2, "no row is decoded"


def test_labels_of_several_tokens_are_computed_after_one_prompt(folder: Path) -> None:
    prompt = texts_of(1, seed=7)[0]
    labels = ((1, 2), (3, 4), (3, 5, 6), (3, 5, 7), (9,))
    tree = LabelTree.from_labels(labels)
    with float32_engine(folder, block_size=8) as engine:
        completions_of(engine, [prompt], [Choice(labels)])
        assert engine.stats.prompt_tokens == len(prompt)
        assert (engine.stats.cached_tokens, engine.stats.generated_tokens, engine.stats.plain_steps) == (0, 0, 0)
        assert engine.stats.num_steps == 2, "one for each beginning that labels share"
    assert tree.num_computed == 3
    assert LabelTree.from_labels(((5, 6, 7), (5, 6, 8, 9), (5, 40, 2))).num_computed == 2 + 1 + 1


SHARED = tuple(range(40, 48))  # fill a block
PREEMPTED = {
    "once": (9, ((1, 2), (3, 4), (3, 5, 6), (3, 6, 7), (9,)), 1),
    "twice, in blocks that labels fill": (
        16,
        (tuple(range(1, 22)), (*SHARED, 3, 5), (*SHARED, 4, 5, 6), (*SHARED, 4, 7, 8)),
        2,
    ),
}


@pytest.mark.parametrize("name", PREEMPTED)
def test_labels_have_the_same_numbers_whenever_their_row_is_preempted(folder: Path, name: str) -> None:
    """A block's content of one turn is not reused as that of a later one."""
    length, labels, times = PREEMPTED[name]
    prompt = texts_of(1, seed=14)[0][:length]
    with float32_engine(folder, **TIGHT) as engine:
        expected = completions_of(engine, [prompt], [Choice(labels)])[0].result
        num_steps = engine.stats.num_steps
        assert num_steps > 2
        for steps in combinations(range(1, num_steps + times - 1), times):
            for forgets in (False, True):
                engine.forget()
                engine.add(Request(0, prompt, PARAMS, task=Choice(labels)))
                done: list[Completion] = []
                number = 0
                while engine.has_unfinished:
                    done += engine.step()
                    number += 1
                    if number in steps and engine.has_unfinished:
                        preempt(engine)
                        if forgets:
                            engine.forget()
                assert done[0].result.logprobs == pytest.approx(expected.logprobs, abs=1e-4), (steps, forgets)


@torch.inference_mode()
def test_embeddings_are_those_of_transformers(folder: Path) -> None:
    texts = texts_of(12, seed=9)
    reference = load_reference(folder).model
    with float32_engine(folder, **TIGHT) as engine:
        last = engine.embed(texts)
        mean = engine.embed(texts, pooling="mean", normalize=False)
        first = engine.embed(texts, pooling="cls", dimensions=5)
        assert engine.pool.num_held == 0
    for row, text in enumerate(texts):
        hidden = reference(torch.tensor([text])).last_hidden_state[0]
        np.testing.assert_allclose(last[row].result.values, hidden[-1] / hidden[-1].norm(), atol=2e-5)
        np.testing.assert_allclose(mean[row].result.values, hidden.mean(0), atol=2e-4)
        np.testing.assert_allclose(first[row].result.values, hidden[0, :5] / hidden[0, :5].norm(), atol=2e-5)
        assert last[row].result.values.dtype == np.float32


def classifier(folder: Path, model_type: str, num_labels: int) -> Path:
    torch.manual_seed(3)
    config = small_config(32, 48, 2, 4, 2, num_labels=num_labels, initializer_range=0.3, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **config))
    model.float().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("num_labels", [1, 5])
@torch.inference_mode()
def test_a_classification_head_gives_the_logits_of_transformers(tmp_path: Path, num_labels: int) -> None:
    folder, texts = classifier(tmp_path, "qwen3", num_labels), texts_of(9, seed=11)
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with float32_engine(folder, **TIGHT) as engine:
        engine.warm_up()
        assert engine.resolved["speculation"] == "off", "it generates nothing"
        done = engine.classify(texts)
        refused = engine.generate(texts[:1], greedy(4)) + engine.score(texts[:1])
    for text, completion in zip(texts, done):
        logits = reference(torch.tensor([text])).logits[0]
        np.testing.assert_allclose(completion.result.values, logits, atol=1e-4)
    assert [completion.error for completion in refused] == ["task_not_served"] * 2
    assert "no language model head" in refused[0].error_message


def test_a_bare_decoder_embeds_and_generates_nothing(tmp_path: Path) -> None:
    """Checkpoints made for embeddings are stored like this."""
    folder = make_family(tmp_path, Family("qwen3", "qwen3", {"head_dim": 32}), seed=8)
    texts = texts_of(3, seed=12)
    with float32_engine(folder) as engine:
        expected = [completion.result.values for completion in engine.embed(texts)]
    tensors: dict = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors")
    with float32_engine(folder) as engine:
        for values, completion in zip(expected, engine.embed(texts)):
            np.testing.assert_array_equal(values, completion.result.values)
        assert engine.generate(texts[:1], greedy(2))[0].error == "task_not_served"


def test_what_cannot_be_read_is_an_error_row(folder: Path) -> None:
    with float32_engine(folder, max_model_len=32) as engine:
        cases = [
            ([7], Score(), "empty_prompt", "has 1 tokens and is scored from token 2 on"),
            ([], Score(), "empty_prompt", ""),
            ([], Choice(((1,),)), "empty_prompt", ""),
            ([1, 2], Choice(((1,), (999,))), "token_out_of_vocabulary", "a label contains token id 999"),
            ([1, 2], Choice(((1,), (-3,))), "token_out_of_vocabulary", "a label contains token id -3"),
            ([1, 999], Embed(), "token_out_of_vocabulary", "contains token id 999"),
            ([1, 2**40], Embed(), "token_out_of_vocabulary", f"contains token id {2**40}"),
            ([1, 2**80], Score(), "token_out_of_vocabulary", f"contains token id {2**80}"),
            ([1, 2], Classify(), "task_not_served", "no sequence classification head"),
            ([1, 2], Embed(dimensions=4096), "task_not_served", "dimensions = 4096"),
            (list(range(33)), Score(), "prompt_too_long", "at most 32 fit"),
            (list(range(32)), Choice(((1, 2), (3, 4))), "prompt_too_long", "with its longest label 33 tokens"),
        ]
        done = completions_of(engine, [text for text, *_ in cases], [task for _, task, *_ in cases])
        whole = engine.score([list(range(32))])[0]
    for (_, _, error, message), completion in zip(cases, done):
        assert completion.error == error
        assert message in completion.error_message
        assert (completion.num_lost_prompt_tokens, completion.num_lost_generated_tokens) == (0, 0)
    assert whole.error is None
    for wrong in (lambda: Choice(()), lambda: Choice(((1,), (1,))), lambda: Score(0), lambda: Embed("max")):
        with pytest.raises(ConfigError):
            wrong()


class HiddenLogits:
    """Model whose hidden states are its logits."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return hidden_RH


def logits_of(num: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num, vocab_size, generator=torch.Generator().manual_seed(1)) * 4


def test_a_token_s_log_probability_is_the_same_bits_whatever_else_is_read() -> None:
    """A sum over one large row is split among threads, sums over several rows are not."""
    model, logits_NV = HiddenLogits(40_000), logits_of(96, 40_000)
    rows, tokens, before = np.arange(96), np.arange(96) * 7, torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = token_logprobs(logits_NV, model, rows, tokens, num_top=2)
        alone = [token_logprobs(logits_NV, model, rows[n : n + 1], tokens[n : n + 1], 2) for n in range(96)]
    finally:
        torch.set_num_threads(before)
    assert [(float(logprob[0]), top[0]) for logprob, top in alone] == list(zip(*(together[0].tolist(), together[1])))


def test_log_probabilities_are_float32_s_whatever_the_model_s_type() -> None:
    model, logits_NV = HiddenLogits(600), logits_of(20, 600).bfloat16()
    found, expected = (
        token_logprobs(each, model, np.arange(20), np.arange(20), num_top=2) for each in (logits_NV, logits_NV.float())
    )
    assert found[0].tolist() == expected[0].tolist()
    assert found[1] == expected[1]


def test_the_time_of_labels_is_that_of_reading(folder: Path) -> None:
    """Their tokens count as read, although they follow the prompt."""
    with float32_engine(folder, **TIGHT) as engine:
        completions_of(engine, texts_of(6), [Choice(((1, 2), (3, 4, 5, 6, 7), (1, 8, 9)))] * 6)
        assert engine.stats.prefill_us > 0
        assert (engine.stats.decode_us, engine.stats.drafts_us) == (0, 0)


def test_labels_by_text(folder: Path) -> None:
    with float32_engine(folder) as engine:
        found = engine.choose(["Is it warm?", "Is it cold?"], [" yes", " no", " not sure"])
        assert [len(completion.result.logprobs) for completion in found] == [3, 3]
        with pytest.raises(ConfigError, match="occurs twice"):
            engine.choose("Is it?", [" yes", " yes"])
        scored = engine.score(["Is it warm?"], [" yes"])[0].result
        ends = engine.score(["Is it warm?"], [" no"])[0].result
    assert scored.num_tokens == 4
    assert ends.num_tokens == 3


@pytest.mark.parametrize("options", [{}, {**TIGHT, "kv_cache_memory_bytes": 1 << 17}], ids=["", "tight"])
def test_log_probabilities_of_prompts_with_their_completions(folder: Path, options: dict) -> None:
    prompts = [*texts_of(10, seed=13), [7]]
    plain = greedy(6)
    with float32_engine(folder, **options) as engine:
        expected = engine.generate(prompts, plain)
    with float32_engine(folder, **options) as engine:
        wanted = [replace(plain, prompt_logprobs=2) if row % 2 == 0 else plain for row in range(len(prompts))]
        done = engine.generate(prompts, wanted)
        assert engine.table.num_readers == 0
        twice = engine.generate(prompts[0], SamplingParams(n=2, temperature=1.0, seed=1, prompt_logprobs=0))[0]
    for row, (prompt, completion) in enumerate(zip(prompts, done)):
        assert completion.token_ids == expected[row].token_ids
        if row % 2:
            assert completion.prompt_logprobs is None
            continue
        logprobs = reference_logprobs(folder, prompt)
        each = [float(logprobs[i - 1, prompt[i]]) for i in range(1, len(prompt))]
        assert [token.logprob for token in completion.prompt_logprobs] == pytest.approx(each, abs=2e-4)
        assert [len(token.top) for token in completion.prompt_logprobs] == [2] * (len(prompt) - 1)
    assert [t.logprob for t in twice.prompt_logprobs] == pytest.approx([t.logprob for t in done[0].prompt_logprobs])


def test_a_read_prompt_no_longer_delays_steps_in_flight(folder: Path) -> None:
    with float32_engine(folder) as engine:
        engine.add(Request(0, list(range(20)), replace(greedy(30), prompt_logprobs=0)))
        engine.step()
        assert engine.table.num_readers == 0
        preempt(engine)
        done: list[Completion] = []
        while engine.has_unfinished:
            done += engine.step()
            assert engine.table.num_readers == 0, "preempted, it is not read again"
        assert len(done[0].prompt_logprobs) == 19


@pytest.mark.parametrize("name", ["sampling", "hidden states of other texts"])
def test_a_step_that_is_undone_after_its_texts_were_read_is_read_once(folder: Path, monkeypatch, name: str) -> None:
    """Memory may run out later in the step."""
    texts, failed = [list(range(30)), list(range(60, 100))], list[int]()
    with float32_engine(folder, **TIGHT) as engine:
        expected = [completion.result.values for completion in engine.embed(texts, pooling="mean")]
        engine.forget()
        target, attribute = (engine.loop, "_sample") if name == "sampling" else (torch, "stack")
        whole = getattr(target, attribute)

        def fails(*args):
            found, plan = whole(*args), engine.loop.computing
            if plan is not None and plan.num_tokens > 1 and engine.stats.num_steps not in failed:
                failed.append(engine.stats.num_steps)
                raise MemoryError
            return found

        monkeypatch.setattr(target, attribute, fails)
        for completion, values in zip(engine.embed(texts, pooling="mean"), expected, strict=True):
            np.testing.assert_allclose(completion.result.values, values, atol=1e-5)
    assert len(failed) > 2

"""`pipeline plan` of jobs whose rows a server computes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.checkpoints.locate import locate_model
from pipeline.tokenization.tokenizer import Tokenizer
from tests.endpoint.fake_server import FakeServer
from tests.endpoint.test_job import job_file

Pipe = Callable[..., tuple[int, str, str]]
SHORT = "A longer run opens up to 100"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def planned(pipe: Pipe) -> Callable[..., Any]:
    """Return a function that plans a job and returns the estimate's JSON, or its text with `as_text`."""

    def plan(path: Path, *flags: str, as_text: bool = False) -> Any:
        code, shown, errors = pipe("plan", str(path), *flags, *([] if as_text else ["--json"]))
        assert code == 0, errors
        return shown if as_text else json.loads(shown)

    return plan


def test_without_an_earlier_run_plan_contacts_no_server_and_names_what_is_known(
    tmp_path: Path, planned: Callable[..., Any]
):
    with FakeServer() as server:
        path = job_file(tmp_path, server.url, 30)
        shown = planned(path, as_text=True)
        assert server.num_connections == 0
    assert "job: 30 rows\n" in shown
    assert "Prompts     unknown\n" in shown
    assert "`--probe 64` measures" in shown
    assert not (tmp_path / "out").exists()
    started = tmp_path / "started"
    path = job_file(tmp_path, "", 30, server={"base_url": None, "serve": ["touch", str(started)]})
    assert planned(path)["estimate"] is None
    assert not started.exists()


def test_the_tokenizer_of_the_job_counts_prompts(tmp_path: Path, planned: Callable[..., Any]):
    path = job_file(tmp_path, "http://localhost:9", 30, model={"path": "demo"})
    tokenizer = Tokenizer.from_folder(str(locate_model("demo")), None)
    texts = pq.read_table(tmp_path / "in.parquet")["text"].to_pylist()
    tokens = sum(map(len, tokenizer.encode_batch([f"say {text}" for text in texts])))
    assert planned(path)["prompts"] == pytest.approx(dict.fromkeys(("low", "expected", "high"), tokens))
    assert f"Prompts     {tokens:,} tokens, by the tokenizer of model.path\n" in planned(path, as_text=True)


def test_a_probe_estimates_tokens_time_and_cost_and_the_run_reuses_its_rows(
    tmp_path: Path, pipe: Pipe, planned: Callable[..., Any]
):
    cost = {"hourly_usd": 3.6, "usd_per_million": {"input": 10, "cached_input": 1, "output": 100}}
    with FakeServer(slots=16, seconds_per_request=0.02, cached_tokens=2) as server:
        path = job_file(tmp_path, server.url, 100, cost=cost)
        found = planned(path, "--probe", "32")
        assert SHORT in planned(path, as_text=True)
        code, shown, errors = pipe("run", str(path), "--json")
        assert code == 0, errors
        report = json.loads(shown)
        assert report["work"]["resumed_rows"] == 32
        again = planned(path, "--set", f"output.path={tmp_path}/other")
    made, pool = found["estimate"], found["here"][0]
    assert made["rows"] == 100
    assert made["cached_tokens"] == pytest.approx(200, rel=0.05)  # the first requests count too
    assert made["lengths_from"] == "32 rows of 1 earlier run of this job"
    assert made["generated_tokens"]["expected"] == pytest.approx(400, rel=0.05)
    assert found["prompts"]["expected"] == made["prompt_tokens"]["expected"] + made["cached_tokens"]
    assert 480 <= found["prompts"]["expected"] <= 520
    tokens = made["prompt_tokens"]["expected"], made["cached_tokens"], made["generated_tokens"]["expected"]
    tokens_usd = (tokens[0] * 10 + tokens[1] * 1 + tokens[2] * 100) / 1e6
    assert pool["usd"]["expected"] == pytest.approx(tokens_usd + pool["machine_us"]["expected"] / 1e9)
    assert sum(made["phases_us"].values()) == pytest.approx(made["machine_us"]["expected"], abs=10)
    start_us = made["phases_us"]["startup"] + made["phases_us"]["load"]
    low, expected, high = (pool["machine_us"][name] - start_us for name in ("low", "expected", "high"))
    assert low < 0.4 * expected < 0.4 * high, "at most 32 of 100 requests were open"
    assert made["phases_us"]["decode"] / 1e6 > 100 / 16 * 0.02, "16 slots answer 100 rows"
    assert len(found["doubts"]) == 1
    assert again["doubts"] == [], "the run of 68 rows was about as long"
    assert again["estimate"]["lengths_from"] == "68 rows of 1 earlier run of this job"

    lines = {line["what"]: line for line in report["estimate"]["lines"]}
    assert lines["rows"]["expected"] == lines["rows"]["actual"] == 100
    assert lines["usd"]["expected"] == pytest.approx(pool["usd"]["expected"])
    run = json.loads((tmp_path / "out" / "_pipeline" / "runs" / f"{report['runs'][-1]['run_id']}.json").read_text())
    stats = run["actors"][0]["stats"]
    computed, generated = stats["prompt_tokens"] - stats["cached_tokens"], stats["generated_tokens"]
    tokens_usd = (computed * 10 + stats["cached_tokens"] * 1 + generated * 100) / 1e6
    assert lines["usd"]["actual"] == pytest.approx(tokens_usd + lines["machine_us"]["actual"] / 1e9)


def test_rows_that_do_not_meet_the_condition_are_no_requests(tmp_path: Path, planned: Callable[..., Any]):
    with FakeServer() as server:
        path = job_file(tmp_path, server.url, 40)
        whole = planned(path, "--probe", "16")
        some = planned(
            path, "--set", f"output.path={tmp_path}/other", "--set", "input.when=text >= 'row30' and text < 'row3:'"
        )
    assert (whole["estimate"]["rows"], some["rows_left"], some["estimate"]["rows"]) == (40, 40, 10)
    assert some["prompts"]["expected"] == pytest.approx(whole["prompts"]["expected"] / 4)


def test_limits_of_a_minute_bound_the_time(tmp_path: Path, planned: Callable[..., Any]):
    with FakeServer() as server:
        path = job_file(tmp_path, server.url, 100)
        free = planned(path, "--probe", "32")["here"][0]["wall_us"]["expected"]
    for key, minutes in ("requests_per_minute=10", 10), ("tokens_per_minute=100", 9):  # of some 9 tokens a row
        found = planned(path, "--set", f"server.{key}")
        assert found["here"][0]["wall_us"]["low"] > minutes * 60e6 * 0.95 > free
        made = found["estimate"]
        assert sum(made["phases_us"].values()) == pytest.approx(made["machine_us"]["expected"], abs=10)


def test_runs_on_another_server_or_with_other_requests_are_not_used(tmp_path: Path, planned: Callable[..., Any]):
    with FakeServer() as server, FakeServer() as other:
        path = job_file(tmp_path, server.url, 30)
        path.write_text(path.read_text().replace("sampling:\n  max_tokens: 4\n", ""))  # a task has no max_tokens
        planned(path, "--probe", "8")
        assert planned(path)["estimate"] is not None
        embed = ["--set", "task.type=embed", "--set", "task.dimensions=8"]
        differences = [
            ["--set", f"server.base_url={other.url}"],
            ["--set", "server.model=large"],
            ["--set", "server.extra_body={reasoning_effort: high}"],
            embed,
        ]
        for flags in differences:
            assert planned(path, *flags, "--set", f"output.path={tmp_path}/other")["estimate"] is None, flags
        vectors = planned(path, *embed, "--probe", "8", "--set", f"output.path={tmp_path}/vectors")
        assert vectors["estimate"]["generated_tokens"]["high"] == 0 < vectors["prompts"]["low"]
        server.behaviour.model = "other-model"
        found = planned(path, "--probe", "4", "--set", f"output.path={tmp_path}/again")
    assert found["estimate"]["lengths_from"] == "4 rows of 1 earlier run of this job"
    assert "other-model" in found["estimate"]["speeds_from"]


def test_engines_with_a_server_each_are_compared(tmp_path: Path, planned: Callable[..., Any]):
    serve = [sys.executable, "-m", "tests.endpoint.fake_server"]
    behaviour = {"slots": 1, "seconds_per_request": 0.05, "usage": "missing"}
    backend = {"base_url": None, "serve": [*serve, "--behaviour", json.dumps(behaviour)]}
    path = job_file(tmp_path, "", 200, server=backend)
    found = planned(path, "--probe", "8", "--actors", "1,2")
    one, two = found["here"]
    phases = found["estimate"]["phases_us"]
    start_us = phases["startup"] + phases["load"]
    assert two["machine_us"]["expected"] - one["machine_us"]["expected"] == pytest.approx(start_us, abs=10)
    assert one["wall_us"]["expected"] - two["wall_us"]["expected"] == pytest.approx(
        (one["machine_us"]["expected"] - start_us) / 2, abs=10
    )
    assert "10 requests are of unknown usage" in found["doubts"][1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hardware", "h100"], "--hardware: has no effect with a server"),
        (["--actors", "1,2"], "--actors: must be 1 with server.base_url"),
    ],
)
def test_options_of_our_own_engine_are_refused(tmp_path: Path, pipe: Pipe, flags: list[str], message: str):
    code, _, errors = pipe("plan", str(job_file(tmp_path, "http://localhost:9", 3)), *flags)
    assert code == 2
    assert message in errors


def test_validate_says_that_the_server_tokenizes(tmp_path: Path, pipe: Pipe):
    code, shown, errors = pipe("validate", str(job_file(tmp_path, "http://localhost:9", 3)))
    assert code == 0, errors
    assert "The server tokenizes: tokens are not counted" in shown


def test_the_images_of_a_sample_are_counted_by_the_formula_of_the_model(tmp_path: Path, planned: Callable[..., Any]):
    pytest.importorskip("PIL")
    from tests.endpoint.odd_images import BAD, GOOD
    from tests.model_folders import write_tokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder)
    template = "{% for part in messages[0].content %}{{ part.text if part.type == 'text' else '#' }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    images = [GOOD["large"](0)] * 30 + [GOOD["wide"](0)] * 29 + [BAD["html"](0)]
    pq.write_table(pa.table({"image": images}), tmp_path / "images.parquet")
    path = job_file(tmp_path, "http://localhost:9", 1, model={"path": str(folder)},
                    input={"path": str(tmp_path / "images.parquet")},
                    prompt={"template": "Describe it.", "images": ["image"]})  # fmt: skip
    texts = 60 * len("#Describe it.")
    for config, of_images in (
        ({"model_type": "gemma3"}, 60 * 259),
        ({"model_type": "qwen2_vl"}, 60 / 59 * (30 * (32 * 25 - 1) + 29 * 39)),
        ({"model_type": "other"}, None),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        size = {"min_pixels": 400, "max_pixels": 1 << 24, "patch_size": 14, "merge_size": 2}
        (folder / "preprocessor_config.json").write_text(json.dumps(size))
        for kind in "png", "jpeg":
            found = planned(path, "--set", f"images.format={kind}")["prompts"]
            assert found is None if of_images is None else found["expected"] == pytest.approx(texts + of_images), config

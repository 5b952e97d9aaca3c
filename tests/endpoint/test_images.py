"""Images in prompts: columns, chats and lines of requests; decoding; jobs that are killed while images are decoded."""

import asyncio
import base64
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

pytest.importorskip("PIL")

from PIL import Image

from pipeline.config import load_job
from pipeline.data.prompts import PromptSpec, render
from pipeline.endpoint.images.decode import NoImage, converted
from pipeline.endpoint.spec import EndpointRequest, ImageOptions
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import ConfigError
from pipeline.job.planning.plan import make_plan
from pipeline.job.preview.validation import validate_job
from pipeline.job.running.run import run_job
from tests.endpoint.fake_server import FakeServer
from tests.endpoint.odd_images import BAD, GOOD, colour_of, odd_image
from tests.endpoint.test_engine import opened, steps

MAX_PIXELS = 100_000
HF_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def decoded(raw: bytes, max_pixels: int = MAX_PIXELS, kind: str = "png") -> Image.Image:
    image = Image.open(io.BytesIO(converted(raw, max_pixels, kind, 90)))
    assert (image.format, image.mode) == (kind.upper(), "RGB")
    assert image.size[0] * image.size[1] <= max_pixels
    return image


def sent_images(server: FakeServer) -> dict[str, list[list[bytes]]]:
    """Return the images of each request by its text, which is the same for a request that is sent again."""
    found: dict[str, list[list[bytes]]] = {}
    for request in server.requests:
        parts = request.body["messages"][-1]["content"]
        if isinstance(parts, list):
            urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
            text = "".join(part["text"] for part in parts if part["type"] == "text")
            found.setdefault(text, []).append([base64.b64decode(url.partition(",")[2]) for url in urls])
    return found


def job_file(folder: Path, url: str, table: pa.Table, **sections: dict[str, Any]) -> Path:
    pq.write_table(table, folder / "in.parquet", row_group_size=64)
    job: dict[str, dict[str, Any]] = {
        "input": {"path": str(folder / "in.parquet")},
        "prompt": {"template": "{id}", "images": ["image"]},
        "images": {"max_pixels": MAX_PIXELS, "processes": 2},
        "server": {"base_url": url},
        "sampling": {"max_tokens": 4},
        "output": {"path": str(folder / "out"), "rows_per_file": 32},
        "run": {"max_error_rate": 1.0},
    }
    for name, section in sections.items():
        job[name] = {**job.get(name, {}), **section}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def odd_table(num_rows: int) -> pa.Table:
    images = [{"bytes": odd_image(i)[1], "path": f"{i}.jpg"} for i in range(num_rows)]
    return pa.table({"id": [f"row{i}" for i in range(num_rows)], "image": pa.array(images, HF_IMAGE)})


def check_output(folder: Path, server: FakeServer, num_rows: int) -> None:
    """Check that each row is there once, with an error if its image is bad, and that its own image was sent."""
    found = pq.read_table(folder / "out").to_pylist()
    assert sorted(row["id"] for row in found) == sorted(f"row{i}" for i in range(num_rows))
    assert "image" not in found[0]
    sent = sent_images(server)
    for row in found:
        kind, raw = odd_image(int(row["id"][3:]))
        assert row["error"] == ("invalid_image" if kind in BAD else None), (kind, row["error_message"])
        if kind in GOOD:
            hashes = {hashlib.sha256(image).digest() for (image,) in sent[row["id"]]}
            assert hashes == {hashlib.sha256(converted(raw, MAX_PIXELS, "jpeg", 90)).digest()}, kind
        assert kind in GOOD or row["id"] not in sent


def test_images_of_odd_kinds_reach_the_server_and_bad_ones_are_error_rows(tmp_path: Path):
    num_rows = int(os.environ.get("NUM_ODD_IMAGES", "250"))
    with FakeServer() as server:
        run_job(load_job(job_file(tmp_path, server.url, odd_table(num_rows))))
        check_output(tmp_path, server, num_rows)
    raw = base64.b64encode(odd_image(0)[1])
    for file in tmp_path.joinpath("out").rglob("*"):
        assert file.is_dir() or raw[:60] not in file.read_bytes(), f"{file} holds an image"


@pytest.mark.parametrize("kind", GOOD)
def test_an_image_is_upright_in_rgb_and_small(kind: str):
    for number in 3, 8:
        image, expected = decoded(GOOD[kind](number)), colour_of(number)
        if kind == "grey":
            expected = (image.getpixel((5, 5))[0],) * 3
        if kind == "16 bits":
            expected = (expected[0],) * 3
        if kind == "bits":
            expected = (255 * (number % 2),) * 3
        if kind == "transparent":
            assert image.getpixel((5, 5)) == (255, 255, 255)
        if kind == "turned":
            assert (image.size, image.getpixel((35, 5))) == ((40, 20), (0, 0, 0))
        if kind not in ("noise", "wide"):
            position = (20, 5) if kind == "transparent" else (5, 5)
            shown = zip(image.getpixel(position), expected, strict=True)
            assert all(abs(a - b) <= (60 if kind == "palette" else 6) for a, b in shown), kind


def test_a_large_image_keeps_its_shape():
    image = decoded(GOOD["large"](1), 10_000)
    assert image.width / image.height == pytest.approx(900 / 700, rel=0.02)
    assert image.width * image.height > 9_500
    assert decoded(GOOD["wide"](1), 300).size == (300, 1)


def test_a_file_that_needs_no_change_is_sent_as_it_is():
    for kind, name in ("jpeg", "jpeg"), ("png", "png"):
        raw = GOOD[kind](1)
        assert converted(raw, MAX_PIXELS, name, 90) == raw
        assert converted(raw, 100, name, 90) != raw
    assert converted(GOOD["grey"](1), MAX_PIXELS, "jpeg", 90) != GOOD["grey"](1)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_refused_with_the_reason(kind: str):
    reasons = {"bomb": "30001 x 30000 pixels", "html": "an HTML or XML page", "svg": "an HTML or XML page"}
    with pytest.raises(NoImage, match=reasons.get(kind, "not an image of a known format|damaged")):
        converted(BAD[kind](1), MAX_PIXELS, "jpeg", 90)


def rendered(table: dict[str, Any], **spec: Any) -> list[Any]:
    """Return each row's parts, with images as their bytes, or its error."""
    made = pa.table(table)
    wanted = PromptSpec(**spec).of_input(made.schema.names)
    wanted.check(made.schema)
    out = render(made, wanted)
    rows: list[Any] = []
    for prompt, error, images in zip(out.prompts, out.errors, out.images, strict=True):
        if prompt is None:
            rows.append(error)
            continue
        left = iter(images)
        (turn,) = json.loads(prompt)
        rows.append([part["text"] if part["type"] == "text" else next(left) for part in turn["content"]])
        assert list(left) == []
    return rows


def test_images_come_before_the_text_or_in_place_of_their_column():
    columns = {"a": [b"A"], "b": [[b"B", b"C"]], "text": ["t"]}
    assert rendered(columns, template="see {text}", images=("b", "a")) == [[b"B", b"C", b"A", "see t"]]
    assert rendered(columns, column="text", images=("a",)) == [[b"A", "t"]]
    assert rendered(columns, template="1: {a} 2: {b}{text}", images=("a", "b")) == [
        ["1: ", b"A", " 2: ", b"B", b"C", "t"]
    ]
    assert rendered(columns, template="What is it?", images=("a",)) == [[b"A", "What is it?"]]


def test_forms_of_image_columns():
    url = "data:image/png;base64," + base64.b64encode(b"A").decode()
    structs = pa.array([{"bytes": b"A", "path": None}, None, {"bytes": None, "path": "/etc/passwd"}], HF_IMAGE)
    for values, expected in (
        (structs, [[b"A", "?"], "null_prompt", ["/etc/passwd", "?"]]),
        ([[b"A"], [], [b"A", None], None], [[b"A", "?"], "null_prompt", "invalid_image", "null_prompt"]),
        ([b"A", b"", None], [[b"A", "?"], "invalid_image", "null_prompt"]),
        ([url, "data:,A%20", "data:image/png;base64,!", "data:", "a.png"],
         [[b"A", "?"], [b"A ", "?"], *["invalid_image"] * 2, ["a.png", "?"]]),
    ):  # fmt: skip
        assert rendered({"image": values}, template="?", images=("image",)) == expected
    for column in ([1], [{"path": "a"}]):
        with pytest.raises(ConfigError, match=r"prompt\.images: column 'image' is .* expected images"):
            rendered({"image": column}, template="?", images=("image",))
    with pytest.raises(ConfigError, match="no fields or format"):
        rendered({"image": structs}, template="{image.path}", images=("image",))


def test_lines_of_requests_and_chats_are_decoded_too(tmp_path: Path):
    png = "data:image/png;base64," + base64.b64encode(GOOD["png"](1)).decode()
    urls = {"good": png, "bad": "data:,no image", "file": "file:///etc/passwd"}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [
            {"role": "user", "content": [{"type": "text", "text": name},
                                         {"type": "image_url", "image_url": {"url": url, "detail": "low"}}]}]}}
        for name, url in urls.items()
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = {"input": {"path": str(tmp_path / "in.jsonl"), "format": "openai"}, "output": {"path": str(tmp_path / "out")},
           "run": {"max_error_rate": 1.0}}  # fmt: skip
    with FakeServer() as server:
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**job, "server": {"base_url": server.url}}))
        run_job(load_job(tmp_path / "job.yaml"))
        ((image,),) = sent_images(server)["good"]
        assert '"detail": "low"' in json.dumps([request.body for request in server.requests])
    assert Image.open(io.BytesIO(image)).format == "JPEG"
    found = {row["custom_id"]: row["error"] for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert found == {"good": None, "bad": "invalid_image", "file": "image_not_allowed"}


def test_the_report_counts_the_images_of_completed_rows_and_their_cost(tmp_path: Path):
    images = [[GOOD["jpeg"](i)] * (1 + i % 3) for i in range(11)] + [[GOOD["animated"](0)] * 3] + [[BAD["html"](0)]]
    table = pa.table({"id": [f"row{i}" for i in range(13)], "image": images})
    with FakeServer() as server:
        report = run_job(
            load_job(job_file(tmp_path, server.url, table, cost={"hourly_usd": 36_000}, output={"rows_per_file": 4}))
        )
    assert report.rows.images == 24
    usd = report.cost.total_usd
    assert usd is not None
    assert report.cost.per_1k_images_usd == pytest.approx(usd * 1000 / 24)
    shown = (tmp_path / "out" / "_pipeline" / "report.md").read_text()
    assert "per 1,000 images" in shown
    assert "| Images | 24 |" in shown
    assert "3 images from files with more frames or pages, of which only the first was sent" in shown


def test_windows_of_images_are_smaller(tmp_path: Path):
    table = pa.table({"id": [f"row{i}" for i in range(100)], "image": [bytes(1 << 20)] * 100})
    path = job_file(tmp_path, "http://127.0.0.1:1", table)
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=10, use_dictionary=False)
    text = yaml.safe_load(path.read_text())
    del text["prompt"]["images"], text["images"]
    found = [make_plan(load_job(path), "server").windows]
    assert validate_job(load_job(path)).facts["input"]["windows"] == 2
    path.write_text(yaml.safe_dump(text))
    found.append(make_plan(load_job(path), "server").windows)
    assert [[window.num_rows for window in windows] for windows in found] == [[60, 40], [100]]


def test_images_without_a_server_are_a_mistake_of_the_job_file(tmp_path: Path):
    path = job_file(tmp_path, "http://127.0.0.1:1", odd_table(1))
    job = yaml.safe_load(path.read_text())
    del job["server"]
    path.write_text(yaml.safe_dump({**job, "model": "demo"}))
    with pytest.raises(ConfigError, match=r"prompt\.images: needs a server; our own engine reads only text"):
        load_job(path)


def request(index: int, images: tuple[bytes, ...]) -> EndpointRequest:
    parts = [{"type": "image_url", "image_url": {"url": "image:"}}] * len(images)
    content = [{"type": "text", "text": str(index)}, *parts]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return EndpointRequest(index, body, SamplingParams(max_tokens=4), images=images)


FAULTY_DECODER = """
import os, signal, sys
from pipeline.endpoint.images import decode
real = decode.converted
def converted(raw, *options):
    if raw[-4:] in (b"kill", b"stop"):
        os.kill(os.getpid(), signal.SIGKILL if raw.endswith(b"kill") else signal.SIGSTOP)
    return real(raw, *options)
decode.converted = converted
decode.main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
"""


def test_a_process_that_ends_or_hangs_costs_its_row_at_most(monkeypatch: pytest.MonkeyPatch):
    """Other images that are in the process are decoded by another one."""
    monkeypatch.setattr("pipeline.endpoint.images.pool.DECODE_TIMEOUT_S", 5.0)
    monkeypatch.setattr("pipeline.endpoint.images.pool.DECODER", ("-c", FAULTY_DECODER))
    started: list[int] = []
    start = asyncio.create_subprocess_exec

    async def recorded(*command: Any, **options: Any) -> Any:
        process = await start(*command, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)
    faults = {2: b"kill", 3: b"kill", 5: b"stop"}
    with FakeServer() as server, opened(server, route="chat", images=ImageOptions(processes=1)) as engine:
        for index in range(8):
            engine.add(request(index, (GOOD["jpeg"](index) + faults.get(index, b""),)))
        done = steps(engine)
    errors = {index: row.error_message or "" for index, row in done.items() if row.error == "invalid_image"}
    assert set(errors) == set(faults)
    assert all("its decoder ended in each of 2 tries" in errors[index] for index in (2, 3))
    assert "not decoded within 5 s" in errors[5]
    assert [row.error for index, row in done.items() if index not in faults] == [None] * 5
    assert len(started) == 6
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_row_with_too_many_bytes_is_an_error_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipeline.endpoint.images.pool.MAX_BYTES", 10_000)
    with FakeServer() as server, opened(server, route="chat") as engine:
        engine.add(request(0, (GOOD["noise"](0),)))
        engine.add(request(1, (GOOD["noise"](0),) * 4))
        done = steps(engine)
    assert (done[0].error, done[1].error) == (None, "prompt_too_large")
    assert "lower images.max_pixels" in (done[1].error_message or "")


def test_images_that_are_decoded_wait_within_the_memory_for_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipeline.endpoint.engine.MAX_IMAGE_BYTES", 40_000)
    most = 0
    with FakeServer(slots=1, seconds_per_request=0.02) as server, opened(server, route="chat") as engine:
        for index in range(40):
            engine.add(request(index, (GOOD["noise"](index),)))
        done = {}
        while engine.has_unfinished:
            most = max(most, engine._image_bytes)
            done |= {each.row_id: each for each in engine.step()}
        assert engine._image_bytes == 0
    assert len(done) == 40
    assert 30_000 < most < 40_000 + 5 * 10_000


def test_a_run_that_is_killed_while_images_are_decoded_loses_and_doubles_nothing(tmp_path: Path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    num_rows = 400
    with FakeServer(slots=8, seconds_per_request=0.02) as server:
        path = job_file(tmp_path, server.url, odd_table(num_rows))
        command = [sys.executable, "-m", "pipeline", "run", str(path)]
        for number in range(3):
            before, deadline_s = server.num_answered, time.monotonic() + 60
            driver = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment, start_new_session=True)
            while server.num_answered < before + 20 + 30 * number:
                assert driver.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        check_output(tmp_path, server, num_rows)
    assert not [*temporary.rglob("*")]
    assert not [*(tmp_path / "out").rglob("*.tmp*")]

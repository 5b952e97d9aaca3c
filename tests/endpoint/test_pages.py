"""Pages of PDFs as input: rows, windows, rendering, hostile documents, and jobs that are killed."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest
import yaml

pytest.importorskip("PIL")
pytest.importorskip("pypdfium2")

from PIL import Image

from pipeline.config import load_job
from pipeline.data.files import pdf_pages
from pipeline.data.source import cut_windows, open_source, read_window
from pipeline.data.units import window_units
from pipeline.endpoint.images.decode import Pages
from pipeline.endpoint.images.documents import MAX_COPIES, Documents
from pipeline.endpoint.images.pool import ImagePool, size_of
from pipeline.endpoint.spec import DocumentFolder, ImageOptions
from pipeline.errors import ConfigError, InputError
from pipeline.job.planning.plan import make_plan
from pipeline.job.running.run import run_job
from tests.endpoint.fake_server import FakeServer
from tests.endpoint.odd_images import colour_of
from tests.endpoint.test_images import sent_images
from tests.pdfs import HOSTILE, pdf

ROOT = Path(__file__).parents[2]


def put(folder: Path, documents: dict[str, bytes]) -> str:
    for name, raw in documents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return str(folder)


def job_file(folder: Path, url: str, **sections: dict[str, Any]) -> Path:
    job: dict[str, dict[str, Any]] = {
        "input": {"path": str(folder / "in"), "format": "pdf"},
        "prompt": {"template": "{source_page}", "images": ["page"]},
        "images": {"max_pixels": 10_000, "format": "png"},
        "server": {"base_url": url},
        "sampling": {"max_tokens": 4},
        "output": {"path": str(folder / "out"), "rows_per_file": 16},
        "run": {"max_error_rate": 1.0},
    }
    for name, section in sections.items():
        job[name] = {**job.get(name, {}), **section}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def rows_of(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of the output by document and page. Each is there once."""
    rows = pq.read_table(folder / "out").to_pylist()
    found = {(row["source_file"], row["source_page"]): row for row in rows}
    assert len(found) == len(rows)
    assert all(row["source_page"] == row["source_row"] + 1 and "page" not in row for row in rows)
    return found


def colour(image: bytes) -> tuple[int, int, int]:
    opened = Image.open(io.BytesIO(image))
    assert opened.width * opened.height <= 10_000
    pixel = opened.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel[0], pixel[1], pixel[2]


def test_each_page_of_each_document_is_a_row_with_its_image(tmp_path: Path):
    numbers = {"a.pdf": range(1, 4), "b/c.PDF": range(10, 50), "d.pdf": range(60, 61)}
    documents = {name: pdf(each) for name, each in numbers.items()}
    put(tmp_path / "in", {**documents, "notes.txt": b"no PDF"})
    with FakeServer() as server:
        template = {"template": "Page {source_page}:", "images": ["page"]}
        run_job(load_job(job_file(tmp_path, server.url, prompt=template)))
        sent = sent_images(server)
    found = rows_of(tmp_path)
    assert found.keys() == {(name, page) for name, each in numbers.items() for page in range(1, len(each) + 1)}
    assert {row["error"] for row in found.values()} == {None}
    for page in range(1, 41):
        expected = {colour_of(each[page - 1]) for each in numbers.values() if page <= len(each)}
        assert {colour(image) for (image,) in sent[f"Page {page}:"]} == expected


def test_hostile_documents_are_error_rows(tmp_path: Path):
    good = {"good.pdf": pdf([1, 2])}
    put(tmp_path / "in", good | {f"{name}.pdf": raw for name, (raw, _, _) in HOSTILE.items()})
    with FakeServer() as server:
        template = {"template": "Transcribe.", "images": ["page"]}
        run_job(load_job(job_file(tmp_path, server.url, prompt=template)))
    by_document: dict[str, list[dict[str, Any]]] = {}
    for (name, _), row in sorted(rows_of(tmp_path).items()):
        by_document.setdefault(name.removesuffix(".pdf"), []).append(row)
    expected = {name: (rows, rendered) for name, (_, rows, rendered) in HOSTILE.items()} | {"good": (2, 2)}
    assert {n: (len(rows), sum(not row["error"] for row in rows)) for n, rows in by_document.items()} == expected
    errors = [row for rows in by_document.values() for row in rows if row["error"]]
    assert {row["error"] for row in errors} == {"invalid_image"}
    assert by_document["encrypted"][0]["error_message"].endswith("the PDF is encrypted, and opens only with a password")
    assert by_document["more pages stated"][3]["error_message"].endswith("page 4 of 1000000 is missing or damaged")


def test_windows_know_their_pages_without_opening_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = put(tmp_path, {"long.pdf": pdf(range(25)), "short.pdf": pdf([1])})
    source = open_source(folder, kind="pdf")
    assert source == open_source(folder, kind="pdf")
    monkeypatch.setattr(pdf_pages.PdfReader, "_count", lambda *_: pytest.fail("counted again"))
    windows = cut_windows(source, max_rows=10, max_bytes=1 << 20)
    tables = [read_window(source, window, ("source_page", "page")) for window in windows]
    assert [name for table in tables for name in table["page"].to_pylist()] == [
        *(f"long.pdf#page={page}" for page in range(1, 26)),
        "short.pdf#page=1",
    ]
    assert max(table.num_rows for table in tables) <= 10
    changed = bytearray(pdf(range(25)))
    changed[200] ^= 1
    put(tmp_path, {"long.pdf": bytes(changed)})
    with pytest.raises(InputError, match=r"long\.pdf: the file has changed since the job was planned"):
        read_window(source, windows[0], ("page",))


def test_units_have_fewer_pages_if_images_are_larger(tmp_path: Path):
    put(tmp_path / "in", {"long.pdf": pdf(range(100))})
    sizes = []
    for max_pixels in 1_000_000, 8_000_000:
        job = load_job(job_file(tmp_path, "http://127.0.0.1:1", images={"max_pixels": max_pixels},
                                output={"rows_per_file": 512}))  # fmt: skip
        plan = make_plan(job, "server")
        sizes.append([unit.num_rows for unit in window_units(plan.source, plan.windows[0], plan.job.units)])
    assert sizes == [[67, 33], [8] * 12 + [4]]


def test_a_count_that_kills_or_hangs_its_process_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = (
        "import os, time\nfrom pipeline.data.files import pdf_document as d\ncount = d.count_rows\n"
        "def counted(path):\n"
        "    'killed' in path and os.kill(os.getpid(), 9)\n"
        "    'slow' in path and time.sleep(60)\n"
        "    return count(path)\n"
        "d.count_rows = counted\nd.main()"
    )
    monkeypatch.setattr(pdf_pages, "COUNT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(pdf_pages, "COMMAND", ("-c", code))
    three = pdf([1, 2, 3])
    folder = put(tmp_path, {"a.pdf": three, "killed.pdf": three, "slow.pdf": three, "z.pdf": three})
    assert [file.num_rows for file in open_source(folder, kind="pdf").files] == [3, 1, 1, 3]


def test_mistakes_of_the_job_file_and_the_input(tmp_path: Path):
    folder = put(tmp_path / "in", {"notes.txt": b"none"})
    for images in [], ["source_page"]:
        with pytest.raises(ConfigError, match=r"prompt\.images: required by input.format pdf: write images: \[page\]"):
            load_job(job_file(tmp_path, "http://127.0.0.1:1", prompt={"images": images}))
    with pytest.raises(InputError, match=r"contains no \.pdf files"):
        open_source(folder, kind="pdf")
    put(tmp_path / "in", {"a.pdf": pdf([1])})
    with pytest.raises(InputError, match=r"for the pages of PDFs set input\.format: pdf"):
        open_source(folder)


def test_pages_have_the_resolution_of_the_job_up_to_max_pixels(tmp_path: Path):
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf([1], box="0 0 144 72"))
    for dpi, max_pixels, expected in ((72, 10**6, (144, 72)), (144, 10**6, (288, 144)), (600, 800, (40, 20))):
        image = Image.open(io.BytesIO(Pages(max_pixels, "png", 90, dpi).image(str(path), 0)))
        assert (image.size, image.format, image.mode) == (expected, "PNG", "RGB")


def test_the_memory_of_a_process_does_not_grow_with_the_length_of_a_document(tmp_path: Path):
    """PDFium keeps what it has read of an open document: here 200 MB."""
    put(tmp_path, {"long.pdf": pdf(range(200), content="0.5 g 0 0 600 700 re f" + " " * 1_000_000)})

    async def peak_mb() -> int:
        options = ImageOptions(processes=1, max_pixels=10_000, documents=DocumentFolder(str(tmp_path), str(tmp_path)))
        pool = ImagePool(options, {})
        for page in range(1, 201):
            assert size_of(await pool.encoded(f"long.pdf#page={page}")) == (88, 113)
        process = pool._decoders[0].process
        assert process is not None
        status = Path(f"/proc/{process.pid}/status").read_text()
        await pool.close()
        return int(status.partition("VmHWM:")[2].split()[0]) >> 10

    assert asyncio.run(peak_mb()) < 160


def test_documents_of_a_store_are_copied_once_while_their_pages_are_read(monkeypatch: pytest.MonkeyPatch):
    store = fsspec.filesystem("memory")
    for number in range(3 * MAX_COPIES):
        store.pipe_file(f"/pages/{number}.pdf", f"content {number}".encode())
    most, copied = 0, []
    from pipeline.endpoint.images import documents as module

    copy = module._copied
    monkeypatch.setattr(module, "_copied", lambda fs, path: copied.append(path) or copy(fs, path))

    async def read(documents: Documents, number: int) -> None:
        nonlocal most
        async with documents.local(f"{number}.pdf") as path:
            most = max(most, len(documents._copies))
            await asyncio.sleep(0.01)
            assert Path(path).read_text() == f"content {number}"

    async def read_all() -> None:
        documents = Documents(DocumentFolder("memory://pages", "/pages"), {})
        await asyncio.gather(*(read(documents, number // 5) for number in range(15 * MAX_COPIES)))
        with pytest.raises(InputError, match="missing"):
            await read(documents, "missing")  # type: ignore[arg-type]
        await read(documents, 0)
        documents.close()

    asyncio.run(read_all())
    assert most == MAX_COPIES
    assert len(copied) == 3 * MAX_COPIES + 2


@pytest.mark.usefixtures("engines_in_threads")
def test_a_job_of_a_store_reads_its_pages(tmp_path: Path):
    store = fsspec.filesystem("memory")
    store.pipe_file("/scans/a.pdf", pdf([1, 2, 3]))
    with FakeServer() as server:
        path = job_file(tmp_path, server.url, input={"path": "memory://scans", "format": "pdf"},
                        )  # fmt: skip
        run_job(load_job(path))
        sent = sent_images(server)
    assert {row["error"] for row in rows_of(tmp_path).values()} == {None}
    assert {text: colour(images[0]) for text, (images,) in sent.items()} == {str(n): colour_of(n) for n in (1, 2, 3)}


def test_a_run_that_is_killed_while_pages_are_rendered_loses_and_doubles_nothing(tmp_path: Path):
    numbers = {f"{n}.pdf": range(7 * n, 8 * n + 1) for n in range(20)} | {"long.pdf": range(200, 400)}
    put(tmp_path / "in", {name: pdf(each) for name, each in numbers.items()})
    put(tmp_path / "in", {"encrypted.pdf": HOSTILE["encrypted"][0]})
    with FakeServer(slots=8, seconds_per_request=0.02) as server:
        path = job_file(tmp_path, server.url,
                        )  # fmt: skip
        command, deadline_s = [sys.executable, "-m", "pipeline", "run", str(path)], time.monotonic() + 60
        driver = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        while server.num_answered < 60:
            assert driver.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        sent = sent_images(server)
    found = rows_of(tmp_path)
    pages = {(name, page): each[page - 1] for name, each in numbers.items() for page in range(1, len(each) + 1)}
    assert found.keys() == pages.keys() | {("encrypted.pdf", 1)}
    assert {key for key, row in found.items() if row["error"]} == {("encrypted.pdf", 1)}
    for page in range(1, 201):
        expected = {colour_of(number) for (_, each), number in pages.items() if each == page}
        assert {colour(image) for images in sent[str(page)] for image in images} == expected


def test_the_jobs_of_the_cookbook_run_on_a_server_and_documents_are_joined(
    tmp_path: Path, pipe: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    with FakeServer() as server:
        for name in "captions", "ocr":
            address = ["--set", "server.serve=null", "--set", f"server.base_url={server.url}"]
            code, _, errors = pipe("run", f"jobs/{name}.yaml", *address, "--set", f"output.path={tmp_path / name}")
            assert code == 0, errors
        assert {len(images) for images in sent_images(server).values()} == {3, 2}
    captions = pq.read_table(tmp_path / "captions").to_pylist()
    assert {row["photo_id"] for row in captions if row["caption"]} == {"F-1", "F-2", "F-3"}
    pages = sorted(pq.read_table(tmp_path / "ocr").to_pylist(), key=lambda row: row["source_page"])
    joined = str(tmp_path / "joined")
    code, shown, errors = pipe("compact", str(tmp_path / "ocr"), "--output", joined, "--by", "source_file")
    assert code == 0, errors
    assert "joined by source_file" in shown
    assert pq.read_table(joined).to_pylist() == [
        {"source_file": "scan.pdf", "text": "\n\n".join(row["text"] for row in pages), "num_rows": 2, "error_rows": []}
    ]

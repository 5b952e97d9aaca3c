"""Redaction: messages show no secret of urls and of library errors."""

import json
import traceback

import fsspec
import pyarrow as pa
import pytest

from pipeline.config import JobConfig
from pipeline.config.identity import free_of
from pipeline.data.source import cut_windows, open_source, read_window
from pipeline.errors import InputError, PipelineError
from pipeline.stores.redaction import error_text, secrets_of, shown_url
from tests.data.conftest import StoreSaidNo, in_memory

SECRET = "hunter2-hunter2"
OPTIONS = {"client_kwargs": {"headers": {"Authorization": f"Bearer {SECRET}"}}, "password": SECRET, "region": "eu-1"}


@pytest.mark.parametrize(("url", "shown"), [
    ("ftp://me:word@host/a:b@c", "ftp://host/a:b@c"),
    ("s3://u:p@bucket/a", "s3://bucket/a"),
    ("https://ghp_token@host/a", "https://host/a"),
    ("https://me:w@rd@host/a?X-Amz-Signature=1 2", "https://host/a"),
    ("simplecache::ftp://me:word@host/a", "simplecache::ftp://host/a"),
    ("abfs://container@account/x", "abfs://container@account/x"),
    ("abfs://container:key@account/x", "abfs://account/x"),
    ("s3://bucket/a?.parquet", "s3://bucket/a?.parquet"),
    ("s3://bucket/me@home/*", "s3://bucket/me@home/*"),
    ("/local/a@b", "/local/a@b"),
    ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
])  # fmt: skip
def test_urls_are_shown_without_secrets(url, shown):
    assert shown_url(url) == shown
    if "?" not in url:
        assert error_text(OSError(f"cannot open '{url}'\nnow")) == f"OSError: cannot open '{shown}' now"


def test_secrets_are_found_by_name_at_any_depth():
    assert secrets_of(OPTIONS) == {SECRET, f"Bearer {SECRET}"}
    error = ValueError(f"sent Bearer {SECRET}\n to https://u:{SECRET}@host/x?sig=1 in eu-1")
    assert error_text(error, secrets_of(OPTIONS)) == "ValueError: sent *** to https://host/x in eu-1"


def test_the_record_of_a_job_has_no_password():
    config = JobConfig.model_validate(
        {
            "name": "x", "input": {"path": f"ftp://me:{SECRET}@host/in"}, "prompt": {"column": "text"},
            "model": {"path": "demo:target-awq"}, "output": {"path": "abfs://container@account/out"},
        }
    )  # fmt: skip
    assert SECRET not in json.dumps(free_of(config))
    assert free_of(config)["output"]["path"] == "abfs://container@account/out"


@pytest.mark.parametrize("error", [PermissionError, OSError, StoreSaidNo, ValueError])
def test_an_input_that_cannot_be_opened_shows_no_secret(monkeypatch, error):
    def refuse(*args, **options):
        raise error(f"denied for {SECRET} at https://u:{SECRET}@host/in?sig={SECRET}")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", refuse)
    with pytest.raises(PipelineError, match=r"denied for \*\*\*") as refused:
        open_source("memory://x", {"secret": SECRET})
    assert SECRET not in "".join(traceback.format_exception(refused.value)), "nor in a log"


@pytest.mark.parametrize("failing", ["cat_file", "info"])
def test_an_input_that_cannot_be_read_shows_no_secret(write, monkeypatch, failing):
    folder = write("a.parquet", pa.table({"text": ["x"] * 10}))
    source = open_source(in_memory(f"{folder}/a.parquet", "redacted"), {"secret": SECRET})
    (window,) = cut_windows(source, 100, 1 << 30)

    def refuse(*args, **options):
        raise StoreSaidNo(f"token {SECRET} expired")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), failing, refuse)
    with pytest.raises(PipelineError, match=r"token \*\*\* expired") as refused:
        read_window(source, window, ["text"])
    assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_invalid_options_are_reported_without_their_values(monkeypatch):
    def refuse(*args, **options):
        raise ValueError(f"Invalid endpoint: https://u:{SECRET}@host, key {SECRET}")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(InputError, match=r"these storage options: .*https://host, key \*\*\*") as refused:
        open_source("s3://bucket/in", {"key": SECRET})
    assert SECRET not in "".join(traceback.format_exception(refused.value))

"""Credentials that are unknown, missing, or lack a right are an error at once, and the message shows no secret."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.checkpoints.cache import fetch_model
from pipeline.data.output.parts import PartStore
from pipeline.data.source import open_source
from pipeline.errors import UserError

# Run moto in its own process: it checks credentials everywhere in a process or nowhere.
SERVER = """
import boto3, json, logging, sys
from urllib.request import Request, urlopen
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
url = "http://%s:%s" % server.get_host_and_port()
access = dict(endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1")
boto3.client("s3", **access).create_bucket(Bucket="bucket")
iam = boto3.client("iam", **access)
iam.create_user(UserName="reader")
allowed = [{"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}]
policy = json.dumps({"Version": "2012-10-17", "Statement": allowed})
iam.put_user_policy(UserName="reader", PolicyName="reads", PolicyDocument=policy)
made = iam.create_access_key(UserName="reader")["AccessKey"]
text = {"Content-Type": "text/plain"}
urlopen(Request(url + "/moto-api/reset-auth", data=b"0", method="POST", headers=text)).close()
print(json.dumps({"endpoint_url": url, "key": made["AccessKeyId"], "secret": made["SecretAccessKey"]}), flush=True)
sys.stdin.read()
"""
SECRET = "a-secret-that-no-message-shows"


@pytest.fixture(scope="module")
def reader() -> Iterator[dict[str, Any]]:
    """Yield the storage options of a user with the rights to list and read."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        yield json.loads(server.stdout.readline())
        server.communicate()


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch, tmp_path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


@pytest.mark.parametrize(("changes", "code"), [
    ({"key": "AKIANOBODYSKEY000000"}, "InvalidAccessKeyId"),
    ({"secret": SECRET}, "SignatureDoesNotMatch"),
    ({"key": None, "secret": None}, "NoCredentialsError"),
    ({"key": None, "secret": None, "profile": "missing"}, "ProfileNotFound"),
])  # fmt: skip
def test_unknown_and_missing_credentials(reader, tmp_path, changes, code):
    storage = {key: value for key, value in {**reader, **changes}.items() if value is not None}
    shown: list[str] = []
    outputs = PartStore("s3://bucket/out", storage).folder
    reads: dict[str, Callable[[], Any]] = {
        "input.path s3://bucket/in": lambda: open_source("s3://bucket/in", storage),
        "s3://bucket/out": lambda: outputs.names(),
        "s3://bucket/out/_pipeline/status.json": lambda: outputs.read("_pipeline/status.json"),
        "s3://bucket/out/_pipeline/tmp": outputs.probe,
        "model.path s3://bucket/model": lambda: fetch_model("s3://bucket/model", storage, tmp_path, shown.append),
    }
    for prefix, read in reads.items():
        with pytest.raises(
            UserError, match=f"^{prefix}: .*{code}.*set the store's credentials: .*AWS_PROFILE"
        ) as raised:
            read()
        assert not {SECRET, reader["secret"]} & set(str(raised.value).split())
        assert SECRET not in str(raised.value)


def test_an_invalid_token(reader):
    """An answer to HEAD has no body, so only other requests can distinguish it from an expired one."""
    storage = {**reader, "token": SECRET}
    with pytest.raises(UserError, match=r"s3://bucket/out: .*InvalidToken.*set the store's credentials"):
        PartStore("s3://bucket/out", storage).folder.names()

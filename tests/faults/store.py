"""A local object store with a bucket, behind a proxy that injects faults. Needs no pytest."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import boto3
from moto.server import ThreadedMotoServer

from tests.faults.proxy import FaultProxy

KEY, SECRET = "AKIATESTKEY", "the-secret-that-must-not-leak"


@dataclass(frozen=True)
class Bucket:
    """A bucket of the store; `storage` holds the fsspec options by which a job reaches it, through the proxy."""

    name: str
    storage: Mapping[str, Any]
    client: Any = field(repr=False)  # boto3 client that bypasses the proxy

    def url(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def upload(self, path: Path, key: str) -> None:
        self.put(key, path.read_bytes())

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def tags(self, prefix: str = "") -> dict[str, str]:
        """Return each key without the prefix -> its entity tag."""
        found = {}
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix):
            for entry in page.get("Contents", []):
                found[entry["Key"].removeprefix(prefix)] = entry["ETag"]
        return found

    def download(self, prefix: str, folder: Path) -> None:
        for key in self.tags(prefix):
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.get(prefix + key))


class FaultyStore:
    """moto, the proxy and a bucket; a context manager.

    `chances`: probability of each fault of `proxy` for a request that it applies to.
    """

    def __init__(self, seed: int = 0, chances: Mapping[str, float] | None = None) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._seed = seed
        self._chances = chances

    def __enter__(self) -> "FaultyStore":
        self._server.start()
        host, port = self._server.get_host_and_port()
        # moto keeps one state for all servers of a process: clear that of earlier ones
        urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST"), timeout=30).close()
        self.proxy = FaultProxy(port, self._seed, self._chances).__enter__()
        client = boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="bucket")
        storage = {"key": KEY, "secret": SECRET, "endpoint_url": self.proxy.url}
        self.bucket = Bucket("bucket", storage, client)
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.__exit__()
        self._server.stop()

    def fault_counts(self) -> str:
        """Return the counts of injected faults as text."""
        return ", ".join(f"{n} {fault}" for fault, n in sorted(self.proxy.done.items())) or "none"

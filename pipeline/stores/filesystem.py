"""fsspec filesystems whose requests are retried (`retries`).

The libraries below are configured to try once, so that retries do not multiply and each one is counted here. Local
filesystems are returned unwrapped. Storage options hold secrets: no message and no repr shows them.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pipeline.errors import EnvironmentFailed, PipelineError
from pipeline.stores.ranged_file import RangedFile
from pipeline.stores.redaction import error_text, secrets_of, shown_url
from pipeline.stores.retries import RetryCounts, RetryPolicy, with_retries
from pipeline.stores.store_errors import PreconditionFailed, ShortRead, client_error, status_of

T = TypeVar("T")

HUB = "hf://datasets/"  # urls of datasets on the Hugging Face Hub


def is_url(path: str) -> bool:
    """Return whether a user's path is an fsspec url and not a local path."""
    return "://" in path


def local_path(path: str) -> str | None:
    """Return the local path of a path or a `file:` url; None for the url of a store."""
    scheme, colon, rest = path.partition(":")
    if colon and scheme in ("file", "local"):
        return rest.removeprefix("//")
    return None if is_url(path) else path


def storage_prefix(path: str, storage: Iterable[str]) -> str | None:
    """Return the longest prefix in `storage` of the url `path`: a protocol, or a url of whole path components. None if
    there is none, or for a local path."""
    if not is_url(path):
        return None
    protocol = path.partition("://")[0]
    bare = (prefix for prefix in storage if prefix == protocol or f"{path}/".startswith(prefix.rstrip("/") + "/"))
    return max(bare, key=len, default=None)


def storage_for(path: str, storage: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fsspec options of `path`. storage: the job's options, by url prefix."""
    prefix = storage_prefix(path, storage)
    return {} if prefix is None else dict(storage[prefix])


def open_problem(url: str, storage: Mapping[str, Any], error: Exception) -> str:
    """Return the message for an `error` that `filesystem` raised. It shows no values of options."""
    return (
        f"cannot be opened ({type(error).__name__}); check that {url.partition('://')[0]}:// is a known protocol, that "
        f"its library is installed, and its storage options ({', '.join(sorted(storage)) or 'none given'})"
    )


def filesystem(
    url: str,
    options: Mapping[str, Any] | None = None,
    policy: RetryPolicy | None = None,
    retries: RetryCounts | None = None,
) -> tuple[Any, str]:
    """Return the filesystem of a url and the path on it: fsspec's own for local urls, else a `RemoteFilesystem`.

    retries: counts retried requests. Makes no request. Raises fsspec's ImportError, ValueError or TypeError for an
    unknown protocol or invalid options.
    """
    import fsspec.core

    given = dict(options or {})

    def connect() -> tuple[Any, str]:
        if url.startswith(HUB):
            from pipeline.stores.hub_files import HubFiles

            return HubFiles(**given), url.removeprefix("hf://").rstrip("/")
        chained = "::" in url
        try:
            fs, path = fsspec.core.url_to_fs(url, **(given if chained or not _names_s3(url) else _one_try_s3(given)))
        except AttributeError as e:  # a nested filesystem without its inner one
            raise ValueError(str(e)) from e
        if _is_s3(fs):
            fs.retries = 1  # the class default is 5; only our own loop may retry
            _open_session(fs)
        return fs, path

    fs, path = connect()
    if "file" in protocols(fs):
        return fs, path
    return RemoteFilesystem(fs, lambda: connect()[0], policy or RetryPolicy(), secrets_of(given), retries), path


def _open_session(fs: Any) -> None:
    """Connect early, because s3fs raises TypeError for invalid options only here. Other errors, such as a missing
    profile, are raised again by the first request, which reports them with the path."""
    try:
        fs.connect()
    except TypeError:
        raise
    except Exception:
        return


def secrets_in(fs: Any) -> frozenset[str]:
    """Return the values of a filesystem's storage options that must not be shown; a local one has none."""
    return fs.secrets if isinstance(fs, RemoteFilesystem) else frozenset()


def protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def md5(data: bytes) -> str:
    """Return the MD5 digest, which most S3 stores use as the entity tag of a file written by one PUT."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class RemoteFilesystem:
    """The fsspec operations that the pipeline uses, with retries. Thread-safe.

    Other fsspec operations are left out on purpose: their requests would not be retried.
    """

    def __init__(
        self,
        fs: Any,
        connect: Callable[[], Any],
        policy: RetryPolicy,
        secrets: frozenset[str],
        retries: RetryCounts | None = None,
    ) -> None:
        self._fs = fs
        self._connect = connect
        self._policy = policy
        self.secrets = secrets
        self.retries = retries or RetryCounts()
        self._lock = threading.Lock()
        self.protocol = fs.protocol
        self.is_s3 = _is_s3(fs)

    def __repr__(self) -> str:
        return f"RemoteFilesystem({protocols(self)[0]})"

    @property
    def raw(self) -> Any:
        """The wrapped fsspec filesystem, without retries."""
        return self._fs

    def unstrip_protocol(self, path: str) -> str:
        return self._fs.unstrip_protocol(path)

    def info(self, path: str) -> dict[str, Any]:
        return self._fresh(path, lambda fs: self._info(fs, path))

    def exists(self, path: str) -> bool:
        try:
            return bool(self.info(path))
        except FileNotFoundError:
            return False

    def ls(self, path: str) -> list[dict[str, Any]]:
        return self._fresh(path, lambda fs: fs.ls(path, detail=True))

    def pages(self, path: str) -> Iterator[list[tuple[str, int | None]]]:
        """List the direct children of an S3 folder, page by page, as (name, size); the size of a folder is None.
        fsspec's own listing takes a kilobyte of memory per name."""
        assert self.is_s3
        bucket, key = self._fs.split_path(path)[:2]
        prefix = f"{key.strip('/')}/" if key.strip("/") else ""
        request = {"Bucket": bucket, "Prefix": prefix, "Delimiter": "/"}
        while True:
            page = self.call(path, lambda fs: fs.call_s3("list_objects_v2", **request))
            found = [(entry["Key"], int(entry["Size"])) for entry in page.get("Contents", ())]
            found += [(entry["Prefix"], None) for entry in page.get("CommonPrefixes", ())]
            yield [(key[len(prefix) :].rstrip("/"), size) for key, size in found if key != prefix]
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def find(self, path: str, detail: bool = False) -> Any:
        return self._fresh(path, lambda fs: fs.find(path, detail=detail))

    def glob(self, path: str, detail: bool = False) -> Any:
        return self._fresh(path, lambda fs: fs.glob(path, detail=detail))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the file's bytes, or those from `start` to `end`, after checking their number.

        start, end: None, or nonnegative offsets from the beginning.
        """
        assert min(start or 0, end or 0) >= 0, (start, end)
        if start is None and end is None:
            return self.whole(path)[0]

        def read(fs: Any) -> bytes:
            first = start or 0
            if end is not None and end <= first:
                return b""
            data = fs.cat_file(path, start=first, end=end)
            if end is None or len(data) != end - first:
                size = int(fs.info(path)["size"])
                expected = max(0, (size if end is None else min(end, size)) - first)
                if len(data) == size > expected:
                    raise EnvironmentFailed(
                        f"{self._shown(path)}: the server ignores Range requests and sends the whole file, so the file "
                        "cannot be read from there; download it, or move it to a server that supports Range"
                    )
                if len(data) != expected:
                    raise ShortRead(f"received {len(data)} of {expected} bytes")
            return data

        return self._fresh(path, read)

    def whole(self, path: str) -> tuple[bytes, str | None]:
        """Return the file's bytes and its entity tag (None if the store has none), both of the same version."""
        alone = {"max_concurrency": 1} if self.is_s3 else {}  # a single GET reads a single version

        def read(fs: Any) -> tuple[bytes, str | None]:
            info = self._info(fs, path)
            if info["type"] == "directory":
                raise FileNotFoundError(path)
            data, tag = fs.cat_file(path, **alone), etag(info)
            if len(data) != int(info["size"]):
                raise ShortRead(f"received {len(data)} of {info['size']} bytes")
            if tag is not None and tag != md5(data) and tag != etag(fs.info(path)):
                raise ShortRead("the file was replaced while it was read")
            return data, tag

        return self._fresh(path, read)

    def tail(self, path: str, length: int) -> bytes:
        """Return the file's last `length` bytes, or all of a shorter file. Takes one request on S3 unless the file is
        shorter."""

        def read(fs: Any) -> bytes:
            data = fs.cat_file(path, start=-length) if self.is_s3 else b""
            if len(data) != length:
                size = int(fs.info(path)["size"])
                data = data if self.is_s3 else fs.cat_file(path, start=max(0, size - length), end=size)
                if len(data) != min(length, size):
                    raise ShortRead(f"received {len(data)} of {min(length, size)} bytes")
            return data

        return self._fresh(path, read)

    def open(self, path: str, mode: str = "rb", size: int | None = None) -> RangedFile:
        """Open the file for reading, with one request per read. size: saves a request if it is known."""
        assert mode == "rb", mode
        known = int(self.info(path)["size"]) if size is None else size
        return RangedFile(lambda start, stop: self.cat_file(path, start, stop), known, path)

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite", if_match: str | None = None) -> str | None:
        """Write the file in one request. Return its entity tag, or None if the store reports none.

        mode "create": raises FileExistsError if the file exists, even if an earlier try of this call created it and the
        response was lost. if_match: S3 only; raises PreconditionFailed unless the file has this tag.
        """
        extra: dict[str, Any] = {}
        if self.is_s3:
            extra["chunksize"] = len(data) + 1  # makes s3fs send one PUT, not a multipart upload
        if if_match is not None:
            if not self.is_s3:
                raise PipelineError(f"{self._shown(path)}: conditional replacement is supported on S3 only")
            extra["IfMatch"] = if_match

        def write(fs: Any) -> str | None:
            try:
                answer = fs.pipe_file(path, data, mode=mode, **extra)
            except Exception as e:
                # s3fs recognizes a failed If-None-Match only if the response repeats the header's name
                if status_of(e) == 412:
                    raise (FileExistsError(path) if mode == "create" else PreconditionFailed(path)) from e
                raise
            tag = answer.get("ETag") if isinstance(answer, dict) else None
            return tag.strip('"') if isinstance(tag, str) else None

        return self.call(path, write)

    def rm_file(self, path: str) -> None:
        self.call(path, lambda fs: fs.rm_file(path))

    def _info(self, fs: Any, path: str) -> dict[str, Any]:
        """Return fsspec's info, also if the user may list only some prefixes of a bucket.

        S3 then answers 403 instead of 404 for a missing key, and for a folder, which has no key.
        """
        try:
            return fs.info(path)
        except PermissionError:
            bucket, key = fs.split_path(path)[:2] if self.is_s3 else ("", "")
            if not key or _first_key(fs, bucket, key) == key:
                raise
            below = _first_key(fs, bucket, key.rstrip("/") + "/")
        if below is None:
            raise FileNotFoundError(path)
        return {"name": path, "type": "directory", "size": 0}

    def _fresh(self, path: str, operation: Callable[[Any], T]) -> T:
        """Run `call` after dropping fsspec's cached listings."""

        def run_uncached(fs: Any) -> T:
            fs.invalidate_cache()
            return operation(fs)

        return self.call(path, run_uncached)

    def call(self, path: str, operation: Callable[[Any], T]) -> T:
        """Run `operation` on the fsspec filesystem with retries. Raises the errors of `with_retries`."""
        used: Any = None

        def request() -> T:
            nonlocal used
            used = self._fs
            return operation(used)

        def renew() -> None:
            self._renew(used)

        return with_retries(request, renew, self._policy, self.retries, lambda: self._shown(path), self.error_text)

    def _renew(self, expired: Any) -> None:
        """Replace the filesystem by one that reads the credentials again, unless another thread has done so."""
        with self._lock:
            if self._fs is expired:
                type(expired).clear_instance_cache()
                self._fs = self._connect()

    def _shown(self, path: str) -> str:
        return shown_url(self._fs.unstrip_protocol(path))

    def error_text(self, error: BaseException) -> str:
        """Return the store's error message on one line, without secrets."""
        return error_text(client_error(error) or error, self.secrets)


def _is_s3(fs: Any) -> bool:
    return "s3" in protocols(fs)


def _names_s3(url: str) -> bool:
    return url.partition("://")[0] in ("s3", "s3a")


def _one_try_s3(options: dict[str, Any]) -> dict[str, Any]:
    """Return options for s3fs without a listings cache, and with one try in botocore unless configured."""
    config = {"retries": {"total_max_attempts": 1}, **options.get("config_kwargs", {})}
    return {"use_listings_cache": False, **options, "config_kwargs": config}


def _first_key(fs: Any, bucket: str, prefix: str) -> str | None:
    """Return the first key of the bucket with this prefix, in order, or None."""
    found = fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1).get("Contents")
    return found[0]["Key"] if found else None


def etag(info: Mapping[str, Any]) -> str | None:
    """Return the entity tag in fsspec's info of a file, or None."""
    tag = info.get("ETag") or info.get("etag")
    return tag.strip('"') if isinstance(tag, str) and tag else None

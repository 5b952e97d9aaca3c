"""What the errors of object stores and of the libraries before them mean: whether another try may help, and why.

Told by codes, classes and numbers, never by the text of a message.
"""

import errno
from enum import StrEnum
from typing import Any


class Fault(StrEnum):
    """Why a request is tried again."""

    THROTTLED = "throttled"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    SHORT_READ = "short_read"  # a body that came short or damaged, in either direction
    CONFLICT = "conflict"  # 409: another request on the same key is under way
    CREDENTIALS = "credentials"  # expired: read afresh and tried once more


class ShortRead(OSError):
    """Fewer bytes came than there are."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EIO, message)


class PreconditionFailed(Exception):
    """The file is not the one that was to be replaced."""


_THROTTLED = frozenset(
    ("SlowDown", "ServiceUnavailable", "TooManyRequestsException", "RequestLimitExceeded", "429", "503")
)
_THROTTLED |= {
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "RequestThrottled",
    "RequestThrottledException",
}
_SERVER = frozenset(("InternalError", "InternalFailure", "500", "502", "504"))
_TIMEOUT = frozenset(("RequestTimeout", "RequestTimeoutException", "408"))
_BROKEN = frozenset(("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"))
_CONFLICT = frozenset(("OperationAborted", "ConditionalRequestConflict", "Conflict", "409"))
_EXPIRED = frozenset(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"))
_BY_STATUS = {
    408: Fault.TIMEOUT,
    429: Fault.THROTTLED,
    500: Fault.SERVER_ERROR,
    502: Fault.SERVER_ERROR,
    503: Fault.THROTTLED,
    504: Fault.SERVER_ERROR,
}
_BY_ERRNO = {
    errno.ECONNRESET: Fault.CONNECTION,
    errno.ECONNABORTED: Fault.CONNECTION,
    errno.ECONNREFUSED: Fault.CONNECTION,
    errno.EPIPE: Fault.CONNECTION,
    errno.ENETUNREACH: Fault.CONNECTION,
    errno.EHOSTUNREACH: Fault.CONNECTION,
    errno.ETIMEDOUT: Fault.TIMEOUT,
    errno.EBUSY: Fault.THROTTLED,  # s3fs for 503
    errno.EREMOTEIO: Fault.SERVER_ERROR,  # s3fs for 500
}


def fault_of(error: BaseException) -> Fault | None:
    """Why another try may help; None where it cannot. Told by codes and classes, never by the message."""
    if isinstance(error, ShortRead):
        return Fault.SHORT_READ
    said = client_error(error)
    if said is not None:
        return _fault_of_answer(said)
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError, PreconditionFailed)):
        return None
    fault = _fault_of_class(error)
    if fault is not None:
        return fault
    status = status_of(error)
    if status is not None:
        return _BY_STATUS.get(status)
    return _BY_ERRNO.get(error.errno or 0) if isinstance(error, OSError) else None


def status_of(error: BaseException) -> int | None:
    """The HTTP status of the answer that the error stands for, where there was one."""
    said = client_error(error)
    if said is not None:
        return said.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for attribute in ("status", "status_code", "code"):  # aiohttp, azure, gcsfs
        status = getattr(error, attribute, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None


def _fault_of_answer(error: Any) -> Fault | None:
    code = str(error.response.get("Error", {}).get("Code", ""))
    for codes, fault in (
        (_EXPIRED, Fault.CREDENTIALS),
        (_THROTTLED, Fault.THROTTLED),
        (_SERVER, Fault.SERVER_ERROR),
        (_TIMEOUT, Fault.TIMEOUT),
        (_BROKEN, Fault.SHORT_READ),
        (_CONFLICT, Fault.CONFLICT),
    ):
        if code in codes:
            return fault
    if code == "400" and error.operation_name.startswith("Head"):
        # an answer to HEAD has no body, so expired credentials have no other name there
        return Fault.CREDENTIALS
    return _BY_STATUS.get(status_of(error) or 0)


def _fault_of_class(error: BaseException) -> Fault | None:
    import aiohttp
    import botocore.exceptions as boto
    import botocore.parsers

    for classes, fault in (
        ((boto.ReadTimeoutError, boto.ConnectTimeoutError, TimeoutError), Fault.TIMEOUT),
        (
            (
                boto.IncompleteReadError,
                boto.ResponseStreamingError,
                boto.ChecksumError,
                boto.FlexibleChecksumError,
                aiohttp.ClientPayloadError,
            ),
            Fault.SHORT_READ,
        ),
        (botocore.parsers.ResponseParserError, Fault.SERVER_ERROR),
        (
            (boto.HTTPClientError, boto.ConnectionError, aiohttp.ClientConnectionError, ConnectionError),
            Fault.CONNECTION,
        ),
    ):
        if isinstance(error, classes):
            return fault
    return None


def is_malformed(error: BaseException) -> bool:
    """Whether the request was never sent because its bucket or key cannot be one."""
    from botocore.exceptions import ParamValidationError

    return isinstance(error, ParamValidationError)


def client_error(error: BaseException | None) -> Any:
    """The answer of an S3 store that the error was made from, by s3fs or by botocore; None for others."""
    from botocore.exceptions import ClientError

    while error is not None and not isinstance(error, ClientError):
        error = error.__cause__  # not __context__: that may be another answer, looked into when this one came
    return error

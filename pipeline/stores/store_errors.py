"""Classification of errors of object stores and their libraries: transient (`Fault`) or permanent (`Failure`).

It depends on codes, classes and numbers, never on the text of a message.
"""

import errno
from enum import StrEnum
from typing import Any

from pipeline.errors import PipelineError


class Fault(StrEnum):
    """Reason for a retry."""

    THROTTLED = "throttled"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    SHORT_READ = "short_read"  # a truncated or damaged body, in either direction
    CONFLICT = "conflict"  # 409: another request on the same key is in progress
    CREDENTIALS = "credentials"  # expired: read again, then one more try


class Failure(StrEnum):
    """Reason for the permanent failure of a request."""

    ABSENT = "absent"
    DENIED = "denied"
    CREDENTIALS = "credentials"  # none were found, or the store rejects them
    SYSTEM = "system"  # an OSError of the disk or of a store's library
    MALFORMED = "malformed"  # an invalid bucket or key: never sent
    OTHER = "other"  # any other error of a store's library


class ShortRead(OSError):
    """The response had fewer bytes than the file."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EIO, message)


class PreconditionFailed(Exception):
    """The file does not have the expected tag."""


_THROTTLED = frozenset(
    ("SlowDown", "ServiceUnavailable", "TooManyRequestsException", "RequestLimitExceeded", "429", "503", "Throttling",
     "ThrottlingException", "ThrottledException", "RequestThrottled", "RequestThrottledException")
)  # fmt: skip
_SERVER = frozenset(("InternalError", "InternalFailure", "500", "502", "504"))
_TIMEOUT = frozenset(("RequestTimeout", "RequestTimeoutException", "408"))
_BROKEN = frozenset(("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"))
_CONFLICT = frozenset(("OperationAborted", "ConditionalRequestConflict", "Conflict", "409"))
_EXPIRED = frozenset(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"))
_NOT_VALID = frozenset(("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId"))
SET_CREDENTIALS = (
    "set the store's credentials: key and secret, or profile, under `storage` in the job file, or AWS_ACCESS_KEY_ID "
    "and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the environment"
)
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
    """Return the reason to retry, or None for a permanent error."""
    if isinstance(error, ShortRead):
        return Fault.SHORT_READ
    response_error = client_error(error)
    if response_error is not None:
        return _fault_of_answer(response_error)
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
    """Return the HTTP status of the response that caused the error, or None."""
    response_error = client_error(error)
    if response_error is not None:
        return response_error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for owner in (error, getattr(error, "response", None)):  # huggingface_hub: of the response
        for attribute in ("status", "status_code", "code"):  # aiohttp, azure, gcsfs
            status = getattr(owner, attribute, None)
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
        # a response to HEAD has no body, so expired credentials have no code of their own there
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


def failure_of(error: Exception) -> Failure | None:
    """Return the kind of failure; None for an error that neither a disk nor a store raised.

    The libraries behind fsspec raise their own exceptions, without a common base class. A builtin exception other than
    OSError is therefore a bug of ours, and any other class is theirs.
    """
    if _has_unknown_credentials(error):
        return Failure.CREDENTIALS
    for kind, failure in (
        (FileNotFoundError, Failure.ABSENT),
        (PermissionError, Failure.DENIED),
        (OSError, Failure.SYSTEM),
    ):
        if isinstance(error, kind):
            return failure
    if isinstance(error, (PipelineError, PreconditionFailed)) or type(error).__module__ == "builtins":
        return None
    from botocore.exceptions import ParamValidationError

    return Failure.MALFORMED if isinstance(error, ParamValidationError) else Failure.OTHER


def _has_unknown_credentials(error: BaseException) -> bool:
    import botocore.exceptions as boto

    answer = client_error(error)
    if answer is not None:
        return str(answer.response.get("Error", {}).get("Code", "")) in _NOT_VALID
    return isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound))


def client_error(error: BaseException | None) -> Any:
    """Return the botocore ClientError that caused the error, through s3fs or directly; None for other errors."""
    from botocore.exceptions import ClientError

    while error is not None and not isinstance(error, ClientError):
        error = error.__cause__  # not __context__: it may belong to an earlier response
    return error

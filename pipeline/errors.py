"""Exceptions with their exit codes, and the codes of row errors.

The failure of a row is data: it becomes an output row whose `error` column holds one of `RowError`'s codes.
The failure of a system is an exception of this tree. `cli/console.py` prints it and exits with `exit_code`:

    PipelineError            70  a bug when raised directly
    ├── UserError             2  something the user can change
    │   ├── ConfigError          job file, flags, engine options
    │   ├── InputError           the dataset to read
    │   ├── ModelError           the checkpoint or tokenizer
    │   ├── FingerprintError     the output belongs to another job
    │   └── OutputError          the output folder cannot be used
    ├── TooManyRowErrors      1  run.max_error_rate was exceeded
    ├── EnvironmentFailed     3  disk, store, actors; the job can be resumed
    │   ├── RankLost             another process of tensor parallelism ended
    │   └── EngineUnusable       the engine failed in a way that no restart of its process heals
    └── Interrupted          75  stopped by a signal; the job can be resumed
        └── LimitReached         by cost.budget_usd or run.max_runtime
"""

from enum import StrEnum


class PipelineError(Exception):
    """Base of all errors raised on purpose. The message says what happened, where, and what to do.

    A message about a key of the job file begins with the key: `output.path out: ...`, `prompt.template: ...`. `key`
    names it if the message alone is ambiguous.
    """

    exit_code = 70

    def __init__(self, *args: object, key: str = "") -> None:
        super().__init__(*args)
        self.key = key

    def problem(self, key: str) -> str:
        """Return the message without a leading `key`, for use next to the key."""
        return str(self).removeprefix(key).lstrip(":= ")


class UserError(PipelineError):
    exit_code = 2


class ConfigError(UserError):
    pass


class InputError(UserError):
    pass


class ModelError(UserError):
    pass


class FingerprintError(UserError):
    pass


class OutputError(UserError):
    pass


class TooManyRowErrors(PipelineError):
    exit_code = 1


class EnvironmentFailed(PipelineError):
    exit_code = 3


class RankLost(EnvironmentFailed):
    pass


class EngineUnusable(EnvironmentFailed):
    pass


class Interrupted(PipelineError):
    exit_code = 75


class LimitReached(Interrupted):
    pass


def error_named(name: str, message: str) -> PipelineError:
    """Return the error that another process reported by class name; PipelineError if the name is unknown."""
    kind = globals().get(name)
    return kind(message) if isinstance(kind, type) and issubclass(kind, PipelineError) else PipelineError(message)


class RowError(StrEnum):
    """Codes of the `error` column. The same row gets the same code on every try."""

    NULL_PROMPT = "null_prompt"
    EMPTY_PROMPT = "empty_prompt"
    INVALID_UTF8 = "invalid_utf8"
    INVALID_VALUE = "invalid_value"  # no text form, although its type has one: a date in the year 12000
    PROMPT_TOO_LARGE = "prompt_too_large"  # too many bytes; rejected before tokenization
    PROMPT_TOO_LONG = "prompt_too_long"  # too many tokens for the context
    CORRUPT_INPUT = "corrupt_input"  # corrupt row group or line, with input.on_corrupt: skip
    # a line of a batch API (input.format) without a supported request, or a request that the server rejects
    INVALID_REQUEST = "invalid_request"
    INVALID_MESSAGES = "invalid_messages"  # not a chat that the template accepts
    INVALID_IMAGE = "invalid_image"  # it cannot be decoded
    IMAGE_NOT_ALLOWED = "image_not_allowed"  # its path or url is in none of the job's roots and hosts
    IMAGE_UNAVAILABLE = "image_unavailable"  # its path or url cannot be read
    INVALID_SAMPLING = "invalid_sampling"  # a per-row sampling value out of range
    UNKNOWN_ADAPTER = "unknown_adapter"  # the row names none of the job's adapters
    INVALID_LABELS = "invalid_labels"  # task choice: no labels, empty ones, or two with the same tokens
    INVALID_COMPLETION = "invalid_completion"  # task score: null, empty or unusable
    KV_CACHE_EXHAUSTED = "kv_cache_exhausted"  # too long for the KV cache even when alone in the engine
    OUT_OF_MEMORY = "out_of_memory"  # a step with a single token of the row runs out of memory
    TOKEN_OUT_OF_VOCABULARY = "token_out_of_vocabulary"  # the tokenizer has more tokens than the model
    NON_FINITE_LOGITS = "non_finite_logits"
    TASK_NOT_SERVED = "task_not_served"  # the model lacks the task's head: vocabulary or classes
    # structured_outputs that cannot be compiled, reach a dead end, or do not match the row's output
    GRAMMAR_ERROR = "grammar_error"
    CONTENT_FILTER = "content_filter"  # the server's filter rejected the prompt or ended the answer
    REFUSED = "refused"  # the model on the server refused to answer; the message is its sentence
    REJECTED = "rejected"  # the server rejects this request (status 402 to 405), and accepts others
    CONTROL_TOKENS = "control_tokens"  # the text holds control tokens of the tokenizer, which a server would parse
    SERVER_ERROR = "server_error"  # each try ended with an error of the server, or an answer without the right form
    ENGINE_FAILURE = "engine_failure"  # the row repeatedly crashed the engine's process
    ROW_FN_FAILED = "row_fn_failed"  # the function of `run_job(row_fn=...)` raised, or its result does not fit

"""The exception tree, each branch with its exit code, and the codes of row errors.

A row's failure is data: it becomes an output row whose `error` column holds one of `RowError`'s codes.
A system's failure is an exception of this tree; `cli/console.py` prints it and leaves with `exit_code`:

    PipelineError            70  a defect of ours when raised bare
    ├── UserError             2  something the user can change
    │   ├── ConfigError          job file, flags, engine options
    │   ├── InputError           the dataset to read
    │   ├── ModelError           the checkpoint or tokenizer
    │   ├── FingerprintError     the output belongs to another job
    │   └── OutputError          the output folder cannot be used as asked
    ├── TooManyRowErrors      1  run.max_error_rate was passed
    ├── EnvironmentFailed     3  disk, store, actors; the job can be resumed
    └── Interrupted          75  stopped by a signal; the job can be resumed
        └── LimitReached         by cost.budget_usd or run.max_runtime
"""

from enum import StrEnum


class PipelineError(Exception):
    """Base of all errors raised on purpose. The message says what happened, where, and what to do. One about a key of
    the job file begins with it: `output.path out: ...`, `prompt.template: ...`; `key` names it where several can be
    meant."""

    exit_code = 70

    def __init__(self, *args: object, key: str = "") -> None:
        super().__init__(*args)
        self.key = key

    def problem(self, key: str) -> str:
        """The message, for where `key` is told beside it."""
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


class Interrupted(PipelineError):
    exit_code = 75


class LimitReached(Interrupted):
    pass


def error_named(name: str, message: str) -> PipelineError:
    """The error that another process told by its class's name; a defect where the name is none of this tree."""
    kind = globals().get(name)
    return kind(message) if isinstance(kind, type) and issubclass(kind, PipelineError) else PipelineError(message)


class RowError(StrEnum):
    """Codes of the `error` column. The same row gets the same code on every try."""

    NULL_PROMPT = "null_prompt"
    EMPTY_PROMPT = "empty_prompt"
    INVALID_UTF8 = "invalid_utf8"
    INVALID_VALUE = "invalid_value"  # of a type that has a text, but not this value: a date in the year 12000
    PROMPT_TOO_LARGE = "prompt_too_large"  # bytes, refused before tokenizing
    PROMPT_TOO_LONG = "prompt_too_long"  # tokens, does not fit the context
    CORRUPT_INPUT = "corrupt_input"  # a damaged row group or line of the input, and input.on_corrupt is skip
    INVALID_REQUEST = (
        "invalid_request"  # a line of a batch API (input.format) asks for what is not done, or for nothing
    )
    INVALID_MESSAGES = "invalid_messages"  # not a chat the template can take
    INVALID_SAMPLING = "invalid_sampling"  # a per-row sampling value out of range
    INVALID_LABELS = "invalid_labels"  # of task choice: none, empty ones, or two with the same tokens
    INVALID_COMPLETION = "invalid_completion"  # of task score: null, empty or unusable
    KV_CACHE_EXHAUSTED = "kv_cache_exhausted"  # alone in the engine and still too long for the KV cache
    OUT_OF_MEMORY = "out_of_memory"  # one token of it, alone in a step, needs more memory than there is
    TOKEN_OUT_OF_VOCABULARY = "token_out_of_vocabulary"  # the tokenizer knows more tokens than the model
    NON_FINITE_LOGITS = "non_finite_logits"
    TASK_NOT_SERVED = "task_not_served"  # the model has no head for what is asked: no vocabulary, or no classes
    # its structured_outputs cannot be compiled, come to where no token can follow, or do not hold what it has written
    GRAMMAR_ERROR = "grammar_error"
    ENGINE_FAILURE = "engine_failure"  # the row ended the engine's process, repeatedly

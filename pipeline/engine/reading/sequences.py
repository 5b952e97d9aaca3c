"""Builds the sequence and the reader of a request with a task."""

from functools import lru_cache

from pipeline.engine.forward.runner import Runner
from pipeline.engine.reading.label_tree import LabelReader, LabelTree
from pipeline.engine.reading.readers import LogprobReader, PoolingReader, StatesReader
from pipeline.engine.request import Request
from pipeline.engine.schedule.request_stream import RequestStream
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.tasks import Choice, Classify, Embed, HiddenStates, Score
from pipeline.engine.token_ids import token_array
from pipeline.errors import RowError

_tree_of = lru_cache(maxsize=256)(LabelTree.from_labels)  # usually all rows of a job have the same labels


def unsupported_reason(request: Request, model: Runner) -> tuple[RowError, str] | None:
    """Return why the model cannot compute the request, or the request is empty; None if it can be computed."""
    task, num_tokens = request.task, len(request.prompt_token_ids)
    if isinstance(task, Embed | Classify):
        if isinstance(task, Classify) and model.class_head_CH is None:
            return RowError.TASK_NOT_SERVED, "classify: the model has no sequence classification head (score.weight)"
        if isinstance(task, Embed) and (task.dimensions or 1) > model.hidden_size:
            reason = f"embed: dimensions = {task.dimensions}: the model's embeddings have {model.hidden_size}"
            return RowError.TASK_NOT_SERVED, reason
        return None
    if not model.has_vocabulary_head:
        name = "text" if task is None else type(task).__name__.lower()
        return RowError.TASK_NOT_SERVED, f"{name}: the model has no language model head, so it cannot predict tokens"
    if task is not None and not num_tokens:
        return RowError.EMPTY_PROMPT, "the prompt has no tokens"
    if isinstance(task, Score) and task.first >= num_tokens:
        reason = f"the text has {num_tokens} tokens and is scored from token {task.first + 1} on"
        return RowError.EMPTY_PROMPT, f"score: {reason}, so there is nothing to score"
    if isinstance(task, Choice):
        outside = [token for label in task.labels for token in label if not 0 <= token < model.vocab_size]
        if outside:
            reason = f"a label contains token id {outside[0]}, but the model's vocabulary has {model.vocab_size} tokens"
            return RowError.TOKEN_OUT_OF_VOCABULARY, f"{reason}; check that the tokenizer belongs to the model"
    return None


def sequence_of(request: Request, order: int, call: RequestStream, queued_us: int, model: Runner) -> Sequence:
    """Build the sequence of a supported request with a task."""
    ids, task = request.prompt_token_ids, request.task
    tree = _tree_of(task.labels) if isinstance(task, Choice) else None
    text = ids if tree is None else [*ids, *tree.continuations[0]]
    sequence = Sequence(request, token_array(text), order, 0, call, queued_us=queued_us)
    if tree is not None:
        sequence.reader = LabelReader(tree, len(ids))
    elif isinstance(task, Score):
        sequence.reader = LogprobReader.of_tokens(sequence.token_ids, task)
    elif isinstance(task, HiddenStates):
        sequence.reader = StatesReader(task.first, len(ids))
    else:
        assert isinstance(task, Embed | Classify)
        sequence.reader = PoolingReader(task, len(ids), model.class_head_CH)
    return sequence


def prompt_reader(sequence: Sequence) -> LogprobReader | None:
    """Build the reader of prompt log-probabilities; None if none are requested, or the prompt has only one token. Of
    several samples only the first has one."""
    wanted, ids = sequence.request.params.prompt_logprobs, sequence.request.prompt_token_ids
    if wanted is None or sequence.sample_index > 0 or len(ids) < 2:
        return None
    return LogprobReader.of_tokens(ids, Score(1, wanted))

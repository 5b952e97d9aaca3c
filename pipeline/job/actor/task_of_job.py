"""Determine the task of a job from its job file and checkpoint."""

from pathlib import Path
from typing import Literal

from pipeline.checkpoints.file_checks import read_json
from pipeline.checkpoints.pooling import read_pooling
from pipeline.config import FromColumn
from pipeline.config.sections.task import TaskSection
from pipeline.engine.tasks import Embed
from pipeline.errors import ConfigError
from pipeline.job.actor.tasks import Activation, ChoiceTask, ClassifyTask, EmbedTask, JobTask, ScoreTask

_BY_PROBLEM_TYPE: dict[object, Activation] = {
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
    "regression": "none",
}


def plain_task(task: TaskSection) -> JobTask | None:
    """Return the task of a section whose columns depend on the job file alone; None if it generates text."""
    if task.type == "choice":
        labels = task.labels
        return ChoiceTask(None if isinstance(labels, FromColumn) else labels)
    if task.type == "score":
        return ScoreTask(task.completion is not None, task.token_logprobs)
    return None


def embed_task(given: TaskSection, model: Path, shown: str) -> tuple[TaskSection, EmbedTask]:
    """Return the section with the checkpoint's values instead of `auto`, which become part of the job's identity, and
    the task. shown: the model's name. Raises ConfigError, ModelError."""
    from pipeline.model.config import read_config

    pooling, normalize, hidden = given.pooling, given.normalize, read_config(model).hidden_size
    if pooling == "auto" or normalize == "auto":
        stored = read_pooling(model)
        if pooling == "auto":
            pooling = "last" if stored is None else stored.pooling
        if normalize == "auto":
            normalize = stored is None or stored.normalize
    if given.dimensions is not None and given.dimensions > hidden:
        raise ConfigError(
            f"task.dimensions {given.dimensions}: the vectors of {shown} have {hidden:,} numbers (hidden_size in its "
            "config.json); expected at most that many",
            key="task.dimensions",
        )
    found = given.model_copy(update={"pooling": pooling, "normalize": normalize})
    return found, EmbedTask(Embed(pooling, normalize, given.dimensions), given.dimensions or hidden)


def classify_task(activation: Activation | Literal["auto"], model: Path, shown: str) -> ClassifyTask:
    """Return the task of a classification head. activation: as in the job file. shown: the model's name. Raises
    ConfigError if the checkpoint has no suitable head, ModelError if it cannot be read."""
    from pipeline.model.config import class_names, read_config

    num_classes = read_config(model).num_classes
    if num_classes is None:
        raise ConfigError(
            f"task classify: {shown} has no sequence classification head (architectures in its "
            "config.json names no ...ForSequenceClassification); use task: choice with any model"
        )
    values = read_json(model / "config.json")
    labels = class_names(values) or [f"LABEL_{number}" for number in range(num_classes)]
    if activation == "auto":
        activation = _BY_PROBLEM_TYPE.get(values.get("problem_type"), "softmax" if num_classes > 1 else "sigmoid")
    if activation == "softmax" and num_classes == 1:
        raise ConfigError(
            "task.activation softmax: with one label it is always 1; use sigmoid or none",
            key="task.activation",
        )
    return ClassifyTask(tuple(labels), activation)

"""The task of a job, from its job file and its checkpoint."""

from pathlib import Path

from pipeline.checkpoints.file_checks import read_json
from pipeline.checkpoints.pooling import read_pooling
from pipeline.config import FromColumn, JobConfig
from pipeline.engine.tasks import Embed
from pipeline.errors import ConfigError
from pipeline.job.actor.tasks import Activation, ChoiceTask, ClassifyTask, EmbedTask, JobTask, ScoreTask
from pipeline.stores.redaction import shown_url

OF_CHECKPOINT = ("embed", "classify")  # tasks whose columns follow from the checkpoint
_BY_PROBLEM_TYPE: dict[object, Activation] = {
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
    "regression": "none",
}


def with_stored_pooling(config: JobConfig, model: Path) -> JobConfig:
    """`config` with what the checkpoint's files say in the place of `auto`, so that it is in the job's identity. Raises
    ModelError."""
    given = config.task
    if given.type != "embed" or "auto" not in (given.pooling, given.normalize):
        return config
    stored = read_pooling(model)
    said = ("last", True) if stored is None else (stored.pooling, stored.normalize)
    pooling = said[0] if given.pooling == "auto" else given.pooling
    normalize = said[1] if given.normalize == "auto" else given.normalize
    task = given.model_copy(update={"pooling": pooling, "normalize": normalize})
    return config.model_copy(update={"task": task})


def task_of(config: JobConfig, model: Path) -> JobTask | None:
    """None where the job generates. config: as from `with_stored_pooling`. Raises ConfigError where the checkpoint
    cannot do it, ModelError where it cannot be read."""
    match config.task.type:
        case "choice":
            labels = config.task.labels
            return ChoiceTask(None if isinstance(labels, FromColumn) else labels)
        case "score":
            return ScoreTask(config.task.completion is not None, config.task.token_logprobs)
        case "embed":
            return _embed(config, model)
        case "classify":
            return _classify(config, model)
    return None


def _embed(config: JobConfig, model: Path) -> EmbedTask:
    from pipeline.model.config import read_config

    given, hidden = config.task, read_config(model).hidden_size
    assert given.pooling != "auto", "with_stored_pooling comes first"
    assert given.normalize != "auto", "with_stored_pooling comes first"
    if given.dimensions is not None and given.dimensions > hidden:
        raise ConfigError(
            f"task.dimensions {given.dimensions}: the vectors of {shown_url(config.model.path)} have {hidden:,} "
            "numbers (hidden_size in its config.json); expected at most so many"
        )
    return EmbedTask(Embed(given.pooling, given.normalize, given.dimensions), given.dimensions or hidden)


def _classify(config: JobConfig, model: Path) -> ClassifyTask:
    from pipeline.model.config import class_names, read_config

    num_classes = read_config(model).num_classes
    if num_classes is None:
        raise ConfigError(
            f"task classify: {shown_url(config.model.path)} has no sequence classification head (architectures in its "
            "config.json names no ...ForSequenceClassification); task: choice asks any model for one of some labels"
        )
    values = read_json(model / "config.json")
    labels = class_names(values) or [f"LABEL_{number}" for number in range(num_classes)]
    activation = config.task.activation
    if activation == "auto":
        activation = _BY_PROBLEM_TYPE.get(values.get("problem_type"), "softmax" if num_classes > 1 else "sigmoid")
    if activation == "softmax" and num_classes == 1:
        raise ConfigError("task.activation softmax: the head has one label, of which it is always 1; sigmoid or none")
    return ClassifyTask(tuple(labels), activation)

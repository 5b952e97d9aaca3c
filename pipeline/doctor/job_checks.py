"""Checks of the job file, the model, the input and the output."""

import os
import posixpath
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoints.adapters import adapter_here
from pipeline.checkpoints.cache import cache_folder, check_copy
from pipeline.checkpoints.chat_template import read_template
from pipeline.checkpoints.file_checks import is_gguf
from pipeline.checkpoints.locate import checkpoint_problem, folder_here, locate_model, model_kind
from pipeline.checkpoints.quantizer_files import CONFIG, QUANTIZER_FILES
from pipeline.data.output.parts import PartStore
from pipeline.data.source import open_source
from pipeline.doctor.check import Check, Setup
from pipeline.errors import ModelError, OutputError, PipelineError
from pipeline.formatting import counted, shown_bytes
from pipeline.job.planning.checkpoint_values import MODEL_FILES
from pipeline.job.planning.locate import missing_from_store
from pipeline.job.preview.validation import validate_job
from pipeline.machine.caches import hub_folder
from pipeline.stores.filesystem import filesystem, local_path, storage_for
from pipeline.stores.redaction import shown_url

if TYPE_CHECKING:
    from pipeline.estimate.fit import ServedModel
    from pipeline.model.config import ModelConfig


def job(setup: Setup) -> Iterator[Check]:
    """Yield everything that `pipeline validate` finds."""
    if setup.job is None:
        return
    found = validate_job(setup.job)
    for mistake in found.mistakes:
        name = f"{mistake.location}: {mistake.key}"
        yield Check("job", name, "failed", mistake.problem, mistake.hint, exit_code=2)
    for failure in found.failures:
        yield Check("job", "store", "failed", failure)
    if not found.mistakes and not found.failures:
        yield Check("job", setup.job.name, "ok", f"valid, {counted(found.facts['input']['rows_to_do'], 'row')}")


def model(setup: Setup) -> Iterator[Check]:
    if setup.model is None:
        return
    path, kind = setup.model, model_kind(setup.model)
    shown = shown_url(path)
    if kind == "missing":
        raise ModelError(f"{shown}: {checkpoint_problem(path)}")
    if kind == "url":
        absent = missing_from_store(path, storage_for(path, setup.storage))
        if absent:
            raise ModelError(f"{shown}: no {' and no '.join(absent)}; expected the folder of a checkpoint")
        if is_gguf(path):
            yield Check("model", "folder", "ok", f"{shown}: exists", "Its contents are checked once it is downloaded.")
            return
        yield Check("model", "folder", "ok", f"{shown}: has {' and '.join(MODEL_FILES)}")
        with _fetched_config(setup) as folder:
            yield from _architecture(folder, setup)
        yield from _copy(path, setup)
        return
    folder = _cached(path, setup) if kind == "id" else locate_model(path)
    if folder is None:
        todo = "The job downloads it. With HF_HUB_OFFLINE or without a network, download it into the cache first."
        yield Check("model", "folder", "warning", f"{shown}: not in the local cache", todo)
        return
    yield Check("model", "folder", "ok", str(folder))
    yield from _architecture(folder, setup)
    yield _weights(folder)
    yield from _tokenizer(folder, setup)


def _copy(url: str, setup: Setup) -> Iterator[Check]:
    """Check the cached copy of a model at a url, if one exists."""
    if (copy := check_copy(url, storage_for(url, setup.storage), cache_folder())) is None:
        return
    folder, is_whole = copy
    if is_whole:
        yield Check("model", "copy", "ok", f"{folder}: every file has the sha256 of its download")
    else:
        todo = "Remove the folder; the next run downloads the model again."
        yield Check("model", "copy", "failed", f"{folder}: differs from the download", todo)


def served_model(setup: Setup) -> "ServedModel | None":
    """Return the model as the job loads it, or None if it cannot be read, which `model` reports."""
    from pipeline.estimate.fit import ServedModel

    if setup.model is None:
        return None
    try:
        kind = model_kind(setup.model)
        if kind == "url" and is_gguf(setup.model):
            return None
        if kind == "url":
            with _fetched_config(setup) as folder:
                return ServedModel.read(folder, setup.engine)
        folder = _cached(setup.model, setup) if kind == "id" else locate_model(setup.model)
        return None if folder is None else ServedModel.read(folder, setup.engine)
    except (PipelineError, OSError):
        return None


@contextmanager
def _fetched_config(setup: Setup) -> Iterator[Path]:
    """Yield a temporary folder with config.json, and the quantizer's own files, of a model in a store."""
    assert setup.model is not None
    with tempfile.TemporaryDirectory() as folder:
        fs, root = filesystem(setup.model, storage_for(setup.model, setup.storage))
        (Path(folder) / CONFIG).write_bytes(fs.cat_file(posixpath.join(root, CONFIG)))
        for name in QUANTIZER_FILES:
            with suppress(FileNotFoundError):
                (Path(folder) / name).write_bytes(fs.cat_file(posixpath.join(root, name)))
        yield Path(folder)


def _cached(name: str, setup: Setup) -> Path | None:
    """Return the cache folder of a Hugging Face model, or None. Downloads nothing."""
    if is_gguf(name):
        return folder_here(name, setup.job and setup.job.model.revision)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        revision = setup.job and setup.job.model.revision
        return Path(snapshot_download(name, revision=revision, local_files_only=True, cache_dir=hub_folder()))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelError(f"{name}: not a Hugging Face id: {error}") from None


def _architecture(folder: Path, setup: Setup) -> Iterator[Check]:
    """Report the architecture in config.json, and whether the machine has enough memory."""
    import torch

    from pipeline.estimate.fit import ServedModel

    model, device = ServedModel.read(folder, setup.engine), setup.torch_device
    config = model.config
    config.local(setup.engine.tensor_parallel_size)  # raises ConfigError if it cannot be divided
    stored = str(config.dtype).removeprefix("torch.")
    kind = stored if config.quantization is None else f"{config.quantization}, other weights {stored}"
    yield Check("model", "architecture", "ok", f"{config.parameters_text()}, {config.num_layers} layers, {kind}")
    fit = model.on_device(device)
    adapters = _adapter_bytes(config, setup) * fit.dtype.itemsize // 4
    need, kv = adapters + fit.weight_bytes, fit.kv_bytes_per_token
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else fit.memory_bytes
    length, pages = config.max_position, fit.pages
    context = f"a full context of {length:,} tokens {shown_bytes(pages.num_pages(length) * pages.page_bytes)}"
    if pages.window is not None:
        context += f" (some layers keep the last {pages.window:,})"
    if fit.state_bytes:
        context += f", states {shown_bytes(fit.state_bytes)} a row"
    others = ["a draft model"] * (model.draft is not None) + [f"adapters: {shown_bytes(adapters)}"] * bool(adapters)
    included = f" (with {', '.join(others)})" if others else ""
    weights = f"about {shown_bytes(need)} of weights{included} in {str(fit.dtype).removeprefix('torch.')}"
    found = f"{weights}; KV cache {kv:,} bytes a token, {context}; {shown_bytes(free)} free on {device.type}"
    if need > free:
        todo = "Use a smaller or quantized model, a smaller dtype, or a larger machine."
        if device.type == "cuda":
            todo = "Divide it over several GPUs with engine.tensor_parallel_size, or use a smaller or quantized model."
        yield Check("model", "memory", "failed", found, todo)
    elif need > 0.8 * free:
        todo = "Little memory is left for the KV cache: lower engine.max_model_len."
        yield Check("model", "memory", "warning", found, todo)
    else:
        yield Check("model", "memory", "ok", found)


def _adapter_bytes(config: "ModelConfig", setup: Setup) -> int:
    """Return the size of the job's adapters in float32, without those that are not on this machine, or that do not fit
    the model, which `job` reports."""
    from pipeline.model.lora import read_adapter

    total = 0
    for name, path in setup.job.used_adapters.items() if setup.job is not None else ():
        with suppress(ModelError):
            folder = adapter_here(path, name)
            layers = [] if folder is None else read_adapter(folder, config)
            total += sum(update.num_bytes for layer in layers for update in layer.values())
    return total


def _weights(folder: Path) -> Check:
    """Check that every file has a valid header and length, and that every tensor of the index exists."""
    from pipeline.checkpoints.file_checks import read_json
    from pipeline.model.load import Checkpoint, checkpoint_files

    tensors, files = Checkpoint(folder).home, checkpoint_files(folder)
    index = folder / "model.safetensors.index.json"
    listed = read_json(index)["weight_map"] if index.exists() else {}
    absent = sorted(set(listed) - set(tensors))
    if absent:
        raise ModelError(f"{index}: {len(absent)} tensors are missing from the files: {', '.join(absent[:3])}")
    size = sum(file.stat().st_size for file in files)
    kind = "GGUF" if is_gguf(files[0].name) else "safetensors"
    return Check("model", "weights", "ok", f"{len(tensors):,} tensors in {len(files):,} {kind}, {shown_bytes(size)}")


def _tokenizer(folder: Path, setup: Setup) -> Iterator[Check]:
    from pipeline.model.config import read_config
    from pipeline.tokenization.tokenizer import Tokenizer

    chat = setup.job and setup.job.prompt.chat
    template = read_template(chat.chat_template) if chat is not None and chat.chat_template is not None else None
    tokenizer = Tokenizer.from_folder(str(folder), template)
    known, rows = tokenizer.vocab_size, read_config(folder).vocab_size
    if known > rows:
        todo = "Prompts with the extra tokens become error rows. Check that this tokenizer belongs to the model."
        yield Check("model", "tokenizer", "warning", f"{known:,} tokens, the model has {rows:,}", todo)
    else:
        yield Check("model", "tokenizer", "ok", f"{known:,} tokens, EOS {sorted(tokenizer.eos_token_ids)}")
    if tokenizer.has_chat_template or chat is None:
        found = "present" if tokenizer.has_chat_template else "none: prompts must be plain text"
        yield Check("model", "chat template", "ok", found)
    else:
        todo = "Use prompt.template instead of prompt.chat, or use the model's instruct version."
        yield Check("model", "chat template", "failed", "none, but the job uses prompt.chat", todo, exit_code=2)


def input(setup: Setup) -> Iterator[Check]:
    """Check an input other than the job's, which `job` checks."""
    if setup.input is None or (setup.job is not None and setup.input == setup.job.input.path):
        return
    source = open_source(setup.input, storage_for(setup.input, setup.storage))
    found = f"{counted(len(source.files), 'file')}, {counted(source.num_rows, 'row')}, {shown_bytes(source.num_bytes)}"
    yield Check("input", shown_url(setup.input), "ok", found)


def output(setup: Setup) -> Iterator[Check]:
    if setup.output is None:
        return
    store, name = PartStore(setup.output, storage_for(setup.output, setup.storage)), shown_url(setup.output)
    with _left_as_found(setup.output):
        store.folder.probe()
        yield Check("output", name, "ok", "new files can be created without overwriting, and read back")
        try:
            store.folder.probe_swap()
        except OutputError as error:
            yield Check("output", "--retry-failed", "warning", str(error), "Runs without this option still work.")
        else:
            yield Check("output", "--retry-failed", "ok", "a part can be replaced if it is unchanged")


@contextmanager
def _left_as_found(output: str) -> Iterator[None]:
    """Remove the local folders that the probe created, if they are still empty."""
    root = Path(os.path.expanduser(local_path(output) or output)).absolute()
    made = [p for p in (root / "_pipeline" / "tmp", root / "_pipeline", root, *root.parents) if not p.exists()]
    try:
        yield
    finally:
        if local_path(output) is not None:
            with suppress(OSError):
                for folder in made:
                    folder.rmdir()

"""Checks of this machine: versions, devices, memory and disks, kernels."""

import importlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from pipeline import __version__
from pipeline.doctor.check import Check, Setup, State
from pipeline.formatting import shown_bytes
from pipeline.machine.caches import cache_root, cpu_kernel_folder, gpu_kernel_folder
from pipeline.machine.cgroup import cpu_quota, memory_limit
from pipeline.machine.host import VECTOR_FLAGS, available_cores, package_versions, processor
from pipeline.machine.numba import numba_unavailable_reason
from pipeline.machine.ray_folder import ray_folder, ray_folder_problem
from pipeline.stores.filesystem import is_url

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "ray", "pyarrow", "s3fs", "numba", "numpy")
OPTIONAL = ("triton",)
_POOLS = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}  # numba's layers and their modules
_MIN_FREE_BYTES = 2**30
_RAY_FULL = 0.95  # used share of a disk above which Ray stores nothing more
_ENVIRONMENT = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION",
                "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ROLE_ARN",
                "AWS_WEB_IDENTITY_TOKEN_FILE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN", "PIPELINE_CACHE",
                "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")  # fmt: skip


def versions(setup: Setup) -> Iterator[Check]:
    yield Check("versions", "pipeline", "ok", f"{__version__}, Python {platform.python_version()}")
    installed = package_versions((*PACKAGES, *OPTIONAL))
    for name in (*PACKAGES, *OPTIONAL):
        if name in installed:
            yield Check("versions", name, "ok", installed[name])
        elif name in PACKAGES:
            yield Check("versions", name, "failed", "not installed", f"pip install {name}")
    present = [name for name in _ENVIRONMENT if name in os.environ]
    yield Check("versions", "environment", "ok", f"set: {', '.join(present) or 'no relevant variables'}")


def devices(setup: Setup) -> Iterator[Check]:
    import torch

    from pipeline.kernels.cpu.linear.selection import supports_bf16

    model, flags = processor()
    cores = available_cores()
    named = ", ".join(flag for flag in VECTOR_FLAGS if flag in flags) or "no AVX2"
    quota = cpu_quota()
    limited = "" if quota is None else f" (quota of {quota.cpus:.3g}, {quota.source})"
    found = f"{model}; this process can use {cores} of {os.cpu_count()} cores{limited}; {named}"
    yield Check("devices", "cpu", "ok", found)
    if "avx2" not in flags and platform.machine() in ("x86_64", "AMD64"):
        yield Check("devices", "cpu flags", "warning", "no AVX2", "Linears and attention will be slow here.")
    native = supports_bf16()
    yield Check("devices", "bfloat16 on cpu", "ok", "native" if native else "emulated, so `dtype: auto` is float32")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
            kind = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
            yield Check("devices", f"cuda:{i}", "ok", f"{kind}; {shown_bytes(free)} of {shown_bytes(total)} free")
        if setup.engine.tensor_parallel_size > (count := torch.cuda.device_count()):
            found = f"{count}, but engine.tensor_parallel_size is {setup.engine.tensor_parallel_size}"
            yield Check("devices", "GPUs of an engine", "failed", found, "Use a machine with more GPUs.")
    elif os.path.exists("/dev/nvidiactl") or setup.engine.device.startswith("cuda"):
        build = "torch is a CPU build" if torch.version.cuda is None else f"torch for CUDA {torch.version.cuda}"
        todo = "Install torch's CUDA build and a recent driver (check with nvidia-smi), or set engine.device: cpu."
        state: State = "failed" if setup.engine.device.startswith("cuda") else "warning"
        yield Check("devices", "cuda", state, f"no usable device ({build})", todo)
    else:
        yield Check("devices", "cuda", "ok", "no device; the engine uses the CPU")


def memory(setup: Setup) -> Iterator[Check]:
    from pipeline.engine.startup.memory import free_cpu_bytes

    free = free_cpu_bytes()
    low = free < 2 * _MIN_FREE_BYTES
    todo = "Ray alone uses up to 1 GB: stop other processes, or use a larger machine." if low else ""
    limit = memory_limit()
    limited = "" if limit is None else f" (limit of {shown_bytes(limit.limit_bytes)}, {limit.source})"
    yield Check("memory and disks", "memory", "warning" if low else "ok", f"{shown_bytes(free)} free{limited}", todo)
    seen: set[int] = set()
    for name, path in _folders(setup):
        folder = next(p for p in (path, *path.parents) if p.is_dir())
        if (device := folder.stat().st_dev) in seen:
            continue
        seen.add(device)
        usage = shutil.disk_usage(folder)
        found = f"{folder}: {shown_bytes(usage.free)} of {shown_bytes(usage.total)} free"
        if usage.free < _MIN_FREE_BYTES:
            yield Check("memory and disks", name, "failed", found, "Free some space, or use another disk.")
        elif name != "output" and usage.free < (1 - _RAY_FULL) * usage.total:
            todo = "Ray stops storing objects on a disk that is over 95% full: free some space, or set RAY_TMPDIR."
            yield Check("memory and disks", name, "warning", found, todo)
        else:
            yield Check("memory and disks", name, "ok", found)
    if problem := ray_folder_problem(ray_folder()):
        found, _, todo = problem.partition(". ")
        todo += "; jobs with one engine do not need it."
        yield Check("memory and disks", "ray's folder", "warning", found, todo)
    if os.path.isdir("/dev/shm") and (shm := shutil.disk_usage("/dev/shm").total) < _MIN_FREE_BYTES:
        todo = "Ray falls back to slow files. Start containers with --shm-size=2g."
        yield Check("memory and disks", "/dev/shm", "warning", shown_bytes(shm), todo)


def _folders(setup: Setup) -> Iterator[tuple[str, Path]]:
    if setup.output is not None and not is_url(setup.output):
        yield "output", Path(os.path.expanduser(setup.output)).absolute()
    yield "temporary files", Path(tempfile.gettempdir())
    yield "ray", ray_folder().absolute()
    yield "cache", cache_root()


def kernels(setup: Setup) -> Iterator[Check]:
    import torch

    from pipeline.errors import ConfigError
    from pipeline.kernels.activations.act_quant import ACT_QUANT_SCHEMES, Activations, with_act_quant
    from pipeline.kernels.select import default_dtype, keep_cpu_kernels_in, keep_gpu_kernels_in, select_kernels
    from pipeline.model.config import DTYPES

    yield _numba_layer()
    device = setup.torch_device
    notes: list[str] = []
    keep_cpu_kernels_in(cpu_kernel_folder(log=notes.append))
    for note in notes:
        yield Check("kernels", "cache", "warning", note)
    if device.type == "cuda":
        keep_gpu_kernels_in(gpu_kernel_folder())
    dtype = DTYPES.get(setup.engine.dtype) or default_dtype(device, torch.bfloat16)
    kernels = select_kernels(device, dtype)
    if (activation_dtype := setup.engine.activation_dtype) in ACT_QUANT_SCHEMES:
        try:
            kernels = with_act_quant(kernels, Activations.for_all_weights(activation_dtype), device)
        except ConfigError as error:
            yield Check("kernels", f"activations in {activation_dtype}", "failed", str(error), exit_code=2)
    for operation, origin in sorted(kernels.backends.items()):
        yield Check("kernels", operation, "ok", f"{origin} ({device.type}, {str(dtype).removeprefix('torch.')})")
    if device.type == "cuda" and find_spec("triton") is not None:
        yield gpu_kernel_cache()
    if device.type == "cpu" and numba_unavailable_reason() is None:
        module = importlib.import_module("pipeline.kernels.cpu.attention.decode_kernel")
        cache = module.paged_decode.stats.cache_path
        yield Check("kernels", "numba cache", "ok", f"{cache}: folder of compiled kernels")


def gpu_kernel_cache() -> Check:
    """Report the folder of compiled GPU kernels, and their count and size."""
    folder = gpu_kernel_folder()
    files = [file for file in folder.glob("*/*") if file.is_file()]
    count, size = sum(file.suffix == ".cubin" for file in files), sum(file.stat().st_size for file in files)
    return Check("kernels", "GPU kernel cache", "ok", f"{folder}: {count} compiled kernels, {shown_bytes(size)}")


def _numba_layer() -> Check:
    """Check numba's threading layer: the first in numba's order that can be loaded."""
    if (lacks := numba_unavailable_reason()) is not None:
        todo = "CPU kernels are slower and n-gram drafts are off: install numba and a numpy that it supports."
        return Check("kernels", "numba threads", "warning", f"numba {lacks}", todo)
    from pipeline.kernels.cpu.compile.threads import threading_layers

    for layer in threading_layers():
        try:
            importlib.import_module(f"numba.np.ufunc.{_POOLS[layer]}")
        except ImportError:
            continue
        if layer == "workqueue":
            todo = "The process aborts if two threads run parallel kernels at once: install libgomp or tbb."
            return Check("kernels", "numba threads", "warning", layer, todo)
        return Check("kernels", "numba threads", "ok", layer)
    return Check("kernels", "numba threads", "failed", "no threading layer", "Reinstall numba.")

"""What is in infra/, as far as it can be checked without Docker, Kubernetes and AWS: pins, rights, keys and times agree
with the code."""

import json
import re
import shlex
import tomllib
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from pipeline.config import JobConfig, load_job

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = ("cpu", "cuda")
RAY_JOB = yaml.safe_load((INFRA / "kuberay" / "rayjob-summarize.yaml").read_text())
NIGHTLY = yaml.safe_load((INFRA / "kuberay" / "schedule.yaml").read_text())
ACCESS = yaml.safe_load((INFRA / "kuberay" / "s3-access.yaml").read_text())
POLICY = json.loads((INFRA / "s3" / "policy.json").read_text())


# --- the images


def instructions(image: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, a line each, and what they are given."""
    text = (INFRA / "docker" / f"Dockerfile.{image}").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def given(image: str, instruction: str) -> list[str]:
    return [rest for word, rest in instructions(image) if word == instruction]


def user_id() -> int:
    return int(given("cpu", "USER")[-1].split(":")[0])


def pins() -> dict[str, str]:
    lines = (INFRA / "docker" / "constraints.txt").read_text().splitlines()
    found = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in found.items()}


@pytest.mark.parametrize("image", IMAGES)
def test_images_are_pinned_and_run_as_an_ordinary_user(image):
    bases = [base.split()[0] for base in given(image, "FROM")]
    assert len(bases) == 2
    for base in bases:
        version = re.fullmatch(r"python:(\d+\.\d+\.\d+)-slim-bookworm", base)
        assert version is not None
        assert version[1] in SpecifierSet(PROJECT["requires-python"])
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", given(image, "USER")[-1])
    assert not given(image, "ADD")
    assert json.loads(given(image, "ENTRYPOINT")[0])[-1] == "pipeline"
    assert not re.search(r"(?i)secret|password|token|access_key", " ".join(given(image, "ENV") + given(image, "ARG")))
    installs = [part for run in given(image, "RUN") for part in run.split("&&") if "pip install" in part]
    assert len(installs) >= 3
    assert all("-c constraints.txt" in part or "--no-deps" in part for part in installs)


@pytest.mark.parametrize("image", IMAGES)
def test_images_have_what_kuberay_calls(image):
    packages = next(run for run in given(image, "RUN") if "apt-get install" in run)
    assert {"bash", "wget", "tini"} <= set(packages.split())
    assert any('"ray[default]"' in run for run in given(image, "RUN"))
    # a login shell forgets PATH
    assert any("/opt/venv/bin" in run and "/etc/profile.d/" in run for run in given(image, "RUN"))
    environment = " ".join(given(image, "ENV"))
    made = next(run for run in given(image, "RUN") if "useradd" in run)
    for name in ("PIPELINE_CACHE", "NUMBA_CACHE_DIR"):
        folder = re.search(rf"{name}=(\S+)", environment)
        assert folder is not None
        assert folder[1] in made.split()


@pytest.mark.parametrize("image", IMAGES)
def test_images_are_made_of_files_that_are_there_and_let_in(image):
    ignore = (INFRA / "docker" / f"Dockerfile.{image}.dockerignore").read_text().splitlines()
    assert "*" in ignore
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied = set()
    for copy in given(image, "COPY"):
        *sources, _ = [word for word in copy.split() if not word.startswith("--")]
        if not copy.startswith("--from"):
            copied |= set(sources)
    for source in copied:
        assert (ROOT / source).exists()
        assert any(source == entry or source.startswith(f"{entry}/") for entry in allowed), source
    assert {entry for entry in allowed if not any(s.startswith(entry) for s in copied)} == set()


def test_the_cuda_image_is_the_cpu_image_but_for_torch():
    cpu, cuda = instructions("cpu"), instructions("cuda")
    only_cpu = [rest for word, rest in cpu if (word, rest) not in cuda]
    only_cuda = [rest for word, rest in cuda if (word, rest) not in cpu]
    assert len(only_cpu) == 3  # where torch comes from, its install, the environment
    assert len(only_cuda) == 2
    assert [re.sub(r" NVIDIA_\w+=\S+", "", rest) for rest in only_cuda][-1] == only_cpu[-1]


def test_every_dependency_is_pinned_within_its_bounds():
    pinned = pins()
    direct = [Requirement(text) for text in PROJECT["dependencies"]] + [Requirement("ray[default]")]
    waiting, seen = list(direct), set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        assert name in pinned, f"{wanted} is not in constraints.txt"
        assert wanted.specifier.contains(pinned[name]), f"{wanted}, and constraints.txt has {pinned[name]}"
        if (name, *sorted(wanted.extras)) in seen:
            continue
        seen.add((name, *sorted(wanted.extras)))
        try:
            here = distribution(name)
        except PackageNotFoundError:
            continue  # of ray[default]: not needed on one machine
        if here.version.partition("+")[0] != pinned[name]:
            continue  # another version may need other things
        needs = [Requirement(text) for text in here.requires or ()]
        waiting += [
            r
            for r in needs
            if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras))
        ]
    assert RAY_JOB["spec"]["rayClusterSpec"]["rayVersion"] == pinned["ray"]


# --- the rights on S3

RIGHTS = {  # which right S3 asks for
    "HeadObject": "s3:GetObject",
    "GetObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
}
ARN = "arn:aws:s3:::"
BUCKET = "amzn-s3-demo-bucket"


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def allows(right: str, resource: str, prefix: str | None = None) -> bool:
    """Whether the policy does. `prefix`: what is listed."""
    for statement in POLICY["Statement"]:
        prefixes = statement.get("Condition", {"StringLike": {"s3:prefix": ["*"]}})["StringLike"]["s3:prefix"]
        if (
            statement["Effect"] == "Allow"
            and right in listed(statement["Action"])
            and any(fnmatchcase(ARN + resource, pattern) for pattern in listed(statement["Resource"]))
            and (right != "s3:ListBucket" or any(fnmatchcase(prefix or "", pattern) for pattern in prefixes))
        ):
            return True
    return False


@pytest.fixture
def under_policy(monkeypatch):
    """A bucket whose requests, from here on, are refused where the policy does not allow them; gives the bucket,
    the rights that were used and what was refused."""
    from aiobotocore.client import AioBaseClient
    from botocore.exceptions import ClientError

    from tests.faults.store import Bucket, FaultyStore

    used: set[tuple[str, str]] = set()
    refused: set[tuple[str, str]] = set()
    call = AioBaseClient._make_api_call

    async def allowed_call(self, operation, parameters):
        if parameters.get("Bucket") != BUCKET:  # a job of another test may still be writing its logs
            return await call(self, operation, parameters)
        key, prefix = parameters.get("Key", ""), parameters.get("Prefix", "")
        right = RIGHTS[operation]
        resource = parameters["Bucket"] + (f"/{key}" if key else "")
        denied = ClientError(
            {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, operation
        )
        if not allows(right, resource, prefix):
            refused.add((right, key or prefix))
            raise denied
        used.add((right, (key or prefix).split("/")[0]))
        try:
            return await call(self, operation, parameters)
        except ClientError as error:
            # only who may list learns that a key is not there
            missing = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404
            if missing and not allows("s3:ListBucket", parameters["Bucket"], key):
                refused.add(("s3:ListBucket", key))
                raise denied from error
            raise

    with FaultyStore() as store:
        store.bucket.client.create_bucket(Bucket=BUCKET)
        monkeypatch.setattr(AioBaseClient, "_make_api_call", allowed_call)
        yield Bucket(BUCKET, store.bucket.storage, store.bucket.client), used, refused


def test_the_policy_is_enough_for_input_output_and_model_and_no_more(under_policy):
    from pipeline.data.output.parts import SUCCESS, PartStore
    from pipeline.data.source import cut_windows, open_source, read_window
    from pipeline.stores.filesystem import filesystem
    from tests.data.output.finished_units import FP, name, result

    bucket, used, refused = under_policy
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["a", "b"]}), sink)
    bucket.put("input/reports/2026/a.parquet", sink.getvalue().to_pybytes())
    bucket.put("models/my-model/config.json", b"{}")

    for path in ("input/reports", "input/reports/*/*.parquet", "input/reports/2026/a.parquet"):
        source = open_source(bucket.url(path), bucket.storage)
        (window,) = cut_windows(source, 10, 2**20)
        assert read_window(source, window, ["text"])["text"].to_pylist() == ["a", "b"]
    fs, folder = filesystem(bucket.url("models/my-model"), bucket.storage)
    assert [fs.cat_file(path) for path in fs.find(folder)] == [b"{}"]

    store = PartStore(bucket.url("output/summarize"), bucket.storage)
    assert store.list(FP).num_units == 0
    store.folder.probe()
    store.folder.probe_swap()
    assert store.folder.read("_pipeline/job.json") is None
    assert store.folder.create("_pipeline/job.json", b"1")
    store.folder.replace("_pipeline/status.json", b"1")
    assert store.write(name(), result(50))
    assert not store.write(name(), result(50, seed=2))
    assert store.folder.has(str(name()))
    part = store.read_part(name())
    store.rewrite(name(), result(50, seed=3), part.metadata, part.tag)
    store.folder.remove("_pipeline/status.json")
    store.folder.clean_tmp()
    store.folder.replace(SUCCESS, b"{}")
    assert store.folder.names("_pipeline") == ["job.json"]
    assert store.totals().rows == 50

    # of an empty folder s3fs looks into the one above, and does without it
    assert refused <= {("s3:ListBucket", "output/")}
    granted = {
        (right, re.split(r"[:/]", resource.removeprefix(ARN + BUCKET + "/"))[0])
        for statement in POLICY["Statement"]
        for right in listed(statement["Action"])
        for resource in (
            listed(statement["Resource"])
            if "Condition" not in statement
            else [f"{ARN}{BUCKET}/{prefix}" for prefix in statement["Condition"]["StringLike"]["s3:prefix"]]
        )
    }
    assert granted == used


def test_the_policy_names_what_it_gives():
    for statement in POLICY["Statement"]:
        assert statement["Effect"] == "Allow"
        assert not any("*" in right for right in listed(statement["Action"]))
        for resource in listed(statement["Resource"]):
            assert re.fullmatch(rf"{ARN}{BUCKET}(/[a-z-]+/[a-z-]+(/\*)?)?", resource)
    assert not allows("s3:GetObject", f"{BUCKET}/output/summarize-secret/x")
    assert not allows("s3:PutObject", f"{BUCKET}/input/reports/x")
    assert not allows("s3:ListBucket", BUCKET, "")


# --- the manifests

POD = {
    "automountServiceAccountToken",
    "containers",
    "restartPolicy",
    "securityContext",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "volumes",
}
CONTAINER = {"name", "image", "securityContext", "ports", "env", "envFrom", "lifecycle", "resources", "volumeMounts"}
GROUP = {"rayStartParams", "template"}
WORKERS = GROUP | {"groupName", "replicas", "minReplicas", "maxReplicas"}
CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
JOB = {  # of ray.io/v1 RayJobSpec
    "activeDeadlineSeconds",
    "backoffLimit",
    "entrypoint",
    "rayClusterSpec",
    "shutdownAfterJobFinishes",
    "submitterPodTemplate",
    "ttlSecondsAfterFinished",
}


def head_and_workers(job: dict) -> tuple[dict, dict]:
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    return job["rayClusterSpec"]["headGroupSpec"], workers


def pods(job: dict) -> list[dict]:
    templates = [job["submitterPodTemplate"], *(group["template"] for group in head_and_workers(job))]
    return [template["spec"] for template in templates]


def container(pod: dict) -> dict:
    (only,) = pod["containers"]
    return only


def cpus(group: dict) -> int:
    return int(container(group["template"]["spec"])["resources"]["limits"]["cpu"])


def configured(job: dict) -> JobConfig:
    """The job that the entrypoint runs, as its paths are in the repository."""
    words = shlex.split(job["entrypoint"].replace("$(date -u +%F)", "2026-01-31"))
    assert words[:2] == ["pipeline", "run"]
    assert words[3::2] == ["--set"] * len(words[3::2])
    assert "WORKDIR /work" in (INFRA / "docker" / "Dockerfile.cpu").read_text()
    here = [word.replace("/work/", f"{ROOT}/") for word in words]
    return load_job(here[2], here[4::2])


@pytest.mark.parametrize("job", [RAY_JOB["spec"], NIGHTLY["spec"]["jobTemplate"]], ids=["once", "nightly"])
def test_the_cluster_runs_the_job_it_names(job):
    from pipeline.job.dataflow.spec import NUM_READERS

    config = configured(job)
    assert config.run.ray_address == "auto"
    assert Path(config.input.path).is_dir()
    bucket, _, folder = config.output.path.removeprefix("s3://").partition("/")
    for right in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
        assert allows(right, f"{bucket}/{folder}/part.parquet")
    assert allows("s3:ListBucket", bucket, f"{folder}/")
    head, workers = head_and_workers(job)
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert config.run.cpus_per_actor is not None
    actors_each = config.run.actors / workers["replicas"]
    readers_each = min(NUM_READERS, config.run.actors) / workers["replicas"]
    assert actors_each * config.run.cpus_per_actor + readers_each <= cpus(workers)


@pytest.mark.parametrize("job", [RAY_JOB["spec"], NIGHTLY["spec"]["jobTemplate"]], ids=["once", "nightly"])
def test_a_cluster_that_ends_leaves_time_to_drain(job):
    from pipeline.job.dataflow.graph import EngineActor
    from pipeline.job.watch import GIVE_UP_S

    run = configured(job).run
    head, workers = head_and_workers(job)
    pod = head["template"]["spec"]
    (wait_s,) = [int(e["value"]) for e in container(pod)["env"] if e["name"] == "RAY_JOB_STOP_WAIT_TIME_S"]
    assert run.drain_s + GIVE_UP_S < wait_s
    titles = "/opt/venv/bin/pipeline", f"ray::MapWorker(MapBatches({EngineActor.__name__})).submit"
    for waiting, title in zip((pod, workers["template"]["spec"]), titles, strict=True):
        assert waiting["terminationGracePeriodSeconds"] >= wait_s + 10
        *_, stay = container(waiting)["lifecycle"]["preStop"]["exec"]["command"]
        assert int(re.findall(r"\{1\.\.(\d+)\}", stay)[0]) >= wait_s
        pattern = re.findall(r"'(.*)'", stay)[0]
        assert re.search(pattern, title)
        assert not re.search(pattern, stay), "it would wait for itself"


@pytest.mark.parametrize("job", [RAY_JOB["spec"], NIGHTLY["spec"]["jobTemplate"]], ids=["once", "nightly"])
def test_keys_are_kuberays_and_pods_have_few_rights(job):
    head, workers = head_and_workers(job)
    assert set(job) == JOB
    assert set(job["rayClusterSpec"]) == CLUSTER
    assert set(head) == GROUP
    assert set(workers) == WORKERS
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert job["shutdownAfterJobFinishes"] is True
    assert job["backoffLimit"] >= 1
    for pod in pods(job):
        assert set(pod) <= POD
        assert set(container(pod)) <= CONTAINER
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == user_id()
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        limits = container(pod)["securityContext"]
        assert limits == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container(pod)["image"].rpartition(":")[2] not in ("", "latest")
        assert {mount["name"] for mount in container(pod).get("volumeMounts", ())} == {
            volume["name"] for volume in pod.get("volumes", ())
        }
        for variable in container(pod).get("env", ()):
            assert not re.search(r"KEY|SECRET|TOKEN|PASSWORD", variable["name"])
    for group in (head, workers):
        assert group["template"]["spec"]["serviceAccountName"] == ACCESS["metadata"]["name"]


def test_manifests_say_what_they_are():
    assert (RAY_JOB["apiVersion"], RAY_JOB["kind"]) == ("ray.io/v1", "RayJob")
    assert (NIGHTLY["apiVersion"], NIGHTLY["kind"]) == ("ray.io/v1", "RayCronJob")
    assert set(NIGHTLY["spec"]) == {"schedule", "jobTemplate"}
    assert (ACCESS["apiVersion"], ACCESS["kind"]) == ("v1", "ServiceAccount")


def test_the_night_is_the_job_with_a_day_in_its_output():
    once, nightly = RAY_JOB["spec"], NIGHTLY["spec"]["jobTemplate"]
    assert nightly["entrypoint"].replace("/$(date -u +%F)", "") == once["entrypoint"]
    assert {**nightly, "entrypoint": ""} == {**once, "entrypoint": ""}
    minute, hour, *days = NIGHTLY["spec"]["schedule"].split()
    assert days == ["*"] * 3
    longest_s = (nightly["backoffLimit"] + 1) * nightly["activeDeadlineSeconds"]
    assert int(hour) * 3600 + int(minute) * 60 + longest_s < 86_400, "a late try would find another day"

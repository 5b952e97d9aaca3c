"""Files of infra/, as far as they can be checked without Docker, Kubernetes and AWS: pins, rights, keys and times agree
with the code."""

import json
import re
import subprocess
import tomllib
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from aiobotocore.client import AioBaseClient
from botocore.exceptions import ClientError
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import fillout_defaults, validate_config

from pipeline.config import load_job
from pipeline.data.output.parts import SUCCESS, PartStore
from pipeline.data.source import cut_windows, open_source, read_window
from pipeline.stores.filesystem import filesystem
from tests.data.output.finished_units import FP, name, result
from tests.faults.store import Bucket, FaultyStore

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = ("cpu", "cuda")
ONCE = list(yaml.safe_load_all((INFRA / "kuberay" / "once.k8s.yaml").read_text()))
ACCESS = yaml.safe_load((INFRA / "kuberay" / "s3-access.yaml").read_text())
POLICY = json.loads((INFRA / "s3" / "policy.json").read_text())


# --- the images


def instructions(image: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, one per line, with their arguments."""
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
def test_images_have_the_commands_that_kuberay_calls(image):
    packages = next(run for run in given(image, "RUN") if "apt-get install" in run)
    assert {"bash", "wget", "tini"} <= set(packages.split())
    assert any('"ray[default]"' in run for run in given(image, "RUN"))
    # a login shell resets PATH
    assert any("/opt/venv/bin" in run and "/etc/profile.d/" in run for run in given(image, "RUN"))
    environment = " ".join(given(image, "ENV"))
    made = next(run for run in given(image, "RUN") if "useradd" in run)
    folder = re.search(r"PIPELINE_CACHE=(\S+)", environment)
    assert folder is not None
    assert folder[1] in made.split()
    assert "-g 0 -m 0775" in made, "`docker run --user 12345` gives that user group 0"


@pytest.mark.parametrize("image", IMAGES)
def test_images_copy_files_that_exist_and_are_not_ignored(image):
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
        folder = (ROOT / source).resolve()
        links = [path for path in folder.rglob("*") if path.is_symlink()]
        assert not [link for link in links if not link.resolve().is_relative_to(folder)], "they dangle in the image"
    assert {entry for entry in allowed if not any(s.startswith(entry) for s in copied)} == set()


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
            continue  # another version may need other packages
        for needed in map(Requirement, here.requires or ()):
            extras = [{"extra": extra} for extra in ("", *wanted.extras)]
            if needed.marker is None or any(map(needed.marker.evaluate, extras)):
                waiting.append(needed)
    assert ONCE[-1]["spec"]["rayClusterSpec"]["rayVersion"] == pinned["ray"]


# --- rights on S3

RIGHTS = {  # the right that each operation needs
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
    """Return True if the policy allows it. `prefix`: the listed prefix."""
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
    """Yield a bucket that refuses requests which the policy does not allow, the set of used rights, and the set of
    refused ones."""
    used: set[tuple[str, str]] = set()
    refused: set[tuple[str, str]] = set()
    call = AioBaseClient._make_api_call

    async def allowed_call(self, operation, parameters):
        if parameters.get("Bucket") != BUCKET:  # a job of another test may still be writing its logs
            return await call(self, operation, parameters)
        key, prefix = parameters.get("Key", ""), parameters.get("Prefix", "")
        right = RIGHTS[operation]
        resource = parameters["Bucket"] + (f"/{key}" if key else "")
        answer = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
        denied = ClientError(answer, operation)
        if not allows(right, resource, prefix):
            refused.add((right, key or prefix))
            raise denied
        used.add((right, (key or prefix).split("/")[0]))
        try:
            return await call(self, operation, parameters)
        except ClientError as error:
            # only a user with the right to list gets 404 for a missing key
            missing = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404
            if missing and not allows("s3:ListBucket", parameters["Bucket"], key):
                refused.add(("s3:ListBucket", key))
                raise denied from error
            raise

    with FaultyStore() as store:
        store.bucket.client.create_bucket(Bucket=BUCKET)
        monkeypatch.setattr(AioBaseClient, "_make_api_call", allowed_call)
        yield Bucket(BUCKET, store.bucket.storage, store.bucket.client), used, refused


def test_the_policy_allows_input_output_and_model_and_no_more(under_policy):
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

    # s3fs tries to list the parent of an empty folder, and works without it
    assert refused <= {("s3:ListBucket", "output/")}
    granted = set()
    for statement in POLICY["Statement"]:
        prefixes = [resource.removeprefix(f"{ARN}{BUCKET}/") for resource in listed(statement["Resource"])]
        if "Condition" in statement:
            prefixes = statement["Condition"]["StringLike"]["s3:prefix"]
        granted |= {(right, prefix.split("/")[0]) for right in listed(statement["Action"]) for prefix in prefixes}
    assert granted == used


def test_the_policy_names_every_right_and_resource():
    for statement in POLICY["Statement"]:
        assert statement["Effect"] == "Allow"
        assert not any("*" in right for right in listed(statement["Action"]))
        for resource in listed(statement["Resource"]):
            assert re.fullmatch(rf"{ARN}{BUCKET}(/[a-z-]+/[a-z-]+(/\*)?)?", resource)
    assert not allows("s3:GetObject", f"{BUCKET}/output/summarize-secret/x")
    assert not allows("s3:PutObject", f"{BUCKET}/input/reports/x")
    assert not allows("s3:ListBucket", BUCKET, "")


# --- manifests; the other tests of manifests are in tests/cluster/test_manifests.py


def test_manifests_fit_the_image_the_policy_and_the_account():
    assert (ACCESS["apiVersion"], ACCESS["kind"]) == ("v1", "ServiceAccount")
    config_map, *_, job = ONCE
    shipped = json.loads(config_map["data"]["job.json"])
    bucket, _, folder = shipped["output"]["path"].removeprefix("s3://").partition("/")
    for right in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
        assert allows(right, f"{bucket}/{folder}/part.parquet")
    assert allows("s3:ListBucket", bucket, f"{folder}/")
    assert "WORKDIR /work" in (INFRA / "docker" / "Dockerfile.cpu").read_text()
    assert (ROOT / Path(shipped["input"]["path"]).relative_to("/work")).is_dir()
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsUser"] == user_id()
        assert pod["serviceAccountName"] == ACCESS["metadata"]["name"]
        (cache,) = [m["mountPath"] for m in pod["containers"][0]["volumeMounts"] if m["name"] == "cache"]
        assert f"PIPELINE_CACHE={cache}" in " ".join(given("cpu", "ENV"))


# --- clusters on machines


def test_ray_accepts_the_cluster_of_ray_up():
    cluster = yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())
    validate_config(fillout_defaults(cluster))
    head, engine = (cluster["available_node_types"][name] for name in (cluster["head_node_type"], "engine"))
    assert head["resources"] == {"CPU": 0}
    assert engine["max_workers"] == cluster["max_workers"]
    with pytest.raises(Exception, match="availble"):
        validate_config(fillout_defaults(cluster | {"availble": {}}))


def scripts():
    sky = yaml.safe_load((INFRA / "skypilot" / "job.yaml").read_text())
    assert set(sky) == {"name", "resources", "num_nodes", "workdir", "envs", "run"}
    return {"sky": sky["run"], "slurm": (INFRA / "slurm" / "job.sbatch").read_text()}


@pytest.mark.parametrize("name", ["sky", "slurm"])
@pytest.mark.parametrize("code", [0, 75])
def test_scripts_start_ray_run_the_job_and_return_its_exit_code(name, code, tmp_path):
    """The test replaces Ray, Slurm and `pipeline` by scripts that record their arguments."""
    for word in ("ray", "srun", "scontrol", "sleep", "pipeline"):
        tool = tmp_path / word
        body = "echo node1; echo node2" if word == "scontrol" else f"exit {code}" if word == "pipeline" else ":"
        tool.write_text(f'#!/bin/sh\necho "{word} $* $RAY_ADDRESS" >> {tmp_path}/calls\n{body}\n')
        tool.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SKYPILOT_NODE_IPS": "node1\nnode2", "SKYPILOT_NODE_RANK": "0",
           "SKYPILOT_NUM_NODES": "2", "JOB": "my job.yaml", "OUTPUT": "s3://b/o", "SLURM_JOB_ID": "7",
           "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", scripts()[name], "job", "my job.yaml"], env=env, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    calls = (tmp_path / "calls").read_text()
    (ran,) = [line for line in calls.splitlines() if line.startswith("pipeline run my job.yaml ")]
    assert re.search(r" node1:\d+$", ran)
    assert f"run.actors={2 if name == 'sky' else 8}" in ran
    assert re.search(r"(ray|overlap ray) start --head", calls)
    if name == "slurm":
        assert ("scontrol requeue 7" in calls) == (code == 75)
    options = dict(re.findall(r"--set (run\.\w+)=(\S+)", ran))
    load_job(ROOT / "jobs" / "summarize.yaml", [f"{key}={value}" for key, value in options.items()])

"""Manifests: Kubernetes and KubeRay accept them, pods reach their data, and no text reaches a shell unquoted."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline.config import load_job
from pipeline.config.identity import identity_of
from pipeline.config.values import parse_duration
from pipeline.config.variables import moment_of
from pipeline.job.dataflow.graph import EngineActor
from pipeline.job.running.driver import GIVE_UP_S
from tests.cluster.kubernetes_schema import wrong
from tools.generated import stale
from tools.manifests import COMMANDS, files

ROOT = Path(__file__).parents[2]
KUBERAY = "infra/kuberay"
JOBS = sorted(path.name for path in (ROOT / "jobs").glob("*.yaml"))
REACHED = ["--set", "output.path=s3://bucket/out", "--set", "input.path=s3://bucket/in"]
GPU = f"jobs/summarize.yaml {' '.join(REACHED)} --preset h100 --config {KUBERAY}/cluster-gpu.yaml"
NIGHTLY = COMMANDS["nightly.k8s.yaml"]
EXAMPLES = [COMMANDS["once.k8s.yaml"], GPU, NIGHTLY]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def job_file(tmp_path):
    def write(**changed):
        job = {
            "input": {"path": "s3://bucket/in"},
            "prompt": {"column": "text"},
            "model": {"path": "demo:target"},
            "output": {"path": "s3://bucket/out"},
            "kubernetes": {"image": "r.io/image@sha256:00"},
        }
        (tmp_path / "my.yaml").write_text(json.dumps(job | changed))
        return str(tmp_path / "my.yaml")

    return write


def made_by(pipe, *arguments):
    code, out, err = pipe("manifests", *arguments)
    assert code == 0, err
    return list(yaml.safe_load_all(out))


def refusal(pipe, *arguments):
    code, out, err = pipe("manifests", *arguments)
    assert (code, out) == (2, "")
    return err


def only(made, kind):
    (found,) = [each for each in made if each["kind"] == kind]
    return found


def ray_job(made):
    """Return the RayJobSpec of a RayJob or of a CronJob's ConfigMap."""
    if made[-1]["kind"] == "CronJob":
        return yaml.safe_load(made[0]["data"]["rayjob.yaml"])["spec"]
    return made[-1]["spec"]


def pods(made):
    """Return the pod specs of head and workers."""
    cluster = ray_job(made)["rayClusterSpec"]
    return cluster["headGroupSpec"]["template"]["spec"], cluster["workerGroupSpecs"][0]["template"]["spec"]


def all_wrong(made):
    inner = [yaml.safe_load(each["data"]["rayjob.yaml"]) for each in made if "rayjob.yaml" in each.get("data", {})]
    return [found for each in [*made, *inner] for found in wrong(each)]


# --- what is accepted


def test_the_examples_are_up_to_date():
    assert stale(files()) == [], "run `python -m tools.manifests`"


def test_every_field_is_known_and_an_unknown_one_is_found(pipe):
    for example in EXAMPLES:
        assert all_wrong(made_by(pipe, *shlex.split(example))) == []
    for name in JOBS:
        made = made_by(pipe, f"jobs/{name}", *REACHED, "--config", f"{KUBERAY}/cluster-gpu.yaml")
        assert all_wrong(made) == [], name
        assert json.loads(made[0]["data"]["job.json"]).get("prompt") == load_job(f"jobs/{name}").data.get("prompt")
    for key, value in (("ttl", 3), ("backoffLimit", "3"), ("backoffLimit", -1), ("deletionStrategy", {})):
        assert wrong({**made[-1], "spec": made[-1]["spec"] | {key: value}}), key


# --- what the pods do


def test_a_cluster_leaves_time_to_drain(pipe):
    for example in (*EXAMPLES, f"{EXAMPLES[0]} --set run.drain_timeout='120 s'"):
        made = made_by(pipe, *shlex.split(example))
        drain = json.loads(made[0]["data"]["job.json"])["run"].get("drain_timeout", "30 s")
        head, worker = pods(made)
        (wait_s,) = [int(e["value"]) for e in head["containers"][0]["env"] if e["name"] == "RAY_JOB_STOP_WAIT_TIME_S"]
        assert parse_duration(drain) + GIVE_UP_S < wait_s
        titles = "/opt/venv/bin/pipeline", f"ray::MapWorker(MapBatches({EngineActor.__name__})).submit"
        for pod, title in zip((head, worker), titles):
            assert pod["terminationGracePeriodSeconds"] >= wait_s + 10
            *_, stay = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert int(re.findall(r"\{1\.\.(\d+)\}", stay)[0]) >= wait_s
            pattern = re.findall(r"grep -qs '(.*)'", stay)[0]
            assert re.search(pattern, title)
            assert not re.search(pattern, stay), "it would wait for itself"
            assert subprocess.run(["bash", "-n", "-c", stay]).returncode == 0
        assert "ray drain-node" in worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
        budgets = [each["spec"] for each in made if each["kind"] == "PodDisruptionBudget"]
        assert [budget["maxUnavailable"] for budget in budgets] == [0, 1]
        cluster = ray_job(made)["rayClusterSpec"]
        for budget, group in zip(budgets, (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0])):
            assert budget["selector"]["matchLabels"] == group["template"]["metadata"]["labels"]


def test_pods_have_few_rights_and_room_for_their_engine(pipe):
    for example in EXAMPLES:
        made = made_by(pipe, *shlex.split(example))
        job, shipped = ray_job(made), json.loads(made[0]["data"]["job.json"])
        cluster, (head, worker) = job["rayClusterSpec"], pods(made)
        for pod in (job["submitterPodTemplate"]["spec"], head, worker):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            elastic_head = pod is head and "enableInTreeAutoscaling" in cluster
            assert pod["automountServiceAccountToken"] is elastic_head
            mounts = {mount["name"] for mount in pod["containers"][0].get("volumeMounts", ())}
            assert mounts == {volume["name"] for volume in pod.get("volumes", ())}
        limits = worker["containers"][0]["resources"]["limits"]
        assert shipped["run"]["cpus_per_actor"] + 1 <= int(limits["cpu"])
        assert shipped["run"]["gpus_per_actor"] == int(limits.get("nvidia.com/gpu", 0))
        assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
        assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
        assert "kubernetes" not in shipped


def test_an_elastic_job_has_an_elastic_cluster(pipe):
    made = made_by(pipe, *shlex.split(GPU))
    cluster = ray_job(made)["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 1, 16)
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert pods(made)[1]["tolerations"][0] == {"key": "nvidia.com/gpu", "operator": "Exists"}
    fixed = ray_job(made_by(pipe, *shlex.split(EXAMPLES[0])))["rayClusterSpec"]
    assert not {"enableInTreeAutoscaling", "autoscalerOptions"} & fixed.keys()


# --- patches


def test_patches_reach_every_object(pipe, job_file):
    env = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "a"}}}
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone]}}}
    patch = {
        "pods": {
            "metadata": {"annotations": {"a": "b"}},
            "spec": {"containers": [{"name": "ray", "env": [env]}], "serviceAccountName": "s3"},
        },
        "head": {"spec": {"containers": [{"name": "ray", "resources": {"limits": {"memory": "8Gi"}}}]}},
        "worker": {"spec": {"affinity": affinity, "serviceAccountName": None}},
        "job": {
            "metadata": {"labels": {"team": "x"}},
            "spec": {"activeDeadlineSeconds": 60, "rayClusterSpec": {
                "authOptions": None, "workerGroupSpecs": [{"groupName": "engines", "idleTimeoutSeconds": 9}]}},
        },
    }  # fmt: skip
    path = job_file(**DATED, kubernetes={"image": "r.io/x:1", "patch": patch})
    made = made_by(pipe, path, "--schedule", "0 2 * * *")
    assert all_wrong(made) == []
    (head, worker), job = pods(made), yaml.safe_load(made[0]["data"]["rayjob.yaml"])
    assert [e["name"] for e in head["containers"][0]["env"]] == ["RAY_JOB_STOP_WAIT_TIME_S", "A"]
    assert worker["containers"][0]["env"] == [env]
    assert (head["serviceAccountName"], worker.get("serviceAccountName")) == ("s3", None)
    assert head["containers"][0]["resources"]["limits"] == {"cpu": "1", "memory": "8Gi"}
    assert head["containers"][0]["image"] == "r.io/x:1"
    assert (worker["affinity"], "affinity" in head) == (affinity, False)
    assert job["metadata"] == {"name": "my", "labels": {"team": "x"}}
    assert (job["spec"]["activeDeadlineSeconds"], job["spec"]["backoffLimit"]) == (60, 3)
    cluster = job["spec"]["rayClusterSpec"]
    assert "authOptions" not in cluster
    assert (cluster["workerGroupSpecs"][0]["idleTimeoutSeconds"], len(cluster["workerGroupSpecs"])) == (9, 1)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["annotations"] == {"a": "b"}


# --- schedules


def started(job, tmp_path, cluster_name):
    """Return the arguments that a driver's `pipeline` receives."""
    fake = tmp_path / "bin" / "pipeline"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    fake.chmod(0o755)
    line = job["entrypoint"].replace("cd /etc/pipeline", f"cd {tmp_path}")
    env = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "RAY_CLUSTER_NAME": cluster_name}
    done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_scheduled_run_keeps_its_date_in_each_try(pipe, tmp_path):
    # 2026-11-24 00:05 in Berlin is still the 23rd in UTC
    minutes = 1795475100 // 60
    made = made_by(pipe, *shlex.split(NIGHTLY))
    for suffix in ("x7k2p", "09090"):
        words = started(ray_job(made), tmp_path, f"summarize-{minutes}-{suffix}")
        assert words[:3] == ["run", "job.json", "--logical-date"]
        (tmp_path / "job.json").write_text(made[0]["data"]["job.json"])
        fired = load_job(tmp_path / "job.json", now=moment_of(words[3]))
        assert fired.output.path == "s3://amzn-s3-demo-bucket/output/summarize/2026-11-24"
    once = made_by(pipe, *shlex.split(EXAMPLES[0]))
    assert started(ray_job(once), tmp_path, "summarize-x7k2p") == ["run", "job.json"]


def test_a_cron_job_names_a_ray_job_by_its_scheduled_time(pipe):
    made = made_by(pipe, *shlex.split(NIGHTLY))
    cron = only(made, "CronJob")["spec"]
    assert (cron["concurrencyPolicy"], cron["timeZone"]) == ("Forbid", "Europe/Berlin")
    pod = cron["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    *python, file, name = container["command"]
    assert python == ["python", "-m", "pipeline.cluster.create_ray_job"]
    (mount,) = container["volumeMounts"]
    assert (Path(file).parent, Path(file).name in made[0]["data"]) == (Path(mount["mountPath"]), True)
    assert container["env"][0]["name"] == name.strip("$()")
    assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['job-name']"
    account = only(made, "ServiceAccount")["metadata"]["name"]
    assert pod["serviceAccountName"] == only(made, "RoleBinding")["subjects"][0]["name"] == account
    (rules,) = only(made, "Role")["rules"]
    assert rules == {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["create"]}


HOSTILE = ["a b", "it's", '"q"', "$(touch x)", "`touch x`", "a;touch x", "a\nb: c"]
HOSTILE += ["- x", "{{x}}", "<image>", "é", "!!python/x"]


def test_hostile_texts_stay_text(pipe, job_file, tmp_path):
    for text in HOSTILE:
        location = {"path": f"s3://bucket/{text}".replace("\n", "")}
        made = made_by(pipe, job_file(name=f"x {text}", prompt={"template": text + "{text}"}, input=location))
        assert all_wrong(made) == []
        sent = json.loads(made[0]["data"]["job.json"])
        assert (sent["name"], sent["prompt"]["template"]) == (f"x {text}", text + "{text}")
        assert started(ray_job(made), tmp_path, "c") == ["run", "job.json"]
        assert re.fullmatch(r"x[a-z0-9-]*", made[-1]["metadata"]["name"])


def test_a_job_means_the_same_in_a_pod(pipe, job_file, tmp_path, monkeypatch):
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    path = job_file(
        prompt={
            "template": "${price} {text} $(reboot) 'quoted'\n",
            "chat": {"chat_template": str(tmp_path / "mine.jinja")},
        },
        sampling={"max_tokens": 7, "temperature": 1e-05, "stop": ["no", "1e5", "012", "~"]},
    )
    made = made_by(pipe, path, "--set", "sampling.seed=3")
    before = load_job(path, ["sampling.seed=3"])
    for name, text in made[0]["data"].items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    after = load_job("job.json")
    assert identity_of(after) == identity_of(before)
    assert (after.sampling, after.input, after.output) == (before.sampling, before.input, before.output)
    assert Path(after.prompt.chat.chat_template).read_text() == "{{ messages[0].content }}"
    assert "no such file" in refusal(pipe, path, "--set", "prompt.chat.chat_template=none.jinja")


# --- what is refused


def test_jobs_that_pods_cannot_run_are_refused(pipe, job_file):
    image = {"image": "r.io/x:1"}
    for changed, expected in [
        ({"kubernetes": {}}, "kubernetes.image: missing"),
        ({"output": {"path": "out/here"}}, "output.path out/here: is a relative path on this machine"),
        ({"input": {"path": "data/in"}}, "input.path data/in: is a relative path on this machine"),
        ({"model": {"path": "tests"}}, "model.path tests: is a relative path on this machine"),
        ({"model": {"path": "demo", "adapters": {"a": "tests"}, "adapter": "a"}},
         "model.adapters.a tests: is a relative path on this machine"),
        ({"output": {"path": "/work/out"}}, "output.path /work/out: is not on a disk that the pods share"),
        ({"output": {"path": "/tmp/ray/out"}}, "output.path /tmp/ray/out: is not on a disk that the pods share"),
        ({"output": {"path": "s3://b/o"}, "storage_options": {"s3": {"secret": "hidden-word"}}},
         "storage_options.s3: contains a secret"),
        ({"input": {"path": "s3://b/o"},
          "storage_options": {"s3://b": {"client_kwargs": {"aws_secret_access_key": "hidden-word"}}}},
         "storage_options.s3://b: contains a secret"),
        ({"name": "n" * 48}, "up to 47 characters"),
        ({"run": {"cpus_per_actor": 4}}, "run.cpus_per_actor 4: a worker has 4 CPUs"),
        ({"kubernetes": {"image": "r.io/x; reboot"}}, "kubernetes.image"),
        ({"kubernetes": image | {"memory": "lots"}}, "kubernetes.memory"),
        ({"kubernetes": image | {"patch": {"workers": {}}}}, "Did you mean `worker`?"),
        ({"kubernetes": image | {"patch": {"worker": []}}}, "kubernetes.patch.worker: expected `key: value` lines"),
        ({"kubernetes": image | {"patch": {"worker": {"spec": {"containers": "x"}}}}},
         "kubernetes.patch: leaves a pod without"),
        ({"kubernetes": image | {"patch": {"head": {"spec": None}}}}, "kubernetes.patch: leaves a pod without"),
    ]:  # fmt: skip
        error = refusal(pipe, job_file(**changed))
        assert expected in error
        assert "hidden-word" not in error


def test_pods_mount_a_shared_disk_by_its_claim(pipe, job_file):
    claim = {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}
    mount = {"name": "shared", "mountPath": "/data"}
    pod = {"spec": {"volumes": [claim], "containers": [{"name": "ray", "volumeMounts": [mount]}]}}
    changed = {"input": {"path": "/data/in"}, "output": {"path": "/data/out"}}
    kubernetes = {"image": "r.io/x:1", "patch": {"pods": pod}}
    for spec in pods(made_by(pipe, job_file(**changed, kubernetes=kubernetes))):
        assert mount in spec["containers"][0]["volumeMounts"]
        assert claim in spec["volumes"]
        assert len(spec["volumes"]) >= 3
    only_workers = {"image": "r.io/x:1", "patch": {"worker": pod}}
    assert "not on a disk that the pods share" in refusal(pipe, job_file(**changed, kubernetes=only_workers))
    refused = {"kubernetes": kubernetes, "output": {"path": "/database/out"}}
    assert "not on a disk that the pods share" in refusal(pipe, job_file(**refused))


DATED = {"vars": {"date": {"today": "Europe/Berlin"}, "kind": "a"}, "output": {"path": "s3://b/${date}/${kind}"}}


def test_schedules_that_cannot_work_are_refused(pipe, job_file):
    for arguments, expected in [
        (["--schedule", "2 * *"], "expected minute, hour"),
        (["--schedule", "TZ=UTC 0 2 * * *"], "expected minute, hour"),
        (["--schedule", "0 2 * * *", "--time-zone", "Berlin"], "--time-zone 'Berlin'"),
        (["--schedule", "0 2 * * *", "--set", f"name={'n' * 37}"], "up to 36 characters"),
        (["--schedule", "0 2 * * *", "--var", "date=2026-01-01"], "every firing would have the same output"),
    ]:
        assert expected in refusal(pipe, job_file(**DATED), *arguments)


def test_a_schedule_leaves_its_date_open_and_fills_in_the_rest(pipe, job_file):
    made = made_by(pipe, job_file(**DATED), "--schedule", "*/5 2-4 * * mon,fri", "--var", "kind=b")
    sent = json.loads(made[0]["data"]["job.json"])
    assert sent["output"]["path"] == "s3://b/${date}/b"
    assert sent["vars"] == {"date": {"today": "Europe/Berlin"}}
    assert made[-1]["spec"]["schedule"] == "*/5 2-4 * * mon,fri"
    once = made_by(pipe, job_file(**DATED), "--var", "date=2026-01-01")
    assert json.loads(once[0]["data"]["job.json"])["output"]["path"] == "s3://b/2026-01-01/a"


def test_the_patches_of_the_page_are_known_to_kubernetes(pipe, tmp_path):
    (section,) = re.findall(r"```yaml\n(kubernetes:.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL)
    (tmp_path / "patched.yaml").write_text(section)
    made = made_by(pipe, *shlex.split(NIGHTLY), "--config", str(tmp_path / "patched.yaml"))
    assert all_wrong(made) == []
    assert "podAntiAffinity" in pods(made)[1]["affinity"]

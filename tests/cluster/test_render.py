"""Rendered manifests: what Kubernetes and KubeRay take, what pods can reach, and nothing for a shell to trip over."""

import copy
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline.cluster.kuberay import schedule
from pipeline.config import load_job
from pipeline.config.variables import moment_of
from tests.cluster.kubernetes_schema import wrong
from tools.generated import stale
from tools.manifests import COMMANDS, files

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "infra" / "kuberay"
EXAMPLES = {name: list(yaml.safe_load_all((KUBERAY / name).read_text())) for name in COMMANDS}
ONCE, NIGHTLY = EXAMPLES["once.k8s.yaml"], EXAMPLES["nightly.k8s.yaml"]
JOBS = sorted(path.name for path in (ROOT / "jobs").glob("*.yaml"))
REACHED = ["--set", "output.path=s3://bucket/out", "--set", "input.path=s3://bucket/in", "--config"]


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
            "cluster": {"image": "r.io/image@sha256:00"},
        }
        (tmp_path / "my.yaml").write_text(json.dumps(job | changed))
        return str(tmp_path / "my.yaml")

    return write


def rendered(pipe, *arguments):
    code, out, err = pipe("render", *arguments)
    assert code == 0, err
    return list(yaml.safe_load_all(out))


def refusal(pipe, *arguments):
    code, out, err = pipe("render", *arguments)
    assert (code, out) == (2, "")
    return err


def only(made, kind):
    (found,) = [each for each in made if each["kind"] == kind]
    return found


def ray_job(made):
    """The RayJobSpec, wherever it stands."""
    if made[-1]["kind"] == "CronJob":
        (template,) = [each["data"]["rayjob.json"] for each in made if "rayjob.json" in each.get("data", {})]
        return json.loads(template)["spec"]
    return made[-1]["spec"].get("jobTemplate", made[-1]["spec"])


# --- what is taken


def test_the_examples_are_as_they_are_rendered():
    assert stale(files()) == [], "run `python -m tools.manifests`"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_field_of_the_examples_is_known(name):
    assert [found for each in EXAMPLES[name] for found in wrong(each)] == []
    made = EXAMPLES[name]
    if made[-1]["kind"] == "CronJob":
        body = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "x"}, "spec": ray_job(made)}
        assert wrong(body) == []


@pytest.mark.parametrize("name", JOBS)
def test_every_job_renders(pipe, name):
    made = rendered(pipe, f"jobs/{name}", *REACHED, "infra/kuberay/cluster-gpu.yaml")
    assert [found for each in made for found in wrong(each)] == []
    assert json.loads(made[0]["data"]["job.json"]).get("prompt") == load_job(f"jobs/{name}").data.get("prompt")


@pytest.mark.parametrize(
    ("at", "key", "value", "told"),
    [
        ((), "ttl", 3, "RayJob.spec.ttl: unknown"),
        ((), "backoffLimit", "3", "RayJob.spec.backoffLimit: '3' is no int"),
        ((), "backoffLimit", -1, "retries are not negative"),
        ((), "shutdownAfterJobFinishes", False, "a time to live needs the shutdown"),
        ((), "deletionStrategy", {}, "a deletion strategy stands alone"),
        (("rayClusterSpec",), "authOptions", {"mode": "x"}, "the token has a mode"),
        (("rayClusterSpec", "workerGroupSpecs", 0), "minReplicas", 3, "replicas are in order"),
        (("rayClusterSpec", "headGroupSpec"), "rayStartParams", {"num-cpus": 0}, "0 is no str"),
        (
            ("rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "lifecycle"),
            "prestop",
            {},
            "lifecycle.prestop: unknown",
        ),
        (("submitterPodTemplate", "spec"), "restartPolicy", "Always", "a submitter ends"),
    ],
)
def test_the_check_itself_refuses(at, key, value, told):
    made = copy.deepcopy(ONCE[-1])
    place = made["spec"]
    for step in at:
        place = place[step]
    place[key] = value
    assert any(told in found for found in wrong(made)), wrong(made)


# --- what the pods do


@pytest.mark.parametrize("name", COMMANDS)
def test_a_cluster_that_ends_leaves_time_to_drain(name):
    from pipeline.job.dataflow.graph import EngineActor
    from pipeline.job.running.watch import GIVE_UP_S

    job, shipped = ray_job(EXAMPLES[name]), json.loads(EXAMPLES[name][0]["data"]["job.json"])
    drain_s = shipped["run"].get("drain_timeout", 30)
    groups = job["rayClusterSpec"]["headGroupSpec"], job["rayClusterSpec"]["workerGroupSpecs"][0]
    head, worker = (group["template"]["spec"] for group in groups)
    (wait_s,) = [int(e["value"]) for e in head["containers"][0]["env"] if e["name"] == "RAY_JOB_STOP_WAIT_TIME_S"]
    assert drain_s + GIVE_UP_S < wait_s
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
    drains = [each["spec"]["maxUnavailable"] for each in EXAMPLES[name] if each["kind"] == "PodDisruptionBudget"]
    assert drains == [0, 1]
    for budget, group in zip([e for e in EXAMPLES[name] if e["kind"] == "PodDisruptionBudget"], groups):
        assert budget["spec"]["selector"]["matchLabels"] == group["template"]["metadata"]["labels"]


@pytest.mark.parametrize("name", COMMANDS)
def test_pods_have_few_rights_and_room_for_their_engine(name):
    made = EXAMPLES[name]
    job, shipped = ray_job(made), json.loads(made[0]["data"]["job.json"])
    cluster = job["rayClusterSpec"]
    head, worker = cluster["headGroupSpec"]["template"]["spec"], cluster["workerGroupSpecs"][0]["template"]["spec"]
    for pod in (job["submitterPodTemplate"]["spec"], head, worker):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        elastic_head = pod is head and "enableInTreeAutoscaling" in cluster
        assert pod.get("automountServiceAccountToken", True) is elastic_head
        mounts = {mount["name"] for mount in pod["containers"][0].get("volumeMounts", ())}
        assert mounts == {volume["name"] for volume in pod.get("volumes", ())}
    limits = worker["containers"][0]["resources"]["limits"]
    assert shipped["run"]["cpus_per_actor"] + 1 <= int(limits["cpu"])
    assert shipped["run"]["gpus_per_actor"] == int(limits.get("nvidia.com/gpu", 0))
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    assert cluster["authOptions"] == {"mode": "token", "secretName": "ray-token"}
    assert "cluster" not in shipped


def test_an_elastic_job_has_an_elastic_cluster():
    job = ray_job(EXAMPLES["gpu.k8s.yaml"])
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 1, 16)
    assert job["rayClusterSpec"]["autoscalerOptions"]["version"] == "v2"
    spec = group["template"]["spec"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]
    assert spec["containers"][0]["envFrom"] == [{"secretRef": {"name": "pipeline-s3"}}]
    assert "enableInTreeAutoscaling" not in ray_job(ONCE)["rayClusterSpec"]


# --- what the shell of the driver does


def started(job, tmp_path, cluster_name):
    """The words that a driver's `pipeline` gets."""
    fake = tmp_path / "bin" / "pipeline"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    fake.chmod(0o755)
    line = job["entrypoint"].replace("cd /etc/pipeline", f"cd {tmp_path}")
    env = {"PATH": f"{fake.parent}:{os.environ['PATH']}", "RAY_CLUSTER_NAME": cluster_name}
    done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["nightly.k8s.yaml", "nightly-cronjob.k8s.yaml"])
def test_a_firing_knows_its_date_in_each_try(name, tmp_path, monkeypatch):
    # 2026-11-24 00:05 in Berlin is still the 23rd in UTC
    minutes = 1795475100 // 60
    for suffix in ("x7k2p", "09090"):
        words = started(ray_job(EXAMPLES[name]), tmp_path, f"summarize-{minutes}-{suffix}")
        assert words[:3] == ["run", "job.json", "--logical-date"]
        (tmp_path / "job.json").write_text(EXAMPLES[name][0]["data"]["job.json"])
        fired = load_job(tmp_path / "job.json", now=moment_of(words[3]))
        assert fired.output.path == "s3://amzn-s3-demo-bucket/output/summarize/2026-11-24"
    assert started(ray_job(ONCE), tmp_path, "summarize-x7k2p") == ["run", "job.json"]


def test_a_cron_job_makes_a_ray_job_named_by_its_firing_once(tmp_path):
    made = EXAMPLES["nightly-cronjob.k8s.yaml"]
    cron = only(made, "CronJob")["spec"]
    assert (cron["concurrencyPolicy"], cron["timeZone"], cron["startingDeadlineSeconds"]) == (
        "Forbid", "Europe/Berlin", schedule.LATE_S,
    )  # fmt: skip
    pod = cron["jobTemplate"]["spec"]["template"]["spec"]
    line = pod["containers"][0]["command"][-1].replace("/etc/rayjob", str(tmp_path)).replace("/tmp/ray", f"{tmp_path}/")
    (template,) = [each["data"]["rayjob.json"] for each in made if "rayjob.json" in each.get("data", {})]
    (tmp_path / "rayjob.json").write_text(template)
    fake = tmp_path / "kubectl"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" = create ] || [ -e {tmp_path}/there ]\n')
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB": "summarize-29924585"}
    line = line.replace(f"> {tmp_path}/job.json", f"> {tmp_path}/out.json").replace(
        "-f " + f"{tmp_path}/job.json", "-f x"
    )
    assert subprocess.run(line, shell=True, env=env).returncode == 0
    assert json.loads((tmp_path / "out.json").read_text())["metadata"]["name"] == "summarize-29924585"
    (tmp_path / "there").touch()
    assert subprocess.run(line, shell=True, env=env).returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["get", "create", "get"]
    (rules,) = only(made, "Role")["rules"]
    assert rules == {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["get", "create"]}


HOSTILE = ["a b", "it's", '"q"', "$(touch x)", "`touch x`", "a;touch x", "a\nb: c", "- x", "{{x}}", "é", "!!python/x"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_text(pipe, job_file, tmp_path, text):
    path = job_file(
        name=f"x {text}", prompt={"template": text + "{text}"}, input={"path": f"s3://bucket/{text}".replace("\n", "")}
    )
    made = rendered(pipe, path)
    assert [found for each in made for found in wrong(each)] == []
    sent = json.loads(made[0]["data"]["job.json"])
    assert (sent["name"], sent["prompt"]["template"]) == (f"x {text}", text + "{text}")
    assert started(ray_job(made), tmp_path, "c") == ["run", "job.json"]
    assert re.fullmatch(r"x[a-z0-9-]*", made[-1]["metadata"]["name"])


# --- what is refused


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"cluster": {}}, "cluster.image: is missing"),
        ({"output": {"path": "out/here"}}, "is on no disk of the pods"),
        ({"input": {"path": "/data/in"}}, "input.path /data/in: is on no disk of the pods"),
        ({"model": {"path": "/data/model"}}, "model.path /data/model"),
        ({"output": {"path": "/work/out"}}, "output.path /work/out"),
        ({"output": {"path": "s3://b/o"}, "storage": {"s3": {"secret": "hidden-word"}}}, "storage.s3: holds a secret"),
        ({"input": {"path": "s3://b/o"},
          "storage": {"s3://b": {"client_kwargs": {"aws_secret_access_key": "hidden-word"}}}},
         "storage.s3://b: holds a secret"),
        ({"name": "n" * 48}, "at most 47 characters"),
        ({"run": {"cpus_per_actor": 4}}, "run.cpus_per_actor 4: a worker has 4 CPUs"),
        ({"cluster": {"image": "r.io/x", "secrets": ["a b"]}}, "cluster.secrets"),
        ({"cluster": {"image": "r.io/x; reboot"}}, "cluster.image"),
        ({"cluster": {"image": "r.io/x", "memory": "lots"}}, "cluster.memory"),
    ],
)  # fmt: skip
def test_what_pods_could_not_do_is_refused(pipe, job_file, changed, told):
    said = refusal(pipe, job_file(**changed))
    assert told in said
    assert "hidden-word" not in said


def test_a_shared_disk_is_reached_by_its_claim(pipe, job_file):
    cluster = {"image": "r.io/x:1", "volumes": {"shared": "/data"}}
    made = rendered(pipe, job_file(cluster=cluster, output={"path": "/data/out"}, input={"path": "/data/in"}))
    for group in (
        ray_job(made)["rayClusterSpec"]["headGroupSpec"],
        *ray_job(made)["rayClusterSpec"]["workerGroupSpecs"],
    ):
        spec = group["template"]["spec"]
        assert {"name": "shared", "mountPath": "/data"} in spec["containers"][0]["volumeMounts"]
        assert {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}} in spec["volumes"]
    refused = {"cluster": cluster, "output": {"path": "/database/out"}}
    assert "is on no disk" in refusal(pipe, job_file(**refused))


DATED = {"vars": {"date": {"today": "Europe/Berlin"}, "kind": "a"}, "output": {"path": "s3://b/${date}/${kind}"}}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--schedule", "2 * *"], "expected minute, hour"),
        (["--schedule", "TZ=UTC 0 2 * * *"], "expected minute, hour"),
        (["--schedule", "0 2 * * $(x)"], "expected minute, hour"),
        (["--schedule", "0 2 * * *", "--time-zone", "Berlin"], "--time-zone 'Berlin'"),
        (["--schedule", "0 2 * * *", "--operator", "1.5"], "cluster.kubectl_image: is missing"),
        (["--schedule", "0 2 * * *", "--set", f"name={'n' * 37}"], "at most 36 characters"),
        (["--schedule", "0 2 * * *", "--var", "date=2026-01-01"], "every firing would have the same output"),
    ],
)
def test_schedules_that_would_not_work_are_refused(pipe, job_file, arguments, told):
    assert told in refusal(pipe, job_file(**DATED), *arguments)


def test_a_schedule_keeps_its_date_open_and_fills_in_the_rest(pipe, job_file):
    made = rendered(pipe, job_file(**DATED), "--schedule", "*/5 2-4 * * mon,fri", "--var", "kind=b")
    sent = json.loads(made[0]["data"]["job.json"])
    assert sent["output"]["path"] == "s3://b/${date}/b"
    assert sent["vars"] == {"date": {"today": "Europe/Berlin"}}
    assert made[-1]["spec"]["schedule"] == "*/5 2-4 * * mon,fri"
    once = rendered(pipe, job_file(**DATED), "--var", "date=2026-01-01")
    assert json.loads(once[0]["data"]["job.json"])["output"]["path"] == "s3://b/2026-01-01/a"

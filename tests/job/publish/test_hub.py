"""Publication to the Hub: what the dataset holds, what is refused, and what the Hub may answer."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml

from pipeline.data.output.parts import PartStore
from pipeline.errors import ConfigError, EnvironmentFailed, OutputError
from pipeline.job.publish.card import dataset_card
from pipeline.job.publish.finished import FinishedOutput
from tests.job.publish.fake_hub import TOKEN
from tests.job.publish.kills import HUB_TARGET, rows_in_folder, rows_on_hub, to_hub


def test_a_dataset_is_created_with_a_card_and_loads(hub, output, tmp_path, monkeypatch):
    import datasets

    done = to_hub(output)
    dataset = hub.datasets["me/answers"]
    assert (done.is_new, done.rows, done.error_rows) == (True, 22, 2)
    assert done.version == f"{hub.url}/datasets/me/answers/tree/{dataset.branches['main']}"
    assert dataset.private
    assert rows_on_hub(hub) == rows_in_folder(output)
    files = dataset.files()
    card = files["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    assert header == {
        "configs": [{"config_name": "default", "data_files": "data/*.parquet"}],
        "tags": ["synthetic", "parquet-batch-inference"],
    }
    for row in ("| Rows | 22 |", "| Error rows | 2 (", "| Cost | unpriced |", "| id | int64 | kept from the input |"):
        assert row in card
    assert "| generated_text | string | the completion; null in error rows |" in card
    assert "template: Say {text}" in card
    for name, data in files.items():
        path = tmp_path / "clone" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        assert TOKEN.encode() not in data
        assert b"f0.parquet" not in data or name.startswith("data/"), "names of input files stay private"
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    loaded = datasets.load_dataset(str(tmp_path / "clone"), cache_dir=str(tmp_path / "cache"), split="train")
    assert len(loaded) == 22


def test_the_same_output_is_published_once(hub, output):
    to_hub(output)
    first = hub.datasets["me/answers"].branches["main"]
    hub.requests.clear()
    assert not to_hub(output).is_new
    assert hub.datasets["me/answers"].branches["main"] == first
    assert not [request for request in hub.requests if not request.startswith(("GET", "HEAD"))]
    hub.datasets["me/answers"].edit(**{f"data__{next(output.glob('part-*')).name}": None})
    assert to_hub(output).is_new, "a part was deleted there"
    assert rows_on_hub(hub) == rows_in_folder(output)


def test_another_state_replaces_the_first_and_keeps_what_was_written_around_it(hub, states):
    old, new = states
    to_hub(old, public=True)
    dataset = hub.datasets["me/answers"]
    assert not dataset.private
    fingerprint8 = next(old.glob("part-*")).name[5:13]
    former = {f"data__part-{fingerprint8}-w00009-u0000of0001-n1_dot_parquet".replace("_dot_", "."): b"a former part"}
    card = dataset.files()["README.md"].decode()
    card = card.replace("tags:", "license: mit\ntags:") + "\nWritten by hand.\n"
    dataset.edit(**former, README_dot_md=card.encode(), LICENSE=b"MIT")
    assert to_hub(new).is_new
    files, texts = dataset.files(), dataset.files()["README.md"].decode()
    assert rows_on_hub(hub) == rows_in_folder(new) != rows_in_folder(old)
    assert "license: mit" in texts
    assert texts.endswith("Written by hand.\n")
    assert "| Error rows | 1 (null_prompt 1) |" in texts
    assert files["LICENSE"] == b"MIT"
    dataset.edit(README_dot_md=b"mine")
    assert to_hub(old).is_new
    assert dataset.files()["README.md"] == b"mine"


def test_a_branch_is_created_and_leaves_others_unchanged(hub, output):
    hub.create("me/answers")
    to_hub(output, f"{HUB_TARGET}@v1")
    assert rows_on_hub(hub, "v1") == rows_in_folder(output)
    assert rows_on_hub(hub) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train_dot_csv": b"a"}, "holds files that this job has not published: train.csv"),
        ({"pipeline_dot_json": b'{"fingerprint": "0"}'}, "holds another job's output: pipeline.json"),
        ({"pipeline_dot_json": b"mine", "README_dot_md": b"mine"}, "overwrites README.md, pipeline.json and deletes"),
        ({"data__train_dot_parquet": b"a"}, "deletes data/train.parquet, in one commit|and deletes data/train.parquet"),
    ],
)
def test_files_of_other_origin_are_overwritten_only_on_request(hub, output, files, message):
    dataset = hub.create("me/answers")
    dataset.edit(**files)
    before = dict(dataset.files())
    with pytest.raises(OutputError, match=message):
        to_hub(output)
    assert dataset.files() == before
    assert to_hub(output, replace=True).is_new
    assert rows_on_hub(hub) == rows_in_folder(output)
    assert dataset.files().get("train.csv") == before.get("train.csv"), "other files stay"
    assert dataset.files()["README.md"].startswith(b"---\nconfigs:")


def test_files_that_would_change_the_rows_are_refused(hub, output):
    to_hub(output)
    hub.datasets["me/answers"].edit(data__mine_dot_parquet=b"a")
    with pytest.raises(OutputError, match=r"readers would take for parts: data/mine.parquet"):
        to_hub(output)
    to_hub(output, replace=True)
    assert rows_on_hub(hub) == rows_in_folder(output)
    hub.datasets["me/answers"].edit(_dot_gitignore=b"data", pipeline_dot_json=None)
    with pytest.raises(OutputError, match="gitignore"):
        to_hub(output, replace=True)


def test_a_branch_that_moves_is_looked_at_again(hub, output):
    hub.create("me/answers")
    moves = [1, 2]

    def move(request, is_done):
        if "/commit/" in request and not is_done and moves:
            hub.datasets["me/answers"].edit(**{f"_dot_gitattributes{moves.pop()}": b""})
        return False

    hub.strike = move
    with pytest.raises(OutputError, match=r"has not published: \.gitattributes2"):
        to_hub(output)
    moves[:] = [3]
    assert to_hub(output, replace=True).is_new
    moves[:] = range(100)
    (output / "_SUCCESS").touch()
    hub.datasets["me/answers"].edit(pipeline_dot_json=None)
    with pytest.raises(EnvironmentFailed, match="commits failed, or other writers were faster"):
        to_hub(output, replace=True)


def test_a_commit_whose_answer_was_lost_is_found(hub, output):
    lost = [True]
    hub.strike = lambda request, is_done: "/commit/" in request and is_done and bool(lost and lost.pop())
    assert not to_hub(output).is_new
    assert not lost
    assert sum(title.startswith("Publish") for title in hub.datasets["me/answers"].titles) == 1
    assert rows_on_hub(hub) == rows_in_folder(output)


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (401, OutputError, "does not accept the token"),
        (403, OutputError, "may not write"),
        (404, OutputError, "not found, or hidden"),
        (400, OutputError, "refuses the request"),
        (503, EnvironmentFailed, "cannot be reached, or failed"),
    ],
)
def test_answers_of_the_hub_become_messages_without_the_token(hub, output, status, kind, message):
    hub.statuses["/preupload/"] = status
    with pytest.raises(kind, match=message) as raised:
        to_hub(output)
    assert TOKEN not in str(raised.value)


def test_a_hidden_dataset_is_not_found(hub, output):
    hub.create("me/answers")
    hub.statuses["/api/datasets/me/answers"] = 404
    with pytest.raises(OutputError, match="not found, or hidden"):
        to_hub(output)


def test_without_a_network_or_a_token(hub, output, monkeypatch):
    hub.__exit__()
    with pytest.raises(EnvironmentFailed, match="cannot be reached"):
        to_hub(output)
    with pytest.raises(OutputError, match="the Hub refuses the request"):
        to_hub(output, "hf://datasets/me/-answers")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="set HF_TOKEN"):
        to_hub(output)
    with pytest.raises(ConfigError, match="expected hf://datasets/OWNER/NAME"):
        to_hub(output, "hf://datasets/answers")


def test_a_part_that_is_replaced_meanwhile_ends_the_publication(hub, states, output):
    shown = FinishedOutput.open(PartStore(str(output)))
    (changed,) = [part for part in states[1].glob("part-*") if part.read_bytes() != (output / part.name).read_bytes()]
    shutil.copy(changed, output)
    with pytest.raises(OutputError, match=f"{changed.name}: replaced or removed while it was published"):
        list(shown.read(print))


def test_a_part_that_was_written_again_with_the_same_rows_is_another_state(hub, output):
    to_hub(output)
    store = PartStore(str(output))
    name = next(store.list().parts())
    part = store.read_part(name)
    store.rewrite(name, part.table, part.metadata, part.tag)
    assert (
        FinishedOutput.open(store).digest != json.loads(hub.datasets["me/answers"].files()["pipeline.json"])["digest"]
    )
    assert to_hub(output).is_new


def test_secrets_and_private_paths_stay_out_of_the_card(output):
    shown = FinishedOutput.open(PartStore(str(output)))
    job = json.loads(json.dumps(shown.job))
    job["identity"]["server"] = {"model": None, "extra_body": {"api_key": "sk-secret-1", "user": "me"}}
    job["free"]["model"]["path"] = "/home/alice/models/Qwen3-4B"
    card = dataset_card(dataclasses.replace(shown, job=job))
    assert "sk-secret" not in card
    assert "user: me" in card
    assert "alice" not in card
    assert "| Model | Qwen3-4B |" in card


def test_the_command(hub, output, pipe, monkeypatch, tmp_path):
    code, out, err = pipe("publish", str(output), HUB_TARGET, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer == {**answer, "output": str(output), "target": HUB_TARGET, "is_new": True, "rows": 22}
    assert "already holds these 22 rows (2 error rows), nothing to do" in pipe("publish", str(output), HUB_TARGET)[1]
    code, _, err = pipe("publish", str(output), "s3://bucket/x")
    assert (code, err) == (2, "Error: TARGET s3://bucket/x: expected hf://datasets/OWNER/NAME or delta:PATH\n")
    (output / "_SUCCESS").unlink()
    code, _, err = pipe("publish", str(output), HUB_TARGET)
    assert code == 2
    assert "no _SUCCESS that `pipeline run` wrote, so the job is not finished; finish it" in err
    assert Path(output).exists()

"""Meaning of a job file: defaults, strictness, all mistakes at once, and which keys make two jobs different."""

import json
import pickle
import re
from datetime import date, datetime
from pathlib import Path

import pytest

from pipeline import run_job
from pipeline.config import JobConfig, JobFileError, load_job
from pipeline.config.identity import free_of, identity_of, numerics_of
from pipeline.config.mistakes import section_at
from pipeline.config.sections.prompt import PromptSection
from pipeline.engine.config import EngineConfig
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.speculation.config import SpeculationConfig
from pipeline.errors import ConfigError
from pipeline.job.actor.resolved_job import sampling_columns, sampling_params
from pipeline.stores.filesystem import storage_for
from tests.job.conftest import units_as_written

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
MINIMAL = """\
input: {path: data}
prompt: {column: text}
model: {path: demo}
output: {path: out}
"""


@pytest.fixture
def job(tmp_path: Path):
    """Return a function that loads a job from text, with the options of `load_job`."""

    def load(text: str = MINIMAL, **options) -> JobConfig:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return load_job(path, **options)

    return load


@pytest.fixture
def mistakes(job):
    """Return a function that lists the mistakes of a job with added lines, as `line: key: problem` without the path."""

    def list_mistakes(more: str = "", text: str = MINIMAL, **options) -> list[str]:
        with pytest.raises(JobFileError) as caught:
            job(text + more, **options)
        return [str(m).replace(m.location, m.location.rpartition("/")[2]) for m in caught.value.mistakes]

    return list_mistakes


def test_defaults_are_those_of_the_engine(job):
    config = job()
    assert config.name == "job"
    assert config.input.columns is None
    assert config.engine_config("folder", None, 2) == EngineConfig(model="folder", num_threads=2)
    smaller = job(MINIMAL.replace("path: demo", "path: demo, quantization: int4-rtn"))
    assert smaller.engine_config("folder", None) == EngineConfig(model="folder", quantization="int4-rtn")
    assert sampling_params(config.sampling) == SamplingParams(max_tokens=256)
    assert sampling_columns(config) == {}
    assert config.prompt.spec().columns == ("text",)
    assert config.cost.hourly_usd is None


def test_a_full_job(job):
    config = job(
        "name: full\n"
        "input: {path: 's3://b/*.parquet', columns: [id, text], limit: 10}\n"
        "storage_options: {s3: {key: k}}\n"
        "prompt: {template: '{title}: {text} {{x}} {title}',\n"
        "         chat: {system: Be brief., chat_template_kwargs: {a: false}}}\n"
        "model: org/name\n"
        "engine: {device: 'cuda:1', dtype: bfloat16, deterministic: on,\n"
        "         kv_cache_memory_bytes: 2 GiB, max_num_seqs: 64}\n"
        "sampling: {max_tokens: {column: budget}, min_tokens: 20, temperature: 1, stop: END, top_k: 5, seed: 3}\n"
        "output: {path: out/full, rename: {generated_text: answer}}\n"
        "run: {actors: 4, drain_timeout: 1 h 30 min}\n"
        "cost: {hourly_usd: 2.5}\n"
    )
    assert config.prompt.spec().columns == ("title", "text")
    assert config.prompt.chat.system == "Be brief."
    engine = config.engine_config("folder", None, 1)
    assert (engine.device, engine.dtype, engine.kv_cache_memory_bytes) == ("cuda:1", "bfloat16", 2 * 2**30)
    assert engine.deterministic
    params = sampling_params(config.sampling)
    assert params.min_tokens == 20, "a constant min_tokens is kept although max_tokens is per row"
    assert (params.temperature, params.stop, params.top_k) == (1.0, ("END",), 5)
    assert sampling_columns(config) == {"max_tokens": "budget"}
    assert config.run.drain_timeout == 5400
    assert config.model.path == "org/name"
    assert config.seed == 3


def test_every_engine_and_sampling_option_reaches_the_engine(job):
    """Each engine field must be in the job file, or be excluded here on purpose."""
    config = job()
    not_in_jobs = {"model", "adapters", "quantization", "speculation", "num_threads"}  # or in another section
    not_in_jobs |= {"block_size", "kernels", "enable_prefix_caching", "seed"}  # for measuring and tests
    assert set(EngineConfig.__dataclass_fields__) - not_in_jobs == set(type(config.engine).model_fields)
    of_jobs_alone = {"generation_config"}
    assert set(SamplingParams.__dataclass_fields__) == set(type(config.sampling).model_fields) - of_jobs_alone


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("adapters: {a: x}", "model.adapters: has no effect without model.adapter"),
        ("adapter: a", "model.adapter: needs model.adapters"),
        ("adapters: {a: x, b: y}, adapter: c", "model.adapter: 'c' is not in model.adapters; expected one of a, b"),
        (
            "adapters: {a: 'demo:x'}, adapter: a",
            "model.adapters.a: no embedded adapter 'demo:x': expected demo:invoice",
        ),
        ("adapters: {a/b: x}, adapter: a/b", "model.adapters.a/b"),
    ],
)
def test_adapters_and_their_names_belong_together(job, keys, message):
    with pytest.raises(JobFileError, match=re.escape(message)):
        job(MINIMAL.replace("path: demo", f"path: demo, {keys}"))


def test_only_adapters_that_rows_may_use_are_used(job):
    both = "path: demo, adapters: {a: x, b: y}, adapter: "
    assert job(MINIMAL.replace("path: demo", f"{both}b")).model.used_adapters == {"b": "y"}
    by_row = job(MINIMAL.replace("path: demo", f"{both}{{column: style}}"))
    assert by_row.model.used_adapters == {"a": "x", "b": "y"}
    assert by_row.urls["model.adapters.b"] == "y"
    with pytest.raises(JobFileError, match=r"engine.deterministic: is not supported with model.adapters"):
        job(MINIMAL.replace("path: demo", f"{both}b") + "engine: {deterministic: on}\n")


def test_minus_1_is_off_as_in_vllm(job):
    plain, off = job(MINIMAL), job(MINIMAL + "sampling: {top_k: -1, seed: -1, thinking_token_budget: -1}\n")
    assert identity_of(off) == identity_of(plain)
    assert sampling_params(off.sampling) == sampling_params(plain.sampling)
    assert sampling_params(off.sampling) == SamplingParams(max_tokens=256, top_k=-1, seed=-1)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    for key in ("top_k: -2", "seed: -2", "top_k: true", "max_tokens: -1"):
        with pytest.raises(JobFileError, match=key.partition(":")[0]):
            job(MINIMAL + f"sampling: {{{key}}}\n")


def test_off_and_false_both_switch_off(job):
    for word in ("off", "false", "no", "False"):
        assert job(MINIMAL + f"engine: {{deterministic: {word}}}\n").engine.deterministic is False
    for word in ("off", "false"):
        assert job(MINIMAL + f"speculation: {word}\n").speculation.method == "off"
        assert job(MINIMAL + f"speculation: {{method: {word}}}\n").speculation.method == "off"


def test_speculation_reaches_the_engine(job):
    assert job().engine_config("folder", None).speculation_config == SpeculationConfig("auto")
    config = job(MINIMAL + "speculation: {method: draft_model, model: demo:draft, num_speculative_tokens: 3}\n")
    assert config.engine_config("folder", "found").speculation_config == SpeculationConfig("draft_model", "found", 3)
    assert config.engine_config("folder", None).speculation_config.model == "demo:draft"
    assert free_of(config)["speculation"]["model"] == "demo:draft"


def test_messages_are_a_chat(job):
    config = job(MINIMAL.replace("column: text", "messages: turns"))
    assert config.prompt.chat is not None
    assert config.prompt.spec().columns == ("turns",)
    assert job().prompt.chat is None
    assert job(MINIMAL.replace("column: text", "column: text, chat: true")).prompt.chat is not None


def test_all_mistakes_at_once_with_line_and_suggestion(mistakes):
    found = "\n".join(
        mistakes(
            text="inptu: {path: data}\n"
            "prompt: {column: a, template: 'x {b}'}\n"
            "model: [demo]\n"
            "engine:\n"
            "  pipeline_parallel_size: 2\n"
            "  max_num_seq: 3\n"
            "  dtype: bfloat\n"
            "sampling: {temperature: hot, top_p: 2, actors: 2}\n"
            "output: {path: ''}\n"
            "run: {actors: 0}\n"
            "cost: {hourly_usd: 0}\n"
        )
    )
    for expected in [
        "job.yaml: input: required, but missing\n    Write `input: {path: prompts.parquet}`.",
        "job.yaml:1: inptu: unknown key\n    Did you mean `input`?",
        "job.yaml:2: prompt: expected exactly one of template, column, messages; got template and column",
        "job.yaml:3: model: expected `key: value` lines; got a list of 1",
        "job.yaml:5: engine.pipeline_parallel_size: unknown key\n    pipeline parallelism is not supported",
        "job.yaml:6: engine.max_num_seq: unknown key\n    Did you mean `max_num_seqs`?",
        "job.yaml:7: engine.dtype: expected one of auto, bfloat16, float16, float32; got 'bfloat'"
        "\n    Did you mean `bfloat16`?",
        "job.yaml:8: sampling.actors: unknown key\n    Did you mean `run.actors`?",
        "job.yaml:8: sampling.temperature: expected a number, or {column: name}; got 'hot'",
        "job.yaml:8: sampling.top_p: expected a number in (0, 1]; got 2.0",
        "job.yaml:9: output.path: must not be empty",
        "job.yaml:10: run.actors: expected a number from 1 to 100,000, or [MIN, MAX]; got 0",
        "job.yaml:11: cost.hourly_usd: expected more than 0",
    ]:
        assert expected in found


ADDED = [
    ("model2: {}\n", "model2: unknown key\n    Did you mean `model`?"),
    ("sampling: {max_tokens: true}\n", "expected an integer, or {column: name}; got true"),
    ("task: summarize\n", "task.type: expected one of generate, choice, score, embed, classify; got 'summarize'"),
    ("task: choice\n", "task.labels: required by task choice, but missing"),
    ("task: {labels: [a, b]}\n", "task.labels: has no effect with task generate; write type: choice, or remove"),
    (
        "task: {type: embed, completion: '{a}'}\n",
        "task.completion: has no effect with task embed; write type: score",
    ),
    ("task: {type: choice, labels: [a]}\n", "task.labels: expected at least two labels; got 1"),
    ("task: {type: choice, labels: [a, b, a]}\n", "task.labels: 'a' is listed twice"),
    ("task: {type: choice, labels: [a, '']}\n", "task.labels: an empty label"),
    ("task: {type: score, completion: plain}\n", "task.completion: names no column"),
    ("task: {type: score, completion: 5}\n", "task.completion: expected text, or {column: name}; got 5"),
    ("task: {type: score, token_logprobs: 101}\n", "task.token_logprobs: expected at most 100"),
    ("task: {type: embed, normalize: maybe}\n", "task.normalize: expected auto, true or false; got 'maybe'"),
    ("task: {type: embed, dimensions: 0}\n", "task.dimensions: expected at least 1"),
    ("task: {type: classify, activation: relu}\n", "expected one of auto, softmax, sigmoid, none; got 'relu'"),
    ("task: embed\nsampling: {max_tokens: 3}\n", "sampling.max_tokens: has no effect with task embed"),
    ("task: embed\nquality: {sample: 0.1}\n", "quality.sample: compares completions"),
    ("task: embed\nspeculation: lookup\n", "speculation: has no effect with task"),
    ("sampling: {max_tokens: '64'}\n", "expected an integer, or {column: name}; got '64'"),
    ("sampling: {max_tokens: 0}\n", "expected an integer of at least 1; got 0"),
    ("sampling: {max_tokens: {colum: b}}\n", "sampling.max_tokens.colum: unknown key\n    Did you mean `column`?"),
    ("sampling: {seed: {column: b}}\n", "sampling.seed: expected an integer"),
    ("sampling: {reasoning: atuo}\n", "sampling.reasoning: 'atuo': expected auto, or {start: <think>, "),
    ("sampling: {logprobs: {column: ''}}\n", "sampling.logprobs.column: must not be empty"),
    ("sampling: {min_tokens: 300}\n", "min_tokens 300 is more than max_tokens 256"),
    ("sampling: {temperature: .nan}\n", "expected a finite number of at least 0; got nan"),
    ("sampling: {stop: ['']}\n", "expected non-empty strings"),
    ("sampling: {max_new_tokens: 5}\n", "named sampling.max_tokens here"),
    ("n: 5\n", "Did you mean `sampling.n`?"),
    ("sampling: {prompt_logprobs: 101}\n", "expected an integer from 0 to 100, or none; got 101"),
    ("task: score\nsampling: {prompt_logprobs: 1}\n", "sampling.prompt_logprobs: has no effect with task score"),
    ("engine: {device: gpu}\n", "expected auto, cpu, cuda or cuda:N; got 'gpu'"),
    ("speculation: eagle\n", "expected one of auto, off, lookup, draft_model; got 'eagle'"),
    ("speculation: {method: eagle}\n", "expected one of auto, off, lookup, draft_model; got 'eagle'"),
    ("speculation: draft_model\n", "speculation: model: required by method draft_model"),
    ("speculation: {model: demo:draft}\n", "only for method draft_model, but the method is auto"),
    ("speculation: {method: lookup, model: demo}\n", "only for method draft_model, but the method is lookup"),
    ("speculation: {method: draft_model, model: demo:small}\n", "no embedded model 'demo:small'"),
    ("speculation: {num_speculative_tokens: 99}\n", "speculation.num_speculative_tokens: expected at most 32"),
    ("engine: {speculation: off}\n", "Did you mean `speculation`?"),
    ("engine: {kv_cache_dtype: int8}\n", "expected one of auto, none, fp8; got 'int8'"),
    ("engine: {activation_dtype: fp16}\n", "expected one of auto, none, fp8, int8; got 'fp16'"),
    ("engine: {quantization: awq}\n", "named model.quantization here; quantized checkpoints"),
    ("engine: {gpu_memory_utilization: 90}\n", "expected at most 1"),
    ("engine: {gpu_memory_utilization: .nan}\n", "gpu_memory_utilization: expected a finite number; got nan"),
    ("engine: {max_num_seqs: .nan}\n", "max_num_seqs: expected an integer; got nan"),
    ("engine: {cpu_offload_gb: -1}\n", "expected at least 0"),
    (
        "engine: {kv_cache_memory_bytes: lots}\n",
        "expected a number of bytes, such as 8_000_000 or 8 GiB; got 'lots'",
    ),
    ("run: {max_error_rate: 5}\n", "expected at most 1"),
    ("run: {drain_timeout: .inf}\n", "run.drain_timeout: expected a duration"),
    ("run: {drain_timeout: 60}\n", "run.drain_timeout: expected a duration with its unit, such as `60 s`; got 60"),
    (
        "run: {max_runtime: 5 weeks}\n",
        "expected a duration, such as 90 s, 30 min, 6 h or 1 h 30 min; got '5 weeks'",
    ),
    ("run: {max_runtime: 0 s}\n", "run.max_runtime: expected more than 0"),
    ("storage_options: {s3: {profile: lab}}\n", "storage_options.s3: matches no path of this job"),
    ("run: [actors]\n", "expected `key: value` lines; got a list of 1"),
    ("name: 5\n", "expected text; got 5\n    Quote it to make it text."),
]
REPLACED = [
    ("column: text", "template: plain words", "names no column"),
    ("column: text", "template: 'x {text[0]}'", "indices, conversions and nested"),
    ("column: text", "template: 'x {text!r}'", "indices, conversions and nested"),
    ("column: text", "template: 'x {'", "prompt.template: "),
    ("column: text", "column: text, fill_null: {txt: x}", "prompt: fill_null: 'txt' is not in the prompt"),
    ("column: text", "messages: text, fill_null: {text: x}", "not with messages"),
    ("column: text", "column: text, special_tokens: template", "special_tokens: template needs a prompt.template"),
    ("column: text", "messages: text, special_tokens: template", "column and messages hold data"),
    ("column: text", "template: '{text}', chat: true, special_tokens: template", "with chat the chat template"),
    ("{column: text}", "{}", "expected exactly one of template, column, messages; got none of them"),
    ("path: demo", "path: demo:large", "expected demo, demo:target, demo:target-awq"),
    ("path: data", "path: data, columns: [a, a]", "'a' is repeated"),
    ("path: demo", "path: 's3://b/m', revision: x", "model.revision: only a Hugging Face id has revisions"),
    ("path: data", "path: data, limit: 0", "expected at least 1"),
    ("path: data", "path: 's3://user:hunter2@bucket/x'", "input.path: a bucket's url cannot contain a user or"),
    ("path: demo", "path: 's3://user:hunter2@bucket'", "model.path: a bucket's url cannot contain a user or password"),
    ("path: out", "path: 'gs://hunter2@bucket/x'", "output.path: a bucket's url cannot contain a user or password"),
    ("path: out", 'path: "out\\n"', "output.path: expected a path on one line, without control characters"),
    ("path: out", "path: out, rename: {error: e, finish_reason: e}", "two columns get the same new name"),
]
REFUSED = {MINIMAL + more: expected for more, expected in ADDED}
REFUSED |= {MINIMAL.replace(before, after): expected for before, after, expected in REPLACED}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(mistakes, text: str):
    assert REFUSED[text] in "\n".join(mistakes(text=text))


STORES = MINIMAL.replace("path: data", "path: 'ftp://user:hunter2@host/x'").replace("path: out", "path: 's3://b/out'")
STORES = STORES.replace("path: demo", "path: 's3://models/m'")
STORES += "speculation: {method: draft_model, model: 's3://models2/d'}\n"
STORES += (
    "storage_options: {ftp: {secret: hunter2}, s3: {profile: all}, 's3://models/': {key: hunter2, secret: hunter2}}\n"
)


def test_the_longest_prefix_of_a_url_gives_its_options(job):
    config = job(STORES)
    profile, keys = {"profile": "all"}, {"key": "hunter2", "secret": "hunter2"}
    for path, options in (
        (config.input.path, {"secret": "hunter2"}), ("s3://b/out", profile), ("s3://models", keys),
        ("s3://models/m", keys), ("s3://models2/d", profile), ("gs://models/m", {}), ("models/m", {}),
    ):  # fmt: skip
        assert storage_for(path, config.storage_options) == options, path


def test_secrets_are_in_no_message_and_no_record(job, mistakes):
    config = job(STORES)
    assert "hunter2" not in repr(config).replace("ftp://user:hunter2@", "")
    assert "storage_options" not in json.dumps([identity_of(config), numerics_of(config), free_of(config)])
    assert "hunter2" not in json.dumps([identity_of(config), numerics_of(config), free_of(config)])
    found = "\n".join(mistakes(text=MINIMAL + "storage_options: {s3: hunter2}\n"))
    assert "storage_options.s3" in found
    assert "hunter2" not in found
    for setting in (
        "storage_options.s3.secret hunter2",
        "storage_options.=hunter2",
        "storage_options={secret: [hunter2}",
    ):
        assert "hunter2" not in "\n".join(mistakes(text=STORES, sets=[setting]))


def test_settings_overlays_and_limit_in_this_order(job, tmp_path, mistakes):
    overlay = tmp_path / "gpu.yaml"
    overlay.write_text("engine: {max_num_seqs: 8}\nrun: {actors: 2}\n")
    config = job(overlays=[overlay], sets=["run.actors=3", "prompt.column=null", "prompt.template={a}: b"], limit=7)
    assert (config.engine.max_num_seqs, config.run.actors, config.input.limit) == (8, 3, 7)
    assert config.prompt.template == "{a}: b", "a text key keeps everything after the = unchanged"
    assert config.location("engine.max_num_seqs") == f"{overlay}:1"
    assert config.location("run.actors") == "--set"
    assert config.location("input.limit") == "--limit"
    assert config.location("input.path").endswith("job.yaml:1")
    assert sampling_columns(job(sets=["sampling.max_tokens={column: b}"])) == {"max_tokens": "b"}
    assert "Did you mean `actors`?" in mistakes(sets=["run.actor=2"])[0]
    assert "expected key=value" in mistakes(sets=["run.actors"])[0]
    overlay.write_text("engine: {max_seqs: 8}\n")
    assert mistakes(overlays=[overlay])[0].startswith("gpu.yaml:1: engine.max_seqs: unknown key")


def test_a_job_survives_pickling_with_its_lines(job):
    config = job()
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.location("prompt.column") == config.location("prompt.column")
    with pytest.raises(Exception, match="frozen"):
        copy.name = "x"


IDENTITY = [
    ("path: data", "path: data, columns: [id]"), ("path: data", "path: data, limit: 5"),
    ("column: text", "column: other"), ("column: text", "template: '{text}'"),
    ("column: text", "column: text, chat: true"), ("path: out", "path: out, rename: {generated_text: a}"),
    ("prompt:", "sampling: {max_tokens: 5}\nprompt:"), ("prompt:", "sampling: {max_tokens: {column: b}}\nprompt:"),
    ("prompt:", "sampling: {seed: 5}\nprompt:"), ("prompt:", "engine: {max_model_len: 5}\nprompt:"),
    ("prompt:", "run: {window_rows: 5}\nprompt:"), ("path: out", "path: out, rows_per_file: 5"),
    ("column: text", "column: text, fill_null: {text: none}"),
    ("column: text", "column: text, chat: {system: Be brief.}"), ("prompt:", "task: embed\nprompt:"),
    ("prompt:", "task: {type: choice, labels: [a, b]}\nprompt:"),
    ("column: text", "template: '{text}', special_tokens: template"),
]  # fmt: skip
NUMERICS = [
    ("prompt:", "engine: {dtype: float32}\nprompt:"),
    ("prompt:", "engine: {device: cpu}\nprompt:"),
    ("path: demo", "path: demo, quantization: nf4"),
    ("prompt:", "engine: {deterministic: on}\nprompt:"),
]
FREE = [
    ("path: out", "path: elsewhere"),
    ("path: data", "path: copied/data"),
    ("path: demo", "path: other/folder"),
    ("prompt:", "name: other\nprompt:"),
    ("prompt:", "run: {actors: 3, max_error_rate: 0.5, drain_timeout: 3 s, notify: x}\nprompt:"),
    ("prompt:", "engine: {max_num_seqs: 3, cpu_offload_gb: 1}\nspeculation: off\nprompt:"),
    ("path: demo", "path: owner/name, revision: v1"),
    ("prompt:", "speculation: {method: draft_model, model: demo:draft, num_speculative_tokens: 3}\nprompt:"),
    ("prompt:", "cost: {hourly_usd: 3}\nprompt:"),
]


@pytest.mark.parametrize(
    ("change", "identity", "numerics"),
    [*((each, True, False) for each in IDENTITY), *((each, False, True) for each in NUMERICS),
     *((each, False, False) for each in FREE)],
)  # fmt: skip
def test_each_change_is_of_the_identity_the_numerics_or_free(job, change, identity, numerics):
    base, changed = job(), job(MINIMAL.replace(*change, 1))
    assert (identity_of(changed) != identity_of(base)) == identity
    assert (numerics_of(changed) != numerics_of(base)) == numerics
    for part in (identity_of(changed), numerics_of(changed), free_of(changed)):
        assert json.loads(json.dumps(part)) == part


def test_every_key_is_of_one_class(job):
    """Each field of a section is in the identity, the numerics or the record of free keys, except fields that may hold
    a secret, and the file of a chat template, whose text is in the identity."""
    text = MINIMAL.replace("column: text", "column: text, chat: true") + "server: {base_url: 'http://localhost:8000'}\n"
    parts = [free_of(job(text)), numerics_of(job(text)), identity_of(job(text))]
    seen = {f"{name}.{key}" for part in parts for name in part if isinstance(part[name], dict) for key in part[name]}
    hidden = {"run.notify", "server.api_key", "server.headers"}
    for name, field in JobConfig.model_fields.items():
        section = section_at(JobConfig, (name,))
        if section is not None and name not in ("kubernetes", "steps"):  # steps are wholly in the identity
            recorded = {inner.serialization_alias or key for key, inner in section.model_fields.items()}
            assert not {f"{name}.{key}" for key in recorded} - seen - hidden, field
    assert set(parts[2]["prompt"]["chat"]) == {"system", "continue_final_message", "template_kwargs"}


def test_a_renamed_key_keeps_its_first_name_in_the_identity(job):
    """Outputs that exist can be resumed."""
    chat = "column: text, chat: {chat_template_kwargs: {a: 1}}"
    text = MINIMAL.replace("column: text", chat).replace("path: out", "path: out, samples_as: rows")
    identity = identity_of(job(text), only_set=True)
    assert identity["prompt"] == {"column": "text", "chat": {"template_kwargs": {"a": 1}}}
    assert identity["output"] == {"samples": "rows"}


def test_a_task_is_in_the_identity_and_computes_no_completion(job):
    chosen = job(MINIMAL + "task: {type: choice, labels: [a, b]}\n")
    assert identity_of(chosen)["task"]["labels"] == ["a", "b"]
    column = job(MINIMAL + "task: {type: choice, labels: {column: options}}\n")
    assert identity_of(column)["task"]["labels"] == {"column": "options"}
    assert units_as_written(column).columns == ("text", "options")
    assert chosen.engine_config("folder", None).speculation_config.method == "off"
    assert units_as_written(chosen).default_max_tokens == 0


def test_overlays_merge_with_a_bare_word_as_a_section(job, tmp_path):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("model: {quantization: int8}\n")
    config = job(
        MINIMAL.replace("{path: demo}", "demo") + "task: embed\n", overlays=[overlay], sets=["task.pooling=mean"]
    )
    assert (config.model.path, config.model.quantization) == ("demo", "int8")
    assert (config.task.type, config.task.pooling) == ("embed", "mean")
    assert config.location("model.path").endswith("job.yaml:3")
    assert job(sets=["model=other/model"], overlays=[overlay]).model.quantization == "none", "a word replaces the whole"


def test_another_gpu_of_the_machine_is_the_same_numerics(job):
    one, two = (job(MINIMAL + f"engine: {{device: 'cuda:{n}'}}\n") for n in (0, 1))
    assert numerics_of(one) == numerics_of(two)


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda p: p.name)
@pytest.mark.parametrize("overlay", [None, *PRESETS], ids=lambda p: p.name if p else "plain")
def test_the_job_files_and_presets_we_ship_are_valid(path: Path, overlay: Path | None):
    plain = load_job(path)
    if overlay is not None and plain.server is not None:
        with pytest.raises(JobFileError, match=r"no effect with a server"):
            load_job(path, overlays=[overlay])
        return
    config = load_job(path, overlays=[overlay] if overlay else [])
    assert identity_of(config) == identity_of(plain), "a preset must not make it another job"


def test_the_date_of_a_chat_is_a_date_with_or_without_a_time(job):
    def date_of(value: str):
        return job(MINIMAL.replace("column: text", f"column: text, chat: {{date: {value}}}")).prompt.chat.date

    assert date_of("2026-11-23") == date_of("'2026-11-23'") == "2026-11-23T00:00:00"
    assert date_of("'2026-11-23 14:05'") == date_of("2026-11-23T14:05:00") == "2026-11-23T14:05:00"
    assert date_of("null") is None
    given = job(MINIMAL.replace("column: text", "column: text, chat: true"), sets=["prompt.chat.date=2026-11-23"])
    assert given.prompt.chat.date == "2026-11-23T00:00:00"
    for value in (date(2026, 11, 23), datetime(2026, 11, 23)):  # like other YAML libraries parse it
        data = {"column": "text", "chat": {"date": value}}
        assert PromptSection.model_validate(data).chat.date == "2026-11-23T00:00:00"


@pytest.mark.parametrize("value", ["tomorrow", "23.11.2026", "2026", "2026-02-30", "2026-11-23T10:00:00Z", "true"])
def test_invalid_dates_of_a_chat_are_refused(mistakes, value):
    (mistake,) = mistakes(text=MINIMAL.replace("column: text", f"column: text, chat: {{date: {value}}}"))
    assert "prompt.chat.date: expected a date, such as 2026-11-23" in mistake


@pytest.mark.parametrize(("actors", "pool"), [("[2, 5]", (2, 5)), ("5", (5, 5))])
def test_actors_are_a_number_or_a_pool(job, actors, pool):
    assert job(sets=[f"run.actors={actors}"]).run.pool == pool


def test_an_impossible_pool_is_refused_with_its_key(mistakes):
    for pool in ("[3, 2]", "[0, 2]", "[1]", "[1, 2, 3]", "{min: 1, max: 2}", "0", "x", "true", "100001"):
        (mistake,) = mistakes(sets=[f"run.actors={pool}"])
        assert mistake.startswith("--set: run.actors: expected a number from 1 to 100,000, or [MIN, MAX]; got ")


def test_wrong_arguments_from_python_are_refused_by_name(tmp_path):
    for settings in ("input.limit=3", {"input.limit": 3}):
        with pytest.raises(ConfigError, match=r"load_job: sets = .*: expected a list of texts"):
            load_job(tmp_path / "job.yaml", sets=settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"run_job\('job.yaml'\): expected a job, as in run_job\(load_job"):
        run_job("job.yaml")  # type: ignore[arg-type]

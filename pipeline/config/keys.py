"""The keys of a job file: its sections in the order of the reference, and the few keys outside of them.

Owns what each section is for. The keys within a section are in `sections/`, what must agree between keys is in
`contradictions.py`.
"""

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from pipeline.config.sections.data import InputSection, OutputSection
from pipeline.config.sections.engine import EngineSection
from pipeline.config.sections.kubernetes import KubernetesSection
from pipeline.config.sections.limits import CostSection, QualitySection, TargetsSection
from pipeline.config.sections.model import ModelSection
from pipeline.config.sections.prompt import PromptSection
from pipeline.config.sections.run import RunSection
from pipeline.config.sections.sampling import SamplingSection
from pipeline.config.sections.speculation import BareMethod, SpeculationSection
from pipeline.config.sections.task import BareTask, TaskSection
from pipeline.config.values import HIDDEN, ModelPlace, Section, or_word
from pipeline.config.variables import TodaySection

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
UrlPrefix = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9+.-]*(://.*)?$")]
WORDS = {
    "model": "path",
    "task": "type",
    "speculation": "method",
}  # sections that a bare word may stand for, by the key that it is


class JobKeys(Section):
    """What a job file says, each section checked on its own."""

    name: str = Field(
        default="",
        max_length=200,
        description="What reports call the job. The file's name when left out.",
        examples=["summarize"],
        json_schema_extra={"type": ["string", "null"]},
    )
    vars: dict[VariableName, str | TodaySection | None] = Field(
        default={},
        description="Variables of input.path and output.path, written `${NAME}` there, each with its text, {today: "
        "ZONE} for the date there, or null where every run gives it: --var NAME=VALUE.",
        examples=[{"date": {"today": "Europe/Berlin"}}],
        json_schema_extra=HIDDEN,
    )
    storage: dict[UrlPrefix, dict[str, Any]] = Field(
        default={},
        repr=False,
        description="fsspec options, such as a profile or an endpoint, of the urls that begin with a prefix: a "
        "protocol (s3) or the beginning of a url (s3://bucket/path). The longest prefix wins; urls without one take "
        "the environment's. Never shown.",
        examples=[{"s3": {"profile": "research"}}],
        json_schema_extra=HIDDEN,
    )
    input: InputSection = Field(description="What is read.", examples=[{"path": "prompts.parquet"}])
    prompt: PromptSection = Field(
        description="Where a row's prompt comes from: one of template, column and messages.",
        examples=[{"template": "Summarize: {text}"}, {"column": "text"}],
    )
    model: Annotated[ModelSection, or_word(WORDS["model"], ModelSection, ModelPlace)] = Field(
        description="Which checkpoint answers. A bare word is its path: `model: Qwen/Qwen3-4B`.",
        examples=["Qwen/Qwen3-4B", {"path": "Qwen/Qwen3-4B"}],
    )
    task: Annotated[TaskSection, or_word(WORDS["task"], TaskSection, BareTask)] = Field(
        default=TaskSection(),
        description="What is computed for each row. A bare word is its type: `task: embed`.",
        examples=["embed", {"type": "choice", "labels": ["billing", "bug", "question"]}],
    )
    engine: EngineSection = Field(
        default=EngineSection(), description="How the engine computes.", examples=[{"dtype": "bfloat16"}]
    )
    speculation: Annotated[SpeculationSection, or_word(WORDS["speculation"], SpeculationSection, BareMethod)] = Field(
        default=SpeculationSection(),
        description="Speculative decoding. A bare word is its method: `speculation: off`.",
        examples=["off", {"method": "draft_model", "model": "models/Qwen3-0.6B"}],
    )
    sampling: SamplingSection = Field(
        default=SamplingSection(),
        description="How tokens are chosen, in vLLM's names. All but generation_config, seed, repetition_detection "
        "and reasoning may be {column: name}.",
        examples=[{"max_tokens": 256, "temperature": 0.7}],
    )
    output: OutputSection = Field(description="Where the results go.", examples=[{"path": "out/summarize"}])
    run: RunSection = Field(default=RunSection(), description="How the work is run.", examples=[{"actors": 8}])
    kubernetes: KubernetesSection = Field(
        default=KubernetesSection(),
        description="The Ray cluster that `pipeline manifests` writes manifests for.",
        examples=[{"image": "registry.example.com/parquet-batch-inference:0.1.0-cpu"}],
        json_schema_extra=HIDDEN,
    )
    cost: CostSection = Field(
        default=CostSection(), description="What the machines cost, for the report.", examples=[{"hourly_usd": 2.5}]
    )
    quality: QualitySection = Field(
        default=QualitySection(),
        description="Compares a sample of the rows with a reference model while the job runs.",
        examples=[{"sample": 0.001, "model": "Qwen/Qwen3-4B"}],
    )
    targets: TargetsSection = Field(
        default=TargetsSection(),
        description="Figures that the finished job is compared with.",
        examples=[{"max_usd_per_1m_generated": 0.5}],
    )

    @property
    def seed(self) -> int:
        """The job's seed."""
        return self.sampling.seed or 0

    @property
    def urls(self) -> dict[str, str]:
        """Each path of the job that may be a url, by its key."""
        paths = {
            "input.path": self.input.path,
            "output.path": self.output.path,
            "model.path": self.model.path,
            "speculation.model": self.speculation.model,
            "quality.model": self.quality.model,
        }
        return {key: path for key, path in paths.items() if path is not None}

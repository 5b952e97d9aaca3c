"""Top-level keys of a job file: its sections, in the order of the reference, and a few others.

Keys within sections are in `sections/`, checks between keys in `contradictions.py`.
"""

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from pipeline.checkpoints.locate import NO_CHECKPOINT
from pipeline.config.sections.data import InputSection, OutputSection
from pipeline.config.sections.engine import EngineSection
from pipeline.config.sections.images import ImagesSection
from pipeline.config.sections.kubernetes import KubernetesSection
from pipeline.config.sections.limits import CostSection, QualitySection
from pipeline.config.sections.model import ModelSection
from pipeline.config.sections.prompt import PromptSection
from pipeline.config.sections.run import RunSection
from pipeline.config.sections.sampling import SamplingSection
from pipeline.config.sections.server import ServerSection
from pipeline.config.sections.speculation import BareMethod, SpeculationSection
from pipeline.config.sections.steps import StepSection
from pipeline.config.sections.task import BareTask, TaskSection
from pipeline.config.values import HIDDEN, ConfigSection, ModelPath, or_word
from pipeline.config.variables import TodaySection

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
UrlPrefix = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9+.-]*(://.*)?$")]
WORDS = {
    "model": "path",
    "task": "type",
    "speculation": "method",
}  # sections that may be a bare word, and the key that it sets


class JobKeys(ConfigSection):
    """Keys of a job file, with each section checked on its own."""

    name: str = Field(
        default="",
        max_length=200,
        description="Name of the job in reports. Default: the file's name.",
        examples=["summarize"],
        json_schema_extra={"type": ["string", "null"]},
    )
    vars: dict[VariableName, str | TodaySection | None] = Field(
        default={},
        description="Variables for input.path and output.path, used as `${NAME}`: a text, {today: ZONE} for the date "
        "in that time zone, or null if each run sets it with --var NAME=VALUE.",
        examples=[{"date": {"today": "Europe/Berlin"}}],
        json_schema_extra=HIDDEN,
    )
    storage_options: dict[UrlPrefix, dict[str, Any]] = Field(
        default={},
        repr=False,
        description="fsspec options, such as a profile or an endpoint, by url prefix: a protocol (s3) or the beginning "
        "of a url (s3://bucket/path). The longest prefix wins; other urls use the environment. Never logged.",
        examples=[{"s3": {"profile": "research"}}],
        json_schema_extra=HIDDEN,
    )
    input: InputSection = Field(description="Input data.", examples=[{"path": "prompts.parquet"}])
    prompt: PromptSection = Field(
        description="Source of a row's prompt: one of template, column and messages.",
        examples=[{"template": "Summarize: {text}"}, {"column": "text"}],
    )
    images: ImagesSection = Field(
        default=ImagesSection(),
        description="Images of prompts, which need a server.",
        examples=[{"max_pixels": 1_000_000}],
    )
    model: Annotated[ModelSection, or_word(WORDS["model"], ModelSection, ModelPath)] = Field(
        description="Checkpoint. A bare word is its path: `model: Qwen/Qwen3-4B`. With server it is optional: "
        "only its tokenizer is used.",
        examples=["Qwen/Qwen3-4B", {"path": "Qwen/Qwen3-4B"}],
    )
    task: Annotated[TaskSection, or_word(WORDS["task"], TaskSection, BareTask)] = Field(
        default=TaskSection(),
        description="What to compute for each row. A bare word is its type: `task: embed`.",
        examples=["embed", {"type": "choice", "labels": ["billing", "bug", "question"]}],
    )
    engine: EngineSection = Field(
        default=EngineSection(), description="Engine settings.", examples=[{"dtype": "bfloat16"}]
    )
    server: ServerSection | None = Field(
        default=None,
        description="A server with OpenAI's API instead of our own engine. Of the section engine, only max_num_seqs "
        "applies to it.",
        examples=[{"base_url": "http://localhost:8000/v1"}],
    )
    speculation: Annotated[SpeculationSection, or_word(WORDS["speculation"], SpeculationSection, BareMethod)] = Field(
        default=SpeculationSection(),
        description="Speculative decoding. A bare word is its method: `speculation: off`.",
        examples=["off", {"method": "draft_model", "model": "models/Qwen3-0.6B"}],
    )
    sampling: SamplingSection = Field(
        default=SamplingSection(),
        description="Sampling parameters, with vLLM's names. All but generation_config, seed, repetition_detection and "
        "reasoning may be {column: name}.",
        examples=[{"max_tokens": 256, "temperature": 0.7}],
    )
    steps: tuple[StepSection, ...] = Field(
        default=(),
        strict=False,
        max_length=32,
        description="Further prompts of each row, in order, which use the answers of earlier ones. A row passes all "
        "its steps on one loaded model, and its part is written once.",
        examples=[[{"name": "short", "prompt": {"template": "{draft}\nShorter:"}, "replaces": "draft"}]],
    )
    output: OutputSection = Field(description="Output folder and columns.", examples=[{"path": "out/summarize"}])
    run: RunSection = Field(default=RunSection(), description="Engines and limits of a run.", examples=[{"actors": 8}])
    kubernetes: KubernetesSection = Field(
        default=KubernetesSection(),
        description="Ray cluster of `pipeline manifests`.",
        examples=[{"image": "registry.example.com/parquet-batch-inference:0.1.0-cpu"}],
        json_schema_extra=HIDDEN,
    )
    cost: CostSection = Field(default=CostSection(), description="Prices and budget.", examples=[{"hourly_usd": 2.5}])
    quality: QualitySection = Field(
        default=QualitySection(),
        description="Comparison of some rows with a reference model while the job runs.",
        examples=[{"sample": 0.001, "model": "Qwen/Qwen3-4B"}],
    )

    @property
    def seed(self) -> int:
        """Random seed of the job."""
        return self.sampling.seed or 0

    @property
    def used_adapters(self) -> dict[str, str]:
        """Paths of the adapters that rows and steps may use, by name."""
        names = {step.adapter for step in self.steps if step.adapter is not None}
        return self.model.used_adapters | {name: self.model.adapters[name] for name in sorted(names)}

    @property
    def urls(self) -> dict[str, str]:
        """Paths of the job that may be urls, by key."""
        paths = {
            "input.path": self.input.path,
            "output.path": self.output.path,
            "model.path": self.model.path,
            "speculation.model": self.speculation.model,
            "quality.model": self.quality.model,
            **{f"images.roots[{i}]": root for i, root in enumerate(self.images.roots)},
            **{f"model.adapters.{name}": path for name, path in self.model.adapters.items()},
        }
        return {key: path for key, path in paths.items() if path not in (None, NO_CHECKPOINT)}

"""The keys of a job file: its sections in the order of the reference, and the few keys beside them.

Owns what each section is for. The keys within a section are in `sections/`, what must agree between keys is in
`contradictions.py`.
"""

from typing import Annotated

from pydantic import Field, StringConstraints

from pipeline.config.parameters import TodaySection
from pipeline.config.sections.cost import CostSection
from pipeline.config.sections.engine import EngineSection
from pipeline.config.sections.input import InputSection
from pipeline.config.sections.kubernetes import KubernetesSection
from pipeline.config.sections.model import ModelSection
from pipeline.config.sections.output import OutputSection
from pipeline.config.sections.quality import QualitySection
from pipeline.config.sections.row.prompt import PromptSection
from pipeline.config.sections.row.sampling import SamplingSection
from pipeline.config.sections.row.tasks import ChoiceSection, ClassifySection, EmbedSection, ScoreSection, TaskName
from pipeline.config.sections.run import RunSection
from pipeline.config.sections.section import Section
from pipeline.config.sections.targets import TargetsSection

ParameterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class JobKeys(Section):
    """What a job file says, each section checked on its own."""

    name: str = Field(
        default="",
        max_length=200,
        description="What reports call the job. The file's name when left out.",
        examples=["summarize"],
        json_schema_extra={"type": ["string", "null"]},
    )
    params: dict[ParameterName, str | TodaySection | None] = Field(
        default={},
        description="Names that stand as `${NAME}` in input.path and output.path, each with its text, {today: ZONE} "
        "for the date there, or null where every run gives it: --param NAME=VALUE.",
        examples=[{"date": {"today": "Europe/Berlin"}}],
    )
    input: InputSection = Field(description="What is read.", examples=[{"path": "prompts.parquet"}])
    prompt: PromptSection = Field(
        description="Where a row's prompt comes from: one of template, column and messages.",
        examples=[{"template": "Summarize: {text}"}, {"column": "text"}],
    )
    model: ModelSection = Field(description="Which checkpoint answers.", examples=[{"path": "Qwen/Qwen3-4B"}])
    task: TaskName = Field(
        default="generate",
        description="What is asked of each row: a completion (generate), which of some labels follows the prompt "
        "(choice), how likely a text is (score), a vector (embed), or the classes of a classification head (classify).",
        examples=["choice"],
    )
    choice: ChoiceSection = Field(
        default=ChoiceSection(),
        description="With task: choice, the labels.",
        examples=[{"labels": ["billing", "bug", "question"]}],
    )
    score: ScoreSection = Field(
        default=ScoreSection(),
        description="With task: score, which text is scored.",
        examples=[{"completion": "{answer}"}],
    )
    embed: EmbedSection = Field(
        default=EmbedSection(), description="With task: embed, what the vectors are.", examples=[{"pooling": "mean"}]
    )
    classify: ClassifySection = Field(
        default=ClassifySection(),
        description="With task: classify, what becomes of the head's logits.",
        examples=[{"activation": "sigmoid"}],
    )
    engine: EngineSection = Field(
        default=EngineSection(), description="How the engine computes.", examples=[{"dtype": "bfloat16"}]
    )
    sampling: SamplingSection = Field(
        default=SamplingSection(),
        description="How tokens are chosen, in vLLM's names. All but seed, "
        "repetition_detection and reasoning may be {column: name}.",
        examples=[{"max_tokens": 256, "temperature": 0.7}],
    )
    output: OutputSection = Field(description="Where the results go.", examples=[{"path": "out/summarize"}])
    run: RunSection = Field(default=RunSection(), description="How the work is cut and run.", examples=[{"actors": 8}])
    kubernetes: KubernetesSection = Field(
        default=KubernetesSection(),
        description="The Ray cluster that `pipeline manifests` writes manifests for.",
        examples=[{"image": "registry.example.com/parquet-batch-inference:0.1.0-cpu"}],
    )
    cost: CostSection = Field(
        default=CostSection(), description="What the machines cost, for the report.", examples=[{"hourly_usd": 2.5}]
    )
    quality: QualitySection = Field(
        default=QualitySection(),
        description="What the rows of run.quality_sample are compared with, and when that is an alarm.",
        examples=[{"model": "Qwen/Qwen3-4B", "column": "answer"}],
    )
    targets: TargetsSection = Field(
        default=TargetsSection(),
        description="What the finished job is expected to keep to, and who is told when it does not.",
        examples=[{"max_usd_per_1m_generated": 0.5}],
    )

    @property
    def seed(self) -> int:
        """The job's seed: `sampling.seed` where given, else `engine.seed`."""
        return self.engine.seed if self.sampling.seed is None else self.sampling.seed

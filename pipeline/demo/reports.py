"""Seeded field-service reports, each with its one-sentence summary.

Every fact follows a fixed cue ("Technician: Varno Delpik.") and never precedes it, since a small model learns within
minutes to copy text after a cue, but hardly text before one. `check` parses reports with the same forms. A report's
number determines its text.
"""

from dataclasses import dataclass
from random import Random
from typing import Literal

from pipeline.demo import words
from pipeline.demo.words import Split

PROMPT_TEMPLATE = "Summarize the report in one sentence.\n{report}\nSummary:"
HARD_FROM = 10_000_000  # training numbers reports with fillers from here, and those without from 0

Style = Literal["terse", "labels", "prose"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a summary must state, as text."""

    date: str
    site: str
    technician: str
    device: str
    fault: str
    cause: str
    action: str
    part: str
    hours: str
    cost: str


FACT_NAMES = tuple(Facts.__dataclass_fields__)

# Fact -> its wordings, by style. A cue is unique to its fact and precedes the value.
# The customer is not part of the summary: its name is a distractor.
FORMS: dict[Style, dict[str, tuple[str, ...]]] = {
    "terse": {
        "date": ("date {};",),
        "site": ("site {};",),
        "technician": ("tech {};",),
        "device": ("unit {};",),
        "fault": ("fault {};",),
        "cause": ("cause {};",),
        "action": ("action {};",),
        "part": ("part {};",),
        "hours": ("hours {};",),
        "cost": ("cost {};",),
    },
    "labels": {
        "date": ("Date: {}.", "Visit date: {}."),
        "site": ("Site: {}.", "Location: {}."),
        "customer": ("Customer: {}.", "Client: {}."),
        "technician": ("Technician: {}.", "Engineer: {}."),
        "device": ("Device: {}.", "Unit: {}."),
        "fault": ("Fault: {}.", "Problem: {}."),
        "cause": ("Cause: {}.", "Root cause: {}."),
        "action": ("Action: {}.", "Work done: {}."),
        "part": ("Part: {}.", "Part fitted: {}."),
        "hours": ("Hours: {}.", "Labor hours: {}."),
        "cost": ("Cost: {}.", "Total cost: {}."),
    },
    "prose": {
        "date": ("The visit took place on {}.", "The call was made on {}."),
        "site": ("The work was at site {}.", "The crew went to site {}."),
        "customer": ("The site belongs to customer {}.", "The invoice goes to customer {}."),
        "technician": ("The work was led by technician {}.", "The job was assigned to technician {}."),
        "device": ("The report concerns {}.", "The job was to service {}."),
        "fault": ("The operator complained of {}.", "The first check showed {}."),
        "cause": ("The problem was caused by {}.", "It was traced to {}."),
        "action": ("The technician then {}.", "To solve this we {}."),
        "part": ("The repair used part {}.", "The stock list shows part {}."),
        "hours": ("The hours booked were {}.", "The timesheet shows hours {}."),
        "cost": ("The total cost came to {}.", "The customer pays {}."),
    },
}

SUMMARY = (
    "On {date} at {site}, {technician} serviced {device} for {fault} caused by {cause}, {action}, "
    "fitted part {part}, and logged {hours} hours for {cost}."
)

PLAIN_FILLERS = (
    "The weather was dry and clear.",
    "Traffic on the access road was slow.",
    "The guard at the gate checked all tools.",
    "The floor around the machine was clean and dry.",
    "Safety rules were read before the work began.",
    "The old manual was not at hand.",
    "All guards were put back in place after the work.",
    "The night crew was told about the visit.",
    "The machine ran for some time without load.",
    "Photos were stored with the order.",
    "The waste was taken away in a closed box.",
    "The local team was friendly and gave good help.",
    "A short break was needed during the test run.",
    "The lights in the hall were weak.",
    "The tools were cleaned and packed.",
    "The door of the control room was locked at first.",
    "The paint on the frame is old but still good.",
    "No other machine in the hall was stopped.",
    "The readings were written down in the log book.",
    "The staff asked for a new training date.",
    "The next visit should be planned with the office.",
    "The lift for heavy loads was not free in the morning.",
    "Water and air were shut off before the work.",
    "The signs on the wall are hard to read.",
    "The test run was good and the load was normal.",
    "The team waited for the permit in the office.",
)
MISLEADING_FILLERS = (
    "The shift leader {name} {name} was present.",
    "The order was signed by {name} {name}.",
    "The gate code is {number}.",
    "The counter stands at {number}.",
    "The same crew will visit {name} next.",
)


@dataclass(frozen=True, slots=True)
class Report:
    """Report with its facts and its correct summary."""

    report_id: str
    text: str
    facts: Facts
    summary: str

    @property
    def prompt(self) -> str:
        """Return the prompt as the demonstration job renders it."""
        return PROMPT_TEMPLATE.format(report=self.text)


def make_report(split: Split, index: int, *, fillers: bool = True) -> Report:
    """Return report number `index` of `split`. Without `fillers` it has only the facts, as at the start of training.

    The three arguments form the seed.
    """
    rng = Random(f"{split}:{index}:{fillers}")
    facts = _facts(rng, split)
    style: Style = rng.choices(("terse", "labels", "prose"), weights=(15, 45, 40))[0]
    text = _text(rng, split, facts, style, _num_fillers(rng, style) if fillers else 0)
    summary = SUMMARY.format(**{name: getattr(facts, name) for name in FACT_NAMES})
    return Report(f"{split}-{index:05d}", text, facts, summary)


def _facts(rng: Random, split: Split) -> Facts:
    return Facts(
        date=words.date(rng),
        site=f"{words.name(rng, split)} #{rng.randint(10, 99)}",
        technician=f"{words.name(rng, split)} {words.name(rng, split)}",
        device=f"{rng.choice(words.DEVICES)} {rng.randint(100, 999)}",
        fault=rng.choice(words.FAULTS),
        cause=rng.choice(words.CAUSES),
        action=rng.choice(words.ACTIONS),
        part=words.part_code(rng, split),
        hours=f"{rng.randint(1, 9)}.{rng.choice((0, 5))}",
        cost=f"${rng.randint(40, 2400)}",
    )


def _num_fillers(rng: Random, style: Style) -> int:
    """Return a random number of fillers. One report in twelve is long, which spreads the prompt lengths."""
    if style == "terse":
        return 0
    if rng.random() < 1 / 12:
        return rng.randint(15, 45)
    return min(12, int(rng.expovariate(1 / 3)))


def _text(rng: Random, split: Split, facts: Facts, style: Style, num_fillers: int) -> str:
    """Return the facts in a natural order, with filler sentences anywhere between them."""
    values = {name: getattr(facts, name) for name in FACT_NAMES}
    values["customer"] = words.name(rng, split)
    head = [name for name in ("date", "site", "customer", "technician") if name in FORMS[style]]
    rng.shuffle(head)
    tail = ["hours", "cost"]
    rng.shuffle(tail)
    order = [*head, "device", "fault", "cause", "action", "part", *tail]
    sentences = [rng.choice(FORMS[style][name]).format(values[name]) for name in order]
    for _ in range(num_fillers):
        sentences.insert(rng.randint(0, len(sentences)), _filler(rng, split))
    return ("\n" if style == "labels" and rng.random() < 0.5 else " ").join(sentences)


def _filler(rng: Random, split: Split) -> str:
    if rng.random() < 0.85:
        return rng.choice(PLAIN_FILLERS)
    sentence = rng.choice(MISLEADING_FILLERS)
    while "{name}" in sentence:
        sentence = sentence.replace("{name}", words.name(rng, split), 1)
    return sentence.format(number=rng.randint(1000, 9999))

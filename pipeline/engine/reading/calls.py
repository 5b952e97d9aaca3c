"""What is asked of an engine about a whole list of known texts: completions with a `result`, in their order."""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from pipeline.engine.params import Completion, Request, SamplingParams
from pipeline.engine.tasks import Choice, Classify, Embed, Pooling, Score, Task
from pipeline.errors import ConfigError
from pipeline.tokenization.labels import encode_labels
from pipeline.tokenization.tokenizer import Tokenizer

Text = str | list[int]
"""A text, or the ids of its tokens."""


class ReadingCalls:
    """Of an `Engine`. Other requests of the engine go on meanwhile, and keep their completions; when a call is
    interrupted, its own requests end.

    Rows that cannot be served come back as completions with an error.
    """

    tokenizer: Tokenizer

    def _encoded(self, texts: Text | Iterable[Text]) -> list[list[int]]:
        """One text or several, each as ids of its tokens."""
        raise NotImplementedError

    def _completed(self, requests: Items[Request]) -> list[Completion]:
        """The completions of requests whose ids are their positions, in that order."""
        raise NotImplementedError

    def score(
        self, prompts: Text | Iterable[Text], completions: Items[str] | None = None, top: int | None = None
    ) -> list[Completion]:
        """How likely each completion is after its prompt; without completions, how likely each text is from its second
        token on. `result` of each is a `ScoreResult`. top: see `Score`. Raises ConfigError when the counts differ."""
        ids = self._encoded(prompts)
        if completions is None:
            return self._asked(ids, [Score(1, top)] * len(ids))
        _check_several("completions", completions)
        if len(completions) != len(ids):
            raise ConfigError(f"{len(ids)} prompts with {len(completions)} completions: expected one for each")
        texts = [own + self.tokenizer.continuation(own, text) for own, text in zip(ids, completions)]
        return self._asked(texts, [Score(max(len(own), 1), top) for own in ids])

    def choose(self, prompts: Text | Iterable[Text], labels: Items[str]) -> list[Completion]:
        """Which of the labels follows each prompt, by one pass over it. `result` of each is a `ChoiceResult`. Raises
        ConfigError for labels that cannot be told apart."""
        _check_several("labels", labels)
        ids = self._encoded(prompts)
        return self._asked(ids, [Choice(tuple(encode_labels(self.tokenizer, own, labels))) for own in ids])

    def embed(
        self,
        texts: Text | Iterable[Text],
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> list[Completion]:
        """Each text as a vector (see `Embed`). `result` of each is a `VectorResult`."""
        ids = self._encoded(texts)
        return self._asked(ids, [Embed(pooling, normalize, dimensions)] * len(ids))

    def classify(self, texts: Text | Iterable[Text]) -> list[Completion]:
        """What the model's classification head makes of each text (see `Classify`)."""
        ids = self._encoded(texts)
        return self._asked(ids, [Classify()] * len(ids))

    def _asked(self, ids: Items[list[int]], tasks: Items[Task]) -> list[Completion]:
        params = SamplingParams()
        return self._completed(
            [Request(row, own, params, task=task) for row, (own, task) in enumerate(zip(ids, tasks))]
        )


def _check_several(name: str, texts: object) -> None:
    """A single text would be taken for a list of its characters."""
    if isinstance(texts, str) or not isinstance(texts, Items):
        raise ConfigError(f"{name} = {texts!r:.80}: expected a list of texts")

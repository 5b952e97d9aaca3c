"""What is asked of an engine for a whole list at once: prompts or texts in, completions in their order out."""

from collections.abc import Generator, Iterable
from collections.abc import Sequence as Items

from pipeline.engine.params import Completion, Request, SamplingParams
from pipeline.engine.tasks import Choice, Classify, Embed, Pooling, Score, Task
from pipeline.errors import ConfigError
from pipeline.tokenization.labels import encode_labels
from pipeline.tokenization.tokenizer import Tokenizer

Text = str | list[int]
"""A text, or the ids of its tokens."""


class BatchCalls:
    """Of an `Engine`, whose part `stream` is. Other requests of the engine go on meanwhile, and keep their completions;
    when a call is interrupted, its own requests end.

    Rows that cannot be served come back as completions with an error.
    """

    tokenizer: Tokenizer

    def stream(self, requests: Iterable[Request]) -> Generator[Completion, None, None]:
        raise NotImplementedError

    def generate(
        self, prompts: Text | Items[Text], params: SamplingParams | Items[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete `prompts` (strings or lists of token ids) and return the completions in their order.

        `params` is one SamplingParams for all or one for each. Raises ConfigError when the counts differ.
        """
        many = _many(prompts)
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Items) else list(params)
        if len(each) != len(many):
            raise ConfigError(
                f"{len(many)} prompts with {len(each)} sampling params: expected one for all or one for each"
            )
        ids = self._encoded(many)
        return self._completed([Request(row, prompt, own) for row, (prompt, own) in enumerate(zip(ids, each))])

    def score(
        self, prompts: Text | Items[Text], completions: Items[str] | None = None, top: int | None = None
    ) -> list[Completion]:
        """How likely each completion is after its prompt; without completions, how likely each text is from its second
        token on. `result` of each is a `ScoreResult`. top: see `Score`. Raises ConfigError when the counts differ."""
        ids = self._encoded(_many(prompts))
        if completions is None:
            return self._asked(ids, [Score(1, top)] * len(ids))
        if len(completions) != len(ids):
            raise ConfigError(f"{len(ids)} prompts with {len(completions)} completions: expected one for each")
        texts = [own + self.tokenizer.continuation(own, text) for own, text in zip(ids, completions)]
        return self._asked(texts, [Score(max(len(own), 1), top) for own in ids])

    def choose(self, prompts: Text | Items[Text], labels: Items[str]) -> list[Completion]:
        """Which of the labels follows each prompt, by one pass over it. `result` of each is a `ChoiceResult`. Raises
        ConfigError for labels that cannot be told apart."""
        ids = self._encoded(_many(prompts))
        return self._asked(ids, [Choice(tuple(encode_labels(self.tokenizer, own, labels))) for own in ids])

    def embed(
        self,
        texts: Text | Items[Text],
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> list[Completion]:
        """Each text as a vector (see `Embed`). `result` of each is a `VectorResult`."""
        ids = self._encoded(_many(texts))
        return self._asked(ids, [Embed(pooling, normalize, dimensions)] * len(ids))

    def classify(self, texts: Text | Items[Text]) -> list[Completion]:
        """What the model's classification head makes of each text (see `Classify`)."""
        ids = self._encoded(_many(texts))
        return self._asked(ids, [Classify()] * len(ids))

    def _encoded(self, texts: Items[Text]) -> list[list[int]]:
        return [self.tokenizer.encode(text) if isinstance(text, str) else list(text) for text in texts]

    def _asked(self, ids: Items[list[int]], tasks: Items[Task]) -> list[Completion]:
        params = SamplingParams()
        return self._completed(
            [Request(row, own, params, task=task) for row, (own, task) in enumerate(zip(ids, tasks))]
        )

    def _completed(self, requests: Items[Request]) -> list[Completion]:
        done = {completion.row_id: completion for completion in self.stream(requests)}
        return [done[index] for index in range(len(requests))]


def _many(texts: Text | Items[Text]) -> list[Text]:
    if isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int)):
        return [texts]  # type: ignore[list-item]
    return list(texts)  # type: ignore[arg-type]

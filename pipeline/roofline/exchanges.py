"""Exchanges between the cards of a group that computes each layer together (tensor parallelism), and their time.

A step of a group sums partial results over all cards after the embedding, after the output projection and after the
feed-forward of each layer, and gathers the logits on one card.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Link:
    """Connection between the cards of a group.

    bytes_per_s: rate at which a card sends while it receives at the same rate. start_s: time of an exchange before its
    first byte. hop_s: time for data to reach the next card.
    """

    bytes_per_s: float
    start_s: float = 0.0
    hop_s: float = 0.0


@dataclass(frozen=True)
class StepExchange:
    """`count` equal exchanges of a step. num_bytes: of one result, a sum or the gathered logits."""

    kind: Literal["all-reduce", "gather"]
    count: int
    num_bytes: int


def step_exchanges(
    layers: int, hidden: int, vocab: int, num_cards: int, num_tokens: int, num_rows: int, value_bytes: int = 2
) -> list[StepExchange]:
    """Return the exchanges of a step of this engine. num_rows: tokens that need logits; the last layer computes its
    output projection and its feed-forward for these only. vocab: of the whole model, filled up to equal shares."""
    token_bytes = hidden * value_bytes
    found = [
        StepExchange("all-reduce", 2 * layers - 1, num_tokens * token_bytes),
        StepExchange("all-reduce", 2, num_rows * token_bytes),
        StepExchange("gather", 1, num_rows * -(-vocab // num_cards) * num_cards * value_bytes),
    ]
    return [exchange for exchange in found if exchange.num_bytes]


def all_reduce_seconds(num_bytes: float, num_cards: int, link: Link) -> float:
    """Return the seconds in which each of `num_cards` cards gets the sum of their tensors, in a ring.

    A ring takes 2 (n - 1) hops of an n-th of the tensor each, so a card sends 2 (n - 1) / n of it, which is the minimum
    (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). NCCL predicts
    its rings by the same sum of latencies and bytes (`src/graph/tuning.cc`).
    """
    hops = 2 * (num_cards - 1)
    return link.start_s + hops * link.hop_s + hops / num_cards * num_bytes / link.bytes_per_s


def gather_seconds(num_bytes: float, num_cards: int, link: Link) -> float:
    """Return the seconds in which one card receives the other cards' shares of `num_bytes`."""
    return link.start_s + link.hop_s + (num_cards - 1) / num_cards * num_bytes / link.bytes_per_s


def exchange_seconds(exchanges: list[StepExchange], num_cards: int, link: Link) -> float:
    """Return the seconds of a step's exchanges, one after the other."""
    seconds = {"all-reduce": all_reduce_seconds, "gather": gather_seconds}
    return sum(each.count * seconds[each.kind](each.num_bytes, num_cards, link) for each in exchanges)

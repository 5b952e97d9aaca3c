"""Each rank's share of the weights when several ranks compute a layer together (Megatron-LM's split, arXiv 1909.08053).

Linears that read the hidden states are divided by outputs: qkv by heads, gate and up by the feed-forward's width.
Linears that write them, o and down, are divided by inputs, so that the sum over all ranks is the whole product. Experts
are divided by their width too, so that all ranks have the same work for any routing. Routers and norms are whole on all
ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pipeline.kernels.adapters import LowRankUpdate
from pipeline.kernels.ranks import Exchange
from pipeline.model.config import ModelConfig
from pipeline.model.load import LayerWeights
from pipeline.weights.packed import ExpertWeights, LinearWeight, select_inputs, select_outputs


@dataclass(frozen=True)
class Share:
    """The share of rank `rank` of `size`. config: of the whole model."""

    config: ModelConfig
    rank: int = 0
    size: int = 1

    def layer(self, index: int, weights: LayerWeights) -> LayerWeights:
        """Return this rank's share of a layer."""
        if self.size == 1:
            return weights
        num_parts, routed, sinks_N = 1 + self.config.layers[index].is_gated, weights.routed, weights.sinks_N
        if routed is not None:
            gate_up = tuple(self._by_outputs(expert, num_parts) for expert in routed.experts.gate_up)
            down = tuple(self._by_inputs(expert) for expert in routed.experts.down)
            routed = replace(routed, experts=ExpertWeights(gate_up, down))
        return replace(
            weights,
            qkv=select_outputs(weights.qkv, self._qkv_rows(index)),
            o=self._by_inputs(weights.o),
            gate_up=None if weights.gate_up is None else self._by_outputs(weights.gate_up, num_parts),
            down=None if weights.down is None else self._by_inputs(weights.down),
            routed=routed,
            sinks_N=None if sinks_N is None else sinks_N[self._part(len(sinks_N))],
        )

    def updates(self, layers: Sequence[Mapping[str, LowRankUpdate]]) -> list[dict[str, LowRankUpdate]]:
        """Return this rank's share of an adapter's updates of all layers, by linear."""
        return [self._updates(index, updates) for index, updates in enumerate(layers)]

    def _updates(self, index: int, updates: Mapping[str, LowRankUpdate]) -> dict[str, LowRankUpdate]:
        if self.size == 1:
            return dict(updates)
        found = {}
        for name, update in updates.items():
            if name in ("o", "down"):
                part = self._part(update.a_RK.shape[1])
                found[name] = update.select_inputs(part.start, part.stop)
            elif name == "qkv":
                found[name] = update.select_outputs(self._qkv_rows(index))
            else:
                rows = self._rows(len(update.b_NR), 1 + self.config.layers[index].is_gated)
                found[name] = update.select_outputs(rows)
        return found

    def vocabulary(self, weight: LinearWeight) -> LinearWeight:
        """Return this rank's rows of an embedding or a vocabulary head. The last rank's are filled up with copies of
        the last row."""
        if self.size == 1:
            return weight
        num_rows = -(-self.config.vocab_size // self.size)
        rows = (torch.arange(num_rows) + self.rank * num_rows).clamp_(max=self.config.vocab_size - 1)
        return select_outputs(weight, rows)

    def _qkv_rows(self, layer: int) -> torch.Tensor:
        """Return the rows of a layer's fused q, k, v with this rank's heads. With fewer KV heads than ranks,
        neighbours have the same one."""
        num_heads, (num_kv_heads, head_dim) = self.config.num_heads, self.config.heads(layer)
        local = self.config.local(self.size)
        num_local, num_local_kv = local.num_heads, local.heads(layer).num_kv_heads
        first_kv = self.rank * num_kv_heads // self.size
        head_M = [
            *range(self.rank * num_local, (self.rank + 1) * num_local),
            *(num_heads + first_kv + head for head in range(num_local_kv)),
            *(num_heads + num_kv_heads + first_kv + head for head in range(num_local_kv)),
        ]
        return (torch.tensor(head_M)[:, None] * head_dim + torch.arange(head_dim)).flatten()

    def _by_outputs(self, weight: LinearWeight, num_parts: int) -> LinearWeight:
        return select_outputs(weight, self._rows(weight.out_features, num_parts))

    def _by_inputs(self, weight: LinearWeight) -> LinearWeight:
        """Return this rank's inputs of a linear whose outputs are summed, so only the leader adds the bias."""
        part = self._part(weight.in_features)
        return replace(select_inputs(weight, part.start, part.stop), bias_N=weight.bias_N if self.rank == 0 else None)

    def _rows(self, num_outputs: int, num_parts: int) -> torch.Tensor:
        """Return this rank's share of each of the fused parts."""
        rows = torch.arange(num_outputs).view(num_parts, -1)
        return rows[:, self._part(rows.shape[1])].flatten()

    def _part(self, length: int) -> slice:
        return slice(self.rank * length // self.size, (self.rank + 1) * length // self.size)


def exchanges_of_step(
    config: ModelConfig, num_ranks: int, num_tokens: int, num_last: int, num_logits: int
) -> list[Exchange]:
    """Return the exchanges of a step (`kernels/ranks.py`) in their order. config: of the whole model. num_last: tokens
    for which the last layer computes more than keys and values. num_logits: rows of logits, 0 also for a model without
    vocabulary head."""
    hidden = config.hidden_size
    sums = [num_tokens] + [num_tokens] * 2 * (config.num_layers - 1) + [num_last] * 2
    found = [Exchange("sum", rows, hidden) for rows in sums if rows]
    if num_logits:
        found.append(Exchange("gather", num_logits, -(-config.vocab_size // num_ranks)))
    return found

"""`Routing`: how a layer chooses experts for a token. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

CLAMPED_ALPHA, CLAMP = 1.702, 7.0
"""Constants of the activation "clamped_swiglu"."""


@dataclass(frozen=True)
class Routing:
    """Choice of `top_k` experts of each token, and their weights.

    An expert's score is softmax or sigmoid of the router's logits, over all experts. The experts with the highest score
    plus bias are chosen, if the router has a bias of choice. With several groups of adjacent experts, only experts of
    the `top_groups` groups with the highest sum of their two best are eligible (DeepSeek-V3, arXiv 2412.19437). Weights
    are the scores of the chosen, divided by their sum if `renormalize`, times `scale`. Softmax over the logits of the
    chosen alone, as in gpt-oss, is the same as softmax and `renormalize`.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1

"""From scores to predicted classes."""

import torch

TOP_K = 5


def best_classes(scores: torch.Tensor, largest: bool = True) -> torch.Tensor:
    """The ``min(TOP_K, classes)`` best classes of each row, best first: (B, classes) -> int64 (B, <=5).

    Every prediction is made here: a run's, by logits and (with ``largest`` false) by distances to class means, and that
    of saved weights. In bf16 many logits are equal, and equal scores then come in the same order everywhere: in that of
    ``torch.topk`` on float32 columns in learning order. That order depends on how many classes are asked for, so it is
    always as many.
    """
    return scores.float().topk(min(TOP_K, scores.shape[1]), largest=largest).indices


def nearest_means(features: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """The classes whose ``means`` (C, d) are nearest to the normalised ``features`` (B, d): int64 (B, <=5)."""
    unit = features / (features.norm(dim=1, keepdim=True) + 1e-8)
    return best_classes(torch.cdist(unit, means), largest=False)

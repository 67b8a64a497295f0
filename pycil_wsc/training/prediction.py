"""From scores to predicted classes."""

import torch

TOP_K = 5


def best_classes(scores: torch.Tensor, largest: bool = True) -> torch.Tensor:
    """The ``min(TOP_K, classes)`` best classes of each row, best first: (B, classes) -> int64 (B, <=5).

    All predictions are made here, in runs and from saved weights: by logits or, with ``largest=False``, by distances to
    class means. Ties, which are frequent in bf16, are therefore always broken in the same way: as ``torch.topk`` does
    on float32 columns in learning order. Its order of ties depends on k, so k is always the same.
    """
    return scores.float().topk(min(TOP_K, scores.shape[1]), largest=largest).indices


def nearest_means(features: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """The classes whose ``means`` (C, d) are nearest to the normalised ``features`` (B, d): int64 (B, <=5)."""
    unit = features / (features.norm(dim=1, keepdim=True) + 1e-8)
    return best_classes(torch.cdist(unit, means), largest=False)

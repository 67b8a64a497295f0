"""What chooses or mixes prompts for each image, by the features that the pre-trained model gives it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

SMALLEST = 1e-6  # norm of a query or a key


class PromptPool(nn.Module):
    """``size`` prompts with keys; an image gets the ``top_k`` with the nearest keys (L2P, Wang et al., CVPR 2022).

    Args:
        shape: of a prompt, such as (length, dim).
        dim: of queries and keys.
        start: initial values, ``uniform`` in [-1, 1] or ``zero``.
    """

    def __init__(self, size: int, shape: tuple[int, ...], dim: int, top_k: int, start: str = "uniform"):
        super().__init__()
        self.prompts = nn.Parameter(initial((size, *shape), start))
        self.keys = nn.Parameter(initial((size, dim), start))
        self.size = size
        self.top_k = top_k

    def similarity(self, queries: Tensor) -> Tensor:
        """(B, dim) queries -> (B, size) cosines with the keys."""
        return normalize(queries, dim=1, eps=SMALLEST) @ normalize(self.keys, dim=1, eps=SMALLEST).T

    def chosen(self, similarity: Tensor, total: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The prompts of each image: (B, size) -> int64 (B, top_k).

        ``total`` sums the votes of all processes: all images then get the prompts that most of the batch choose.
        """
        best = similarity.detach().topk(self.top_k, 1).indices
        if total is None:
            return best
        votes = best.flatten()
        counts = torch.zeros(self.size, device=votes.device)
        counts = total(counts.scatter_add(0, votes, torch.ones_like(votes, dtype=counts.dtype)))
        present_first = (counts == 0).to(torch.uint8).argsort(stable=True)  # ties are broken as in PILOT
        winners = present_first[counts[present_first].topk(self.top_k).indices]
        return winners.expand(len(best), -1)

    def of_tasks(self, tasks: Tensor, otherwise: Tensor) -> Tensor:
        """The ``top_k`` prompts of each image's task (B,), from 0; ``otherwise`` (B, top_k) where none are left."""
        of_task = tasks.unsqueeze(1) * self.top_k + torch.arange(self.top_k, device=tasks.device)
        return torch.where(of_task[:, -1:] < self.size, of_task, otherwise)

    @torch.no_grad()
    def pass_on(self, task: int, prompts: bool, keys: bool) -> None:
        """Let the ``prompts``, or the ``keys``, of ``task`` begin as those of the task before."""
        start = task * self.top_k
        if start + self.top_k > self.size:
            return
        for wanted, rows in ((prompts, self.prompts), (keys, self.keys)):
            if wanted:
                rows[start : start + self.top_k] = rows[start - self.top_k : start].clone()


class Components(nn.Module):
    """Prompts that are sums of components, weighted by the query's attention to each (CODA, Smith et al., CVPR 2023).

    A task adds ``per_task`` components, orthogonal to those before; only they are trained. Of the ``length`` tokens of
    a prompt, one half are keys, the other values.
    """

    def __init__(self, per_task: int, length: int, dim: int):
        super().__init__()
        self.per_task = per_task
        self.prompts = nn.Parameter(torch.empty(0, length, dim))
        self.keys = nn.Parameter(torch.empty(0, dim))
        self.attention = nn.Parameter(torch.empty(0, dim))

    def grow(self) -> None:
        """Add a task's components: orthonormal, and orthogonal to all earlier ones as they are now."""
        for name in ("prompts", "keys", "attention"):
            rows: nn.Parameter = getattr(self, name)
            flat = rows.detach().flatten(1).cpu()  # random numbers are the same on every device
            new = orthogonal(flat, self.per_task).view(-1, *rows.shape[1:])
            setattr(self, name, nn.Parameter(torch.cat([rows.detach(), new.to(rows)])))

    def forward(self, queries: Tensor) -> Tensor:
        """(B, dim) queries -> (B, length, dim) prompts."""
        prompts, keys, attention = self._trained()
        keys = normalize(keys, dim=1)
        norms = (queries.square() @ attention.square().T).sqrt().clamp(min=1e-12)  # of each query's attention (B, n)
        weights = queries @ (attention * keys).T / norms  # cosines
        return torch.einsum("bn,nld->bld", weights, prompts)

    def penalty(self) -> Tensor:
        """How far prompts, keys and attention are from orthonormal: the mean squares of ``C C^T - 1``, added up."""
        total = torch.zeros(())
        for rows in self._trained():
            products = rows.flatten(1) @ rows.flatten(1).T
            identity = torch.eye(len(rows), device=rows.device, dtype=rows.dtype)
            total = total + (products - identity).square().mean()
        return total

    def _trained(self) -> list[Tensor]:
        """Prompts, keys and attention of all components, without gradients of earlier tasks' ones."""
        before = len(self.keys) - self.per_task
        parts = (self.prompts, self.keys, self.attention)
        return [torch.cat([rows[:before].detach(), rows[before:]]) for rows in parts]


def orthogonal(before: Tensor, count: int) -> Tensor:
    """Random orthonormal rows, orthogonal to those ``before`` (n, d) by Gram-Schmidt: (count, d)."""
    rows = list(before)
    for _ in range(count):
        row = torch.randn(before.shape[1])
        projections = [(row @ other) / (other @ other).clamp(min=1e-8) * other for other in rows]
        rows.append(row - sum(projections, torch.zeros(())))
    new = torch.stack(rows[len(before) :])
    return new / new.norm(dim=1, keepdim=True)


def initial(shape: tuple[int, ...], start: str) -> Tensor:
    """Uniform in [-1, 1], or 0 if ``start`` is ``zero``."""
    return torch.zeros(shape) if start == "zero" else torch.empty(shape).uniform_(-1, 1)

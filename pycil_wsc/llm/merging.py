"""Model merging along a sequence of tasks, each method as one running set of tensors.

theta_0 is the model before the first task, theta_t the one after task t, tau_t = theta_t - theta_0 its task vector::

    merge = MERGES["magmax"](theta_0, scale=0.5)      # state dicts: name -> tensor
    for task in tasks:
        theta = train(task)                           # from merge.result() if merge.online, else from the last theta
        merge.update(theta)
    model.load_state_dict(merge.result())

No method needs the T models at once, not even those that the literature calls offline. Sums and interpolations are
computed in fp32 (or wider); the result has the dtype of theta_0. Tensors that are not floating-point are not merged but
taken from the last model. Tensors that share their storage (tied embeddings) are merged once, and also share it in the
result.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pycil_wsc.consolidation.checks import check_saved_shapes
from pycil_wsc.consolidation.functional import average_

UNMERGED = {"zero_shot": 1, "finetune": 1, "replay": 1, "wsc": 2}  # methods without merging: models kept at once
PARALLEL = 0.9995  # the usual |cos| above which slerp is linear, because the sine in its denominator vanishes

State = Mapping[str, Tensor]
Total = Callable[[Tensor], Tensor]


class Merge:
    """Base class: a method defines how a model is added (``_fold_``) and, if needed, the final result (``_finished``).

    ``start``: theta_0, a state dict, copied if ``task_vectors`` is true. The names, shapes, dtypes and ties of later
    states must be the same; otherwise :meth:`update` raises ValueError.
    """

    online = False  # the next task starts from the merge, not from the last model
    task_vectors = False  # tau_t is merged instead of theta_t, so theta_0 is kept

    def __init__(self, start: State) -> None:
        self._layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in start.items()}
        self._alias = _aliases(start)
        self._merged = [
            name for name, tensor in start.items() if tensor.is_floating_point() and name not in self._alias
        ]
        self._copied = [name for name, tensor in start.items() if not tensor.is_floating_point()]
        self._start = {name: start[name].clone() for name in self._merged} if self.task_vectors else {}
        self._running: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self.count = 0

    @torch.no_grad()
    def update(self, state: State) -> None:
        """Add theta_t, the state dict after the next task. No reference to its tensors is kept."""
        self._check(state)
        for name in self._merged:
            new = self._incoming(name, state[name])
            if self.count:
                self._fold_(self._running[name], new.to(self._running[name].device))
            else:
                self._running[name] = new.clone()
        self._last = {name: state[name].clone() for name in self._copied}
        self.count += 1

    @torch.no_grad()
    def result(self) -> dict[str, Tensor]:
        """The merged model: a state dict of new tensors in the dtypes of theta_0; tied tensors share their storage."""
        if not self.count:
            raise RuntimeError("nothing to merge: call update(state) after each task first")
        merged = {name: self._finished(name).to(self._layout[name][1], copy=True) for name in self._running}
        merged |= {name: tensor.clone() for name, tensor in self._last.items()}
        return {name: merged[self._alias.get(name, name)] for name in self._layout}

    def state_dict(self) -> dict[str, Tensor]:
        """A flat dict of tensors for safetensors, without theta_0: load it into an object with the same theta_0."""
        running = {f"running.{name}": tensor for name, tensor in self._running.items()}
        return (
            running
            | {f"last.{name}": tensor for name, tensor in self._last.items()}
            | {"count": torch.tensor(self.count)}
        )

    def load_state_dict(self, state: State) -> None:
        """Resume from ``state_dict()``. Raises ValueError if it has the names or shapes of another model."""
        count = int(state["count"])
        keys = [f"running.{name}" for name in self._merged] + [f"last.{name}" for name in self._copied] if count else []
        own = {key: self._layout[key.partition(".")[2]][0] for key in keys}
        check_saved_shapes({key: tensor.shape for key, tensor in state.items() if key != "count"}, own)
        self._running = {name: state[f"running.{name}"].clone() for name in self._merged if count}
        self._last = {name: state[f"last.{name}"].clone() for name in self._copied if count}
        self.count = count

    def _fold_(self, running: Tensor, new: Tensor) -> None:
        """Merge the next tensor (or task vector) into the running one, of ``self.count`` models so far, in place."""
        raise NotImplementedError

    def _incoming(self, name: str, tensor: Tensor) -> Tensor:
        wide = tensor.to(_wide(tensor.dtype))
        return wide - self._start[name].to(wide) if self.task_vectors else wide

    def _finished(self, name: str) -> Tensor:
        running = self._running[name]
        return running + self._start[name].to(running) if self.task_vectors else running

    def _check(self, state: State) -> None:
        check_saved_shapes(
            {name: tensor.shape for name, tensor in state.items()},
            {name: shape for name, (shape, _) in self._layout.items()},
        )
        for name, (_, dtype) in self._layout.items():
            if state[name].dtype != dtype:
                raise ValueError(
                    f"'{name}' is {state[name].dtype} but was {dtype} in the first model: convert one of them"
                )
        for name, first in self._alias.items():
            if _storage(state[name]) != _storage(state[first]) and not torch.equal(state[name], state[first]):
                raise ValueError(
                    f"'{name}' and '{first}' were one tensor in the first model and now differ: "
                    "tie or untie them in all models"
                )


class ModelSoup(Merge):
    """The uniform mean of theta_1 .. theta_T (Wortsman et al., 2022)."""

    def _fold_(self, running: Tensor, new: Tensor) -> None:
        average_([running], [new], self.count)


class OnlineAverage(Merge):
    """Mean of the models so far, from which the next task starts.

    The plain mean if ``decay`` is None, else decay * mean + (1 - decay) * theta_t.
    """

    online = True

    def __init__(self, start: State, *, decay: float | None) -> None:
        super().__init__(start)
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"decay={decay}: it must be None (plain mean) or in [0, 1)")
        self.decay = decay

    def _fold_(self, running: Tensor, new: Tensor) -> None:
        average_([running], [new], self.count if self.decay is None else self.decay / (1 - self.decay))


class Slerp(Merge):
    """merged_t = slerp(merged_{t-1}, theta_t, weight) per tensor; the next task starts from it (Jang et al., 2024).

    ``space``: ``"weights"``, or ``"task_vectors"``: theta_0 + slerp(merged_{t-1} - theta_0, tau_t, weight). At the
    learning rates of fine-tuning, weights barely change direction, so that the first is nearly linear. ``total``: for
    sharded tensors, a function that sums a tensor over the processes that hold their parts.
    """

    online = True

    def __init__(self, start: State, *, weight: float, space: str, total: Total | None = None) -> None:
        if not 0 <= weight <= 1:
            raise ValueError(f"weight={weight}: the new model's share must be in 0..1")
        if space not in ("weights", "task_vectors"):
            raise ValueError(f"space={space!r} is unknown; known: 'weights', 'task_vectors'")
        self.weight, self.task_vectors, self.total = weight, space == "task_vectors", total
        super().__init__(start)

    def _fold_(self, running: Tensor, new: Tensor) -> None:
        running.copy_(slerp(running, new, self.weight, self.total))


class TaskArithmetic(Merge):
    """theta_0 + scale * (tau_1 + ... + tau_T) (Ilharco et al., 2023). ``scale`` = 1/T gives the model soup."""

    task_vectors = True

    def __init__(self, start: State, *, scale: float) -> None:
        super().__init__(start)
        self.scale = scale

    def _fold_(self, running: Tensor, new: Tensor) -> None:
        running += new

    def _finished(self, name: str) -> Tensor:
        running = self._running[name]
        return torch.add(self._start[name].to(running), running, alpha=self.scale)


class MagMax(TaskArithmetic):
    """theta_0 + scale * tau, where each element of tau is that tau_t's of largest magnitude (Marczak et al., 2024).

    If magnitudes are equal, the latest task wins.
    """

    def _fold_(self, running: Tensor, new: Tensor) -> None:
        torch.where(new.abs() >= running.abs(), new, running, out=running)


MERGES: dict[str, Any] = {  # by `llm.method`
    "avg_offline": ModelSoup,
    "avg_online": OnlineAverage,
    "slerp": Slerp,
    "task_arithmetic": TaskArithmetic,
    "magmax": MagMax,
}


def slerp(first: Tensor, second: Tensor, weight: float, total: Total | None = None) -> Tensor:
    """Spherical interpolation from ``first`` (weight 0) to ``second`` (weight 1): tensors of one shape as flat vectors.

    With w the angle between them: (sin((1 - weight) w) first + sin(weight w) second) / sin w, without normalisation
    (Shoemake, 1985). Linear if |cos w| exceeds 0.9995 or if a tensor is zero and has no direction. ``total`` as in
    :class:`Slerp`.
    """
    products = torch.stack([(a * b).sum() for a, b in ((first, second), (first, first), (second, second))])
    dot, *squares = (total(products) if total else products).tolist()
    cosine = dot / math.sqrt(math.prod(squares)) if all(squares) else 1.0
    if not abs(cosine) <= PARALLEL:
        return torch.lerp(first, second, weight)
    angle = math.acos(cosine)
    return (math.sin((1 - weight) * angle) * first + math.sin(weight * angle) * second) / math.sin(angle)


@dataclass(frozen=True)
class ResidentModels:
    """The number of models in memory at once, in units of one model.

    ``paper``: as counted by the paper's relative VRAM (T for offline methods); ``streamed``: as needed by this package.
    """

    paper: float
    streamed: float


def models_resident(
    method: str,
    tasks: int,
    task_vectors: bool = False,
    trained: float = 1.0,
    merged: float = 1.0,
    own_moments: bool = False,
) -> ResidentModels:
    """:class:`ResidentModels` of a method over ``tasks`` tasks.

    Counts the model in training, the running merge, and theta_0 if it is kept. WSC keeps the weights before the task
    and, after the reset, the average instead.

    Args:
        task_vectors: whether slerp's ``space`` is ``"task_vectors"``.
        trained: share of the model's parameters that are trained: very few with adapters. Other copies of the model
            hold these only.
        merged: share of the parameters that are merged, which the running merge holds: with adapters, those of the
            adapted layers.
        own_moments: whether WSC keeps the two moments of the gradients itself, instead of reading the optimiser's.
    """
    if method in UNMERGED:
        residents = 1 + (UNMERGED[method] - 1) * trained
        return ResidentModels(residents, residents + 2 * trained * own_moments)
    cls = MERGES[method]
    paper, streamed = 2 if cls.online else tasks, 3 if cls.task_vectors or task_vectors else 2
    return ResidentModels(1 + (paper - 1) * trained, 1 + (streamed - 1) * merged)


def _aliases(state: State) -> dict[str, str]:
    """{name: first name of the same tensor}, for tensors with several names."""
    first = {}
    return {
        name: first[place]
        for name, tensor in state.items()
        if (place := _storage(tensor)) and first.setdefault(place, name) != name
    }


def _storage(tensor: Tensor) -> tuple | None:
    """Equal for tensors that are the same view of one storage; None for a tensor without elements."""
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

"""Model merging along a sequence of tasks, each method as one running set of tensors.

theta_0 is the model before the first task, theta_t the one after task t, tau_t = theta_t - theta_0 its task vector::

    merge = MagMaxMerge(theta_0, scale=0.5)           # state dicts: name -> tensor
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

import torch
from torch import Tensor

from pycil_wsc.consolidation.functional import average_
from pycil_wsc.consolidation.ranking import top_mask
from pycil_wsc.consolidation.tensor_checks import check_saved_shapes

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
        shapes = {key: self._shape_of(*key.split(".", 1)) for key in keys}
        check_saved_shapes({key: tensor.shape for key, tensor in state.items() if key != "count"}, shapes)
        self._running = {name: state[f"running.{name}"].clone() for name in self._merged if count}
        self._last = {name: state[f"last.{name}"].clone() for name in self._copied if count}
        self.count = count

    def _fold_(self, running: Tensor, new: Tensor) -> None:
        """Merge the next tensor (or task vector) into the running one, of ``self.count`` models so far, in place."""
        raise NotImplementedError

    def _shape_of(self, part: str, name: str) -> tuple[int, ...]:
        """The shape of a tensor in :meth:`state_dict`: ``part`` is ``running`` or ``last``."""
        return self._layout[name][0]

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
        self.weight = weight
        self.task_vectors = space == "task_vectors"
        self.total = total
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


class MagMaxMerge(TaskArithmetic):
    """theta_0 + scale * tau, where each element of tau is that tau_t's of largest magnitude (Marczak et al., 2024).

    If magnitudes are equal, the latest task wins.
    """

    def _fold_(self, running: Tensor, new: Tensor) -> None:
        torch.where(new.abs() >= running.abs(), new, running, out=running)


class TiesMerge(Merge):
    """theta_0 + scale * tau, merged without interference (Yadav et al., 2023): trim, elect signs, average the rest.

    Of each tau_t, the share ``keep`` of all elements with the largest magnitudes is kept, and the others are 0. The
    sign of an element of tau is that of the sum over tasks, and its value the mean of those tau_t with this sign. Where
    the sum is exactly 0, no sign is elected and the element is 0 (PEFT's ``ties`` elects +1 there). The positive and
    the negative sums and counts are enough for that, so there is no need for the T models.
    """

    task_vectors = True

    def __init__(self, start: State, *, scale: float, keep: float) -> None:
        super().__init__(start)
        if not 0 < keep <= 1:
            raise ValueError(f"keep={keep}: the fraction of elements that are kept must be above 0 and at most 1")
        self.scale = scale
        self.keep = keep
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, state: State) -> None:
        self._check(state)
        magnitudes = [super(TiesMerge, self)._incoming(name, state[name]).abs() for name in self._merged]
        self._kept = dict(zip(self._merged, top_mask(magnitudes, self.keep), strict=True))
        super().update(state)
        self._kept = {}

    def _incoming(self, name: str, tensor: Tensor) -> Tensor:
        """(4, ...): the positive and the negative part, and whether the element is one of them."""
        vector = torch.where(self._kept[name], super()._incoming(name, tensor), 0)
        return torch.stack([vector.clamp(min=0), vector.clamp(max=0), (vector > 0).to(vector), (vector < 0).to(vector)])

    def _fold_(self, running: Tensor, new: Tensor) -> None:
        running += new

    def _shape_of(self, part: str, name: str) -> tuple[int, ...]:
        shape = super()._shape_of(part, name)
        return (4, *shape) if part == "running" else shape

    def _finished(self, name: str) -> Tensor:
        positive, negative, ups, downs = self._running[name]
        mass = positive + negative
        up = positive / ups.clamp(min=1)
        down = negative / downs.clamp(min=1)
        merged = torch.where(mass > 0, up, torch.where(mass < 0, down, 0))
        return torch.add(self._start[name].to(merged), merged, alpha=self.scale)


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


def fisher_mean(first: Tensor, second: Tensor, weight: float, first_fisher: Tensor, second_fisher: Tensor) -> Tensor:
    """The mean of two tensors, each element weighted by its Fisher information (Matena and Raffel, 2022).

    ((1 - weight) F1 first + weight F2 second) / ((1 - weight) F1 + weight F2), element by element; where both F are 0,
    the mean without them.
    """
    one = (1 - weight) * first_fisher
    two = weight * second_fisher
    total = one + two
    share = torch.where(total > 0, two / torch.where(total > 0, total, 1), weight)
    return torch.lerp(first, second, share)


def _aliases(state: State) -> dict[str, str]:
    """{name: first name of the same tensor}, for tensors with several names."""
    first: dict[tuple, str] = {}  # place -> the name that has it first
    aliases = {}
    for name, tensor in state.items():
        place = _storage(tensor)
        if place is None:
            continue
        if place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
    return aliases


def _storage(tensor: Tensor) -> tuple | None:
    """Equal for tensors that are the same view of one storage; None for a tensor without elements."""
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

"""Where the moments come from that weights are ranked by: followed here, or read from an optimiser that has them anyway."""

from functools import partial

import torch

from pycil_wsc.consolidation.functional import update_moments_
from pycil_wsc.consolidation.importance import moment_score


class Gradients:
    """Which of ``params``, {name: parameter}, have had a gradient since the task's start: for a ranking by something else than moments."""

    def __init__(self, params):
        self.params, self.with_gradient = params, set()

    def check(self, optimizer, steps):
        """Any optimiser will do."""

    def follow(self, optimizer, skipped):
        """Take note of the gradients of a step, {name: tensor or None}, and return them."""
        grads = {name: p.grad for name, p in self.params.items()}
        present = [name for name, grad in grads.items() if grad is not None]
        if not present:
            raise RuntimeError(
                "missing gradients: no parameter has one after optimizer.step(); call backward() before it, zero_grad() only later"
            )
        if new := [name for name in present if name not in self.with_gradient]:
            self._meet(new, grads, skipped)
        return grads

    def _meet(self, names, grads, skipped):
        for name in names:
            if grads[name].layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of '{name}' is sparse: make it dense (for an embedding, sparse=False)"
                )
        if skipped is None or not skipped.item():  # the one wait in the warm-up, and only under a GradScaler
            self.with_gradient.update(names)

    @property
    def nbytes(self):
        """Bytes kept here."""
        return 0

    def state_dict(self):
        return {"first": {}, "second": {}, "with_gradient": sorted(self.with_gradient)}

    def load_state_dict(self, state):
        self.with_gradient = set(state["with_gradient"])


class OwnMoments(Gradients):
    """Exponential moments of the gradients of ``params``, from the task's start on; a missing gradient is zero."""

    def __init__(self, params, betas, absolute, score=moment_score):
        super().__init__(params)
        self.betas, self.absolute, self.score = betas, absolute, score
        self.first, self.second = (
            {name: torch.zeros_like(p, dtype=wide(p.dtype)) for name, p in params.items()} for _ in range(2)
        )

    def follow(self, optimizer, skipped):
        grads = super().follow(optimizer, skipped)
        update_moments_(
            list(self.first.values()),
            list(self.second.values()),
            list(grads.values()),
            self.betas,
            self.absolute,
            skipped,
        )

    def scores(self, optimizer, steps):
        """{name: score} of the parameters that have had a gradient."""
        score = partial(self.score, step=steps, betas=self.betas)
        return {
            name: BlockScore(score, self.first[name], self.second[name])
            for name in self.params
            if name in self.with_gradient
        }

    @property
    def nbytes(self):
        return sum(tensor.nbytes for tensors in (self.first, self.second) for tensor in tensors.values())

    def state_dict(self):
        return super().state_dict() | {"first": dict(self.first), "second": dict(self.second)}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for name, param in self.params.items():
            self.first[name], self.second[name] = (
                state[part][name].to(param.device, copy=True) for part in ("first", "second")
            )


class OptimizerMoments:
    """The moments that Adam or AdamW keeps for ``params``, read when they are needed: nothing is kept here.

    They differ from :class:`OwnMoments` in a parameter whose gradient is missing in some steps: Adam leaves its moments as they are.
    ``carried``: the optimiser may have gone on from earlier tasks, whose last steps its moments then remember.
    """

    def __init__(self, params, score=moment_score, carried=False):
        self.params, self.score, self.carried = params, score, carried
        self.found = False  # moments in the optimiser

    def check(self, optimizer, steps):
        """Raise unless the optimiser is one that has moments, and none from before the task, which has had ``steps`` steps, or they may be carried."""
        if not all("betas" in group for group in optimizer.param_groups):
            raise ValueError(
                f"moments='optimizer' reads Adam's moments, {_kind(optimizer)} has none: use Adam or AdamW, or moments='own'"
            )
        longest = max((float(state["step"]) for state in self._states(optimizer).values()), default=0)
        if longest > steps and not self.carried:
            raise ValueError(
                f"the optimizer has moments of {longest:.0f} steps, this task has had {steps}: make a new optimizer for each task, or use "
                "moments='carried' to count them or 'own' (to go on from a saved state, call load_state_dict() before attach())"
            )

    def follow(self, optimizer, skipped):
        if not self.found and not self._states(optimizer):
            raise RuntimeError(
                "missing gradients: the optimizer has no moments after its step; call backward() before it"
            )
        self.found = True

    def scores(self, optimizer, steps):
        """{name: score} of the parameters that the optimiser has moments of."""
        self.check(optimizer, steps)
        betas = {id(p): tuple(map(float, group["betas"])) for group in optimizer.param_groups for p in group["params"]}
        states = {name: (state, float(state["step"])) for name, state in self._states(optimizer).items()}
        scores = {
            name: partial(self.score, step=step, betas=betas[id(self.params[name])])
            for name, (_, step) in states.items()
        }
        return {
            name: BlockScore(scores[name], state["exp_avg"], state["exp_avg_sq"])
            for name, (state, step) in states.items()
            if step
        }

    def state_dict(self):
        return {"first": {}, "second": {}, "with_gradient": []}  # in the optimiser's

    def load_state_dict(self, state):
        """All is in the optimiser's."""

    def _states(self, optimizer):
        states = {name: optimizer.state[param] for name, param in self.params.items() if optimizer.state.get(param)}
        for state in states.values():
            if missing := {"exp_avg", "exp_avg_sq", "step"} - state.keys():
                raise RuntimeError(
                    f"moments='optimizer' reads Adam's moments, and the state of {_kind(optimizer)} has no '{min(missing)}': "
                    "use Adam or AdamW, or moments='own'"
                )
        return states


class BlockScore:
    """The score of one parameter, computed for the block that is asked for: the scores of a whole model take no memory.

    ``score`` is a function of lists of tensors, two of which, of the parameter's shape, are given.
    """

    def __init__(self, score, first, second):
        self.score, self.first, self.second = score, first, second
        self.shape, self.device, self.dtype = first.shape, first.device, wide(first.dtype)

    def __getitem__(self, index):
        return self.score([self.first[index].to(self.dtype)], [self.second[index].to(self.dtype)])[0]


def wide(dtype):
    """The type of moments and averages: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _kind(optimizer):
    return type(optimizer).__name__

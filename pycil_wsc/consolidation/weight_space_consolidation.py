"""Weight Space Consolidation as an object that follows an optimiser through one task."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer

from pycil_wsc.consolidation.averaging import Average
from pycil_wsc.consolidation.functional import average_, reset_
from pycil_wsc.consolidation.importance import Importance, as_importance, moment_score
from pycil_wsc.consolidation.ranking import Peers
from pycil_wsc.consolidation.resets import Blend, Reset, check_share, check_whole_steps
from pycil_wsc.consolidation.sharded import like, local, part_of, peers_of
from pycil_wsc.consolidation.tensor_checks import (
    by_name,
    check_eligible,
    check_finite,
    check_layouts,
    check_saved,
    check_saved_shapes,
    layouts,
    plain_name,
)
from pycil_wsc.consolidation.trackers import Params, State, Tracker, wide

FORMAT = 2  # version of the saved state
SCOPES = ("global", "tensor")


class WeightSpaceConsolidation:
    """Scores weights during a task's warm-up, then resets those of low importance and averages until the task's end.

    "Forget Forgetting: Continual Learning in a World of Abundant Memory", section 4. Create one object for each task,
    but none for the first task of a model that starts from random weights: there are no weights to preserve yet.

    >>> import torch
    >>> from torch import nn
    >>> from pycil_wsc.consolidation import WeightSpaceConsolidation, recompute_batch_norm
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> batches = [(torch.randn(32, 8), torch.randint(2, (32,))) for _ in range(200)]
    >>> wsc = WeightSpaceConsolidation(model.named_parameters(), warmup_steps=len(batches) // 4).attach(optimizer)
    >>> for inputs, targets in batches:
    ...     loss = nn.functional.cross_entropy(model(inputs), targets)
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> wsc.finish()
    >>> recompute_batch_norm(model, batches)

    Let theta_prev be the weights when the object is created, g the gradient in ``p.grad`` after an optimiser step (of
    the loss, before weight decay and momentum; clipped or scaled if the loop does that), i the number of the step and
    j ``average.every``. With the default options::

        m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2    each step of the warm-up
        S = |m_hat| * v_hat                                  (hat: divided by 1 - b^i, as in Adam)
        theta <- blend * theta + (1 - blend) * theta_prev    once, after `warmup_steps` steps, where S is not in
                                                             the top `retain`
        Theta <- (n * Theta + theta) / (n + 1)               from there on, every j steps; late samples weigh more:
                                                             n = samples / (power + 1)
        theta <- Theta                                       at finish()

    Parameters without a gradient in the whole warm-up are neither ranked nor reset; a gradient missing in some steps
    counts as zero in those. Steps are optimiser steps: gradients may be accumulated over several batches, and a step
    that a ``GradScaler`` skips does not count. No step synchronises with the device except the reset (under a
    ``GradScaler`` also each sample and the first step).

    Memory, for N trainable elements of s bytes, f = max(s, 4): N (s + 2 f) bytes until the reset, N f after it;
    N (s + 3 f) if the reset repeats; N f alone, from the end of the warm-up on, with ``reset=None``. So 12, then 4
    bytes per element for fp32. With ``moment_score(source="optimizer")`` N s until the reset, N f after it: one copy of
    the weights at any time. Ranking adds a few blocks of 4 MB.

    Args:
        named_parameters: iterable of (name, parameter), such as ``model.named_parameters()``. Parameters that do not
            require a gradient are ignored; a parameter with several names counts once.
        warmup_steps: optimiser steps from the task's start to the reset; 0 only with ``reset=None``; None: until
            :meth:`end_warmup`.
        retain: fraction of the elements kept at the reset: exactly ``round(retain * n)`` of n.
        importance: the score to rank weights by: :func:`~.importance.moment_score`, another of :mod:`~.importance`, or
            a function ({name: parameter}, {name: theta_prev}) -> {name: scores}, called at the reset.
        reset: what happens to the other elements: :class:`~.resets.Blend`, ``Revert``, another :class:`~.resets.Reset`,
            or None (average only). The default skips the reset after a warm-up of fewer than 50 steps; ``Blend()`` does
            not.
        average: an :class:`~.averaging.Average`, or None to keep the last weights.
        rank_scope: ``"global"`` ranks all elements together, ``"tensor"`` those of each parameter separately.
        eligible: {name: bool tensor of the parameter's shape}: only elements marked True are ranked and may be reset.
            Parameters left out are eligible as a whole.
        named_buffers: iterable of (name, buffer), such as ``model.named_buffers()``, for ``reset`` and ``average`` with
            ``buffers=True``; buffers that are not floating-point are ignored.
        peers: the processes that hold the other parts, if the parameters are plain tensors that hold one part each of
            sharded parameters; the elements of all parts are ranked together; see :class:`~.ranking.Peers`. Not needed
            with FSDP2: pass the parameters as they are, after ``fully_shard``, in every process. The tensors of the
            state are then sharded like the model's, for ``torch.distributed.checkpoint``.

    Raises:
        ValueError, TypeError: an argument is out of range, unknown or inconsistent.
        NonFiniteGradients: at the reset, if a gradient in the warm-up, or another importance, was infinite or NaN; a
            RuntimeError.
        RuntimeError: a method is called at the wrong time, or gradients are missing; the message says what to do.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        warmup_steps: int | None,
        retain: float = 0.2,
        importance: Importance | Callable[[dict, dict], Mapping[str, Tensor]] = moment_score(),
        reset: Reset | None = Blend(min_warmup=50),
        average: Average | None = Average(),
        rank_scope: str = "global",
        eligible: Mapping[str, Tensor] | None = None,
        named_buffers: Iterable[tuple[str, Tensor]] = (),
        peers: Peers | None = None,
    ):
        self.warmup_steps = warmup_steps
        self.retain = retain
        self.rank_scope = rank_scope
        self.importance = as_importance(importance)
        self.reset = reset
        self.average = average
        self._check_options()
        if self._warmup_is_too_short():
            self.reset = None
        self._params = by_name(named_parameters, "named_parameters", lambda p: p.requires_grad)
        self._buffers = self._wanted_buffers(named_buffers)
        both = [*self._params.items(), *self._buffers.items()]
        self._tensors = by_name(both, "named_parameters and named_buffers", torch.is_tensor)
        self._layouts = layouts(self._tensors)
        if not self._params:
            raise ValueError("named_parameters has no parameter that requires a gradient")
        eligible = {plain_name(name): mask for name, mask in (eligible or {}).items()}
        check_eligible(eligible, self._params)
        self._marked = {name: int(mask.sum()) for name, mask in eligible.items()}  # in whole tensors
        self.peers = peers or peers_of(self._params)
        self._eligible = {
            name: part_of(mask.to(self._params[name].device), self._params[name]) for name, mask in eligible.items()
        }
        self._hook = None
        self._optimizer = None
        self._steps = 0
        self._averaged = 0
        self._resets = 0
        # a context in which scores are followed and, at the reset, computed: for a host that measures what this costs
        self.measure: Callable[[bool], AbstractContextManager[None]] = _unmeasured
        self._skipped: Tensor | None = None  # number of skipped steps, on the device, not yet subtracted from _steps
        self._finished = False
        self._begin()

    @property
    def tracked_bytes(self) -> int:
        """The bytes that the importance's statistics take now; 0 once they are no longer needed."""
        return self._tracker.nbytes if self._tracker else 0

    def attach(self, optimizer: Optimizer) -> "WeightSpaceConsolidation":
        """Follow the steps of ``optimizer``, which may be one that Accelerate has prepared. Returns self.

        Finished objects of earlier tasks stop following it. Warns if the optimizer lacks some of the parameters and
        trains others that this object does not have, which happens if a layer is replaced after one of the two was
        created.

        Raises:
            RuntimeError: it is attached already.
            ValueError: the optimizer holds none of the parameters, or not the moments that ``importance`` reads.
        """
        if self._hook is not None:
            raise RuntimeError("attached already: detach() first")
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):  # Accelerate's wrapper, which steps the inner one
            optimizer = getattr(optimizer, "optimizer", optimizer)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held.isdisjoint(map(id, self._params.values())):
            raise ValueError("the optimizer holds none of the parameters: attach to the one that trains them")
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        others = trained - {id(p) for p in self._params.values()}
        missing = [name for name, p in self._params.items() if id(p) not in held]
        if others and missing:
            warnings.warn(
                f"WSC follows {missing[0]}, which the optimizer does not hold, and leaves out {len(others)} parameters "
                "that it trains: make this object and the optimizer after the last layer has been replaced or extended",
                stacklevel=2,
            )
        if self._tracker:
            self._tracker.check(optimizer, self.steps)
        for hook in list(optimizer._optimizer_step_post_hooks.values()):
            before = getattr(hook, "__self__", None)
            if isinstance(before, WeightSpaceConsolidation) and before.phase == "finished":
                before.detach()
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self._optimizer = optimizer
        return self

    def detach(self) -> None:
        """Stop following the optimiser; does nothing if none is followed."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._optimizer = None

    @torch.no_grad()
    def end_warmup(self) -> None:
        """Reset now, and average from here on: for a warm-up of unknown length (``warmup_steps=None``).

        Raises:
            RuntimeError: ``warmup_steps`` is known, or no step has been followed yet.
            NonFiniteGradients: a gradient in the warm-up, or another importance, was infinite or NaN.
        """
        if self.warmup_steps is not None:
            raise RuntimeError(
                f"end_warmup(): the warm-up ends after {self.warmup_steps} steps; "
                "for one that ends here, make the object with warmup_steps=None"
            )
        if self._optimizer is None or not self.steps:
            raise RuntimeError("end_warmup() before any step: attach() first, and train")
        self.warmup_steps = self.steps
        if self._warmup_is_too_short(stacklevel=4):  # also torch.no_grad
            self._previous = {}
            self._tracker = None
        self._act(self._optimizer)

    @torch.no_grad()
    def finish(self) -> None:
        """End the task: the average becomes the weights, in their dtype, and all memory is freed.

        Raises RuntimeError if there is nothing to average: the warm-up has not ended, or no sample was due.
        """
        steps = self.steps
        warmup = self.warmup_steps
        if self._finished:
            raise RuntimeError("finish() was called already: make a new WeightSpaceConsolidation for each task")
        if warmup is None:
            raise RuntimeError(
                "finish() before end_warmup(): call end_warmup() first, or detach() to leave the weights as they are"
            )
        if not steps and warmup:
            raise RuntimeError(
                "finish() before any step of the optimizer that attach() follows: call attach() with the optimizer "
                "that trains; if you replace it, detach() and attach() to the new one"
            )
        if steps < warmup:
            raise RuntimeError(
                f"finish() after {steps} of {warmup} warm-up steps: train longer or shorten warmup_steps"
            )
        if self.average:
            if self.average.last and not self.average.due(steps, warmup):
                self._sample(self.average)
            if not self._averaged:
                raise RuntimeError("finish() before any sample of the average: give a smaller `every`, or last=True")
        for name, mean in self._average.items():
            local(self._tensors[name]).copy_(mean)
        self._finished = True
        self._previous = {}
        self._average = {}
        self._tracker = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the weights are those that :meth:`finish` would give now; restored exactly on exit.

        For evaluating or saving the average while training continues. Takes a copy of the weights. Raises RuntimeError
        where :meth:`finish` would: in the warm-up, or before any sample.
        """
        if self.average is None or self.warmup_steps is None or not self.has_average:
            raise RuntimeError(
                f"applied() in phase '{self.phase}': there is no average; use it after the reset and the first sample"
            )
        tensors = {name: local(self._tensors[name]) for name in self._average or self._params}
        weights = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        late = self.average.last and not self.average.due(self.steps, self.warmup_steps)
        with torch.no_grad():
            for name, tensor in tensors.items() if self._average else ():
                mean = self._average[name]
                if late:
                    mean = mean.clone()
                    average_([mean], [tensor], self.average.n(self.steps, self._averaged, self.warmup_steps))
                tensor.copy_(mean)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(weights[name])

    def check_fits(self, steps: int) -> None:
        """Raise ValueError if a task of ``steps`` optimiser steps could not be finished."""
        if self.warmup_steps is None:
            return
        if steps < self.warmup_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} is more than the {steps} steps of the task: shorten it")
        if self.average:
            self.average.check_fits(steps, self.warmup_steps)

    @property
    def steps(self) -> int:
        """Optimiser steps followed since the task's start."""
        self._subtract_skipped()
        return self._steps

    @property
    def averaged(self) -> int:
        """Samples in the average."""
        return self._averaged

    @property
    def has_average(self) -> bool:
        """Whether there is an average: after the warm-up and, with ``last=False``, after the first sample."""
        return bool(self.average and self.phase == "averaging" and (self._averaged or self.average.last))

    @property
    def resets(self) -> int:
        """Resets done."""
        return self._resets

    @property
    def phase(self) -> str:
        """``"warm-up"``, ``"averaging"`` or ``"finished"``."""
        if self._finished:
            return "finished"
        return "warm-up" if self.warmup_steps is None or self.steps < self.warmup_steps else "averaging"

    def state_dict(self) -> State:
        """The state to resume from, for ``torch.load(weights_only=True)``. As in torch, tensors are not copied."""
        return {
            "format": FORMAT,
            "options": self._options(),
            "warmup_steps": self.warmup_steps,
            "shapes": self._shapes(),
            "eligible": self._marked,
            "steps": self.steps,
            "averaged": self._averaged,
            "resets": self._resets,
            "finished": self._finished,
            "previous": {name: like(part, self._tensors[name]) for name, part in self._previous.items()},
            "average": {name: like(part, self._tensors[name]) for name, part in self._average.items()},
            "tracker": self._tracker.state_dict() if self._tracker else None,
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from a saved state; load those of the model and the optimiser too.

        Raises ValueError if the state has other options, names or shapes, or the format of another version.
        """
        if state.get("format") != FORMAT:
            raise ValueError(
                f"the state has format {state.get('format', 1)}, this version reads format {FORMAT}: "
                "resume with the version that saved it, or start the task again"
            )
        check_saved(state["options"], self._options())
        eligible = state.get("eligible", self._marked)  # 0.1.0 has none
        check_saved({"eligible": eligible}, {"eligible": self._marked})
        if self.warmup_steps is None:  # end_warmup() may have been called before saving
            self.warmup_steps = state["warmup_steps"]
        check_saved({"warmup_steps": state["warmup_steps"]}, {"warmup_steps": self.warmup_steps})
        check_saved_shapes(state["shapes"], self._shapes())
        self._steps = state["steps"]
        self._averaged = state["averaged"]
        self._resets = state["resets"]
        self._finished = state["finished"]
        self._skipped = None
        self._previous = self._loaded(state["previous"])
        self._average = self._loaded(state["average"])
        self._tracker = None
        if state["tracker"] is not None:
            self._tracker = self._new_tracker()
            self._tracker.load_state_dict(state["tracker"])
            if self.reset and self.reset.momentum and self._resets:
                self._tracker.moments_dropped(self._steps)  # when exactly is not saved

    # ---- setup -----------------------------------------------------------------------------------------------------

    def _check_options(self):
        check_share("retain", self.retain)
        if self.reset is not None and not isinstance(self.reset, Reset):
            raise TypeError(f"reset={self.reset!r}: give Blend(), Revert(), another Reset or None")
        if self.average is not None and not isinstance(self.average, Average):
            raise TypeError(f"average={self.average!r}: give an Average() or None")
        if self.rank_scope not in SCOPES:
            raise ValueError(f"rank_scope={self.rank_scope!r} is unknown; known: {', '.join(SCOPES)}")
        if self.warmup_steps is not None:
            check_whole_steps("warmup_steps", self.warmup_steps, 0)
            if self.reset and self.warmup_steps == 0:
                raise ValueError("warmup_steps=0 leaves no gradient to rank by: give at least 1, or reset=None")

    def _warmup_is_too_short(self, stacklevel=3):
        """Whether the warm-up is too short for the reset (``min_warmup``); warns if so."""
        reset = self.reset
        steps = self.warmup_steps
        if reset is None or steps is None or steps >= reset.min_warmup:
            return False
        what = "WSC averages but does not reset" if self.average else "WSC does not reset"
        warnings.warn(
            f"{what}: after a warm-up of {steps} steps, fewer than min_warmup={reset.min_warmup}, a reset may cost "
            "more than it gains; to reset nevertheless, pass a reset such as Blend(min_warmup=0)",
            stacklevel=stacklevel,
        )
        return True

    def _wanted_buffers(self, named_buffers):
        wanted = any(part and part.buffers for part in (self.reset, self.average))
        if wanted and named_buffers == ():
            raise ValueError("buffers=True needs named_buffers=model.named_buffers()")
        return by_name(named_buffers, "named_buffers", torch.is_floating_point) if wanted else {}

    @torch.no_grad()
    def _begin(self):
        self._previous: dict[str, Tensor] = {}  # theta_prev
        self._average: dict[str, Tensor] = {}  # Theta
        self._tracker: Tracker | None = None
        if self.reset:
            by_previous = self.reset.ranks and self.importance.needs_previous
            params = self._params if self.reset.needs_previous or by_previous else {}
            buffers = self._buffers if self.reset.buffers else {}
            self._previous = {name: local(tensor).clone() for name, tensor in {**params, **buffers}.items()}
            self._tracker = self._new_tracker()
        if self.average and self.warmup_steps == 0 and self.average.due(0, 0):
            self._sample(self.average)

    def _new_tracker(self) -> Tracker:
        return self.importance.track(self._params) if self.reset and self.reset.ranks else Tracker(self._params)

    def _options(self):
        """The options, as text, that a saved state and the object that loads it must share."""
        names = ("retain", "importance", "reset", "average", "rank_scope")
        return {name: repr(getattr(self, name)) for name in names}

    def _shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    # ---- each step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _after_step(self, optimizer, args, kwargs):
        if self._finished:
            raise RuntimeError(
                "a step after finish(): make a new WeightSpaceConsolidation for the next task and attach() it, or "
                "detach() this one"
            )
        check_layouts(self._tensors, self._layouts)
        # A GradScaler lets a fused optimiser skip the step by itself, on the device.
        skipped = getattr(optimizer, "found_inf", None)
        self._steps += 1
        if skipped is not None:
            before = 0 if self._skipped is None else self._skipped
            self._skipped = before + (skipped != 0).long()
        if self._tracker:
            with self.measure(False):
                self._tracker.follow(optimizer, skipped)
        if (self._reset_due() or self._sample_due()) and self._subtract_skipped():
            return  # a step was skipped, so nothing is due yet
        self._act(optimizer)

    def _loaded(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's part of the ``saved`` tensors, on the devices of those that it belongs to."""
        parts = {}
        for name, tensor in self._tensors.items():
            if name in saved:
                parts[name] = part_of(saved[name].to(tensor.device), tensor).clone()
        return parts

    def _subtract_skipped(self):
        """Subtract skipped steps from the count and return their number. Synchronises if there may be any."""
        skipped = 0 if self._skipped is None else int(self._skipped)
        self._steps -= skipped
        self._skipped = None
        return skipped

    def _reset_due(self) -> Reset | None:
        if self.reset is None or self.warmup_steps is None or self.warmup_steps < self.reset.min_warmup:
            return None
        return self.reset if self.reset.due(self._steps - self.warmup_steps) else None

    def _sample_due(self) -> Average | None:
        due = self.average and self.warmup_steps is not None and self.average.due(self._steps, self.warmup_steps)
        return self.average if due else None

    def _act(self, optimizer):
        """Do what is due after this step."""
        reset = self._reset_due()
        if reset:
            self._reset(reset, optimizer)
        average = self._sample_due()
        if average:
            self._sample(average)

    def _reset(self, reset: Reset, optimizer: Optimizer):
        assert self._tracker is not None
        with self.measure(True):
            scores = self._tracker.scores(optimizer, self._steps, self._previous)
        if reset.ranks:
            check_finite(scores, self.peers, self._tracker.of_gradients)
        names = list(scores)
        params = _pick(self._params, names)
        values = reset.others(self._previous)
        others = _pick(values, names) if values else params  # a rule may need none
        if values and not reset.needs_previous:  # whole tensors; previous weights are this process's rows
            others = [part_of(x, self._params[name]).to(p.device) for name, x, p in zip(names, others, params)]
        retain = self.retain if reset.ranks else 0.0
        eligible = [self._eligible.get(name) for name in names]
        reset_(params, others, list(scores.values()), retain, reset, self.rank_scope, eligible, self.peers)
        if reset.buffers:
            buffers = list(self._buffers.values())
            previous = _pick(self._previous, self._buffers)
            reset.reset_buffers_(buffers, previous, [torch.zeros_like(b, dtype=torch.bool) for b in buffers])
        if reset.momentum:
            for param in self._params.values():
                optimizer.state.pop(param, None)  # the optimiser recreates it at its next step
            self._tracker.moments_dropped(self._steps)
        if not reset.every:
            self._previous = {}
            self._tracker = None
        self._resets += 1

    def _sample(self, average: Average):
        tensors = self._tensors if average.buffers else self._params
        if self._averaged:
            n = average.n(self._steps, self._averaged, self.warmup_steps or 0)
            average_(list(self._average.values()), [local(tensor) for tensor in tensors.values()], n)
        else:
            self._average = {name: local(t).to(wide(t.dtype), copy=True) for name, t in tensors.items()}
        self._averaged += 1


def _unmeasured(at_reset: bool) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def _pick(by_name: Params, names: Iterable[str]) -> list[Tensor]:
    return [local(by_name[name]) for name in names]

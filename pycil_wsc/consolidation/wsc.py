"""Weight Space Consolidation as an object that follows an optimiser through one task."""

import time
from dataclasses import asdict, replace

import torch

from pycil_wsc.consolidation.checks import (
    by_name,
    check_eligible,
    check_finite,
    check_layouts,
    check_saved_shapes,
    layouts,
    plain_name,
)
from pycil_wsc.consolidation.functional import average_, blend_, reset_
from pycil_wsc.consolidation.importance import MOMENT_SCORES, drift_score
from pycil_wsc.consolidation.moments import BlockScore, Gradients, OptimizerMoments, OwnMoments, wide
from pycil_wsc.consolidation.options import Options


class WeightSpaceConsolidation:
    """Scores weights while a task warms up, resets the dormant ones once, and averages from there on.

    "Forget Forgetting: Continual Learning in a World of Abundant Memory", section 4. One object serves one task:

    >>> from pycil_wsc.consolidation import WeightSpaceConsolidation, recompute_batch_norm
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> batches = [(torch.randn(32, 8), torch.randint(2, (32,))) for _ in range(20)]
    >>> wsc = WeightSpaceConsolidation(model.named_parameters(), warmup_steps=5, average_every=5).attach(optimizer)
    >>> for inputs, targets in batches:
    ...     loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> wsc.finish()
    >>> recompute_batch_norm(model, batches)

    With theta_prev the weights when the object is made, g the gradient in ``p.grad`` after an optimiser step (the loss's own,
    before weight decay and momentum; clipped or scaled if the loop does that), i the number of the step, j ``average_every``::

        m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2            each step of the warm-up
        S = |m_hat| * v_hat                                          (hat: divided by 1 - b^i, as in Adam)
        theta <- blend * theta + (1 - blend) * theta_prev            after warmup_steps steps, where S is not in the top `retain`
        Theta <- (n * Theta + theta) / (n + 1)                       from there on, every j steps
        theta <- Theta                                               at finish()

    Parameters without a gradient in the whole warm-up are neither ranked nor reset; a gradient missing in some steps counts
    as zero in those. Steps are the optimiser's: gradients may be accumulated over several batches, and a step that a ``GradScaler``
    skips is none. A step does not wait for the device, but for the reset (under a ``GradScaler`` also each sample and the first step).

    Other rules for other questions: ``importance`` and ``reset`` below.

    Memory, for N trainable elements of s bytes, f = max(s, 4): N (s + 2 f) bytes until the reset, N f after it; N (s + 3 f) with
    ``reset_every``; N f alone, from the end of the warm-up, with ``reset="none"``. So 12, then 4 bytes per element for fp32. With
    ``moments="optimizer"`` N s until the reset, N f after it: one copy of the weights at any time. Ranking adds a few blocks of 4 MB.

    Args:
        named_parameters: iterable of (name, parameter), such as ``model.named_parameters()``. Those that do not require a gradient
            are left alone, a parameter under several names counts once.
        warmup_steps: optimiser steps from the task's start to the reset; 0 only with ``reset="none"``; None: until :meth:`end_warmup`.
        average_every: j, optimiser steps between samples of the average, counted from the reset.
        retain: share of the elements kept at the reset, ``round(retain * n)`` of n by exact count, of equals the first.
        blend: share of the present weights in the others.
        importance: what weights are ranked by: ``"moment"`` (S above), ``"first_moment"``, ``"second_moment"``, ``"drift"`` (|theta - theta_prev|), or
            a function ({name: parameter}, {name: theta_prev}) -> {name: scores} that is called at the reset.
        moments: ``"own"`` follows m and v here, whatever the optimiser. ``"optimizer"`` reads Adam's or AdamW's at the reset instead of keeping
            a second pair. The optimiser must be new in each task, its betas count, and of ``torch.optim.Adam`` the weight decay is part of g.
            ``"carried"`` is the same of an optimiser that goes on from task to task: its moments remember the steps before, some 1/(1 - beta).
        betas: decay of the two moments; None: (0.9, 0.999), or the optimiser's.
        score_abs: let m follow |g| instead of g.
        rank_scope: ``"global"`` ranks all elements together, ``"tensor"`` each parameter's by themselves.
        reset: ``"blend"``, ``"revert"`` (blend with 0), ``"random"`` (initial values, drawn anew), ``"shrink_perturb"`` (theta <- shrink * theta +
            perturb * fresh for all elements, with nothing kept: Ash and Adams, 2020) or ``"none"`` (only average).
        shrink, perturb: of ``"shrink_perturb"``.
        fresh: for the last two, a function without arguments -> {name: initial values}, called at each reset.
        reset_every: None for one reset, else reset again every so many steps after the first; the moments go on, theta_prev stays.
        reset_momentum: drop the optimiser's state of the parameters at each reset, so that it starts on them afresh.
        average: False leaves the last weights in place at the end.
        average_start: ``"reset"`` makes the reset weights the first sample (with ``warmup_steps=0`` the weights when the object is
            made); ``"first"`` those j steps later.
        average_count: ``"since_reset"`` sets n to the number of samples so far, for a plain mean; ``"absolute"`` takes the paper's
            n = i / j by the letter, i counted from the task's start (a real number if j does not divide it): then Theta begins
            as the reset weights and they weigh more than one sample. It needs ``average_start="reset"``.
        average_last: add the last weights to the average if their step was not one of the sampled.
        named_buffers: iterable of (name, buffer), such as batch-norm statistics; those not of floating type are left alone.
        reset_buffers: blend the buffers whole with their values at the start, at each reset.
        average_buffers: average the buffers with the weights. Better: :func:`recompute_batch_norm` after ``finish()``.
        eligible: mapping of name to bool tensor of the parameter's shape: only elements marked True are ranked and may be reset.
            Names left out are eligible whole.
        peers: if the parameters are this process's parts of sharded ones, the processes; see :func:`~.ranking.top_blocks`. Not saved.

    Raises:
        ValueError, TypeError: an argument is out of range, unknown or inconsistent.
        RuntimeError: in the course of training, for what cannot go on; the message says what to do.
    """

    def __init__(
        self,
        named_parameters,
        *,
        warmup_steps,
        average_every=1,
        retain=0.2,
        blend=0.5,
        importance="moment",
        moments="own",
        betas=None,
        score_abs=False,
        rank_scope="global",
        reset="blend",
        shrink=0.6,
        perturb=0.01,
        fresh=None,
        reset_every=None,
        reset_momentum=False,
        average=True,
        average_start="reset",
        average_count="since_reset",
        average_last=True,
        named_buffers=(),
        reset_buffers=False,
        average_buffers=False,
        eligible=None,
        peers=None,
    ):
        if betas is None and moments == "own":
            betas = (0.9, 0.999)
        if not callable(importance) and importance not in (*MOMENT_SCORES, "drift"):
            raise ValueError(
                f"importance={importance!r} is unknown; known: {', '.join(MOMENT_SCORES)}, drift, or a function"
            )
        if fresh is None and reset in ("random", "shrink_perturb"):
            raise ValueError(f"reset={reset!r} needs fresh, a function that gives new initial values: {{name: tensor}}")
        self._importance, self._fresh = importance, fresh
        self.options = Options(
            warmup_steps=warmup_steps,
            average_every=average_every,
            retain=retain,
            blend=blend,
            importance=getattr(importance, "__name__", "own") if callable(importance) else importance,
            shrink=shrink,
            perturb=perturb,
            moments=moments,
            betas=None if betas is None else tuple(betas),
            score_abs=score_abs,
            rank_scope=rank_scope,
            reset=reset,
            reset_every=reset_every,
            reset_momentum=reset_momentum,
            average=average,
            average_start=average_start,
            average_count=average_count,
            average_last=average_last,
            reset_buffers=reset_buffers,
            average_buffers=average_buffers,
        )
        with_buffers = reset_buffers or average_buffers
        if with_buffers and named_buffers == ():
            raise ValueError("reset_buffers and average_buffers need named_buffers=model.named_buffers()")
        self._params = by_name(named_parameters, "named_parameters", lambda p: p.requires_grad)
        self._buffers = by_name(named_buffers, "named_buffers", torch.is_floating_point) if with_buffers else {}
        both = [*self._params.items(), *self._buffers.items()]
        self._tensors = by_name(both, "named_parameters and named_buffers", torch.is_tensor)
        self._layouts = layouts(self._tensors)
        if not self._params:
            raise ValueError("named_parameters holds no parameter that requires a gradient")
        eligible = {plain_name(name): mask for name, mask in (eligible or {}).items()}
        check_eligible(eligible, self._params)
        self._eligible = {name: mask.to(self._params[name].device) for name, mask in eligible.items()}
        self._peers, self._hook, self._optimizer = peers, None, None
        self._steps = self._averaged = self._resets = 0
        self._scoring_seconds = 0.0
        self._skipped = None  # how many of the steps were skipped on the device; the host has not asked yet
        self._finished = False
        self._begin()

    @torch.no_grad()
    def _begin(self):
        self._previous, self._average, self._moments = {}, {}, None  # theta_prev and Theta, by name
        if self.options.needs_previous:
            tensors = self._tensors if self.options.reset_buffers else self._params
            self._previous = {name: tensor.clone() for name, tensor in tensors.items()}
        if self.options.resets:
            self._moments = self._new_moments()
        if self.options.samples_at(0):
            self._sample()

    def attach(self, optimizer):
        """Follow ``optimizer``: each of its steps is a step here. Returns the object itself."""
        if self._hook is not None:
            raise RuntimeError("attached already: detach() first")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held.isdisjoint(map(id, self._params.values())):
            raise ValueError("the optimizer holds none of the parameters: attach to the one that trains them")
        if self._moments:
            self._moments.check(optimizer, self.steps)
        self._hook, self._optimizer = optimizer.register_step_post_hook(self._after_step), optimizer
        return self

    def detach(self):
        """No longer follow the optimiser; without effect if none is followed."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = self._optimizer = None

    @torch.no_grad()
    def end_warmup(self):
        """Reset, and average from here on: for a warm-up whose end shows in training, such as a plateau of the loss; with ``warmup_steps=None``."""
        steps = self.steps
        if self.options.warmup_steps is not None:
            raise RuntimeError(
                f"end_warmup(): the warm-up ends after {self.options.warmup_steps} steps; for one that ends here, make the object with warmup_steps=None"
            )
        if self._hook is None or not steps:
            raise RuntimeError("end_warmup() before any step: attach() first, and train")
        self.options = replace(self.options, warmup_steps=steps)
        self._act(self._optimizer)

    @torch.no_grad()
    def finish(self):
        """End the task: the average becomes the weights, in their own type, and all memory is freed.

        Raises RuntimeError if there is nothing to average: the warm-up has not ended, or no sample was due.
        """
        options, steps = self.options, self.steps
        if self._finished:
            raise RuntimeError("finish() was called already: make a new WeightSpaceConsolidation for each task")
        if options.warmup_steps is None:
            raise RuntimeError(
                "finish() before end_warmup(): call it first, or detach() to leave the weights as they are"
            )
        if steps < options.warmup_steps:
            of = f"{steps} of {options.warmup_steps} warm-up steps"
            raise RuntimeError(f"finish() after {of}: train longer or shorten warmup_steps")
        if options.average and options.average_last and not options.samples_at(steps):
            self._sample()
        if options.average and not self._averaged:
            raise RuntimeError("finish() before any sample of the average: shorten average_every, or set average_last")
        for name, mean in self._average.items():
            self._tensors[name].copy_(mean)
        self._finished = True
        self._previous, self._average, self._moments = {}, {}, None

    @property
    def steps(self):
        """Optimiser steps followed since the task's start."""
        self._settle()
        return self._steps

    @property
    def averaged(self):
        """Samples in the average."""
        return self._averaged

    @property
    def resets(self):
        """Resets done."""
        return self._resets

    @property
    def scoring_seconds(self):
        """Seconds that following the gradients and scoring took so far; of work on a GPU, until it was launched."""
        return self._scoring_seconds

    @property
    def scoring_bytes(self):
        """Bytes that are kept at present to score by, the previous weights aside."""
        return self._moments.nbytes if self._moments else 0

    @property
    def phase(self):
        """``"warm-up"``, ``"averaging"`` or ``"finished"``."""
        warmup = self.options.warmup_steps
        return "finished" if self._finished else "warm-up" if warmup is None or self.steps < warmup else "averaging"

    def state_dict(self):
        """All that is needed to go on, for ``torch.load(weights_only=True)``. As in torch, the tensors are not copies."""
        return {
            "options": asdict(self.options),
            "shapes": self._shapes(),
            "steps": self.steps,
            "averaged": self._averaged,
            "resets": self._resets,
            "scoring_seconds": self._scoring_seconds,
            "finished": self._finished,
            "previous": dict(self._previous),
            "average": dict(self._average),
        } | (self._moments.state_dict() if self._moments else {"first": {}, "second": {}, "with_gradient": []})

    def load_state_dict(self, state):
        """Go on from a saved state: load model and optimiser too. Raises ValueError if options, names or shapes differ."""
        if self.options.warmup_steps is None:  # it may have ended
            self.options = replace(self.options, warmup_steps=state["options"]["warmup_steps"])
        self.options.check_saved(state["options"])
        check_saved_shapes(state["shapes"], self._shapes())
        self._steps, self._averaged, self._resets = state["steps"], state["averaged"], state["resets"]
        self._finished, self._skipped, self._scoring_seconds = (
            state["finished"],
            None,
            state.get("scoring_seconds", 0.0),
        )
        for part in "previous", "average":
            saved = state[part]
            setattr(
                self,
                f"_{part}",
                {name: saved[name].to(t.device, copy=True) for name, t in self._tensors.items() if name in saved},
            )
        to_come = self.options.resets and not self._finished and (self.options.reset_every or not self._resets)
        self._moments = self._new_moments() if to_come else None
        if self._moments:
            self._moments.load_state_dict(state)

    def _shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def _after_step(self, optimizer, args, kwargs):
        if self._finished:
            raise RuntimeError(
                "a step after finish(): make a new WeightSpaceConsolidation for the next task, or detach() this one"
            )
        check_layouts(self._tensors, self._layouts)
        skipped = getattr(
            optimizer, "found_inf", None
        )  # a GradScaler lets a fused optimiser skip by itself, on the device
        self._steps += 1
        if skipped is not None:
            self._skipped = (skipped != 0) + (0 if self._skipped is None else self._skipped)
        if self._moments:
            start = time.perf_counter()
            self._moments.follow(optimizer, skipped)
            self._scoring_seconds += time.perf_counter() - start
        if (self.options.resets_at(self._steps) or self.options.samples_at(self._steps)) and self._settle():
            return  # fewer steps than it seemed: the next that is not skipped may be the one
        self._act(optimizer)

    def _act(self, optimizer):
        """Do what is due after this step."""
        if self.options.resets_at(self._steps):
            self._reset(optimizer)
        if self.options.samples_at(self._steps):
            self._sample()

    def _settle(self):
        """Take the skipped steps off the count; returns how many. Waits for the device if there may be any."""
        skipped = 0 if self._skipped is None else int(self._skipped)
        self._steps -= skipped
        self._skipped = None
        return skipped

    def _new_moments(self):
        options = self.options
        if not options.by_moments:
            return Gradients(self._params)
        score = MOMENT_SCORES[options.importance]
        if options.moments == "own":
            return OwnMoments(self._params, options.betas, options.score_abs, score)
        return OptimizerMoments(self._params, score, options.moments == "carried")

    def _now(self):
        """Seconds, when the devices have done all that they were given."""
        for device in {param.device for param in self._params.values() if param.is_cuda}:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def _reset(self, optimizer):
        options = self.options
        start = self._now()
        scores = self._scores(optimizer)
        self._scoring_seconds += self._now() - start
        check_finite(scores)
        names = list(scores)
        others = self._fresh() if options.reset in ("random", "shrink_perturb") else self._previous
        eligible = [self._eligible.get(name) for name in names]
        reset_(
            _pick(self._params, names),
            _pick(others, names),
            list(scores.values()),
            options.kept,
            options.rule,
            options.rank_scope,
            eligible,
            self._peers,
        )
        if options.reset_buffers:
            keep_none = [torch.zeros_like(b, dtype=torch.bool) for b in self._buffers.values()]
            blend_(self._buffers.values(), _pick(self._previous, self._buffers), keep_none, options.reset_blend)
        if options.reset_momentum:
            for param in self._params.values():
                optimizer.state.pop(param, None)  # what an optimiser lacks it makes anew at its next step
        if not options.reset_every:
            self._previous, self._moments = {}, None
        self._resets += 1

    def _scores(self, optimizer):
        """{name: scores} of the parameters that have had a gradient."""
        if self.options.by_moments:
            return self._moments.scores(optimizer, self._steps)
        names = [name for name in self._params if name in self._moments.with_gradient]
        params, previous = ({name: tensors[name] for name in names} for tensors in (self._params, self._previous))
        if self._importance == "drift":
            return {name: BlockScore(drift_score, params[name], previous[name]) for name in names}
        scores = self._importance(params, previous)
        for name in names:
            if name not in scores or scores[name].shape != params[name].shape:
                raise ValueError(
                    f"importance: the function gave no scores of shape {tuple(params[name].shape)} for '{name}'"
                )
        return {name: scores[name].detach().to(params[name].device) for name in names}

    def _sample(self):
        tensors = self._tensors if self.options.average_buffers else self._params
        if self._averaged:
            n = self.options.weight_of_average(self._steps, self._averaged)
            average_(list(self._average.values()), list(tensors.values()), n)
        else:
            self._average = {name: tensor.to(wide(tensor.dtype), copy=True) for name, tensor in tensors.items()}
        self._averaged += 1


def _pick(by_name, names):
    return [by_name[name] for name in names]

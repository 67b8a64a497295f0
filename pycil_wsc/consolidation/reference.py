"""The slow twin of :class:`WeightSpaceConsolidation`: one element at a time, in Python floats, straight from the equations.

It shares no line with the fast version, so that a test can step both and compare. Read it to see what is computed.
"""


class ReferenceConsolidation:
    """Takes the same options, but for an importance that is a function; weights, gradients and buffers are ``{name: [float, ...]}``, changed in place.

    There is no optimiser to attach to: call ``step`` after each of its steps. ``reset_momentum`` concerns the optimiser alone and
    is no option here. ``eligible`` is ``{name: [bool, ...]}``, ``fresh`` ``{name: [float, ...]}``. ``moments="optimizer"``: the moments of an Adam that is new in this task;
    its betas may differ from group to group, so ``betas`` may be ``{name: (b1, b2)}``.
    """

    def __init__(
        self,
        weights,
        *,
        warmup_steps,
        average_every=1,
        retain=0.2,
        blend=0.5,
        importance="moment",
        moments="own",
        betas=(0.9, 0.999),
        score_abs=False,
        rank_scope="global",
        reset="blend",
        shrink=0.6,
        perturb=0.01,
        fresh=None,
        reset_every=None,
        average=True,
        average_start="reset",
        average_count="since_reset",
        average_last=True,
        buffers=None,
        reset_buffers=False,
        average_buffers=False,
        eligible=None,
    ):
        self.warmup_steps, self.average_every, self.retain, self.blend = warmup_steps, average_every, retain, blend
        self.moments, self.score_abs, self.rank_scope = moments, score_abs, rank_scope
        self.betas = betas if isinstance(betas, dict) else {name: betas for name in weights}
        self.importance, self.reset, self.reset_every = importance, reset, reset_every
        self.shrink, self.perturb, self.fresh = shrink, perturb, fresh
        self.average, self.average_start, self.average_count = average, average_start, average_count
        self.average_last, self.reset_buffers, self.average_buffers = average_last, reset_buffers, average_buffers
        self.eligible = eligible or {}
        self.previous = _copy(weights)  # theta_prev
        self.previous_buffers = _copy(buffers or {})
        self.m = {name: [0.0] * len(values) for name, values in weights.items()}
        self.v = _copy(self.m)
        self.t = {name: 0 for name in weights}  # steps that the moments have taken
        self.has_gradient = set()
        self.i = 0  # steps since the task's start
        self.mean, self.samples, self.last_sample = None, 0, None  # Theta, its samples, the step of the latest
        if warmup_steps == 0 and average and average_start == "reset":
            self.sample(weights, buffers or {})

    def step(self, weights, gradients, buffers=None, skipped=False):
        """``gradients[name]`` may be None. ``skipped``: a gradient scaler kept the optimiser from stepping."""
        if skipped:
            return
        self.i += 1
        self.update_moments(gradients)
        since = self.i - self.warmup_steps
        if self.reset != "none":
            if since == 0 or (self.reset_every is not None and since > 0 and since % self.reset_every == 0):
                self.reset_weights(weights, buffers or {})
        if self.average:
            if since == 0 and self.average_start == "reset":
                self.sample(weights, buffers or {})
            elif since > 0 and since % self.average_every == 0:
                self.sample(weights, buffers or {})

    def update_moments(self, gradients):
        for name, m in self.m.items():
            (beta1, beta2), v, gradient = self.betas[name], self.v[name], gradients[name]
            if gradient is not None:
                self.has_gradient.add(name)
            elif self.moments == "optimizer":
                continue
            self.t[name] += 1
            for e in range(len(m)):
                g = 0.0 if gradient is None else gradient[e]
                m[e] = beta1 * m[e] + (1 - beta1) * (abs(g) if self.score_abs else g)
                v[e] = beta2 * v[e] + (1 - beta2) * g * g

    def score(self, weights, name, e):
        """S_l = |m_hat_l| * v_hat_l, one of the two alone, or |theta_l - theta_prev_l|"""
        if self.importance == "drift":
            return abs(weights[name][e] - self.previous[name][e])
        beta1, beta2 = self.betas[name]
        m_hat = self.m[name][e] / (1 - beta1 ** self.t[name])
        v_hat = self.v[name][e] / (1 - beta2 ** self.t[name])
        return {"moment": abs(m_hat) * v_hat, "first_moment": abs(m_hat), "second_moment": v_hat}[self.importance]

    def reset_weights(self, weights, buffers):
        alpha = self.blend if self.reset == "blend" else 0.0
        ranked = {
            name: [e for e in range(len(values)) if name not in self.eligible or self.eligible[name][e]]
            for name, values in weights.items()
            if name in self.has_gradient
        }
        by_tensor = [[(name, e) for e in elements] for name, elements in ranked.items()]
        for group in by_tensor if self.rank_scope == "tensor" else [sum(by_tensor, [])]:
            best_first = sorted(
                group, key=lambda element: -self.score(weights, *element)
            )  # stable: of equals the first
            kept = 0 if self.reset == "shrink_perturb" else round(self.retain * len(group))
            for name, e in best_first[kept:]:
                if self.reset == "random":
                    weights[name][e] = self.fresh[name][e]
                elif self.reset == "shrink_perturb":
                    weights[name][e] = self.shrink * weights[name][e] + self.perturb * self.fresh[name][e]
                else:
                    weights[name][e] = alpha * weights[name][e] + (1 - alpha) * self.previous[name][e]
        if self.reset_buffers:
            for name, values in buffers.items():
                for e in range(len(values)):
                    values[e] = alpha * values[e] + (1 - alpha) * self.previous_buffers[name][e]

    def sample(self, weights, buffers):
        present = {**weights, **buffers} if self.average_buffers else weights
        if self.mean is None:
            self.mean = _copy(present)
        else:
            n = self.samples if self.average_count == "since_reset" else self.i / self.average_every
            for name, values in present.items():
                for e in range(len(values)):
                    self.mean[name][e] = (n * self.mean[name][e] + values[e]) / (n + 1)
        self.samples += 1
        self.last_sample = self.i

    def finish(self, weights, buffers=None):
        if not self.average:
            return
        if self.average_last and self.last_sample != self.i:
            self.sample(weights, buffers or {})
        for name, values in self.mean.items():
            ({**weights, **(buffers or {})})[name][:] = values


def _copy(lists):
    return {name: list(values) for name, values in lists.items()}

"""The model in training: optimiser steps, the consolidation over them, and the merge after each task."""

import contextlib

import torch

from pycil_wsc.consolidation import Average, Blend, Revert, WeightSpaceConsolidation, moment_score
from pycil_wsc.engine.precision import resolved_precision
from pycil_wsc.llm.merging import merges
from pycil_wsc.llm.model import load_model, token_losses
from pycil_wsc.llm.placing import Sharded, Whole
from pycil_wsc.llm.tokens import collate, micro_batches


class Training:
    """``begin_task``, then ``begin_epoch`` and the steps of each epoch, then ``end_task``; between tasks the weights may be tested."""

    def __init__(self, config, tokenizer, processes, device):
        self.config, self.processes, self.device, self.pad = config, processes, device, tokenizer.pad_token_id
        self.placing = (Sharded if config.shard and processes.count > 1 else Whole)(
            load_model(config, tokenizer), processes, device
        )
        self.model, self.parameters = self.placing.model, self.placing.parameters
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.merge = _merge(config, self._weights(), self.placing.peers)
        self.wsc = None
        self.counts = {
            "steps": 0,
            "tokens": 0,
            "padding": 0,
            "answers": 0,
        }  # padding: tokens beside those; answers: tokens with a label

    def begin_task(self, index, epochs):
        """Before task ``index``, whose :class:`pycil_wsc.llm.corpus.Epoch`s are ``epochs``: the weights before it are remembered."""
        steps = sum(steps_of(epoch, self.config) for epoch in epochs if self._covered(epoch))
        wanted = self.config.method == "wsc" and steps and (index or self.config.wsc.first_task)
        self.wsc = _consolidation(self.config.wsc, self.config.betas, self.placing, steps) if wanted else None

    def begin_epoch(self, epoch):
        if self.wsc and self._covered(epoch):
            self.wsc.detach()
            self.wsc.attach(self.optimizer)

    def step(self, examples):
        """One optimiser step; returns this process's part of the mean loss, on the device."""
        self.model.train()
        groups = micro_batches(examples, self.config.micro_tokens, self.config.padding)
        labels, loss = sum(len(e) - e.prompt for e in examples), torch.zeros((), device=self.device)
        for group, factor in self.placing.share(groups):
            loss += self._backward(group, factor, len(examples), labels)
        self.placing.collect_gradients()
        self._clip()
        self.optimizer.step()
        self.placing.clear()
        self._count(groups, labels)
        return loss

    def end_task(self):
        """The average, or an online merge, becomes the weights; other merges take them in."""
        if self.wsc:
            self.wsc.finish()
            self.wsc.detach()
            self.wsc = None
        if self.merge:
            self.merge.update(self._weights())
            if self.merge.online:
                self._set(self.merge.result())

    @contextlib.contextmanager
    def tested(self):
        """Within, the model has the weights to test: those of a merge, where it is not what training goes on from."""
        if not self.merge or self.merge.online:
            yield self.model
            return
        own = {name: tensor.clone() for name, tensor in self._weights().items()}
        self._set(self.merge.result())
        yield self.model
        self._set(own)

    def autocast(self):
        return (
            torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else contextlib.nullcontext()
        )

    @property
    def sharded(self):
        return self.placing.peers is not None

    @property
    def precision(self):
        small = (
            self.config.precision == "auto" and self.device.type == "cpu"
        )  # what a CPU has time for is faster in fp32
        return "fp32" if small else resolved_precision(self.config.precision, self.device)

    # ---- saving and going on -------------------------------------------------------------------------------------------

    def state_dict(self):
        """All that is needed to go on, of the whole model; the tensors are not copies."""
        parts = {"wsc": self.wsc and self.wsc.state_dict(), "merge": self.merge and self.merge.state_dict()}
        state = {"model": self._weights(), "optimizer": self.optimizer.state_dict(), **parts}
        return by_name(self.placing.whole, state, self.parameters) | {"counts": self.counts}

    def load_state_dict(self, state, index, epochs):
        """Go on from ``state``, saved within or after task ``index`` of these ``epochs``."""
        self.counts = state["counts"]
        state = by_name(
            self.placing.part, {name: part for name, part in state.items() if name != "counts"}, self.parameters
        )
        self._set(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["wsc"]:
            self.begin_task(index, epochs)
            self.wsc.load_state_dict(
                state["wsc"] | {"shapes": self.wsc.state_dict()["shapes"]}
            )  # of a sharded model they are this process's
        if state["merge"]:
            self.merge.load_state_dict({name: tensor.to(self.device) for name, tensor in state["merge"].items()})

    # ---- below -------------------------------------------------------------------------------------------------------------

    def _covered(self, epoch):
        return epoch.replay or self.config.wsc.covers == "all"

    def _backward(self, group, factor, examples, labels):
        """Add ``factor`` times the gradients of a group's share in the mean over ``examples`` items, or over ``labels`` tokens; returns the share."""
        batch = collate(group, self.pad, self.device)
        with self.autocast():
            losses = token_losses(self.model, batch).sum(1)
        loss = (losses / batch.counts).sum() / examples if self.config.loss == "item" else losses.sum() / labels
        (factor * loss).backward()
        return loss.detach() if factor else 0.0

    def _clip(self):
        """As torch's ``clip_grad_norm_``, over all parts of the model."""
        factor = (self.config.clip / (self.placing.square_norm().sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([parameter.grad for parameter in self.parameters.values()], factor)

    def _count(self, groups, labels):
        tokens = sum(len(example) for group in groups for example in group)
        area = sum(len(group) * len(group[0]) for group in groups)
        for name, more in {"steps": 1, "tokens": tokens, "padding": area - tokens, "answers": labels}.items():
            self.counts[name] += more

    def _weights(self):
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def _set(self, weights):
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])


def by_name(change, state, names, path=()):
    """``state`` with ``change(name, tensor)`` for each tensor that belongs to the parameter of that name: by its key, or by its number in the optimiser."""
    if isinstance(state, dict):
        return {key: by_name(change, value, names, (*path, key)) for key, value in state.items()}
    if isinstance(state, torch.Tensor) and state.dim():
        (name,) = [
            name
            for key in path
            if (name := list(names)[key] if isinstance(key, int) else str(key).removeprefix("running.")) in names
        ]
        return change(name, state)
    return state


def steps_of(epoch, config):
    """Optimiser steps of an epoch."""
    return -(-len(epoch.examples) // config.batch_size)


def _merge(config, start, peers):
    """The running merge of the method, or None."""
    options = {
        "avg_offline": {},
        "avg_online": {"decay": config.ema_decay if config.average == "ema" else None},
        "slerp": {"weight": config.slerp_weight, "space": config.slerp_on, "total": peers and peers.sum},
        "task_arithmetic": {"scale": config.task_arithmetic_scale},
        "magmax": {"scale": config.magmax_scale},
    }
    return merges[config.method](start, **options[config.method]) if config.method in options else None


def _consolidation(options, betas, placing, steps):
    """A consolidation over ``steps`` optimiser steps, with the present weights as those before the task."""
    warmup, momentum = int(options.warmup * steps), options.reset_momentum
    resets = {"blend": Blend(options.blend, momentum=momentum), "revert": Revert(momentum=momentum), "none": None}
    average = Average(options.average_every, options.average_start, options.average_count, options.average_last)
    return WeightSpaceConsolidation(
        placing.parameters.items(),
        warmup_steps=max(1, warmup) if resets[options.reset] else warmup,
        retain=options.retain,
        importance=moment_score(betas if options.moments == "own" else None, source=options.moments),
        reset=resets[options.reset],
        average=average if options.average else None,
        rank_scope=options.rank_scope,
        peers=placing.peers,
    )

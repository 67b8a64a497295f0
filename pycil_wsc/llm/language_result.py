"""The result of a language-model run."""

from __future__ import annotations

import torch
import transformers

from pycil_wsc.consolidation.model_merging import Merge
from pycil_wsc.devices import device_name
from pycil_wsc.keys import RECORDED, select
from pycil_wsc.llm.config import COMPARED, IDENTIFYING, KEYS, LLMConfig
from pycil_wsc.llm.corpus import Corpus
from pycil_wsc.llm.metrics import VERSIONS, summary
from pycil_wsc.llm.training import TaskTrainer
from pycil_wsc.reproducibility import commit
from pycil_wsc.results.identity import language_identity
from pycil_wsc.results.schema import LanguageResult
from pycil_wsc.runs.journal import Journal
from pycil_wsc.training.precision import resolved_precision


def result_of(
    config: LLMConfig, corpus: Corpus, trainer: TaskTrainer, journal: Journal, device: torch.device
) -> LanguageResult:
    """The result of a finished run, from what its ``journal`` has noted and its data."""
    history = journal.history
    matrices = {version: [row[version] for row in history] for version in VERSIONS}
    scores = {version: {**summary(matrix), "matrix": matrix} for version, matrix in matrices.items()}
    values = select(config.to_dict(), KEYS, RECORDED)
    last = history[-1]
    seconds = journal.clock["train_seconds"]
    minutes = seconds / 60
    computed = last["padding"] + last["tokens"]
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    copied = trained / parameters if config.method == "wsc" else 0
    paper, streamed = models_resident(trainer.merging.merge, len(history), copied)
    return LanguageResult(
        config=values,
        identity=language_identity(config.identity(), values, IDENTIFYING, COMPARED),
        data=corpus.fingerprint,
        tasks=[task.name for task in corpus.tasks],
        metrics=[task.info.metric for task in corpus.tasks],
        avg_score=summary(matrices["trace"])["last_average"],
        scores=scores,
        chat_template=corpus.frame.chat,
        trivial=corpus.trivial,
        warnings=corpus.warnings,
        train_seconds=seconds,
        total_seconds=journal.clock["total_seconds"],
        train_minutes=minutes,
        models_resident=paper,
        models_resident_streamed=streamed,
        relative_vram_minutes=minutes * paper,
        relative_vram_minutes_streamed=minutes * streamed,
        tokens_trained=last["tokens"],
        padding=last["padding"] / computed if computed else 0.0,
        tokens_per_second=last["tokens"] / seconds if last["tokens"] else 0.0,
        peak_memory_bytes=journal.peak_memory,
        processes=trainer.processes.count,
        sharded=trainer.sharded,
        device=device_name(device),
        precision=resolved_precision(config.precision, device),
        torch=torch.__version__,
        transformers=transformers.__version__,
        commit=commit(),
        **{
            "steps": last["steps"],
            "answer_tokens_trained": last["answers"],
            "parameters": parameters,
            "parameters_trained": trained,
        },
    )


def models_resident(merge: Merge | None, tasks: int, copied: float = 0) -> tuple[float, float]:
    """Models in memory at once: as counted by the paper's relative VRAM, T for offline merges, and as needed here.

    These are the model in training, the running merge, theta_0 if the merge keeps it, and the fraction of parameters
    that WSC has ``copied``: as they were before the task and, after the reset, their average instead.
    """
    if not merge:
        return 1 + copied, 1 + copied
    return 2 if merge.online else tasks, 3 if merge.task_vectors else 2

"""The result of a language-model run."""

from __future__ import annotations

import torch
import transformers

from pycil_wsc.devices import device_name
from pycil_wsc.engine.environment import commit
from pycil_wsc.llm.config import LLMConfig
from pycil_wsc.llm.corpus import Corpus
from pycil_wsc.llm.merging import models_resident
from pycil_wsc.llm.metrics import VERSIONS, summary
from pycil_wsc.llm.training import TaskTrainer, precision_of
from pycil_wsc.results.identity import language_identity
from pycil_wsc.results.schema import LanguageResult
from pycil_wsc.runs.journal import Journal


def result_of(
    config: LLMConfig, corpus: Corpus, trainer: TaskTrainer, journal: Journal, device: torch.device, peak_memory: int
) -> LanguageResult:
    """The result of a finished run, from the lines of its ``metrics.jsonl``, its times and its data.

    ``peak_memory``: in bytes.
    """
    history = journal.history
    matrices = {version: [row[version] for row in history] for version in VERSIONS}
    scores = {version: {**summary(matrix), "matrix": matrix} for version, matrix in matrices.items()}
    values, last, seconds = config.recorded(), history[-1], journal.clock["train_seconds"]
    minutes, computed = seconds / 60, last["padding"] + last["tokens"]
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    residents = models_resident(
        config.method,
        len(history),
        trained / parameters,
        own_moments=config.method == "wsc" and config.wsc.moments == "own" and config.wsc.reset != "none",
    )
    return LanguageResult(
        config=values,
        identity=language_identity(config.identity(), values),
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
        models_resident=residents.paper,
        models_resident_streamed=residents.streamed,
        relative_vram_minutes=minutes * residents.paper,
        relative_vram_minutes_streamed=minutes * residents.streamed,
        tokens_trained=last["tokens"],
        padding=last["padding"] / computed if computed else 0.0,
        tokens_per_second=last["tokens"] / seconds if last["tokens"] else 0.0,
        peak_memory_bytes=peak_memory,
        processes=trainer.processes.count,
        sharded=trainer.sharded,
        device=device_name(device),
        precision=precision_of(config, device),
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

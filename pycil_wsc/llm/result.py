"""The result of a language-model run."""

from typing import Any

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


def result_of(
    config: LLMConfig,
    corpus: Corpus,
    trainer: TaskTrainer,
    history: list[dict[str, Any]],
    clock: dict[str, float],
    peak_memory: int,
) -> LanguageResult:
    """The result of a run, from the rows of ``metrics.jsonl``, its times in seconds, and its peak memory in bytes."""
    matrices = {version: [row[version] for row in history] for version in VERSIONS}
    scores: dict[str, Any] = {version: summary(matrix) | {"matrix": matrix} for version, matrix in matrices.items()}
    values = config.recorded()
    return LanguageResult(
        config=values,
        identity=language_identity(config.identity(), values),
        data=corpus.fingerprint,
        tasks=[task.name for task in corpus.tasks],
        metrics=[task.info.metric for task in corpus.tasks],
        avg_score=scores["trace"]["last_average"],
        scores=scores,
        chat_template=corpus.frame.chat,
        trivial=corpus.trivial,
        warnings=corpus.warnings,
        peak_memory_bytes=peak_memory,
        processes=trainer.processes.count,
        sharded=trainer.sharded,
        device=device_name(trainer.args.device),
        precision=precision_of(config, trainer.args.device),
        torch=torch.__version__,
        transformers=transformers.__version__,
        commit=commit(),
        **_cost(config, trainer, history[-1], clock, len(corpus.tasks)),
    )


def _cost(
    config: LLMConfig, trainer: TaskTrainer, last: dict[str, Any], clock: dict[str, float], tasks: int
) -> dict[str, Any]:
    minutes, computed = clock["train_seconds"] / 60, last["padding"] + last["tokens"]
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    merged = trainer.merging.weights.elements
    residents = models_resident(
        config.method,
        tasks,
        config.method == "slerp" and config.slerp_on == "task_vectors",
        trained=trained / parameters,
        merged=merged / parameters,
        own_moments=config.method == "wsc" and config.wsc.moments == "own" and config.wsc.reset != "none",
    )
    return {
        "train_seconds": clock["train_seconds"],
        "total_seconds": clock["total_seconds"],
        "train_minutes": minutes,
        "models_resident": residents.paper,
        "models_resident_streamed": residents.streamed,
        "relative_vram_minutes": minutes * residents.paper,
        "relative_vram_minutes_streamed": minutes * residents.streamed,
        "steps": last["steps"],
        "tokens_trained": last["tokens"],
        "answer_tokens_trained": last["answers"],
        "padding": last["padding"] / computed if computed else 0.0,
        "tokens_per_second": last["tokens"] / clock["train_seconds"] if last["tokens"] else 0.0,
        "parameters": parameters,
        "parameters_trained": trained,
    }

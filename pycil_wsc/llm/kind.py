"""Language models as a kind of run. Their packages are an extra, imported when data for a run are loaded."""

import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycil_wsc.config.kinds import Kind, register_kind, run_folder
from pycil_wsc.errors import UserError
from pycil_wsc.keys import digest, having
from pycil_wsc.llm import config as options
from pycil_wsc.llm.config import KEYS, LLMConfig, resolve
from pycil_wsc.runs.progress import Progress

if TYPE_CHECKING:
    from pycil_wsc.llm.corpus import Corpus


@register_kind("llm")
class LanguageModel(Kind[LLMConfig, "Corpus"]):
    unit = "tokens"
    records = (options.CHECKPOINT, "metrics.jsonl", "predictions", "models", options.CHECKPOINTS)

    def takes_list(self, name: str) -> bool:
        return name in KEYS and KEYS[name].takes_list

    def resolve(self, flat: Mapping[str, object]) -> LLMConfig:
        return resolve(flat)

    def folder(self, config: LLMConfig) -> Path:
        """``<out>/<prefix>/<data>-<model>/<method>/r<replay ratio>/seed<seed>[-<hash of other changed keys>]``"""
        named = having(KEYS, names="folder")
        usual = resolve({name: value for name, value in config.to_dict().items() if name in named}).identity()
        what = re.sub(r"[^\w.]+", "-", f"{config.data}-{config.model}").strip("-")[-80:]
        seed = f"seed{config.seed}{digest(config.identity(), usual)}"
        return Path(config.out, config.prefix, what, config.method, f"r{config.replay_ratio:g}", seed)

    def loader(self) -> Callable[[LLMConfig], "Corpus"]:
        corpora: dict[Hashable, Corpus] = {}

        def load(config: LLMConfig) -> "Corpus":
            try:
                from pycil_wsc.llm.corpus import Corpus
                from pycil_wsc.llm.trainer import LanguageRun  # noqa: F401  # which needs all packages
            except ModuleNotFoundError as error:
                raise UserError(f"language models need {error.name}: pip install -r requirements-llm.txt") from None
            if config.corpus not in corpora:
                corpora[config.corpus] = Corpus(config)
            return corpora[config.corpus]

        return load

    def plan(self, config: LLMConfig, data: "Corpus") -> int:
        return sum(len(example) for step in data.steps(config) for example in step.examples)

    def outline(self, config: LLMConfig, data: "Corpus") -> str:
        return f"{len(config.tasks)} tasks: {', '.join(config.tasks)}"

    def check_model(self, config: LLMConfig, data: "Corpus") -> None:
        if config.method != "wsc" or config.wsc.covers == "all":
            return
        replays = [any(epoch.replay for epoch in data.epochs(config, index)) for index in range(len(data.tasks))]
        if len(replays) > 1 and not any(replays[1:]):
            raise UserError(
                "wsc.covers: no task has a replay epoch for WSC to cover; set llm.pool, raise llm.replay_ratio, or set "
                "wsc.covers to 'all'"
            )
        if config.wsc.first_task and not replays[0]:
            raise UserError(
                "wsc.first_task: the first task has no replay epoch for WSC to cover; set llm.pool, or set wsc.covers "
                "to 'all'"
            )

    def leftovers(self, config: LLMConfig) -> tuple[str, ...]:
        return options.CHECKPOINT, options.CHECKPOINTS

    def unrecorded(self, config: LLMConfig) -> list[str]:
        tasks = range(1, len(config.tasks) + 1)
        wanted = {False: [], True: [tasks[-1]], "every": tasks}[config.save_weights]
        models = run_folder(config) / "models"
        return [] if all((models / f"after-{task}").exists() for task in wanted) else ["save_weights"]

    def execute(self, config: LLMConfig, data: "Corpus", on_progress: Callable[[Progress], None]) -> dict[str, object]:
        from pycil_wsc.llm.trainer import LanguageRun

        return LanguageRun(config, data, on_progress).execute()

    def headline(self, result: Mapping[str, Any]) -> str:
        return f"average score {100 * result['avg_score']:.2f}"

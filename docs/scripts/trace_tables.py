"""The table of language models in docs/results.md, from their records in results/."""

import json
from pathlib import Path
from typing import Any

STUDIES = Path(__file__).parent.parent.parent / "results" / "studies"
METHODS = ("zero_shot", "finetune", "replay", "slerp", "avg_online", "avg_offline", "task_arithmetic", "magmax", "wsc")


def records(folder: str) -> list[dict[str, Any]]:
    """The results of the study ``folder``: full training before LoRA, methods in the paper's order, then seeds."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (STUDIES / folder).glob("*.json")]

    def order(record: dict[str, Any]) -> tuple[Any, ...]:
        config, method = record["config"], METHODS.index(record["config"]["llm.method"])
        return (
            config.get("llm.lora_rank", 0),
            method,
            config["seed"],
            "schema" in record,
            record["precision"],
            config["llm.lr"],
        )

    return sorted(found, key=order)


def runs(folder: str) -> list[tuple[str, ...]]:
    """Header and rows: the scores after the last task in percent, by TRACE's metrics, and what the run cost."""
    found = records(folder)
    if not found:
        return []
    header = ("method", *found[0]["tasks"], "average", "fixed", "forgetting", "backward", "minutes", "relative VRAM")
    return [header, _without_learning(found[0]), *map(_run, found)]


def _without_learning(record: dict[str, Any]) -> tuple[str, ...]:
    """The best trivial answers, which need no learning."""
    best = {
        version: [max(each.values()) for each in record["trivial"][version].values()] for version in ("trace", "fixed")
    }
    means = (sum(best[version]) / len(best[version]) for version in ("trace", "fixed"))
    return ("no learning", *map(_percent, best["trace"]), *map(_percent, means), "", "", "", "")


def _run(record: dict[str, Any]) -> tuple[str, ...]:
    """Runs that transformers' ``Trainer`` trained are named; their records have a schema, the earlier ones none."""
    config, trace, fixed = record["config"], record["scores"]["trace"], record["scores"]["fixed"]
    name = config["llm.method"] + (f", LoRA {config['llm.lora_rank']}" if config.get("llm.lora_rank") else "")
    scores = (*trace["matrix"][-1], trace["last_average"], fixed["last_average"], trace["forgetting"], trace["bwt"][-1])
    cost = (record["train_minutes"], record["relative_vram_minutes"])
    seed = f"seed {config['seed']}"
    if "schema" in record:
        seed += f", Trainer in {record['precision']}"
    return (f"{name}, {seed}", *map(_percent, scores), *(f"{minutes:.1f}" for minutes in cost))


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"

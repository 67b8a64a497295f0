"""The configuration of a language-model run: the keys ``llm.*`` and ``wsc.*``, checked like those of image runs."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from pycil_wsc.config.config_checks import check_device_and_paths
from pycil_wsc.config.dropped import refuse_dropped, without_dropped
from pycil_wsc.config.image_config import RunOptions
from pycil_wsc.config.unknown import refuse_unknown
from pycil_wsc.consolidation.options import WSCOptions
from pycil_wsc.data.data_options import ImageOptions
from pycil_wsc.errors import UserError
from pycil_wsc.keys import (
    RESULT,
    SAME,
    Key,
    again,
    declared,
    having,
    key,
    plain,
    select,
    up_to_date,
    without_empty_groups,
)
from pycil_wsc.training.learner_config import DeviceOptions

TRACE = ("C-STANCE", "FOMC", "MeetingBank", "Py150", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
MERGES = ("avg_offline", "avg_online", "slerp", "task_arithmetic", "magmax")
METHODS = ("zero_shot", "finetune", "replay", *MERGES, "wsc")
TINY = "tiny-llama"
CHECKPOINT = "checkpoint.json"  # in a run's folder: which of the Trainer's checkpoints is the last whole one
CHECKPOINTS = "checkpoints"  # the Trainer's folder


@dataclass(frozen=True)
class Consolidation(WSCOptions):
    """Weight Space Consolidation on a language model, in optimiser steps. Defaults are the paper's for TRACE."""

    warmup: float = again(
        WSCOptions, "warmup", doc="fraction of the covered steps (`wsc.covers`) before the reset; below 1"
    )
    average_every: int | float = again(
        WSCOptions,
        "average_every",
        20,
        doc="steps between samples of the average; a value below 1 is a fraction of the warm-up's steps",
        before=SAME,
    )
    average_count: str = again(WSCOptions, "average_count", "since_reset", before=SAME)
    covers: str = key(
        "replay",
        "consolidate over the `replay` epochs, or `all` epochs of a task; the paper does not say",
        choices=("replay", "all"),
    )

    def _check_each(self) -> None:
        """They were checked as keys."""


@dataclass(frozen=True)
class SharedOptions:
    """Keys that runs of images have, too."""

    prefix: str = again(RunOptions, "prefix", "trace")
    seed: int = again(
        RunOptions, "seed", 1234, doc="seed of the order of items, random initial weights and adapters, and sampling"
    )
    device: str = again(
        DeviceOptions, "device", doc="`auto`, `cpu`, `cuda`, `mps` or `xpu`, or one of these with a number"
    )
    precision: str = again(DeviceOptions, "precision")
    threads: int | None = again(DeviceOptions, "threads")
    data_root: str = again(ImageOptions, "data_root")
    out: str = again(RunOptions, "out")
    save_weights: bool | str = again(
        RunOptions,
        "save_weights",
        doc='save the model as a folder for transformers: after the last task (`true`) or after each task (`"every"`)',
    )


@dataclass(frozen=True)
class TinyModel:
    """The sizes of a small random model."""

    hidden_size: int = key(64, f"width of `{TINY}`", low=1)
    layers: int = key(2, f"layers of `{TINY}`", low=1)
    heads: int = key(4, f"attention heads of `{TINY}`", low=1)
    kv_heads: int = key(2, f"key and value heads of `{TINY}`", low=1)
    mlp_size: int = key(192, f"width of the feed-forward part of `{TINY}`", low=1)


@dataclass(frozen=True)
class CorpusOptions:
    """The keys that decide the tokenised items. Runs in which they agree share them."""

    model: str = key(
        "meta-llama/Llama-3.2-1B-Instruct",
        f"a folder, a name on the Hugging Face Hub, or `{TINY}`: random weights, with the sizes below",
        names="folder",
        compared=True,
    )
    data: str = key(
        "trace/1000",
        "folder below `data_root` with a folder per task, in TRACE's format",
        names="folder",
        compared=True,
    )
    tasks: tuple[str, ...] = key(TRACE, "the tasks, in order")
    test_on: str = key(
        "test", "items to score: `test`, or `eval` to choose the learning rate or epochs by", choices=("test", "eval")
    )
    train_items: int | None = key(None, "use only the first N training items of each task; null: all", low=1)
    test_items: int | None = key(None, "use only the first N test items of each task; null: all", low=1)
    pool: str | None = key("Lima", "folder of general items, all of which are in every replay epoch, or null")
    pool_items: int | None = key(None, "use only the first N items of the pool; null: all", low=1)
    chat_template: bool | None = key(
        None,
        "format prompts as a user's turn of the tokeniser's chat template; null: if it has one, except for "
        "`Llama-3.2-1B`, which the paper's TRACE protocol trains on raw prompts",
    )
    max_prompt: int = key(1024, "maximum tokens of a prompt; longer prompts lose their beginning", low=2)
    max_answer: int = key(
        512, "maximum tokens of an answer, including its end token; longer answers lose their end", low=2
    )
    vocab_size: int = key(2048, f"tokens of `{TINY}`'s byte-level BPE, trained on the tasks' training data", low=260)


@dataclass(frozen=True)
class LLMOptions:
    """The keys ``llm.*``. Defaults are TRACE's unless another source is named."""

    epochs: tuple[int, ...] | None = key(
        None, "epochs of each task; null: the task's default (TRACE's 5, 3, 7, 5, 3, 5, 5, 7)", low=1
    )
    method: str = key(
        "wsc", ", ".join(f"`{name}`" for name in METHODS), choices=METHODS, names="folder", identifies="method"
    )
    replay_ratio: float = key(
        0.1,
        "fraction of each earlier task in a replay epoch (the paper: 0.2, 0.4, 0.6, 0.8)",
        low=0,
        high=1,
        names="folder",
        identifies="memory",
    )
    replay_epochs: int = key(1, "number of replay epochs, after the task's own epochs", low=1)
    task_arithmetic_scale: float = key(
        0.3, "factor of the sum of task vectors (Ilharco et al.); tune it at 20 % memory", read_by=("task_arithmetic",)
    )
    magmax_scale: float = key(0.5, "factor of MagMax's task vector (Marczak et al.)", read_by=("magmax",))

    batch_size: int = key(256, "items per optimiser step, over all processes", low=1)
    lr: float = key(1e-5, "AdamW's learning rate, constant", low=0)
    betas: tuple[float, ...] = key((0.9, 0.95), "AdamW's betas", low=0, below=1)
    eps: float = key(1e-8, "AdamW's epsilon", low=0)
    weight_decay: float = key(0.0, "AdamW's weight decay, of all weights but biases and norms", low=0)
    clip: float | None = key(1.0, "clip the total norm of the gradients to this value; null: no clipping", above=0)
    lora_rank: int = key(0, "rank of the LoRA adapters (needs peft); 0 trains all weights", low=0)
    lora_alpha: float = key(16.0, "LoRA's alpha", low=0)
    lora_targets: str = key("all-linear", "modules that get adapters: `all-linear`, or names separated by commas")

    temperature: float = key(
        0.0,
        "sampling temperature in the test; 0 is greedy (TRACE samples at 0.1), and above 0 the samples also depend on "
        "the number of processes",
        low=0,
    )
    max_new_tokens: int = key(512, "maximum tokens of a generated answer", low=1)

    micro_tokens: int = key(8192, "maximum tokens of a forward pass, including padding", low=1, decides="rounding")
    padding: float = key(
        0.1, "maximum padding in a forward pass, as a fraction of its tokens", low=0, high=1, decides="rounding"
    )
    eval_batch: int = key(
        64,
        "answers generated at a time; with a temperature above 0, a change also changes the samples",
        low=1,
        decides="rounding",
    )
    attn_implementation: str = key(
        "sdpa",
        "transformers' attention: `sdpa`, `eager`, `flash_attention_2` (needs flash-attn, and bf16), ...",
        decides="rounding",
    )
    gradient_checkpointing: bool = key(
        False, "recompute activations in the backward pass, which saves memory but takes time", decides="rounding"
    )
    shard: bool = key(
        False,
        "several processes: shard weights, gradients and moments over them (FSDP2, by accelerate)",
        decides="rounding",
    )
    timeout_minutes: float = key(
        30.0,
        "several processes: how long each waits for the others within a run",
        low=0.01,
        high=10_080,
        decides="speed",
    )
    checkpoint_minutes: float = key(10.0, "time between checkpoints within a task", low=0, decides="speed")


@dataclass(frozen=True)
class LLMConfig(LLMOptions, CorpusOptions, TinyModel, SharedOptions):
    """The complete configuration of a run."""

    wsc: Consolidation = field(default_factory=Consolidation)

    kind: ClassVar[str] = "llm"

    @property
    def keys(self) -> Mapping[str, Key]:
        return KEYS

    def to_dict(self) -> dict[str, object]:
        values = {name: getattr(self, name.removeprefix("llm.")) for name in KEYS if not name.startswith("wsc.")}
        if self.method == "wsc":
            values |= {f"wsc.{name}": value for name, value in vars(self.wsc).items()}
        return plain(values)

    def identity(self) -> dict[str, object]:
        """The keys that decide the result, with their values."""
        return select(self.to_dict(), KEYS, RESULT)

    def continues(self, identity: Mapping[str, object]) -> bool:
        """Whether the run with this ``identity`` is the same run; keys that it lacks have their earlier values."""
        present = self.identity()
        return present == up_to_date(without_dropped(identity), present, KEYS)

    @property
    def corpus(self) -> tuple[Hashable, ...]:
        """The values that decide the tokenised items."""
        return self.data_root, *(getattr(self, option.name) for option in fields(CorpusOptions))


KEYS = {**declared(SharedOptions), **declared(CorpusOptions, "llm."), **declared(TinyModel, "llm.")}
KEYS |= {**declared(LLMOptions, "llm."), **declared(Consolidation, "wsc.")}
IDENTIFYING = {key.identifies: name for name, key in KEYS.items() if key.identifies}  # field of an identity -> its key
COMPARED = having(KEYS, compared=True)


def resolve(flat: Mapping[str, object]) -> LLMConfig:
    """One complete, checked :class:`LLMConfig` from one value per key."""
    given = refuse_dropped(without_empty_groups(flat, KEYS))
    refuse_unknown(given, KEYS)
    values = {name: entry.check(given.get(name, entry.default)) for name, entry in KEYS.items()}
    for name, entry in KEYS.items():  # what the method does not read is not part of the run's identity
        if entry.read_by and values["llm.method"] not in entry.read_by:
            values[name] = entry.default
    if values["llm.model"] != TINY:
        values |= {name: KEYS[name].default for name in (*declared(TinyModel, "llm."), "llm.vocab_size")}
    if values["llm.method"] in ("zero_shot", "finetune"):
        values |= {"llm.replay_ratio": 0.0, "llm.pool": None, "llm.replay_epochs": KEYS["llm.replay_epochs"].default}
    wsc = {name.removeprefix("wsc."): values.pop(name) for name in list(values) if name.startswith("wsc.")}
    try:
        consolidation = Consolidation(**wsc)
    except ValueError as error:
        raise UserError(f"wsc.{error}") from None
    config = LLMConfig(**{name.removeprefix("llm."): value for name, value in values.items()}, wsc=consolidation)
    _check_together(config)
    return config


def _check_together(config: LLMConfig) -> None:
    """Checks that involve several keys."""
    if not config.tasks or len(set(config.tasks)) < len(config.tasks):
        raise UserError(f"llm.tasks: expected different tasks, at least one, got {list(config.tasks)}")
    for name in config.tasks:
        if name in ("", "..") or Path(name).name != name:
            raise UserError(f"llm.tasks: '{name}' is not a name; give that of a folder in llm.data")
    if config.epochs is not None and len(config.epochs) != len(config.tasks):
        raise UserError(
            f"llm.epochs: {len(config.epochs)} numbers for {len(config.tasks)} tasks; give one for each task"
        )
    if config.model == TINY and (
        config.hidden_size % config.heads or config.heads % config.kv_heads or (config.hidden_size // config.heads) % 2
    ):
        raise UserError(
            "llm.heads: must divide llm.hidden_size, with an even quotient, and be divisible by llm.kv_heads"
        )
    if config.lora_rank and config.method in MERGES:
        raise UserError(f"llm.lora_rank: '{config.method}' merges whole weights; use 0, or a method without merging")
    if config.method == "wsc" and config.wsc.warmup >= 1:
        raise UserError("wsc.warmup: 1 leaves no step to average; give a fraction below 1")
    if len(config.betas) != 2:
        raise UserError(f"llm.betas: expected two numbers, got {list(config.betas)}")
    check_device_and_paths(config)

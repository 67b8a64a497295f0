"""What a run saves of its state: ``checkpoint.pt``, from which it resumes, until it has ended, and trained weights."""

import dataclasses
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from torch import nn

from pycil_wsc.config.image_config import Config
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.data.images.fingerprint import changed, decoded_otherwise
from pycil_wsc.devices import computes_bf16
from pycil_wsc.errors import UnusableRun
from pycil_wsc.files import Json
from pycil_wsc.networks.pretrained import Pretrained, joined
from pycil_wsc.seeding import restored
from pycil_wsc.state import State, load_state, save_state
from pycil_wsc.training.learner import BaseLearner

CHECKPOINT = "checkpoint.pt"
WEIGHTS = "weights.pt"  # with ``"save_weights"``; or a file per task
PARTS = {"position", "learner", "optimizer", "history", "curves", "confusion", "records", "clock", "peak_memory"}
EARLIER = "was begun by a version that read transparent images and photographs with an EXIF orientation otherwise"
AGAIN = "delete it to start this run again"


def read_checkpoint(path: Path, config: RunConfig, data: dict[str, Json]) -> State | None:
    """Read the checkpoint ``path``; returns None if there is no such file.

    Raises :class:`UnusableRun` if it is damaged, or was made with another configuration or other data.
    """
    try:
        state = load_state(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnusableRun(f"{path}: cannot be read ({error.strerror}); make it readable to resume this run") from None
    except ValueError as error:
        raise UnusableRun(f"{path}: is damaged or not a checkpoint of this version ({error}); {AGAIN}") from None
    except MemoryError:
        raise UnusableRun(f"{path}: there is not enough memory to load it; free some to resume this run") from None
    return checked(state, path, PARTS, config, data)


def checked(state: Json, path: Path, parts: Collection[str], config: RunConfig, data: dict[str, Json]) -> State:
    """Return the ``state`` that was read from ``path``.

    Raises :class:`UnusableRun` if it lacks any of its ``parts``, or is of another configuration or other data.
    """
    if not isinstance(state, dict) or not state.keys() >= set(parts):
        raise UnusableRun(f"{path}: is not a checkpoint of this version; {AGAIN}")
    if not config.continues(state.get("identity") or {}):
        raise UnusableRun(f"{path}: was made with other settings; move its folder away, or set another prefix or out")
    if difference := changed(state.get("data"), data):
        raise UnusableRun(f"{path}: was made with other data ({difference}); restore them, or {AGAIN}")
    if decoded_otherwise(state.get("data"), data):
        logging.getLogger("pycil_wsc").warning("%s: %s; if there are any, %s", path, EARLIER, AGAIN)
    return state


def pretrained_of(learner: BaseLearner) -> Pretrained | None:
    """The pre-trained backbone that ``learner`` began with, if it did."""
    if not learner.config.pretrained:
        return None
    with restored([]):
        return Pretrained(learner.config.convnet_type, learner.new_backbone())


def without_pretrained(state: State, pretrained: Pretrained | None) -> State:
    """A learner's ``state`` as part of a file: without the pre-trained backbone, where it is unchanged."""
    if pretrained is None:
        return {"learner": state}
    rest, origin = pretrained.parted(state)
    return {"learner": rest, "backbone": origin}


def with_pretrained(saved: State, backbone: Callable[[], nn.Module]) -> State:
    """The learner's state in a file that was ``saved`` so. ``backbone`` makes the pre-trained one, if it is needed.

    Raises :class:`UserError` if it cannot be made, or is another one.
    """
    origin = saved.get("backbone")  # only of a pre-trained one
    if not origin or not origin["unchanged"]:
        return saved["learner"]
    with restored([]):
        return joined(saved["learner"], origin, backbone())


def save_weights(
    folder: Path, learner: BaseLearner, config: Config, pretrained: Pretrained | None, task: int | None = None
) -> None:
    """Save the weights after ``task`` (None: the last one), with everything that :func:`pycil_wsc.load` needs.

    ``pretrained``: that of :func:`pretrained_of`, without which they are of use if all were trained.
    """
    manager = learner.manager
    state = {
        **without_pretrained(learner.state_dict(), pretrained),
        "config": config.to_dict(),
        "info": dataclasses.asdict(learner.batches.source.info),  # class names, image size, mean, std, crop
        "class_order": manager.class_order,
        "boundaries": manager.boundaries,
        "task": len(manager.tasks) - 1 if task is None else task,
    }
    save_state(folder / (WEIGHTS if task is None else f"weights-task{task}.pt"), state)
    if task is not None:
        (folder / WEIGHTS).unlink(missing_ok=True)  # left by the same run with fewer tasks


def arithmetic(learner: BaseLearner) -> dict[str, str]:
    """What decides how a run computes, as the configuration and the device leave it open: a part of its state."""
    return {"precision": learner.precision.name, "source": type(learner.batches.source).__name__}


def keep_arithmetic(learner: BaseLearner, state: State) -> None:
    """Let a learner compute as the stopped run with this ``state`` began, where the configuration leaves it open.

    Raises :class:`UnusableRun` if the device does not have its precision, or the images do not fit on it any more or
    fit only now: those on the device are cropped by another program, whose results differ by a rounding.
    """
    present = arithmetic(learner)
    precision, source = (state.get(name, present[name]) for name in present)  # 0.1.0 has none
    if source != present["source"]:
        change = "no longer" if source == "DeviceSource" else "only now"
        raise UnusableRun(
            f"cache_images: the run began elsewhere: its images {change} fit into the free memory of "
            f"'{learner.device}'; make it as much as it was, or delete the checkpoint to start again"
        )
    if precision == "bf16" and not computes_bf16(learner.device):
        raise UnusableRun(
            f"precision: the run began in bf16, which '{learner.device}' does not have; resume it elsewhere"
        )
    if learner.config.precision == "auto":
        learner.config = replace(learner.config, precision=precision)
        learner.precision.wanted = precision

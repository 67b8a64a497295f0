"""The keys that all learners share; a learner's own are those of its `Options`."""

from dataclasses import dataclass

from pycil_wsc.keys import key


@dataclass(frozen=True)
class LearnerOptions:
    """The method, its batches and its tests."""

    model_name: str = key(
        "wsc", "the learner", decides="later tasks", names="folder", only="experiments"
    )  # see `plain_first_task`
    consolidate: bool = key(
        False,
        "add Weight Space Consolidation (`wsc.*`) to a learner that trains one network in one phase per task",
        decides="later tasks",
        names="folder",
        fixed=True,
    )
    batch_size: int = key(128, "images in a batch", low=1)
    replay_ratio: float | None = key(
        None,
        "share of current-task images in each batch, the rest being exemplars; null: all are shuffled together",
        low=0,
        high=1,
        decides="later tasks",
    )
    label_smoothing: float = key(
        0.0,
        "share of each target that the cross-entropy spreads evenly over the classes",
        low=0,
        below=1,
    )
    nme: bool = key(
        True,
        "also report nearest-mean-of-exemplars accuracy (one more pass over the memory after each task)",
        decides="later tasks",
        affects="accuracy",
        by_method=True,
    )

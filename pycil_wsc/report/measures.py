"""What is read of a language model's result, and whether it is all there."""

from pycil_wsc.errors import UnusableRun
from pycil_wsc.report.tables import Column

MEASURES = (  # column, value of a result
    (Column("average"), lambda result: 100 * result["avg_score"]),
    (Column("new task"), lambda result: 100 * result["scores"]["trace"]["new_score"]),
    (Column("forgetting"), lambda result: 100 * result["scores"]["trace"]["forgetting"]),
    (Column("backward transfer"), lambda result: backward_transfer(result["scores"]["trace"]["matrix"])),
    (Column("minutes", 1), lambda result: result["train_minutes"]),
    (Column("relative VRAM", 1), lambda result: result["relative_vram_minutes"]),
)
COSTS = (
    (Column("models resident", 2, True), lambda result: result["models_resident"]),
    (Column("streamed", 2, True), lambda result: result["models_resident_streamed"]),
    (Column("relative VRAM, streamed", 1), lambda result: result["relative_vram_minutes_streamed"]),
    (Column("peak memory (MiB)", 0), lambda result: result["peak_memory_bytes"] / 2**20),
    (Column("tokens trained", 0, True), lambda result: result["tokens_trained"]),
    (Column("tokens per second", 0), lambda result: result["tokens_per_second"]),
    (Column("padding (%)", 1), lambda result: 100 * result["padding"]),
)


def overall(matrix):
    """Overall performance after each task, in percent: the mean score on the tasks so far. ``matrix``: 0 to 1, by rows."""
    return [100 * sum(row) / len(row) for row in matrix]


def backward_transfer(matrix):
    """The mean over all tasks of (last score - score when learned), in percentage points; the newest task's is 0."""
    return sum(100 * (last - row[-1]) for last, row in zip(matrix[-1], matrix)) / len(matrix)


def of_a_language_model(data):
    return isinstance(data, dict) and data.get("kind") == "llm"


def checked(path, data):
    """``data``, if it is the result of a language model's run as this version writes them."""
    try:
        tasks, matrices = data["tasks"], [data["scores"][version]["matrix"] for version in ("trace", "fixed")]
        numbers = [value(data) for _, value in (*MEASURES, *COSTS)] + [
            score for matrix in matrices for row in matrix for score in row
        ]
        whole = all(type(number) in (int, float) for number in numbers) and all(
            [len(row) for row in matrix] == list(range(1, len(tasks) + 1)) for matrix in matrices
        )
        whole = whole and {"llm.method", "llm.replay_ratio", "llm.data", "llm.model", "seed"} <= data["config"].keys()
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise UnusableRun(f"{path}: is a result of another version; move it away to run this again")
    return data

"""Scores of generated text, 0 to 1, and summaries over a sequence of tasks.

Each metric exists twice: ``"trace"`` as TRACE computes it, with its quirks but without its crashes, so that numbers are
comparable with the published ones; ``"fixed"`` as it should be. TRACE reports Py150 and 20Minuten in percent; here both
are divided by 100, as in its averages.

=================== ==================================================== ==============================================
metric              trace                                                fixed
=================== ==================================================== ==============================================
``exact_match``     equal strings, nothing stripped                      up to white space, quotes, final punctuation
``choice``          equal first characters                               equal single letter at the start: "B", "(B)"
``rouge_l``         ``rouge`` 1.0.1, arguments swapped (:mod:`.overlap`) ``rouge-score``
``edit_similarity`` difflib, rounded to whole percent as by fuzzywuzzy   rapidfuzz's ``ratio``, both stripped
``sari``            SARI, the whole prompt as source; an empty   the paragraph as source, stripped; an empty
                    prediction has a score                               prediction scores 0
=================== ==================================================== ==============================================
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import TypedDict

import numpy as np

from pycil_wsc.llm.overlap import rouge_l, rouge_l_union, sari
from pycil_wsc.results import metrics

VERSIONS = ("trace", "fixed")
LITERAL = re.compile(r"<(?:STR|NUM|CHAR)_LIT:(.*?)>", re.DOTALL)
TEXT = re.compile(r"(?:Paragraph|Meeting transcripts):\n(.*)\n\s*(?:Simplification|Summary):\s*\Z", re.DOTALL)
LEAD = 500  # characters of a transcript that serve as a trivial summary
SHIFTS = 10
Metric = Callable[[str, str, str], float]  # of (prediction, answer, prompt)
# ignored by the fixed exact match around and after a text; not "-", "%" and a leading ".", which change a number
AROUND, AFTER = " \t\r\n\"'`*()[]{}“”‘’「」『』（）【】", ".,;:!?。，；：！？"


def score(
    metric: str, predictions: Sequence[str], answers: Sequence[str], prompts: Sequence[str], version: str = "trace"
) -> float:
    """Mean score of the predictions, 0 to 1, by one of :data:`METRICS` in one of :data:`VERSIONS`.

    The three lists have equal length. Raises ValueError if they do not or if they are empty, KeyError for an unknown
    metric.
    """
    return float(np.mean(item_scores(metric, predictions, answers, prompts, version)))


def item_scores(
    metric: str, predictions: Sequence[str], answers: Sequence[str], prompts: Sequence[str], version: str = "trace"
) -> list[float]:
    """The score of each prediction."""
    one = METRICS[metric][VERSIONS.index(version)]
    if not predictions:
        raise ValueError("no predictions to score")
    return [float(one(*triple)) for triple in zip(predictions, answers, prompts, strict=True)]


def _bare(text: str) -> str:
    """The text without surrounding white space, quotes and brackets and without final punctuation."""
    return text.strip(AROUND).rstrip(AROUND + AFTER) or text.strip()


def _choice(prediction: str, answer: str, prompt: str) -> bool:
    ours, right = (re.match(r"\W*([A-Za-z])\b", text) for text in (prediction, answer))
    return ours is not None and right is not None and ours[1].upper() == right[1].upper()


def _difflib_percent(prediction: str, answer: str, prompt: str) -> float:
    """fuzzywuzzy's ``ratio`` of the code with literals filled in.

    TRACE installs it without python-Levenshtein; it then uses difflib's heuristic.
    """
    ours, theirs = _with_literals(prediction), _with_literals(answer)
    return round(100 * SequenceMatcher(None, ours, theirs).ratio()) / 100 if ours and theirs else 0.0


def _indel_ratio(prediction: str, answer: str, prompt: str) -> float:
    """Twice the longest common subsequence over the sum of the lengths, in characters: rapidfuzz's ``fuzz.ratio``."""
    from rapidfuzz.fuzz import ratio  # imported here: an extra that only this metric needs

    return ratio(*(_with_literals(text).strip() for text in (prediction, answer))) / 100


def _with_literals(code: str) -> str:
    """Replace Py150's placeholders: <NUM_LIT> by 0, <STR_LIT> and <CHAR_LIT> by nothing, <STR_LIT:x> and such by x."""
    code = code.replace("<NUM_LIT>", "0").replace("<STR_LIT>", "").replace("<CHAR_LIT>", "")
    for found in list(LITERAL.finditer(code)):
        code = code.replace(found[0], found[1])
    return code


def _sari_of_paragraph(prediction: str, answer: str, prompt: str) -> float:
    return sari(_text(prompt).strip(), prediction.strip(), [answer.strip()]) if prediction.strip() else 0.0


def _text(prompt: str) -> str:
    """The text to simplify or summarise, without TRACE's instruction around it; other prompts as a whole."""
    found = TEXT.search(prompt)
    return found[1] if found else prompt


METRICS: dict[str, tuple[Metric, Metric]] = {  # name -> (as in TRACE, fixed)
    "exact_match": (
        lambda said, right, prompt: said == right,
        lambda said, right, prompt: _bare(said) == _bare(right),
    ),
    "choice": (lambda said, right, prompt: said[:1] == right[:1], _choice),
    "rouge_l": (
        lambda said, right, prompt: rouge_l_union(said, right),
        lambda said, right, prompt: rouge_l(said, right),
    ),
    "edit_similarity": (_difflib_percent, _indel_ratio),
    "sari": (lambda said, right, prompt: sari(prompt, said, [right]), _sari_of_paragraph),
}


def trivial_scores(
    metric: str, answers: Sequence[str], prompts: Sequence[str], version: str = "trace"
) -> dict[str, float]:
    """Scores on test items of answers that need no model, by name: baselines that a result must beat.

    ``majority``: the commonest test answer (for ``choice``: its first character), the best that a constant can do.
    ``lead``: the first 500 characters of the text to summarise. ``shuffled``: the answers of other test items, the mean
    over ten shifts of the list. ``empty``: nothing. ``source``: the text to simplify.
    """
    answers = list(answers)
    if metric in ("exact_match", "choice"):
        labels = Counter(answer[:1] if metric == "choice" else answer for answer in answers)
        guesses = {"majority": [[labels.most_common(1)[0][0]] * len(answers)]}
    elif metric == "rouge_l":
        guesses = {"lead": [[_text(prompt)[:LEAD] for prompt in prompts]]}
    elif metric == "edit_similarity":
        shifts = range(1, min(len(answers), SHIFTS + 1))
        guesses = {"shuffled": [answers[shift:] + answers[:shift] for shift in shifts]}
    else:
        guesses = {"empty": [[""] * len(answers)], "source": [[_text(prompt) for prompt in prompts]]}
    scores = {}
    for name, lists in guesses.items():
        if lists:
            scores[name] = float(np.mean([score(metric, texts, answers, prompts, version) for texts in lists]))
    return scores


class Summary(TypedDict):
    last_average: float
    op: list[float]
    bwt: list[float]
    new_score: float
    forgetting: float


def summary(matrix: Sequence[Sequence[float]]) -> Summary:
    """The usual summaries of ``matrix[t][i]``, the score on task i after task t (i <= t).

    ``last_average``: mean of the last row. ``op``: the mean of each row (overall performance). ``bwt``: for each row,
    the mean of (score now - score when learned), the newest task's 0 included (backward transfer). ``new_score``: mean
    score of each task when learned. ``forgetting``: mean over all tasks but the last of (best score ever - score at the
    end).
    """
    op = [float(np.mean(row)) for row in matrix]
    learned = [row[-1] for row in matrix]
    bwt = [float(np.mean(np.subtract(row, learned[: len(row)]))) for row in matrix]
    return {
        "last_average": op[-1],
        "op": op,
        "bwt": bwt,
        "new_score": metrics.new_task_accuracy(matrix),
        "forgetting": metrics.forgetting(matrix),
    }

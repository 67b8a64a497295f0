"""Scores of generated text, 0 to 1, and summaries over a sequence of tasks.

Each metric exists twice: ``"trace"`` as TRACE computes it, with its quirks but without its crashes, so that numbers are
comparable with the published ones; ``"fixed"`` as it should be. TRACE reports Py150 and 20Minuten in percent; here both
are divided by 100, as in its averages.

=================== ==================================================== ==============================================
metric              trace                                                fixed
=================== ==================================================== ==============================================
``exact_match``     equal strings, nothing stripped                      up to white space, quotes, final punctuation
``choice``          equal first characters                               equal single letter at the start: "B", "(B)"
``rouge_l``         ``rouge`` 1.0.1, arguments swapped                   ``rouge-score``
``edit_similarity`` difflib, rounded to whole percent as by fuzzywuzzy   rapidfuzz's ``ratio``, both stripped
``sari``            SARI, the whole prompt as source; an empty           the paragraph as source, stripped; an empty
                    prediction has a score                               prediction scores 0
=================== ==================================================== ==============================================

ROUGE-L (Lin, 2004) and SARI (Xu et al., 2016) are reimplemented where the packages that TRACE uses are unsuitable:
``rouge`` fails on long texts and on texts without a sentence, and the SARI of ``evaluate`` is a script on the hub.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

import numpy as np
from rapidfuzz.distance import LCSseq
from rapidfuzz.fuzz import ratio
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from pycil_wsc.files import Json
from pycil_wsc.results import metrics

VERSIONS = ("trace", "fixed")
LITERAL = re.compile(r"<(?:STR|NUM|CHAR)_LIT:(.*?)>", re.DOTALL)
TEXT = re.compile(r"(?:Paragraph|Meeting transcripts):\n(.*)\n\s*(?:Simplification|Summary):\s*\Z", re.DOTALL)
LEAD = 500  # characters of a transcript that serve as a trivial summary
SHIFTS = 10
ORDERS = (1, 2, 3, 4)  # the lengths of SARI's n-grams
TOKENIZER = Tokenizer13a()
Metric = Callable[[str, str, str], float]  # (prediction, answer, prompt) -> score
# ignored by the fixed exact match around and after a text; not "-", "%" and a leading ".", which change a number
AROUND = " \t\r\n\"'`*()[]{}“”‘’「」『』（）【】"
AFTER = ".,;:!?。，；：！？"


def score(
    metric: str, predictions: Sequence[str], answers: Sequence[str], prompts: Sequence[str], version: str = "trace"
) -> float:
    """Mean score of the predictions, 0 to 1, by one of :data:`METRICS` in one of :data:`VERSIONS`.

    The three lists have equal length, at least 1.
    """
    one = METRICS[metric][VERSIONS.index(version)]
    return float(np.mean([float(one(*triple)) for triple in zip(predictions, answers, prompts, strict=True)]))


def _bare(text: str) -> str:
    """The text without surrounding white space, quotes and brackets and without final punctuation."""
    return text.strip(AROUND).rstrip(AROUND + AFTER) or text.strip()


def _choice(prediction: str, answer: str, prompt: str) -> bool:
    chosen, right = (re.match(r"\W*([A-Za-z0-9])\b", text) for text in (prediction, answer))
    return chosen is not None and right is not None and chosen[1].upper() == right[1].upper()


def _difflib_percent(prediction: str, answer: str, prompt: str) -> float:
    """fuzzywuzzy's ``ratio`` of the code with literals filled in.

    TRACE installs it without python-Levenshtein; it then uses difflib's heuristic.
    """
    predicted = _with_literals(prediction)
    expected = _with_literals(answer)
    return round(100 * SequenceMatcher(None, predicted, expected).ratio()) / 100 if predicted and expected else 0.0


def _indel_ratio(prediction: str, answer: str, prompt: str) -> float:
    """Twice the longest common subsequence over the sum of the lengths, in characters: rapidfuzz's ``fuzz.ratio``."""
    return ratio(*(_with_literals(text).strip() for text in (prediction, answer))) / 100


def _with_literals(code: str) -> str:
    """Replace Py150's placeholders: <NUM_LIT> by 0, <STR_LIT> and <CHAR_LIT> by nothing, <STR_LIT:x> and such by x."""
    code = code.replace("<NUM_LIT>", "0").replace("<STR_LIT>", "").replace("<CHAR_LIT>", "")
    for match in list(LITERAL.finditer(code)):
        code = code.replace(match[0], match[1])
    return code


def _sari_of_paragraph(prediction: str, answer: str, prompt: str) -> float:
    return sari(_text(prompt).strip(), prediction.strip(), [answer.strip()]) if prediction.strip() else 0.0


def _text(prompt: str) -> str:
    """The text to simplify or summarise, without TRACE's instruction around it; other prompts as a whole."""
    match = TEXT.search(prompt)
    return match[1] if match else prompt


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L of ``rouge-score`` without stemming, in 0..1: words are ASCII letters and digits, in lower case."""
    words, reference_words = (re.findall(r"[a-z0-9]+", text.lower()) for text in (prediction, reference))
    common = LCSseq.similarity(words, reference_words)
    return 2 * common / (len(words) + len(reference_words)) if common else 0.0


def rouge_l_union(prediction: str, reference: str) -> float:
    """ROUGE-L of ``rouge`` 1.0.1 at summary level, with the arguments swapped as in TRACE, in 0..1.

    For each sentence of the *prediction*, its longest common subsequence with each sentence of the reference is taken;
    their union, as a set of words, is counted against the different words of either text. No sentence scores 0.
    """
    sentences = _sentences(prediction)
    reference_sentences = _sentences(reference)
    if not sentences or not reference_sentences:
        return 0.0
    common = set()
    for sentence in sentences:
        for other in reference_sentences:
            common.update(_common_subsequence(sentence, other))
    precision = len(common) / len(set(itertools.chain.from_iterable(sentences)))
    recall = len(common) / len(set(itertools.chain.from_iterable(reference_sentences)))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    """Lists of words. White space between two full stops is a sentence of one empty word, as in ``rouge``."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A longest common subsequence, found and given from the ends; on a tie, a word of ``second`` is dropped.

    Which one is found among equally long ones decides the score, so rapidfuzz's alignment cannot replace it.
    """
    lengths = [[0] * (len(second) + 1)]
    for word in first:
        above = lengths[-1]
        row = [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    i = len(first)
    j = len(second)
    common = []
    while i and j:
        if first[i - 1] == second[j - 1]:
            i -= 1
            j -= 1
            common.append(first[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common


def sari(source: str, output: str, references: Sequence[str]) -> float:
    """SARI of one ``output`` against a list of references, in 0..1: the mean of three scores over n-grams of 1 to 4.

    Kept n-grams of the source: F1, each weighted by its count (in the source and output, times the number of
    references, against all references together). Deleted ones: precision, likewise. Added ones: F1 of the sets. 0/0 is
    1. Text is lower-cased and tokenised by sacrebleu's 13a tokeniser. An empty text is one empty token, as there.
    """
    given, said, *wanted = (TOKENIZER(text.lower()).split(" ") for text in (source, output, *references))
    return sum(sum(_of_order(n, given, said, wanted)) for n in ORDERS) / (3 * len(ORDERS))


def _of_order(n: int, source: list[str], output: list[str], references: list[list[str]]) -> tuple[float, float, float]:
    """(keep F1, delete precision, add F1) of the n-grams."""
    wanted = sum((_ngrams(tokens, n) for tokens in references), Counter())
    present, said = (_ngrams(tokens, n, times=len(references)) for tokens in (source, output))

    kept = present & said
    to_keep = present & wanted
    deleted = present - said
    kept_well = kept & wanted
    deleted_well = deleted - wanted
    keep = _f1(_mean_share(kept_well, kept), _share(kept_well.total(), to_keep.total()))

    added = said.keys() - present.keys()
    to_add = wanted.keys() - present.keys()
    added_well = len(added & to_add)
    add = _f1(_share(added_well, len(added)), _share(added_well, len(to_add)))
    return keep, _mean_share(deleted_well, deleted), add


def _ngrams(tokens: list[str], n: int, times: int = 1) -> Counter:
    return Counter(list(zip(*(tokens[start:] for start in range(n)))) * times)


def _mean_share(part: Counter, whole: Counter) -> float:
    return _share(sum(part[gram] / count for gram, count in whole.items()), len(whole))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


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

    ``majority``: the best that one of the answers, given each time, can do: the commonest one.
    ``lead``: the first 500 characters of the text to summarise. ``shuffled``: the answers of other test items, the mean
    over ten shifts of the list. ``empty``: nothing. ``source``: the text to simplify.
    """
    answers = list(answers)
    if metric in ("exact_match", "choice"):
        constants = [[answer] * len(answers) for answer in sorted(set(answers))]
        return {"majority": max(score(metric, texts, answers, prompts, version) for texts in constants)}
    if metric == "rouge_l":
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


def summary(matrix: Sequence[Sequence[float]]) -> dict[str, Json]:
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

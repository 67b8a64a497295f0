"""ROUGE-L (Lin, 2004), F-measure, of a summary against one reference, as computed by two well-known packages."""

import re
from collections.abc import Sequence


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L of ``rouge-score`` without stemming, in 0..1.

    Words are runs of ASCII letters and digits, in lower case.
    """
    ours, theirs = (re.findall(r"[a-z0-9]+", text.lower()) for text in (prediction, reference))
    common = len(_common_subsequence(ours, theirs))
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def rouge_l_union(prediction: str, reference: str) -> float:
    """ROUGE-L of ``rouge`` 1.0.1 at summary level, with the arguments swapped as in TRACE, in 0..1.

    Sentences end at full stops, words at white space. For each sentence of the *prediction*, its longest common
    subsequence with each sentence of the reference is taken; their union, as a set of words, is counted against the
    different words of either text. The package fails on a text without a sentence and on long sentences; here the first
    scores 0 and the second is computed.
    """
    ours, theirs = _sentences(prediction), _sentences(reference)
    if not ours or not theirs:
        return 0.0
    common = {word for sentence in ours for other in theirs for word in _common_subsequence(sentence, other)}
    precision, recall = (len(common) / len({word for sentence in text for word in sentence}) for text in (ours, theirs))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    """Lists of words. White space between two full stops is a sentence of one empty word, as in ``rouge``."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A longest common subsequence, found from the ends; on a tie, a word of ``second`` is dropped."""
    lengths = [[0] * (len(second) + 1)]
    for word in first:
        above, row = lengths[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    i, j, common = len(first), len(second), []
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            common.append(first[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common[::-1]

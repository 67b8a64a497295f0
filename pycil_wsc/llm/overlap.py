"""ROUGE-L (Lin, 2004) and SARI (Xu et al., 2016): how many words or n-grams two texts share.

Own code where the packages that TRACE uses cannot serve: ``rouge`` fails on a text without a sentence and on long ones,
and the SARI of ``evaluate`` is a script on the hub, not part of a package.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

ORDERS = (1, 2, 3, 4)  # of SARI's n-grams


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L of ``rouge-score`` without stemming, in 0..1: words are ASCII letters and digits, in lower case."""
    from rapidfuzz.distance import LCSseq  # imported here: an extra that few metrics need

    ours, theirs = (re.findall(r"[a-z0-9]+", text.lower()) for text in (prediction, reference))
    common = LCSseq.similarity(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def rouge_l_union(prediction: str, reference: str) -> float:
    """ROUGE-L of ``rouge`` 1.0.1 at summary level, with the arguments swapped as in TRACE, in 0..1.

    For each sentence of the *prediction*, its longest common subsequence with each sentence of the reference is taken;
    their union, as a set of words, is counted against the different words of either text. No sentence scores 0.
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
    """A longest common subsequence, found and given from the ends; on a tie, a word of ``second`` is dropped.

    Which one is found among equally long ones decides the score, so rapidfuzz's alignment cannot replace it.
    """
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
    return common


def sari(source: str, output: str, references: Sequence[str]) -> float:
    """SARI of one ``output`` against a list of references, in 0..1: the mean of three scores over n-grams of 1 to 4.

    Kept n-grams of the source: F1, each weighted by its count (in the source and output, times the number of
    references, against all references together). Deleted ones: precision, likewise. Added ones: F1 of the sets. 0/0 is
    1. Text is lower-cased and tokenised by sacrebleu's 13a tokeniser. An empty text is one empty token, as there.
    """
    given, said, *wanted = (_tokenizer()(text.lower()).split(" ") for text in (source, output, *references))
    return sum(sum(_of_order(n, given, said, wanted)) for n in ORDERS) / (3 * len(ORDERS))


def _of_order(n: int, source: list[str], output: list[str], references: list[list[str]]) -> tuple[float, float, float]:
    """(keep F1, delete precision, add F1) of the n-grams."""
    wanted = sum((_ngrams(tokens, n) for tokens in references), Counter())
    present, said = (_ngrams(tokens, n, times=len(references)) for tokens in (source, output))

    kept, to_keep, deleted = present & said, present & wanted, present - said
    kept_well, deleted_well = kept & wanted, deleted - wanted
    keep = _f1(_mean_share(kept_well, kept), _share(kept_well.total(), to_keep.total()))

    added, to_add = said.keys() - present.keys(), wanted.keys() - present.keys()
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


@cache
def _tokenizer() -> Callable[[str], str]:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a  # imported here: an extra that only this metric needs

    return Tokenizer13a()

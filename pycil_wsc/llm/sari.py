"""SARI of a simplified text (Xu et al., TACL 2016), as in Hugging Face's ``datasets`` and ``evaluate``."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

ORDERS = (1, 2, 3, 4)


def sari(source: str, output: str, references: Sequence[str]) -> float:
    """SARI of one ``output`` against a list of references, in 0..1: the mean of three scores over n-grams of 1 to 4.

    Kept n-grams of the source: F1, each weighted by its count (in the source and output, times the number of
    references, against all references together). Deleted ones: precision, likewise. Added ones: F1 of the sets. 0/0 is
    1. Text is lower-cased and tokenised by sacrebleu's 13a tokeniser. An empty text is one empty token, as there.
    """
    given, said, *wanted = map(_tokens, (source, output, *references))
    scores = [_of_order(n, given, said, wanted) for n in ORDERS]
    return sum(map(sum, scores)) / (3 * len(ORDERS))


def _of_order(n: int, source: list[str], output: list[str], references: list[list[str]]) -> tuple[float, float, float]:
    """(keep F1, delete precision, add F1) of the n-grams."""
    wanted = sum((_ngrams(tokens, n) for tokens in references), Counter())
    present, said = (
        Counter({gram: count * len(references) for gram, count in _ngrams(tokens, n).items()})
        for tokens in (source, output)
    )

    kept, to_keep, deleted = present & said, present & wanted, present - said
    kept_well, deleted_well = kept & wanted, deleted - wanted
    keep = _f1(_mean_share(kept_well, kept), _share(kept_well.total(), to_keep.total()))

    added, to_add = said.keys() - present.keys(), wanted.keys() - present.keys()
    added_well = len(added & to_add)
    add = _f1(_share(added_well, len(added)), _share(added_well, len(to_add)))
    return keep, _mean_share(deleted_well, deleted), add


def _ngrams(tokens: list[str], n: int) -> Counter:
    return Counter(zip(*(tokens[start:] for start in range(n))))


def _mean_share(part: Counter, whole: Counter) -> float:
    return _share(sum(part[gram] / count for gram, count in whole.items()), len(whole))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _tokens(text: str) -> list[str]:
    return _tokenizer()(text.lower()).split(" ")


@cache
def _tokenizer() -> Callable[[str], str]:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a  # imported here: an extra that only this metric needs

    return Tokenizer13a()

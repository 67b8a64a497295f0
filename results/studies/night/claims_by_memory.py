"""Write results/studies/night/claims.md, which :mod:`claims` calls: each claim at every memory size, the retain rates
and the ranks of the methods.
"""

from collections.abc import Sequence

import pandas as pd
from claims_in_detail import SIZES, at, by_share  # beside this file, as night_runs is
from findings import NOT_RUN, SHARES, Claim, Finding, by_seed
from night_runs import EIGHT, THREE, correlation, table_of
from over_seeds import ROOT, markdown

from pycil_wsc.results.run_table import Row

PAGE = ROOT / "results" / "studies" / "night" / "claims.md"
RETAINED_SHARES = (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)

AT_EACH_SIZE = """\
# The claims at each memory size

These tables belong to [The claims in detail](../../../docs/claims_in_detail.md), which explains the intervals.
`python results/studies/night/claims.py` writes them from `table.csv`.

Each cell has the paper's difference, then ours. In the paper's table of twenty tasks, the entry at 40 % disagrees with
the difference printed beside it, which would give +2.28.
"""
RETAIN_RATES = """\
## Retain rates

Each cell has the difference from retaining all parameters, that is, from no reset, with the same memory. WSC retains
20 % and averages.
"""
RANKS = """\
## Ranks of the eight methods

Kendall's tau compares our order of the eight methods with the paper's (1: the same, -1: reversed). In brackets is the
95 % interval of a bootstrap over our seeds, which is too narrow with so few seeds. p is the probability of such a tau
by chance.
"""


def page(runs: Sequence[Row], findings: Sequence[Finding]) -> str:
    """The page results/studies/night/claims.md."""
    table = table_of(runs)
    wide = [by_share(each) for each in findings if len(each.claim.shares) > 1]
    averaged_or_not = [f"{share} %, {name}" for share in THREE for name in ("averaged", "not averaged")]
    parts = (
        AT_EACH_SIZE,
        markdown(("claim", *SIZES), wide),
        RETAIN_RATES,
        markdown(("retained, %", *averaged_or_not), retained(table)),
        RANKS,
        markdown(("memory, %", *map(str, SHARES)), correlations(table)),
    )
    return "\n".join(parts)


def retained(table: pd.DataFrame) -> list[list[str]]:
    """The rows of the table of retain rates: with averaging and without it, against retaining all."""
    rows = []
    for rate in RETAINED_SHARES:
        pair = [
            Claim(f"{100 * rate:g}", [(retaining(rate, average),)], [(retaining(1, average),)], THREE)
            for average in (True, False)
        ]
        rows.append([pair[0].text, *(at(share, each, table) for share in THREE for each in pair)])
    return rows


def retaining(share: float, average: bool) -> str:
    """The row of WSC that retains this fraction of the parameters."""
    retain = "" if share == 0.2 else f" retain={share:g}"
    return f"wsc{'' if average else ' average=False'}{retain}"


def correlations(table: pd.DataFrame) -> list[list[str]]:
    """The rows of the table of ranks."""
    wide = by_seed(table, "average")
    taus, chances, seeds = ["Kendall's tau"], ["p"], ["seeds"]
    for share in SHARES:
        found = correlation(wide, EIGHT, share)
        taus.append(f"{found.tau:+.2f} ({found.low:+.2f} to {found.high:+.2f})" if found else NOT_RUN)
        chances.append(f"{found.chance:.2f}" if found else "")
        seeds.append(str(found.seeds) if found else "")
    return [taus, chances, seeds]

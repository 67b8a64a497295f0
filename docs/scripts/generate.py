"""Write the generated parts of docs/: the tables of keys, from their declarations, the tables of language-model runs
and of some speeds, from their records, the claims, and the figures.

python docs/scripts/generate.py
"""

import importlib
import json
import re
import sys
from functools import partial
from pathlib import Path

import speed_tables  # beside this file, as is over_seeds
from over_seeds import markdown

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
CONFIGURATION, RESULTS, SPEED, ABUNDANT = "configuration", "results", "speed", "abundant"
WSC, PAPER, STREAMS, CLASSIFIER, CLAIMS, README = "wsc", "paper", "streams", "classifier_details", "claims", "README"
OF_RUNS = ("run", "tasks", "memory", "images", "backbone", "method", "schedule", "optimiser", "device", "wsc")
PAGES = dict.fromkeys((*OF_RUNS, "defaults", "methods", "language models"), CONFIGURATION)
RECORDS = {"trace_smollm2": RESULTS}
RECORDS |= {
    "abundant": ABUNDANT,
    "equal decay": ABUNDANT,
    "several passes": ABUNDANT,
    "one pass": STREAMS,
    "long tail": CLASSIFIER,
    "pretrained": "pretrained_study",
    "pilot": "pretrained",
    "largest losses": WSC,
    "averages of images": WSC,
    "averages of digits": WSC,
    "imagenet100": PAPER,
    "gate": CLAIMS,
    "claims": CLAIMS,
    "claims of the small protocol": CLAIMS,
    "arms": RESULTS,
    "batch norm": RESULTS,
    "gains": README,
}
RECORDS |= dict.fromkeys(speed_tables.TABLES, SPEED)
GENERATED = sorted({*PAGES.values(), *RECORDS.values()})


HEADER = ("key", "default", "values", "meaning")


def table(name):
    """The Markdown table of keys between the marks of ``name``."""
    from pycil_wsc.keys import declared

    if name == "language models":
        from pycil_wsc.llm.config import KEYS as LLM_KEYS

        return markdown(HEADER, map(row, LLM_KEYS.values()))
    if name == "defaults":
        from pycil_wsc.registry import learner_defaults, optimizer_defaults

        own = [*sorted(learner_defaults.items()), *sorted(optimizer_defaults.items())]
        return markdown(
            ("method or optimiser", "its defaults"), ((f"`{name}`", listed(keys)) for name, keys in own if keys)
        )
    if name == "methods":
        from pycil_wsc.registry import learners

        own = [(name, each) for name in sorted(learners) for each in declared(learners[name].Options).values()]
        return markdown(("method", *HEADER), ((f"`{name}`", *row(each)) for name, each in own))
    from pycil_wsc.config.image_config import GROUPS

    return markdown(HEADER, map(row, GROUPS[name].values()))


def row(key):
    return f"`{key.name}`", f"`{json.dumps(key.default)}`", limits(key), key.doc


def limits(key):
    """The allowed values of a key, as far as it declares them."""
    if key.choices:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in key.choices)
    bounds = (("≥", key.low), ("≤", key.high), (">", key.above), ("<", key.below))
    return ", ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)


def listed(values):
    return ", ".join(f"`{name}` {json.dumps(value)}" for name, value in values.items())


def page(name):
    """The page with its tables generated again."""
    text = file_of(name).read_text(encoding="utf-8")
    marks = {f"keys: {mark}": table for mark, on_page in PAGES.items() if on_page == name}
    marks |= {f"records: {mark}": recorded for mark, on_page in RECORDS.items() if on_page == name}
    for mark, make in marks.items():
        pattern = rf"(<!-- {mark} -->\n).*?(<!-- end -->)"
        made = make(mark.partition(": ")[2])
        text, count = re.subn(pattern, lambda match, made=made: match[1] + made + match[2], text, flags=re.DOTALL)
        assert count == 1, f"{name}.md has {count} marks for the table '{mark}'"
    return text


def file_of(name):
    """The file of a page."""
    return ROOT / "README.md" if name == README else ROOT / "docs" / f"{name}.md"


def recorded(name):
    """The Markdown table of a benchmark's record, or of the runs in the folder results/studies/``name``."""
    import pilot_table  # beside this file, as is the next one
    import trace_tables

    abundant = study("abundant")
    averages = study("which_average", "averages")
    well_trained = study("well_trained")
    tables = {
        "abundant": abundant.rows,
        "equal decay": abundant.rows_at_equal_decay,
        "several passes": study("streams").rows,
        "one pass": study("one_pass").rows,
        "long tail": study("long_tail").rows,
        "pretrained": study("pretrained", "pretrained_study").rows,
        "pilot": pilot_table.rows,
        "imagenet100": study("night", "imagenet100").rows,
        "largest losses": averages.worst,
        "averages of images": averages.of_images,
        "averages of digits": averages.of_digits,
        "trace_smollm2": partial(trace_tables.runs, "trace_smollm2"),
        "gate": well_trained.gate,
        "claims": well_trained.claims,
        "claims of the small protocol": study("night", "claims").rows,
        "arms": well_trained.arms,
        "batch norm": study("pycil_protocol").rows,
        "gains": well_trained.gains_of_both_parts,
    }
    tables |= {speed: partial(speed_tables.rows, speed) for speed in speed_tables.TABLES}
    lines = tables[name]()
    if not lines:
        return "None yet.\n"
    below = {
        "abundant": lambda: f"{abundant.sentence()}\n\n{abundant.FIGURE}",
        "claims": well_trained.below_claims,
        "arms": well_trained.below_arms,
    }
    table = markdown(lines[0], lines[1:])
    return f"{table}\n{below[name]()}\n" if name in below else table


def study(name, module=None):
    """The module results/studies/``name``/``module``.py, by default the one with the name of the study."""
    folder = str(ROOT / "results" / "studies" / name)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(module or name)


def main():
    for name in GENERATED:
        file_of(name).write_text(page(name), encoding="utf-8")
    import figure  # beside this file, as is
    import house

    study("night", "claims").main()
    house.main()
    figure.draw_schedule(ROOT / "docs" / "images" / "paper_schedule.svg")
    figure.draw(ROOT / "docs" / "images" / "accuracy_and_cost.svg")
    for name, module in (("abundant", None), ("pretrained", "pretrained_study"), ("well_trained", None)):
        script = study(name, module)
        script.draw(ROOT / "docs" / "images" / f"{module or name}.svg")


if __name__ == "__main__":
    main()

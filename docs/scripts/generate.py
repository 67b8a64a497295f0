"""Write what is generated in README.md and docs/: the tables of keys, from their declarations, and the README's figure.

python docs/scripts/generate.py
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
CONFIGURATION, LANGUAGE_MODELS = "configuration", "language_models"
PAGES = {"run": CONFIGURATION, "wsc": CONFIGURATION, "methods": CONFIGURATION, "language models": LANGUAGE_MODELS}


def table(name):
    """The Markdown table of keys that stands between the marks of ``name``."""
    from pycil_wsc.config.options import KEYS

    if name == "methods":
        return methods()
    if name == "language models":
        from pycil_wsc.llm.config import KEYS as LLM_KEYS

        return rows(("key", "default", "meaning"), key_rows(LLM_KEYS))
    keys = {key: each for key, each in KEYS.items() if key.startswith("wsc.") == (name == "wsc")}
    return rows(("key", "default", "meaning"), key_rows(keys))


def key_rows(keys):
    return [(f"`{name}`", f"`{json.dumps(each.default)}`", each.doc) for name, each in keys.items()]


def methods():
    from pycil_wsc.keys import declared
    from pycil_wsc.registry import learner_defaults, learners

    lines = []
    for name, defaults in sorted(learner_defaults.items()):
        own = {key: each.default for key, each in declared(learners[name].Options).items()}
        lines.append((f"`{name}`", listed(defaults), listed(own)))
    return rows(("method", "its defaults", "its own options"), lines)


def listed(values):
    return ", ".join(f"`{name}` {json.dumps(value)}" for name, value in values.items())


def rows(header, lines):
    return "".join(f"| {' | '.join(line)} |\n" for line in [header, ["---"] * len(header), *lines])


def page(name):
    """The page ``docs/<name>.md`` with its tables made anew."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for mark in (mark for mark, place in PAGES.items() if place == name):
        pattern = rf"(<!-- keys: {mark} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda match: match[1] + table(mark) + match[2], text, count=1, flags=re.DOTALL)
    return text


def main():
    for name in set(PAGES.values()):
        (ROOT / "docs" / f"{name}.md").write_text(page(name), encoding="utf-8")
    import figure  # beside this file

    figure.draw(ROOT / "docs" / "images" / "accuracy_and_cost.svg")


if __name__ == "__main__":
    main()

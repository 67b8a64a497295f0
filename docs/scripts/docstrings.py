"""A Griffe extension that converts docstrings from reStructuredText to Markdown, for the API reference."""

import re

import griffe


class Markdown(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text):
    """Roles become code, ``::`` a colon, and examples with ``>>>`` fenced blocks."""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", lambda role: f"`{role[1].rpartition('.')[2]}`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"(?<=\w)::$", ":", text, flags=re.MULTILINE)
    return re.sub(r"(?:^[ ]*>>> .*\n(?:[ ]*(?:>>>|\.\.\.) ?.*(?:\n|$))*)", fenced, text, flags=re.MULTILINE)


def fenced(match):
    """The lines of an example, without their prompts."""
    lines = [re.sub(r"^\s*(?:>>>|\.\.\.) ?", "", line) for line in match[0].rstrip("\n").split("\n")]
    return "```python\n" + "\n".join(lines) + "\n```\n"

"""The kinds of runs, by the ``kind`` of their configurations."""

from typing import Any

from pycil_wsc.config import forms
from pycil_wsc.config.run_config import RunConfig
from pycil_wsc.llm.kind import LanguageModel
from pycil_wsc.runs.class_incremental import ClassIncremental
from pycil_wsc.runs.kinds import Kind

KINDS: dict[str, Kind[Any, Any]] = {forms.DEFAULT: ClassIncremental(), "llm": LanguageModel()}


def kind_of(config: RunConfig) -> Kind[Any, Any]:
    """The kind of a run."""
    return KINDS[config.kind]

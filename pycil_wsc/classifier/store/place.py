"""Where a learner is saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pycil_wsc.classifier.store.versions import parent_of, signature
from pycil_wsc.errors import UserError


class Place(NamedTuple):
    """The version of a folder that a learner was loaded from or saved as last, and how it was loaded.

    ``folder``; the ``signature`` of its file (:func:`~pycil_wsc.classifier.store.versions.signature`), None if that is
    of another version; ``keys`` and ``held_out`` that were given to ``load``; the ``number`` of the version, if any.
    """

    folder: Path | None = None
    signature: tuple[int, int, int] | None = None
    keys: Mapping[str, object] = {}
    held_out: int | None = None
    number: int | None = None

    def is_current(self) -> bool:
        """Whether it is still the folder's present version."""
        if self.folder is None:
            raise UserError("reload: the learner was neither saved nor loaded; use Learner.load")
        return signature(self.folder) == self.signature

    def number_in(self, folder: Path) -> int:
        """Its number if it is in ``folder``; 0 if not."""
        if self.folder is None or not self.number or self.folder.resolve() != folder.resolve():
            return 0
        return self.number

    def parent_in(self, folder: Path, has_learned_since: bool) -> int | None:
        """The version in ``folder`` that the learner was learned from; None if it was not there."""
        number = self.number_in(folder)
        if not number:
            return None
        return number if has_learned_since else parent_of(folder, number)

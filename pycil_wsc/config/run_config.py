"""The type of all configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol

from pycil_wsc.files import Json
from pycil_wsc.keys import Key


class RunConfig(Protocol):
    """What the configurations of all kinds of runs have; frozen dataclasses."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    kind: ClassVar[str]

    @property
    def prefix(self) -> str:
        """The name of the experiment."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def threads(self) -> int | None: ...

    @property
    def data_root(self) -> str: ...

    @property
    def out(self) -> str:
        """The folder of the results."""
        ...

    @property
    def method(self) -> str:
        """The method's name in tables."""
        ...

    @property
    def keys(self) -> Mapping[str, Key]: ...

    def to_dict(self) -> dict[str, Json]:
        """JSON values by key, which :meth:`pycil_wsc.config.kinds.Kind.resolve` accepts."""
        ...

    def identity(self) -> dict[str, Json]:
        """The values that decide the result."""
        ...

    def continues(self, identity: Mapping[str, Json]) -> bool:
        """Whether the run with this ``identity`` is the same run, or one with fewer tasks."""
        ...

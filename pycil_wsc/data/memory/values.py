"""Values that are stored with exemplars, such as their logits, and are dropped with them."""

import numpy as np
import torch
from torch import Tensor

from pycil_wsc.state import State


class ExemplarValues:
    """A row of numbers for each exemplar, under a name: logits, features, losses.

    ``device``: where the rows are looked up.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows: dict[str, tuple[Tensor, Tensor]] = {}  # name -> (int64 (n,) sorted samples, float32 (n, d))
        self.tables: dict[str, tuple[Tensor, Tensor]] = {}  # `rows` on the device, see `table`

    def put(self, name: str, indices: np.ndarray, values: Tensor) -> None:
        """Store ``values`` (n, d) of the exemplars ``indices`` (n,), in place of earlier ones.

        The rows of others that are narrower, as logits are before a head grows, are filled up with nan.
        """
        new, values = torch.from_numpy(np.asarray(indices)), values.detach().float().cpu()
        samples, rows = self.rows.get(name, (new[:0], values[:0]))
        others = ~torch.isin(samples, new)
        samples, rows = torch.cat([samples[others], new]), _stacked(rows[others], values)
        order = samples.argsort()
        self.rows[name] = samples[order], rows[order]
        self.tables.clear()

    def keep(self, indices: np.ndarray) -> None:
        """Drop the values of all samples but ``indices``, the exemplars."""
        for name, (samples, rows) in self.rows.items():
            kept = torch.isin(samples, torch.from_numpy(indices))
            self.rows[name] = samples[kept], rows[kept]
        self.tables.clear()

    def missing(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Those of ``indices`` that have no values yet."""
        return np.setdiff1d(indices, self.rows[name][0].numpy()) if name in self.rows else indices

    def of(self, name: str, indices: Tensor) -> Tensor:
        """The rows of samples on the device, (B,) -> (B, d); nan for a sample that has none. Does not synchronise."""
        places, rows = self.table(name)
        return rows[places[indices.clamp(max=len(places) - 1)]]

    def table(self, name: str) -> tuple[Tensor, Tensor]:
        """(positions of the samples' rows, up to one beyond the last: int64, the rows and one of nan: (n + 1, d)), on
        the device.
        """
        if name not in self.tables:
            samples, rows = self.rows.get(name, (torch.empty(0, dtype=torch.int64), torch.empty(0, 1)))
            last = int(samples[-1]) if len(samples) else -1
            places = torch.full((last + 2,), len(rows))
            places[samples] = torch.arange(len(rows))
            rows = torch.cat([rows, torch.full((1, rows.shape[1]), torch.nan)])
            self.tables[name] = places.to(self.device), rows.to(self.device)
        return self.tables[name]

    def state_dict(self) -> State:
        return {name: {"indices": samples, "values": rows} for name, (samples, rows) in self.rows.items()}

    def load_state_dict(self, state: State) -> None:
        self.rows = {name: (table["indices"].cpu(), table["values"].cpu()) for name, table in state.items()}
        self.tables.clear()


def renumbered(state: State, numbers: np.ndarray) -> State:
    """The ``state_dict`` of the same values where sample ``i`` has become ``numbers[i]``."""
    changed = {}
    for name, table in state.items():
        changed[name] = {"indices": torch.from_numpy(numbers)[table["indices"]], "values": table["values"]}
    return changed


def _stacked(old, new):
    """Rows below each other; the narrower ones are filled up with nan."""
    width = max(old.shape[1], new.shape[1])
    parts = [torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=torch.nan) for rows in (old, new)]
    return torch.cat(parts)

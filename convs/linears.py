"""PyCIL's linear head, as ``from convs.linears import SimpleLinear``."""

from torch import Tensor

from pycil_wsc.networks.heads import IncrementalHead


class SimpleLinear(IncrementalHead):
    """(B, in_features) -> {"logits": (B, out_features)}, with Kaiming's uniform initialisation and zero bias."""

    def forward(self, input: Tensor) -> dict:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"logits": super().forward(input)}

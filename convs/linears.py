"""PyCIL's linear head, as ``from convs.linears import SimpleLinear``."""

from torch import Tensor

from pycil_wsc.networks.heads import IncrementalHead


class SimpleLinear(IncrementalHead):
    """(B, in_features) -> {"logits": (B, out_features)}, with Kaiming's uniform initialisation and zero bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__(in_features, out_features)
        if not bias:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> dict:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"logits": super().forward(input)}

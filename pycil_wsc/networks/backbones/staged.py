"""What the built-in backbones have in common: a stem, stages in sequence, and the average over all positions."""

from torch import Tensor, nn


class GlobalAverage(nn.Module):
    """(B, d, H, W) -> (B, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class StagedBackbone(nn.Module):
    """(B, 3, H, W) normalised images -> (B, ``out_dim``) features.

    A subclass creates its modules ``stem``, ``stage1``, ``stage2``, ... and ``pool`` in this order.
    """

    out_dim: int
    stem: nn.Module
    pool: nn.Module

    def stages(self) -> list[nn.Module]:
        return [module for name, module in self.named_children() if name.startswith("stage")]

    def forward(self, images: Tensor) -> Tensor:
        current = self.stem(images)
        for stage in self.stages():
            current = stage(current)
        return self.pool(current)

    def forward_stages(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(features, the output of each stage: (B, channels, H, W)); :meth:`forward` does not keep the outputs."""
        outputs = []
        current = self.stem(images)
        for stage in self.stages():
            current = stage(current)
            outputs.append(current)
        return self.pool(current), outputs

    def split(self) -> tuple[nn.Module, nn.Module]:
        """(shared trunk, block of one task), as in MEMO: the block is the last stage."""
        *shared, last = self.stages()
        return nn.Sequential(self.stem, *shared), nn.Sequential(last, self.pool)

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pycil_wsc.methods.closed_form.closed_form import ClosedForm
from pycil_wsc.networks.closed_form_nets import ComputedHead, merged, with_rows, without_empty
from pycil_wsc.registry import register_learner


class NearestMean(ComputedHead):
    """The class whose mean m has the smallest Euclidean distance: logits xᵀm - |m|² / 2."""

    apart = True
    sums: Tensor
    counts: Tensor

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__(width)
        self.register_buffer("sums", torch.zeros(0, width, dtype=dtype))
        self.register_buffer("counts", torch.zeros(0, dtype=dtype))

    def grow(self, num_classes: int) -> None:
        self.sums = with_rows(self.sums, num_classes)
        self.counts = with_rows(self.counts, num_classes)
        super().grow(num_classes)

    def add(self, features: Tensor, labels: Tensor, sign: int = 1) -> None:
        targets = sign * one_hot(labels, len(self.weight)).to(self.sums)
        self.sums = torch.addmm(self.sums, targets.T, features.to(self.sums))
        self.counts = self.counts + targets.sum(0)

    def remove(self, features: Tensor, labels: Tensor) -> None:
        self.add(features, labels, sign=-1)

    def merge(self, label: int, into: int) -> None:
        self.sums, self.counts = merged(self.sums, label, into), merged(self.counts, label, into)

    def class_counts(self) -> Tensor:
        return self.counts

    def solve(self) -> None:
        means = self.sums / self.counts.clamp(min=1)[:, None]
        self.weight = means.float()
        self.bias = without_empty(-torch.linalg.vector_norm(means, dim=1).square().float() / 2, self.counts)


@register_learner("ncm", nme=False)
class NCM(ClosedForm):
    """Nearest class mean (Mensink et al., TPAMI 2013), in the features of a backbone that stays as it is."""

    def new_head(self, width: int, dtype: torch.dtype) -> ComputedHead:
        return NearestMean(width, dtype)

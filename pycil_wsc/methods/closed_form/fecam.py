from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from pycil_wsc.keys import key
from pycil_wsc.methods.closed_form.tuned import TunedClosedForm
from pycil_wsc.networks.closed_form_nets import NEVER
from pycil_wsc.registry import register_learner

ROUNDING = 1e-6  # of a sum of squares in float32 from which most terms were taken out


class Mahalanobis(nn.Module):
    """The class whose mean has the smallest Mahalanobis distance, by the covariance of each class.

    Features and means are compared as powers of length 1 (Tukey's transformation). ``options``: of :class:`FeCAM`;
    ``dtype``: of the computation, whose results are kept in float32.
    """

    apart = True  # as in ComputedHead
    counts: Tensor  # (classes,)
    means: Tensor  # of the features, (classes, d)
    centres: Tensor  # of their powers, (classes, d)
    scatter: Tensor  # of their powers around the centres: sums of products, (classes, d, d)
    inverse: Tensor  # of the correlations, (classes, d, d)

    def __init__(self, width: int, options: "FeCAM.Options", dtype: torch.dtype):
        super().__init__()
        self.in_features = width
        self.options = options
        self.dtype = dtype
        self.register_buffer("counts", torch.zeros(0))
        for name in ("means", "centres"):
            self.register_buffer(name, torch.zeros(0, width))
        for name in ("scatter", "inverse"):
            self.register_buffer(name, torch.zeros(0, width, width))
        self.changed: set[int] = set()  # the classes with images since the last `solve`

    def grow(self, num_classes: int) -> None:
        for name, values in list(self.named_buffers()):
            new = values.new_zeros(num_classes - len(values), *values.shape[1:])
            setattr(self, name, torch.cat([values, new]))

    def power(self, features: Tensor) -> Tensor:
        """Tukey's transformation; features below 0, which ReLU does not leave, keep their sign."""
        return features.sign() * features.abs() ** self.options.beta

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Update means and scatter by the images of a part (Chan et al., 1983)."""
        for label in labels.unique().tolist():
            new = features[labels == label].to(self.dtype)
            powers = self.power(new)
            before, after = self.counts[label].item(), self.counts[label].item() + len(new)
            centre = powers.mean(0)
            shift = powers.mean(0) - self.centres[label]
            around = (powers - centre).T @ (powers - centre)
            self.scatter[label] += around + before * len(new) / after * torch.outer(shift, shift)
            self.centres[label] += shift * len(new) / after
            self.means[label] += (new.mean(0) - self.means[label]) * len(new) / after
            self.counts[label] = after
            self.changed.add(label)

    def remove(self, features: Tensor, labels: Tensor) -> None:
        """The inverse of :meth:`add`. A feature that no other image of the class has is exactly 0 again."""
        for label in labels.unique().tolist():
            gone = features[labels == label].to(self.dtype)
            powers = self.power(gone)
            before, after = self.counts[label].item(), self.counts[label].item() - len(gone)
            if after <= 0:
                self.clear(label)
                continue
            centre = powers.mean(0)
            squares = self.scatter[label].to(self.dtype).diagonal() + before * self.centres[label].square()
            self.centres[label] += (self.centres[label] - centre) * len(gone) / after
            self.means[label] += (self.means[label] - gone.mean(0)) * len(gone) / after
            shift = centre - self.centres[label]
            around = (powers - centre).T @ (powers - centre)
            self.scatter[label] -= around + after * len(gone) / before * torch.outer(shift, shift)
            if after == 1:
                self.scatter[label] = 0
            left = squares - powers.square().sum(0)
            unused = left <= ROUNDING * squares
            self.scatter[label].masked_fill_(unused[:, None] | unused, 0)
            for name in ("means", "centres"):
                getattr(self, name)[label].masked_fill_(unused, 0)
            self.counts[label] = after
            self.changed.add(label)

    def relabel(self, features: Tensor, before: Tensor, after: Tensor) -> None:
        """Move images from the classes ``before`` to the classes ``after``: (n, d), (n,), (n,)."""
        self.remove(features, before)
        self.add(features, after)

    def merge(self, label: int, into: int) -> None:
        """Give the images of one class to another one (Chan et al., 1983)."""
        number, before = self.counts[label].item(), self.counts[into].item()
        if number:
            after = before + number
            shift = self.centres[label] - self.centres[into]
            self.scatter[into] += self.scatter[label] + before * number / after * torch.outer(shift, shift)
            self.centres[into] += shift * number / after
            self.means[into] += (self.means[label] - self.means[into]) * number / after
            self.counts[into] = after
            self.changed.add(into)
        self.clear(label)

    def clear(self, label: int) -> None:
        """Leave a class without images."""
        for name in ("counts", "means", "centres", "scatter", "inverse"):
            getattr(self, name)[label] = 0
        self.changed.discard(label)

    def class_counts(self) -> Tensor:
        return self.counts

    def solve(self) -> None:
        for label in self.changed:
            covariance = self.scatter[label].to(self.dtype) / (self.counts[label] - 1).clamp(min=1)
            if self.options.correlations == "covariances":
                shifted = covariance + self.options.shift * torch.eye(len(covariance)).to(covariance)
                self.inverse[label] = torch.linalg.pinv(torch.corrcoef(shifted), hermitian=True)
                continue
            correlation = correlated(shrunk(covariance, self.options.alpha1, self.options.alpha2))
            self.inverse[label] = torch.linalg.inv_ex(correlation).inverse
        self.changed.clear()

    def forward(self, features: Tensor) -> Tensor:
        """(B, d) -> (B, classes) logits: the negative squared distances."""
        means = normalize(self.power(self.means))[:, None]
        differences = normalize(self.power(features.float())) - means  # (classes, B, d)
        logits = -(torch.bmm(differences, self.inverse) * differences).sum(2).T
        return logits.masked_fill(self.counts <= 0, NEVER)


def shrunk(covariance: Tensor, alpha1: float, alpha2: float) -> Tensor:
    """Add ``alpha1`` times the mean variance on the diagonal, ``alpha2`` times the mean non-zero covariance off it."""
    variances = covariance.diagonal()
    beside = covariance - variances.diag()
    mean_covariance = beside.sum() / beside.count_nonzero().clamp(min=1)
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    return covariance + alpha1 * variances.mean() * identity + alpha2 * mean_covariance * (1 - identity)


def correlated(covariance: Tensor) -> Tensor:
    """The correlations, (d, d): the identity for variances of 0, such as those of a single image."""
    deviations = covariance.diagonal().sqrt()
    known = deviations > 0
    scale = torch.where(known, 1 / deviations, 0)
    return covariance * torch.outer(scale, scale) + (~known).to(covariance).diag()


@register_learner("fecam", nme=False)
class FeCAM(TunedClosedForm):
    """FeCAM (Goswami et al., NeurIPS 2023): the Mahalanobis distance to each class mean, by the class's covariance.

    Covariances are shrunk once, as in the paper; the authors' code for networks trained from scratch does it twice.
    """

    @dataclass(frozen=True)
    class Options(TunedClosedForm.Options):
        beta: float = key(0.5, "power of the features", above=0)
        alpha1: float = key(1.0, "weight of the mean variance that a covariance is shrunk by", above=0)
        alpha2: float = key(1.0, "weight of the mean covariance that a covariance is shrunk by", low=0)
        correlations: str = key(
            "features",
            "correlations by which distances are taken: of the `features`, or, as in PILOT, of the rows of their "
            "`covariances`",
            choices=("features", "covariances"),
        )
        shift: float = key(100.0, "added to the variances, with `correlations` of `covariances`", above=0)

    def new_head(self, width: int, dtype: torch.dtype) -> nn.Module:
        return Mahalanobis(width, self.config.options, dtype)

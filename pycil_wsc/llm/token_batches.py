"""Groups of examples of similar length as padded tensors, and the loss of each example.

transformers and TRL use a fixed number of items per forward pass, so that with TRACE's items a third to more than a
half of the tokens are padding. Their grouping by length makes some optimiser steps of long items, others of short ones.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from pycil_wsc.llm.tokens import Example

IGNORED = -100  # label of a token without a loss: the default ignore_index of torch's cross_entropy


def micro_batches(examples: Iterable[Example], tokens: int, padding: float) -> list[list[Example]]:
    """The examples of an optimiser step in groups of similar length, one for each forward pass.

    A group has at most ``tokens`` tokens, including padding, which is at most the share ``padding`` of them; a longer
    example is a group of its own.
    """
    groups: list[list[Example]] = []
    for example in sorted(examples, key=len, reverse=True):
        if groups and _fits(groups[-1], example, tokens, padding):
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups


def _fits(group: list[Example], example: Example, tokens: int, padding: float) -> bool:
    area = len(group[0]) * (len(group) + 1)
    return area <= tokens and area - sum(map(len, group)) - len(example) <= padding * area


class TokenBatch(NamedTuple):
    """A group as token numbers ``ids`` (B, T), in which only the places ``kept`` (K,) predict a learned token.

    Padding is on the right and attention is causal, so no mask is needed. ``targets`` (B, K) are the tokens predicted
    there, ``IGNORED`` where a row has none; ``counts`` (B,) is how many learned tokens each example has.
    """

    ids: Tensor
    kept: Tensor
    targets: Tensor
    counts: Tensor


def collate(examples: Sequence[Example], pad: int, device: torch.device = torch.device("cpu")) -> TokenBatch:
    """The group as a :class:`TokenBatch` on ``device``."""
    ids = [torch.tensor(example.ids) for example in examples]
    learned = [torch.arange(len(example)) >= example.prompt for example in examples]
    labels = [torch.where(mask, tokens, IGNORED) for mask, tokens in zip(learned, ids, strict=True)]
    targets = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    kept = (targets[:, 1:] != IGNORED).any(0).nonzero().squeeze(1)
    counts = torch.tensor([len(example) - example.prompt for example in examples])
    batch = TokenBatch(pad_sequence(ids, batch_first=True, padding_value=pad), kept, targets[:, kept + 1], counts)
    return TokenBatch(*(tensor.to(device, non_blocking=tensor.is_pinned()) for tensor in batch))


def summed_losses(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Cross-entropy in fp32, summed over each example's learned tokens: (B,).

    Logits, which take most of the memory, are computed for the predicting places only.
    """
    logits = model(input_ids=batch.ids, logits_to_keep=batch.kept, use_cache=False).logits.float()
    losses = cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(batch.targets.shape).sum(1)

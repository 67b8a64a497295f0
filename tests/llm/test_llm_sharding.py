"""Weights shared among processes: ranked together, trained to the same end, saved whole."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pycil_wsc.consolidation.ranking import top_blocks, top_mask


class Threads:
    """Stands for processes: each thread brings a tensor, and all get the sum."""

    def __init__(self, count):
        self.barrier, self.brought = threading.Barrier(count, timeout=20), [None] * count

    def peer(self, rank):
        peer = type("Peer", (), {})()
        peer.sum = lambda tensor: sum(self._all(rank, tensor))
        peer.before = lambda count: sum(self._all(rank, count)[:rank])
        return peer

    def _all(self, rank, value):
        self.brought[rank] = value
        self.barrier.wait()
        together = list(self.brought)
        self.barrier.wait()
        return together


def ranked_apart(scores, retain, scope, count):
    """The mask of each tensor, from threads that have some of its rows each."""
    processes, parts = Threads(count), [torch.tensor_split(score, count) for score in scores]
    masks = [[torch.zeros(part.shape, dtype=torch.bool) for part in split] for split in parts]

    def work(rank):
        for i, index, mask in top_blocks([split[rank] for split in parts], retain, scope, peers=processes.peer(rank)):
            masks[i][rank][index] = mask

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))  # raises what a thread raised
    return [torch.cat(split) for split in masks]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    st.sampled_from(["global", "tensor"]),
    st.integers(2, 4),
)
def test_parts_are_ranked_like_the_whole(seed, retain, scope, count):
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(shape, generator=generator) for shape in ((5, 7), (3,), (2, 4, 3))]
    whole, apart = top_mask(scores, retain, scope), ranked_apart(scores, retain, scope, count)
    assert all(torch.equal(one, other) for one, other in zip(whole, apart, strict=True))


def test_of_equal_scores_as_many_are_marked_as_there_is_room_for():
    scores = [torch.tensor([0.0, 2.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])]
    (first, second) = ranked_apart(scores, 0.5, "global", 2)
    assert int(first.sum() + second.sum()) == 5 and first[1] and second[1]

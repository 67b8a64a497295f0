"""Names of very many files in few bytes, which stand for an array of str."""

import os

import numpy as np
import pytest

from pycil_wsc.data.images import paths
from pycil_wsc.data.images.image_files import common_folder
from pycil_wsc.data.images.paths import Paths, compact, concatenated, folders_in, renamed

NAMES = ["/a/b/c.jpg", "/a/b/d.jpg", "x.jpg", "r/\xe9\udcff.png", "//q/w.jpg", "/a/..", "/z.jpg", "/a/b/e.jpg"]


@pytest.fixture(params=[2, 10_000])
def block(request, monkeypatch):
    """The number of names that are strings at the same time."""
    monkeypatch.setattr(paths, "BLOCK", request.param)


def test_they_give_what_an_array_of_str_gives(block):
    array, names = np.array(NAMES), compact(NAMES)
    assert isinstance(names, Paths) and names.tolist() == list(names) == NAMES
    assert names.shape == array.shape and names.ndim == 1 and names.dtype.kind == "U"
    for rows in (slice(1, 5), slice(0, 0), np.array([3, 0, 3]), array != NAMES[2]):
        assert names[rows].tolist() == array[rows].tolist()
    assert names[3] == NAMES[3] and type(names[3]) is str
    assert np.array_equal(names, array) and (names == NAMES[2]).tolist() == (array == NAMES[2]).tolist()
    assert np.searchsorted(np.unique(names), names).tolist() == np.searchsorted(np.unique(array), array).tolist()


def test_joined_to_others_of_either_form_they_keep_their_order_and_only_the_folders_that_are_used(block):
    names, array = compact(NAMES), np.array(["/new/1.jpg", NAMES[0]])
    assert concatenated([names, array]).tolist() == [*NAMES, *array.tolist()]
    assert concatenated([names[:0], names[6:]]).tolist() == NAMES[6:]
    joined = concatenated([names[:2], compact(["/a/c/1.jpg"])])
    assert isinstance(joined, Paths) and joined.folders == ["/a/b/", "/a/c/"]
    assert np.array_equal(concatenated([np.zeros((2, 1)), np.ones((1, 1))]), [[0], [0], [1]])


@pytest.mark.parametrize("rows", [slice(None), slice(0, 5)])
def test_renamed_each_is_renamed(rows):
    def absolute(path):
        return os.path.normpath(os.path.join("/working/folder", path))

    assert renamed(compact(NAMES)[rows], absolute).tolist() == [absolute(name) for name in NAMES[rows]]
    assert renamed(np.array(NAMES)[rows], absolute).tolist() == [absolute(name) for name in NAMES[rows]]


@pytest.mark.parametrize("rows", [[0, 1], [0, 1, 6], [0, 4], [2], [0]])
def test_the_common_folder_is_that_of_the_paths(rows):
    names = [NAMES[row] for row in rows]
    assert common_folder(folders_in(compact(names))) == common_folder(names)


def test_a_million_take_a_tenth_of_what_an_array_takes():
    names = compact(f"/some/where/photographs/class{number % 10}/{number:06}.jpg" for number in range(1000))
    assert 10 * (names.names.nbytes + names.places.nbytes) < np.asarray(names).nbytes

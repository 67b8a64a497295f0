"""What several tests share: see ``test_shelf.py``."""

from pathlib import Path


def names(folder):
    """What is in ``folder``, apart from the lock and the note of the last number."""
    hidden = {".lock", ".last_version"}
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name not in hidden
    )


def labelled(learner, moved=None):
    """The exemplars: name of the class, and content of the file.

    ``moved``: a folder, and the old and new name of one in it.
    """
    split, found = learner._held.train, []
    for label, path in zip(split.targets, split.images):
        if moved:
            parent, old, new = moved
            path = path.replace(str(parent / old), str(parent / new))
        found.append((learner.classes[label], Path(path).read_bytes()))
    return sorted(found)

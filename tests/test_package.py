"""The package as it is installed."""

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
EXTRA_OF = {"cluster": "ray"}  # requirements-<name>.txt is the extra <name>, but for these


def run(*command, cwd, **environment):
    """What a command prints, without the paths and settings of this process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that no build folder is left in the checkout or read from it."""
    source, folder = tmp_path_factory.mktemp("source") / "pycil_wsc", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "pycil_wsc", source / "pycil_wsc", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", ".", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", *build, cwd=source)
    (path,) = folder.glob("*.whl")
    return path


def requirements(name):
    """The set of a requirements file, with those of the files it names."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    own = {Requirement(line) for line in lines if line and not line.startswith("-r ")}
    return own.union(*(requirements(line.removeprefix("-r ")) for line in lines if line.startswith("-r ")))


def declared(wheel, extra=None):
    """What the wheel says it needs: always, or more with an extra."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    every = [Requirement(line) for line in lines]
    chosen = [each for each in every if (each.marker.evaluate({"extra": extra or ""}) if each.marker else not extra)]
    return {Requirement(str(each).split(";")[0]) for each in chosen}


def test_the_requirements_files_are_what_the_wheel_declares(wheel):
    always = declared(wheel)
    assert always and always <= requirements("requirements.txt") <= always | declared(wheel, "dev")
    assert requirements("requirements-dev.txt") == always | declared(wheel, "dev")
    for path in ROOT.glob("requirements-*.txt"):
        name = path.stem.removeprefix("requirements-")
        needed = declared(wheel, EXTRA_OF.get(name, name))
        assert needed and needed <= requirements(path.name) <= always | declared(wheel, "dev") | needed, path.name

"""Measures the structure of the package: rooms and imports between them, cycles, sizes, density, annotations.

python tests/structure.py [ROOT]
"""

import ast
import functools
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "pycil_wsc"
TOP_LEVEL = ("convs", "utils")  # beside the package: names that scripts written for PyCIL import
LINE_LENGTH = 120


def modules(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """(dotted name, path) of every module of the project; tests and benchmarks are not of it."""
    paths = [*root.glob("*.py"), *(path for top in (PACKAGE, *TOP_LEVEL) for path in (root / top).rglob("*.py"))]
    for path in sorted(paths):
        yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> Sequence[str]:
    """The names that a file imports, at any level: ``package.module.name`` for ``from package.module import name``."""
    names = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def within(name: str, parents: Iterable[str]) -> bool:
    """Whether a module is one of ``parents`` or inside one."""
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def room(name: str, root: Path = ROOT) -> str:
    """The folder a module is in: ``pycil_wsc.data``; ``pycil_wsc.*`` for a file flat in the package;
    ``main`` for a script.
    """
    top, *rest = name.split(".")
    if top != PACKAGE or not rest:
        return top
    return f"{top}.{rest[0]}" if (root / top / rest[0]).is_dir() else f"{top}.*"


def arrows(root: Path = ROOT) -> Counter:
    """{(room, room it imports): how many imports}, between different rooms."""
    ours = {name.split(".")[0] for name, _ in modules(root)}
    counts = Counter()
    for name, path in modules(root):
        for target in imports(path):
            if target.split(".")[0] in ours and room(name, root) != room(target, root):
                counts[room(name, root), room(target, root)] += 1
    return counts


def cycles(root: Path = ROOT) -> list[set[str]]:
    """The groups of modules that import each other, directly or not, imports under TYPE_CHECKING included."""
    names = {name for name, _ in modules(root)}
    wanted = {
        name: {known for target in imports(path) if (known := module_of(target, names))} - {name}
        for name, path in modules(root)
    }
    reached = {name: reachable(name, wanted) for name in wanted}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in wanted}
    return [set(group) for group in sorted(groups, key=sorted) if len(group) > 1]


def module_of(target: str, names: set[str]) -> str | None:
    """The module of ``names`` that an import of ``target`` loads: itself, or the one that has it."""
    return target if target in names else parent if (parent := target.rpartition(".")[0]) in names else None


def reachable(start: str, wanted: dict[str, set[str]]) -> set[str]:
    """What ``start`` imports, directly or not."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = wanted[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def density(path: Path) -> Counter:
    """How many lines, comprehensions, comments and mentions of ``Any`` a file has, imports of it aside."""
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return Counter(
        lines=len(text.splitlines()),
        comprehensions=sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        comments=sum(token.type == tokenize.COMMENT for token in tokens),
        Any=sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
    )


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[tuple[str, Function, bool]]:
    """(dotted name, function, whether it is public) of a file's functions and methods, without nested ones."""

    def walk(body, prefix, public):
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.", public and not node.name.startswith("_"))
            elif isinstance(node, Function):
                dunder = node.name.startswith("__") and node.name.endswith("__")
                yield prefix + node.name, node, public and (dunder or not node.name.startswith("_"))

    yield from walk(parsed(path).body, "", True)


def length(function: Function) -> int:
    """Lines, without decorators."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def annotated(function: Function) -> bool:
    """Whether every argument has a type, ``self`` and ``cls`` aside,
    and the result too (of ``__init__`` it is known).
    """
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    typed = all(argument.annotation or argument.arg in ("self", "cls") for argument in named)
    return typed and bool(function.returns or function.name == "__init__")


def members(root: Path, name: str) -> list[str]:
    """The public names that a class of the project and its bases define: methods, attributes, what ``__init__`` sets.

    Bases are looked up by their names, in all of the project.
    """
    classes: dict[str, ast.ClassDef] = {}
    for _, path in modules(root):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)
    names: set[str] = set()
    waiting = [name]
    while waiting:
        known = classes.get(waiting.pop())
        if known is None:  # of another package
            continue
        waiting += [base.id for base in known.bases if isinstance(base, ast.Name)]
        names |= defined_by(known)
    return sorted(member for member in names if not member.startswith("_"))


def defined_by(node: ast.ClassDef) -> set[str]:
    """The names that a class defines in its body, or on ``self`` in ``__init__``."""
    names: set[str] = set()
    for item in node.body:
        if isinstance(item, Function | ast.ClassDef):
            names.add(item.name)
        elif isinstance(item, ast.AnnAssign):
            names |= targets(item.target)
        elif isinstance(item, ast.Assign):
            names = names.union(*map(targets, item.targets))
        if isinstance(item, Function) and item.name == "__init__":
            for inner in ast.walk(item):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    names |= targets(inner)
    return names


def targets(node: ast.expr) -> set[str]:
    """The name that an assignment sets: ``x``, or ``x`` of ``self.x``."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return {node.attr}
    return set()


def flat_folders(root: Path = ROOT) -> Counter:
    """{folder: how many Python files are directly in it}, the largest ones first by ``most_common``."""
    return Counter(path.parent.relative_to(root) for name, path in modules(root) if within(name, [PACKAGE]))


STEP_OF_REPLAY = (  # what docs/how_a_step_runs.md leads through, without the data path
    "methods/replay/replay.py",
    "training/learner.py",
    "training/loop.py",
    "training/phase.py",
    "training/batches.py",
    "training/over.py",
    "training/precision.py",
    "training/step/backward.py",
)
PREDICTION = (  # an image through Learner.predict
    "classifier/learner.py",
    "classifier/predict/answers.py",
    "classifier/predict/classifier.py",
    "classifier/predict/images.py",
    "training/learner.py",
    "training/outputs.py",
)


def walks(root: Path = ROOT) -> dict[str, list[str]]:
    """{what to follow: the files to read}: two written out, what is imported of consolidation, and what reads a key."""
    package = root / PACKAGE
    names = {name: path for name, path in modules(root) if within(name, [PACKAGE])}
    rooms = [f"{PACKAGE}.consolidation", f"{PACKAGE}.methods.consolidation"]
    of_rooms = {name for name in names if within(name, rooms)}
    wanted = {}
    for name in of_rooms:
        targets = (module_of(target, of_rooms) for target in imports(names[name]))
        wanted[name] = {target for target in targets if target is not None}
    of_wsc = reachable(f"{PACKAGE}.methods.consolidation.wsc", wanted) | {f"{PACKAGE}.methods.consolidation.wsc"}
    read = [path for path in names.values() if ".memory_per_class" in path.read_text()]
    return {
        "a step of Replay": list(STEP_OF_REPLAY),
        "wsc as a whole": sorted(str(names[name].relative_to(package)) for name in of_wsc),
        "memory_per_class": sorted(str(path.relative_to(package)) for path in read),
        "an image through Learner.predict": list(PREDICTION),
    }


def long_lines(root: Path = ROOT) -> list[tuple[Path, int]]:
    """(file, number of lines over ``LINE_LENGTH`` columns) of the Python files that have any,
    tests and benchmarks too.
    """
    paths = [*(path for _, path in modules(root)), *root.glob("tests/**/*.py"), *root.glob("benchmarks/*.py")]
    counts = [(path, sum(len(line) > LINE_LENGTH for line in path.read_text().splitlines())) for path in paths]
    return [(path, count) for path, count in counts if count]


def main(root: Path) -> None:
    print_rooms(root)
    between = arrows(root)
    back = sum((second, first) in between for first, second in between) // 2
    print(f"arrows: {len(between)} ({between.total()} imports), of them {back} pairs that point both ways")
    for (first, second), count in sorted(between.items()):
        print(f"  {first} -> {second}: {count}")
    groups = cycles(root)
    print(f"cycles: {len(groups)}")
    for group in groups:
        print(f"  {', '.join(sorted(group))}")
    every = [(path, *function) for _, path in modules(root) for function in functions(path)]
    path, name, longest, _ = max(every, key=lambda entry: length(entry[2]))
    print(f"longest function: {length(longest)} lines, {name} in {path.relative_to(root)}")
    lines, path = max((len(path.read_text().splitlines()), path) for _, path in modules(root))
    print(f"longest file: {lines} lines, {path.relative_to(root)}")
    (folder, count), *_ = flat_folders(root).most_common(1)
    print(f"largest flat folder: {count} files, {folder}")
    for what, files in walks(root).items():
        print(f"files to read for {what}: {len(files)} ({', '.join(files)})")
    print(f"members of the learner: {len(members(root, 'BaseLearner'))}")
    print(f"lines over {LINE_LENGTH} columns: {sum(count for _, count in long_lines(root))}")
    public = [function for *_, function, is_public in every if is_public]
    typed = sum(map(annotated, public))
    print(f"annotated public functions: {typed} of {len(public)} ({typed / len(public):.0%})")


def print_rooms(root: Path) -> None:
    """A line for each room, and for all: its files and lines, what they have per 1,000 lines, and how many ``Any``."""
    rooms: dict[str, Counter] = {}
    for name, path in modules(root):
        for place in (room(name, root), "all"):
            rooms.setdefault(place, Counter()).update({**density(path), "files": 1})
    print(f"rooms: {len(rooms) - 1}")
    for name, count in sorted(rooms.items()):
        per_thousand = {what: 1000 * count[what] / max(1, count["lines"]) for what in ("comprehensions", "comments")}
        print(
            f"  {name}: {count['files']} files, {count['lines']} lines, {count['Any']} Any; per 1,000 lines "
            + ", ".join(f"{value:.0f} {what}" for what, value in per_thousand.items())
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)

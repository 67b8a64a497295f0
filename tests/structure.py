"""Measures the structure of the package: subpackages and imports between them, sizes, long lines, annotations.

python tests/structure.py [ROOT]
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
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


def imports(path: Path) -> Iterator[str]:
    """The names that a file imports, at any level: ``package.module.name`` for ``from package.module import name``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
    found = Counter()
    for name, path in modules(root):
        for target in imports(path):
            if target.split(".")[0] in ours and room(name, root) != room(target, root):
                found[room(name, root), room(target, root)] += 1
    return found


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

    yield from walk(ast.parse(path.read_text()).body, "", True)


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


def long_lines(root: Path = ROOT) -> list[tuple[Path, int]]:
    """(file, number of lines over ``LINE_LENGTH`` columns) of the Python files that have any,
    tests and benchmarks too.
    """
    paths = [*(path for _, path in modules(root)), *root.glob("tests/**/*.py"), *root.glob("benchmarks/*.py")]
    counts = [(path, sum(len(line) > LINE_LENGTH for line in path.read_text().splitlines())) for path in paths]
    return [(path, count) for path, count in counts if count]


def main(root: Path) -> None:
    files = Counter(room(name, root) for name, _ in modules(root))
    between = arrows(root)
    back = sum((second, first) in between for first, second in between) // 2
    print(f"rooms: {len(files)}\n  " + "\n  ".join(f"{name}: {count} files" for name, count in sorted(files.items())))
    print(f"arrows: {len(between)} ({between.total()} imports), of them {back} pairs that point both ways")
    for (first, second), count in sorted(between.items()):
        print(f"  {first} -> {second}: {count}")
    every = [(path, *found) for _, path in modules(root) for found in functions(path)]
    path, name, longest, _ = max(every, key=lambda each: length(each[2]))
    print(f"longest function: {length(longest)} lines, {name} in {path.relative_to(root)}")
    lines, path = max((len(path.read_text().splitlines()), path) for _, path in modules(root))
    print(f"longest file: {lines} lines, {path.relative_to(root)}")
    print(f"lines over {LINE_LENGTH} columns: {sum(count for _, count in long_lines(root))}")
    public = [function for *_, function, is_public in every if is_public]
    typed = sum(map(annotated, public))
    print(f"annotated public functions: {typed} of {len(public)} ({typed / len(public):.0%})")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)

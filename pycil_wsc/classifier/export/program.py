"""Writes what a learner predicts with as a program: ONNX, or that of ``torch.export``."""

import contextlib
import copy
import functools
import importlib
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from pycil_wsc.classifier.predict.familiarity import Familiarity
from pycil_wsc.classifier.predict.images import Transform
from pycil_wsc.classifier.predict.predictor import FamiliarityModel, Model
from pycil_wsc.errors import UserError, first_line
from pycil_wsc.files import write_atomically

INPUT, OUTPUTS = "images", ("logits", "familiarity")  # the second if the learner holds out images
TOLERANCE = 1e-4  # of the logits, absolute and relative
LARGEST_ONNX = 2 * 10**9  # bytes of weights: the format ends at 2 GiB
OLDEST_OPSET = 18  # the oldest that torch writes: it would write this one instead of an older one
PROGRAMS = (".onnx", ".pt2")
FORMS = "NAME.onnx, NAME.pt2 or the name of a folder"
Outputs = Tensor | Sequence[Tensor]
INSTALL = "pip install -r requirements-export.txt, or pip install '.[export]'"


def export_program(
    path: Path,
    model: Model,
    transform: Transform,
    temperature: float = 1.0,
    opset: int | None = None,
    known: Familiarity | None = None,
) -> None:
    """Write ``model`` to ``path``, ``NAME.onnx`` or ``NAME.pt2``, once its logits have been compared with the model's.

    With ``known``, the familiarity of each image is its second output.

    Args:
        path: the file.
        model: the network; its logits are not divided by the ``temperature``.
        transform: what is done to an image, which is described in the file.
        temperature: of the calibration, which is noted in the file.
        opset: the version of ONNX's operators; None: the one that torch chooses.
        known: the measure of familiarity, if there is one.

    Raises:
        UserError: if a package is missing, the network cannot be converted, or the file cannot be written. What was
            there before is then intact.
    """
    plain = portable(model) if known is None else portable(FamiliarityModel(model, known))
    description = {
        "classes": json.dumps(model.classes),
        "transform": json.dumps(transform.settings()),
        "temperature": json.dumps(temperature),
    }
    if known is not None:
        description["held_out"] = json.dumps(len(known.scores))
    if path.suffix == ".onnx":
        content = onnx_of(plain, transform.side, description, opset)
        run = run_onnx
    elif opset is not None:
        raise UserError(f"opset: applies to ONNX files only, and {path.name} is not one; leave it out")
    else:
        content = pt2_of(plain, transform.side, description)
        run = run_pt2
    check_logits(path.name, plain, transform.side, functools.partial(run, content))
    write_atomically(path, content)


def is_folder(path: Path) -> bool:
    """Whether ``path`` names a folder to export to. Raises a :class:`UserError` if it is a name of neither form."""
    if path.suffix in PROGRAMS or path.is_dir():
        return path.suffix not in PROGRAMS
    if re.fullmatch(r"\.[A-Za-z]\w*", path.suffix):  # but not v1.2
        raise UserError(f"{path}: the name decides the form; give {FORMS}")
    return True


Module = TypeVar("Module", bound=nn.Module)


def portable(model: Module) -> Module:
    """A copy on the CPU, in the usual memory format, without gradients and recomputed activations."""
    plain = copy.deepcopy(model).to("cpu", memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    plain.requires_grad_(False)
    for module in plain.modules():
        recompute = getattr(module, "set_grad_checkpointing", None)
        if callable(recompute):
            recompute(False)
    return plain.eval()


def program_of(model: nn.Module, side: int) -> torch.export.ExportedProgram:
    """The model as a program of ``torch.export`` that takes batches of any size."""
    images = torch.zeros(2, 3, side, side)  # two, since sizes of 0 and 1 are taken for constants
    shapes = {INPUT: {0: torch.export.Dim("batch")}}
    with explained():
        program = torch.export.export(model, (images,), dynamic_shapes=shapes, strict=False)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # names files of this machine
    return program


def pt2_of(model: nn.Module, side: int, description: Mapping[str, str]) -> bytes:
    """The file of a program of ``torch.export``, with the ``description`` as extra files."""
    program = program_of(model, side)
    content = io.BytesIO()
    with explained():
        torch.export.save(program, content, extra_files=dict(description))
    return content.getvalue()


def onnx_of(model: nn.Module, side: int, description: Mapping[str, str], opset: int | None) -> bytes:
    """The ONNX file, with the ``description`` as metadata."""
    onnx = needed("onnx")
    needed("onnxscript")
    if sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) > LARGEST_ONNX:
        raise UserError("export: the weights do not fit into one ONNX file (2 GB); give NAME.pt2, or a folder")
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and not (isinstance(opset, int) and OLDEST_OPSET <= opset <= newest):
        raise UserError(f"opset: {opset!r} is not a whole number from {OLDEST_OPSET} to {newest}")
    program = program_of(model, side)
    with explained():
        graph = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=OUTPUTS[: 1 + isinstance(model, FamiliarityModel)],
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
        assert graph is not None
        written = graph.model.opset_imports[""]
        if opset not in (None, written):
            raise UserError(f"opset: torch {torch.__version__} cannot write {opset}, only {written}; leave it out")
        graph.model.metadata_props.update(description)
        return graph.model_proto.SerializeToString()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """A context that makes one line of an exporter's error, and hides warnings, which they give about each other."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (OSError, UserError):
        raise
    except Exception as error:  # they raise what their many parts raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"export: torch cannot convert this network ({reason}); export it as a folder") from None


def check_logits(name: str, model: nn.Module, side: int, run: Callable[[Tensor], Outputs | None]) -> None:
    """Raise a :class:`UserError`, about ``name``, unless ``run`` gives the outputs of ``model``, in a batch of three.

    ``run`` gives None where it cannot run. The familiarity is a share of the held-out images: rounding may move one.
    """
    images = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, *familiarity = _listed(model(images))
        with explained():
            outputs = run(images)
    if outputs is None:
        return
    logits, *others = _listed(outputs)
    difference = (logits - expected).abs()
    equal = logits == expected  # infinite ones are those of classes that are never answered
    if not (equal | (difference <= TOLERANCE * (1 + expected.abs()))).all():
        raise UserError(
            f"export: the logits of {name} differ by {difference.max():.1g} from those of the learner; "
            "export it in another form"
        )
    for share, exported in zip(familiarity, others, strict=True):
        one = 1 / (len(cast(FamiliarityModel, model).known.scores) + 1)
        if not ((share - exported).abs() < 1.5 * one).all():
            raise UserError(f"export: the familiarity of {name} differs from the learner's; export it in another form")


def _listed(outputs: Outputs) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def run_pt2(content: bytes, images: Tensor) -> Outputs:
    """The outputs of the program in a file with this content."""
    program: nn.Module = torch.export.load(io.BytesIO(content)).module()
    return program(images)


def run_onnx(content: bytes, images: Tensor) -> Outputs | None:
    """The outputs of an ONNX file with this content; None without onnxruntime."""
    runtime = imported("onnxruntime")
    if runtime is None:
        return None
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(output) for output in session.run(None, {INPUT: images.numpy()})]


def needed(name: str) -> ModuleType:
    """The module ``name``, or a :class:`UserError` if it is not installed."""
    module = imported(name)
    if module is None:
        raise UserError(f"export: {name} is not installed; {INSTALL}")
    return module


def imported(name: str) -> ModuleType | None:
    """The module ``name``, or None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None

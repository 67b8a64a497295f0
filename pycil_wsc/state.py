"""A nested state in one file: its tensors as safetensors, everything else as JSON beside them.

Checkpoints, shared first tasks, weights and saved learners are such files. They are replaced atomically, they carry a
checksum, because safetensors takes damaged tensors as they are, and nothing in them is executed when they are read.
"""

import hashlib
import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch

from pycil_wsc.files import Json, check_file, read_file, write_atomically

# mark values that JSON lacks, such as {TENSOR: the tensor's name}
TENSOR, CHANNELS_LAST, TUPLE, PAIRS, FLOAT = "$tensor", "$channels_last", "$tuple", "$pairs", "$float"
PARTS = "parts"  # in the header: the names of other files
JSON = "$json"  # the tensor that holds the JSON: a header of safetensors has at most 100 MB
FORMAT = "pycil_wsc state 1"
WITH_PARTS = "pycil_wsc state 2"  # some tensors are in other files, which a version that knows none would miss
State = dict[str, Any]  # a nested state, of what `packed` allows


def save_state(
    path: str | Path, state: object, write_parts: Callable[[dict[str, torch.Tensor]], list[str]] | None = None
) -> None:
    """Write ``state``, of which :func:`packed` says what it may contain, atomically and durably.

    ``write_parts``: moves some of the tensors, by name, to other files, of which it returns the names.

    Raises a :class:`~pycil_wsc.errors.UserError` if the file cannot be written; the previous one is then intact.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(packed(state, tensors)).encode()
    tensors = _on_their_own(tensors)
    parts = write_parts(tensors) if write_parts else []
    tensors[JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    metadata = {"format": FORMAT, "sha256": digest(tensors)}
    if parts:
        metadata |= {"format": WITH_PARTS, PARTS: " ".join(parts)}
    write_atomically(path, serialised(tensors, metadata))


def serialised(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """A file's content; the tensors are contiguous, as :func:`packed` leaves them (numpy's form is wrong for others).

    By way of numpy where it has the types: safetensors makes a ctypes type of each size of a tensor, which stays.
    """
    try:
        return safetensors.numpy.save({name: tensor.numpy() for name, tensor in tensors.items()}, metadata)
    except TypeError:  # such as bfloat16
        return safetensors.torch.save(tensors, metadata)


def load_state(
    path: str | Path, read_parts: Callable[[Sequence[str]], Mapping[str, torch.Tensor]] | None = None
) -> State:
    """Read what :func:`save_state` wrote, or ``torch.save``, as up to version 0.2.0; its tensors are on the CPU.

    ``read_parts``: the tensors in the other files with these names.

    Raises ``OSError`` if the file cannot be read, and ``ValueError`` if it is damaged or of another kind.
    """
    content = read_file(path)
    if content[:2] == b"PK":  # an archive, as torch.save writes
        return _torch_saved(content)
    try:
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length])["__metadata__"]
        if metadata["format"] != FORMAT and not (metadata["format"] == WITH_PARTS and read_parts):
            raise ValueError(f"it is of the format {metadata['format']!r}")
        tensors = safetensors.torch.load(content)
        if metadata["sha256"] != digest(tensors):
            raise ValueError("its checksum is wrong")
        if read_parts:
            tensors |= read_parts(metadata.get(PARTS, "").split())
        return unpacked(json.loads(tensors[JSON].numpy().tobytes()), tensors.__getitem__)
    except (MemoryError, ValueError):
        raise
    except Exception as error:  # files of other programs raise many kinds of errors
        raise ValueError(type(error).__name__) from None


def _torch_saved(content: bytes) -> State:
    """What ``torch.save`` wrote; nothing in it is executed.

    ``torch.load`` does not detect damaged tensors, so the checksum of every part of the archive is verified first.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            refuse_compressed(archive, len(content))
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of its part {damaged} is wrong")
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (MemoryError, ValueError):
        raise
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # the unpickler raises many kinds of errors
        raise ValueError(type(error).__name__) from None


def refuse_compressed(archive: zipfile.ZipFile, size: int) -> None:
    """Raise ``ValueError`` if the parts of an archive of ``size`` bytes take more: torch compresses nothing.

    A small file could otherwise take all memory.
    """
    if sum(part.file_size for part in archive.infolist()) > size:
        raise ValueError("it is compressed, unlike what torch writes")


def peek_state(path: str | Path, *, without: str = "") -> State:
    """The values of what :func:`save_state` wrote, with empty tensors and unchecked: quick, whatever its size.

    ``without``: an entry that is left out.

    Raises ``OSError`` if the file cannot be read, and ``ValueError`` if it is of another kind.
    """
    check_file(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            text = file.get_tensor(JSON).numpy().tobytes()
        content = json.loads(text)
        content.pop(without, None)
        return unpacked(content, lambda name: torch.empty(0, 0, 0, 0))
    except (OSError, ValueError):
        raise
    except Exception as error:  # files of other programs raise many kinds of errors
        raise ValueError(type(error).__name__) from None


def names_of_parts(path: str | Path) -> list[str]:
    """The names of the other files with tensors of what :func:`save_state` wrote to ``path``; errors as above."""
    check_file(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            return file.metadata().get(PARTS, "").split()
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise ValueError(type(error).__name__) from None


def _on_their_own(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` on the CPU, those that share memory as copies, as safetensors requires."""
    separate, storages = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.cpu()
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return separate


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 of the tensors: their names, types, shapes and bytes."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        sha256.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if tensor.numel():
            sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def packed(value: object, tensors: dict[str, torch.Tensor], place: str = "") -> Json:
    """Convert ``value`` to JSON values and move its tensors to ``tensors``, named by their places, such as
    ``network.fc.weight``.

    ``value``: tensors, numbers, strings, booleans and None, in dicts, lists and tuples, nested at will. Raises a
    TypeError for anything else.
    """
    if isinstance(value, torch.Tensor):
        name = place if place not in tensors else f"{place}#{len(tensors)}"  # {"a.b": ...} beside {"a": {"b": ...}}
        return _packed_tensor(value.detach(), tensors, name)
    if isinstance(value, dict):
        inner = {
            key: item if _is_json(item) else packed(item, tensors, f"{place}.{key}".lstrip("."))
            for key, item in value.items()
        }
        return inner if all(isinstance(key, str) for key in inner) else {PAIRS: [[k, v] for k, v in inner.items()]}
    if isinstance(value, (list, tuple)):
        items = [
            item if _is_json(item) else packed(item, tensors, f"{place}.{number}".lstrip("."))
            for number, item in enumerate(value)
        ]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{place}: a {type(value).__name__} cannot be saved; a state is tensors and JSON values")


def _is_json(value: object) -> bool:
    """Whether a value is a plain one of JSON; of most values that is all there is to do."""
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (str, int, bool)


def _packed_tensor(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], name: str) -> dict[str, object]:
    """Move ``tensor`` to ``tensors`` and return its mark, which tells its memory format."""
    last = tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    tensors[name] = tensor.permute(0, 2, 3, 1) if last else tensor.contiguous()
    return {TENSOR: name, CHANNELS_LAST: True} if last else {TENSOR: name}


def unpacked(value: object, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """What :func:`packed` converted, with ``tensor_of(name)`` for each tensor."""
    if isinstance(value, list):
        return [unpacked(item, tensor_of) if isinstance(item, (dict, list)) else item for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        tensor = tensor_of(value[TENSOR])
        return tensor.permute(0, 3, 1, 2) if value.get(CHANNELS_LAST) else tensor
    if TUPLE in value:
        return tuple(unpacked(item, tensor_of) for item in value[TUPLE])
    if PAIRS in value:
        return {key: unpacked(item, tensor_of) for key, item in value[PAIRS]}
    if FLOAT in value:
        return float(value[FLOAT])
    return {key: unpacked(item, tensor_of) if isinstance(item, (dict, list)) else item for key, item in value.items()}

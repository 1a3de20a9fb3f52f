"""Files of safetensors with numpy alone: eight bytes with the size of the header, the header (JSON), the numbers."""

from __future__ import annotations

import json
import os
from typing import Any, Mapping

import numpy as np

from ._furious import Error

_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype) for name, dtype in {"F32": "<f4", "F64": "<f8", "F16": "<f2", "BF16": "<u2", "I32": "<i4",
                                              "I64": "<i8", "U8": "u1"}.items()}
_NAMES = {"float32": "F32", "float64": "F64", "float16": "F16", "int32": "I32", "int64": "I64", "uint8": "U8"}


def read(file: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a file; bf16 as float32."""
    tensors = {}
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > os.path.getsize(file):
            raise Error(f"{os.fspath(file)}: not a file of safetensors")
        header: dict[str, Any] = json.loads(stream.read(size))
        data = np.memmap(file, np.uint8, "r", 8 + size) if os.path.getsize(file) > 8 + size else np.empty(0, np.uint8)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise Error(f'{os.fspath(file)}: tensor "{name}" has dtype {entry["dtype"]}, which is not supported')
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[begin:end].tobytes(), _DTYPES[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            array = (array.astype("<u4") << 16).view(np.float32)
        tensors[name] = array
    return tensors


def write(file: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        if str(array.dtype) not in _NAMES:
            raise Error(f'{os.fspath(file)}: tensor "{name}" has dtype {array.dtype}; convert it to float32')
        header[name] = {"dtype": _NAMES[str(array.dtype)], "shape": list(array.shape),
                        "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for array in tensors.values():
            stream.write(np.ascontiguousarray(array).tobytes())


def read_folder(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The weights of a checkpoint: model.safetensors, or the shards of its index."""
    folder = os.fspath(folder)
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index, encoding="utf-8") as stream:
            shards = sorted(set(json.load(stream)["weight_map"].values()))
        return {name: array for shard in shards for name, array in read(os.path.join(folder, shard)).items()}
    return read(os.path.join(folder, "model.safetensors"))

"""The compiled library, as ctypes sees it; see `source/` for what its functions do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

I64, INT, SIZE, POINTER = ctypes.c_int64, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
CONFIGURE = ctypes.CFUNCTYPE(None)
TELL = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64)
SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "set_callbacks": (None, [CONFIGURE, TELL]),
    "set_count": (None, [INT]),
    "set_memory": (None, [INT, SIZE, SIZE, SIZE]),
    "poison_fork": (None, []),
    "is_in_bad_fork": (INT, []),
    "init": (None, []),
    "give_default_generators": (None, [INT]),
    "set_sync_debug_mode": (None, [INT]),
    "sync_debug_mode": (INT, []),
    "current": (INT, []),
    "exchange": (INT, [INT]),
    "elapsed_ms": (ctypes.c_double, [POINTER, POINTER]),
    "set_stream": (None, [INT, I64]),
    "stream": (I64, [INT]),
    "set_lag": (None, [INT, INT, ctypes.c_uint, INT, INT]),
    "hold": (None, [INT, I64, INT]),
    "sleep": (None, [INT, I64]),
    "call": (None, [INT, I64, CALL, I64]),
    "set_fraction": (None, [INT, ctypes.c_double]),
    "fraction": (ctypes.c_double, [INT]),
    "free_bytes": (SIZE, [INT]),
    "register": (INT, [POINTER, SIZE]),
    "unregister": (INT, [POINTER]),
    "registered_bytes": (SIZE, []),
    "host_stats": (None, [ctypes.POINTER(I64)]),
    "reset_host_stats": (None, [INT]),
    "empty_host_cache": (None, []),
}


_LOADED: list[ctypes.CDLL] = []


def load(folder: Path) -> None:
    """Load the library, with torch's own from that folder."""
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(os.environ["GPUMIX_TEST_CUDA_LIBRARY"])
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, f"cuda_device_{name}")
        function.restype, function.argtypes = result, arguments
    _LOADED.append(loaded)


@cache
def call(name: str) -> Callable[..., Any]:
    """A function of the library, as one of Python: TorchDynamo keeps a table of those of torch."""
    found = getattr(_LOADED[0], f"cuda_device_{name}")

    def function(*args: Any) -> Any:
        return found(*args)

    return function

"""A CUDA device without a GPU: CUDA code of any library runs on the CPU build of torch.

    python tests/cuda_device -- pytest -m gpu tests/engine       # two devices of 80 GB
    python tests/cuda_device --devices h100:2,t4:0.5 -- gpumix train job.yaml    # 2 and 0.5 GiB
    python tests/cuda_device --lag side-late -- pytest tests/data/workers/test_device_copies.py

The command, and every process that it starts, has the devices: the environment says so
(`environment`, for tests that start commands), and `path/sitecustomize.py`, on `PYTHONPATH`, loads
them before torch. The library is compiled once, in half a minute, into the user's cache folder.

`torch.cuda` is torch's own Python code. Each device has the segments, pools and counters of torch's
caching allocator, a limit (`torch.OutOfMemoryError` with CUDA's words), streams with a queue and a
thread each, events, and a random generator. The host has pinned memory, in powers of two as torch's
host allocator takes it, and registered memory. Backward runs in autograd's thread of the device. A
fork after the first use is refused as CUDA refuses it. `torch.cuda.set_sync_debug_mode` warns or
raises, and `host_waits` counts every wait of the host by its line of Python code.

Streams run at once, unless `--lag` (or `set_lag`) says otherwise:

    side-late     every stream except the default one runs only when somebody waits for it
    side-early    the default stream runs only when somebody waits for it
    random:SEED   a quarter of the work is late, by up to 2 ms

With a lag, memory that is freed is overwritten as soon as its own stream comes to it. So a missing
`wait_stream`, a missing `record_stream`, or a pinned buffer that is used again too early gives a
wrong number; with `side-late` and `side-early` it does so every time. Collectives are never held:
they come as soon as what they take is there.

What `gpumix profile` measures at the size of a GPU is smaller here (`hook.SIZES`).

The device does not show NCCL, Triton and inductor, graphs, time, or expandable segments.
"""

from __future__ import annotations

from cuda_device.environ import environment, is_here
from cuda_device.lag import current_lag, set_lag
from cuda_device.waits import host_waits, reset_host_waits

__all__ = [
    "current_lag",
    "environment",
    "host_waits",
    "is_here",
    "reset_host_waits",
    "set_lag",
]

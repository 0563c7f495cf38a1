"""What Python imports when it starts, with this folder on `PYTHONPATH`: makes the CUDA device for
tests known to torch, where the environment says which devices there are."""

import importlib.util
import os
import sys
from pathlib import Path

if os.environ.get("GPUMIX_TEST_CUDA_LIBRARY"):
    _folder = Path(__file__).parent.parent
    _spec = importlib.util.spec_from_file_location(
        "cuda_device", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    assert _spec is not None and _spec.loader is not None, "a file of this repository"
    sys.modules["cuda_device"] = _module = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    from cuda_device import hook

    hook.install()

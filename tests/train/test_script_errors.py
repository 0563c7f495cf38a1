"""Scripts that end by an error of gpumix."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
from gpumix import Accelerator

def main():
    import torch
    Accelerator(ARGUMENTS)

main()
"""


def run_script(tmp_path, arguments: str, **environment: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("ARGUMENTS", arguments))
    environment = {"OMP_NUM_THREADS": "1"} | environment
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    return ended.stderr


def test_an_error_names_the_line_of_the_script_and_shows_no_traceback(tmp_path):
    pytest.importorskip("accelerate")
    told = run_script(tmp_path, 'mixed_precision="fp8"')
    error = told[told.index("gpumix: ") :].splitlines()
    assert "Traceback" not in told
    assert "fp8" in error[0]
    line = 'Accelerator(mixed_precision="fp8")'
    assert error[-1] == f"  called at: {tmp_path / 'script.py'}:6, {line}"


@pytest.mark.extended
def test_tracebacks_are_shown_on_request_and_of_other_errors(tmp_path):
    pytest.importorskip("accelerate")
    asked = run_script(tmp_path, 'mixed_precision="fp8"', GPUMIX_TRACEBACK="1")
    assert "Traceback" in asked and "InputError" in asked
    assert "Traceback" in run_script(tmp_path, "plan=1 / 0")

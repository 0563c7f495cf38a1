"""What tells a run from others with its output folder."""

from __future__ import annotations

import pytest

from gpumix.train.run_log.run_id import assign_run_id, read_run_id


def test_a_run_keeps_its_id_until_another_begins_in_its_folder(tmp_path):
    assert read_run_id(tmp_path) == ""
    assign_run_id(tmp_path, fresh=False)
    first = read_run_id(tmp_path)
    assert first
    assign_run_id(tmp_path, fresh=False)
    assert read_run_id(tmp_path) == first
    assign_run_id(tmp_path, fresh=True)
    assert read_run_id(tmp_path) not in ("", first)


@pytest.mark.parametrize("content", [b"", b"1a2b", b"../../../elsewhere", b"\xff" * 32])
def test_what_is_no_id_is_replaced(tmp_path, content):
    (tmp_path / ".id").write_bytes(content)
    assert read_run_id(tmp_path) == ""
    assign_run_id(tmp_path, fresh=False)
    assert read_run_id(tmp_path)

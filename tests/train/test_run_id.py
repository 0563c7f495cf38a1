"""What tells a run from others with its output folder."""

from __future__ import annotations

import pytest

from gpumix.train.run_log.run_id import give_id, id_of


def test_a_run_keeps_its_id_until_another_begins_in_its_folder(tmp_path):
    assert id_of(tmp_path) == ""
    give_id(tmp_path, fresh=False)
    first = id_of(tmp_path)
    assert first
    give_id(tmp_path, fresh=False)
    assert id_of(tmp_path) == first
    give_id(tmp_path, fresh=True)
    assert id_of(tmp_path) not in ("", first)


@pytest.mark.parametrize("content", [b"", b"1a2b", b"../../../elsewhere", b"\xff" * 32])
def test_what_is_no_id_is_replaced(tmp_path, content):
    (tmp_path / ".id").write_bytes(content)
    assert id_of(tmp_path) == ""
    give_id(tmp_path, fresh=False)
    assert id_of(tmp_path)

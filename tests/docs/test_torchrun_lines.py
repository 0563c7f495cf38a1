"""Every torchrun line of the pages is known, and what it starts is run by a test that it names.

Those tests start fewer processes, on this host, and their own jobs; the options are the page's.
"""

from __future__ import annotations

import re
import shlex

import pytest
from pages import PAGES, ROOT, blocks, commands, marked

RENDEZVOUS = "--rdzv-backend gpumix --rdzv-endpoint host-a:29500"
HOSTS = f"torchrun --nnodes 2 --nproc-per-node 4 {RENDEZVOUS} -m gpumix"
SCRIPT = "torchrun --nproc-per-node 2 examples"
SCRIPTS = "tests/examples/test_changed_imports.py"
# The file of its test.
TESTS = {
    f"{HOSTS} train job.yaml": "tests/train/test_torchrun.py",
    f"{HOSTS} check job.yaml": "tests/cli/test_check_verb.py",
    f"torchrun --nnodes 1:4 --max-restarts 100 --nproc-per-node 4 {RENDEZVOUS} -m gpumix train "
    "job.yaml": "tests/train/test_elastic_hosts.py",
    f"{SCRIPT}/run_clm.py --output_dir runs/clm": SCRIPTS,
    f"{SCRIPT}/sft_lora.py --output_dir runs/lora": SCRIPTS,
    f"{SCRIPT}/clm_no_trainer.py": SCRIPTS,
    "torchrun --nproc-per-node 3 train.py": "tests/launch/test_on_this_host.py",
}
SHOWN = {
    shlex.join(words)
    for page in PAGES
    for block in blocks(page)
    if not marked(block)
    for words in commands(block)
    if words[0] == "torchrun"
}


def test_each_line_has_its_test():
    assert TESTS.keys() == SHOWN


@pytest.mark.parametrize("line", sorted(TESTS))
def test_that_test_starts_it(line):
    text = (ROOT / TESTS[line]).read_text(encoding="utf-8")
    for helper in re.findall(r"(?m)^from (\w+) import", text):
        for path in (ROOT / "tests").rglob(f"{helper}.py"):
            text += path.read_text(encoding="utf-8")
    options = [word for word in shlex.split(line) if word.startswith("--")]
    wanted = [word for word in options if word != "--output_dir"]
    assert [word for word in wanted if word not in text] == []
    program = next(word for word in shlex.split(line) if word.endswith((".py", "gpumix")))
    assert program.removeprefix("examples/").removesuffix(".py") in text

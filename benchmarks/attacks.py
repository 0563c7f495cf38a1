"""Whether a second user of the machine, a file of a stranger or a client of a port does any harm.

Each attack is prepared as the stranger would, then the user does what users do: reports on a run,
goes on with one, inspects a checkpoint, launches by a cluster file. It succeeds if the user's home
has changed or came out, if the stranger's code ran, or if a terminal was given an order. The second
user is made by giving files away, which only root can: else those attacks are left out.

    python benchmarks/attacks.py [--json] [--kind races] [--name TEXT] [--show]

Figures: `attacks`, `kinds`, `succeeded`, `hung` (over 180 s), `called_a_bug`, `left_out`,
`slowest_s`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from common import make_parser, print_figures
from helpers.attacks import (
    attacked,
    command_attacks,
    file_attacks,
    job_attacks,
    state_attacks,
    word_attacks,
)

WITHOUT_A_SECOND_USER = ("orders to terminals", "odd numbers", "hosts in templates",
                         "hosts to ssh", "values in templates", "ports", "configurations",
                         "saved datasets", "names of cards", "environments", "plans")  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kind", help="only attacks of this kind")
    parser.add_argument("--name", default="", help="only those whose name has this in it")
    parser.add_argument("--show", action="store_true", help="print each attack")
    arguments = parser.parse_args()
    modules = file_attacks, word_attacks, state_attacks, job_attacks, command_attacks
    every = [attack for module in modules for attack in module.every()]
    chosen = [one for one in every if arguments.kind in (None, one.kind)]
    chosen = [one for one in chosen if arguments.name in one.name]
    if os.geteuid() != 0:
        chosen = [one for one in chosen if one.kind in WITHOUT_A_SECOND_USER]
    warm_up()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for number, attack in enumerate(chosen):
            outcome = attacked.attempt(attack, Path(folder) / str(number))
            found.append(outcome)
            told = outcome.harm or ("it hung" if outcome.hung else outcome.bug)
            if told or arguments.show:
                print(f"{attack.id}: {told or 'held'} ({outcome.seconds:.1f} s)", file=sys.stderr)
    figures = {
        "attacks": len(found),
        "kinds": len({one.attack.kind for one in found}),
        "succeeded": sum(bool(one.harm) for one in found),
        "hung": sum(one.hung for one in found),
        "called_a_bug": sum(bool(one.bug) for one in found),
        "left_out": len(every) - len(found),
        "slowest_s": round(max((one.seconds for one in found), default=0.0), 1),
    }
    print_figures(figures, as_json=arguments.json)
    sys.exit(int(any(figures[name] for name in ("succeeded", "hung", "called_a_bug"))))


def warm_up() -> None:
    """Import what attacks use once, not in each of their processes."""
    import datasets  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import gpumix.cli
    import gpumix.launch.launcher
    import gpumix.report.live
    import gpumix.report.page
    import gpumix.train.checkpoint.export
    import gpumix.train.checkpoint.inspect  # noqa: F401

    file_attacks.documents()
    file_attacks.foreign_library()
    state_attacks.whole()


if __name__ == "__main__":
    main()

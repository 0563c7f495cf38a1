"""`gpumix whatif`: worth of more cards, fewer, or different links. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gpumix.cli.common import Json, print_result
from gpumix.cli.planning.profile_source import PlanOptions, add_planning_options
from gpumix.schema.errors import InputError
from gpumix.schema.reading.error_location import locate_errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumix.schema.profile.profile import Profile


@add_planning_options
def whatif(
    asked: PlanOptions,
    add: Annotated[list[str], typer.Option("--add", help="More cards: 2xa6000; repeatable.")] = [],  # noqa: B006
    remove: Annotated[
        list[str], typer.Option("--remove", help="A GPU type, or 2xp40; repeatable.")
    ] = [],  # noqa: B006
    network: Annotated[
        str | None, typer.Option("--network", help="Another link between hosts: 25GbE, ib-hdr.")
    ] = None,
    inside: Annotated[
        str | None,
        typer.Option(
            "--inside", help="Another link between the devices of a host: pcie4, nvlink3."
        ),
    ] = None,
    price: Annotated[
        list[str],
        typer.Option("--price", help="Price per device-hour: a100=1.80; adds cost per token."),
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Show the gain of each change to the cluster, and of all together.

    Example: gpumix whatif job.yaml --add 2xa6000 --remove p40 --inside pcie5
    """
    from gpumix.cli.planning.tables import outlook_page
    from gpumix.planner.cluster_change import forecast_clusters

    source = asked.source()
    variants = _make_variants(source.profile, add, remove, {"network": network, "inside": inside})
    names = {c.name for _, variant in variants for c in variant.cluster.classes}
    prices = _parse_prices(price, names)
    with locate_errors(source.place):
        found = forecast_clusters(variants, source.request, prices)
    print_result(
        lambda: [outlook.model_dump(mode="json") for outlook in found],
        lambda: outlook_page(found, source.note),
        as_json,
    )


def _make_variants(
    profile: Profile, add: list[str], remove: list[str], links: Mapping[str, str | None]
) -> list[tuple[str, Profile]]:
    """Return the present cluster, each change by itself, and all together. `links` are the new
    links."""
    from gpumix.hardware.estimates.what_if import (
        add_devices,
        remove_devices,
        set_link_between_hosts,
        set_link_inside_hosts,
    )

    changes = [(f"add {text}", add_devices, text) for text in add]
    changes += [(f"remove {text}", remove_devices, text) for text in remove]
    ways = {"network": set_link_between_hosts, "inside": set_link_inside_hosts}
    changes += [(f"{name} {text}", ways[name], text) for name, text in links.items() if text]
    if not changes:
        raise InputError(
            "there is nothing to change",
            code="whatif-without-change",
            fix="give --add 2xa6000, --remove p40, --network 25GbE or --inside pcie4",
        )
    variants = [("now", profile)]
    for name, change, text in changes:
        with locate_errors(f"--{name}"):
            changed = change(profile, text)
        variants.append((f"{name}{_describe_new_hosts(profile, changed)}", changed))
    if len(changes) > 1:
        together = profile
        for name, change, text in changes:
            try:
                together = change(together, text)
            except InputError as error:
                raise InputError(
                    f"{name} is not possible after the other changes: {error.what}",
                    code="whatif-change-impossible",
                    where=f"--{name}",
                    why=error.why,
                    fix="give fewer changes at once",
                ) from error
        variants.append(("all together", together))
    return variants


def _describe_new_hosts(before: Profile, after: Profile) -> str:
    """Return the hosts of new devices, in a cluster of several hosts."""
    known = {d.id for d in before.cluster.devices}
    new = sorted({d.host for d in after.cluster.devices if d.id not in known})
    several = len({d.host for d in after.cluster.devices}) > 1
    return f" on {', '.join(new)}" if new and several else ""


def _parse_prices(texts: list[str], names: set[str]) -> dict[str, float] | None:
    """Parse prices such as "a100=1.80" by class; a text may have several, with commas."""
    from gpumix.hardware.estimates.what_if import class_named
    from gpumix.schema.reading.error_text import find_nearest, suggest

    prices: dict[str, float] = {}
    for text in (part for given in texts for part in given.split(",")):
        given, _, amount = text.partition("=")
        name = class_named(names, given.strip())
        if name is None:
            raise InputError(
                f"there is no class '{given.strip()}' to pay for",
                code="price-class-unknown",
                where="--price",
                fix=suggest(find_nearest(given.strip(), names), sorted(names), "there are"),
            )
        prices[name] = _parse_price(amount)
    return prices or None


def _parse_price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < float("inf"):
        raise InputError(
            f"'{text}' is no price",
            code="price-invalid",
            where="--price",
            fix="write it as a100=1.80",
        )
    return price

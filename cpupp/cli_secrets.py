"""Secrets as the verbs use them: read, and hidden in all that is printed from then on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cpupp.errors import CpuppError

if TYPE_CHECKING:
    from cpupp.launch.secret import Secrets
    from cpupp.plan.cluster import ClusterSpec


def use_secrets(spec: ClusterSpec, environment: Mapping[str, str]) -> Secrets:
    """Read the values that the ranks get, before anything connects. Raises CpuppErrors."""
    from cpupp.launch.secret import literal_mask, read_secrets
    from cpupp.render import hide, print_notes

    hide(literal_mask(spec))
    secrets = read_secrets(spec, environment)
    hide(secrets.mask)
    print_notes(secrets.notes)
    return secrets


def try_secrets(spec: ClusterSpec, environment: Mapping[str, str] | None) -> None:
    """Hide what would be secret in a launch, and say why one would be refused. None: only what the file holds."""
    from cpupp.launch.secret import literal_mask
    from cpupp.render import flat, hide, print_notes

    if environment is None:
        hide(literal_mask(spec))
        return
    try:
        use_secrets(spec, environment)
    except CpuppError as error:
        print_notes(f"a launch would be refused: {each} (hint: {each.hint})" for each in flat(error))

"""The version is written once, and what is installed agrees with it."""

from __future__ import annotations

from importlib import metadata

import cpupp


def test_the_installed_version_is_that_of_the_package() -> None:
    assert metadata.version("cpupp") == cpupp.__version__

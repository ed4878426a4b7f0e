"""Adds the patches, which lie at the top of the source tree, to the package; the rest is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["hotspa_plugin*"]), "hotspa_plugin.patches"],
    package_dir={"hotspa_plugin.patches": "patches"},
    package_data={"hotspa_plugin.patches": ["*/*/*.patch"]},
)

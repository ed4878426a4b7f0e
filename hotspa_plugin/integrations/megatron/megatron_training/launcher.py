"""Running an unchanged Megatron script under the hooks."""

from __future__ import annotations

import os
import runpy
import sys

_USAGE = "usage: torchrun ... -m hotspa_plugin.launch [--cpu] SCRIPT [the script's arguments] --hotspa-pool SPEC"


def main(argv: list[str] | None = None) -> None:
    """Installs the hooks and runs the script that ``argv`` (default: the process's) names, with its arguments.

    ``--cpu`` before the script redirects CUDA calls to the CPU first. Exit code 2 where there is no such script.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    on_cpu = bool(arguments) and arguments[0] == "--cpu"
    if on_cpu:
        arguments.pop(0)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        sys.exit(0 if arguments else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {script} is not a script: name a Python file, then its arguments\n{_USAGE}", file=sys.stderr)
        sys.exit(2)
    # As if the script had been started by itself: it imports its neighbours and reads its own arguments.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    sys.argv = arguments
    if on_cpu:
        from hotspa_plugin.integrations.megatron.megatron_training import cpu

        cpu.enable()
    from hotspa_plugin.integrations.megatron.megatron_training.inventory import install

    install()
    runpy.run_path(script, run_name="__main__")

"""``python -m hotspa_plugin`` is the command ``hotspa``."""

from hotspa_plugin.cli.main import main

if __name__ == "__main__":
    main()

"""The command line, `lantern-hf`. Nothing here imports torch before a command runs: `--help` answers at once."""

from lantern_hf.cli.app import app, main

__all__ = ["app", "main"]

"""`python -m lantern_hf.cli` is `lantern-hf`."""

from lantern_hf.cli.app import main

main()

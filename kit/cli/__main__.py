"""`python -m kit.cli` is `grpo-kit`."""

from kit.cli.app import main

main()

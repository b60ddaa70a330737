"""`python -m atoll` is the command `atoll`."""

from atoll.cli.main import main

main()

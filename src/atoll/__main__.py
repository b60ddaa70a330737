"""`python -m atoll` is the command `atoll`."""

from atoll.cli import main

main()

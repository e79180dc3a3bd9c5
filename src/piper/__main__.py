"""`python -m piper`, the same as the `piper` command."""

from piper.cli import main

main()

"""Run the `piper` command as `python -m piper`."""

from piper.cli import main

main()

"""Provide the `piper` command: its subcommands and options, how it loads a FILE.py, and how it ends on an interrupt.

This room may import every other room of `piper`; no other room imports it. Heavy imports happen inside of the commands.
"""

from piper.cli.commands import app
from piper.cli.entry import main

__all__ = ["app", "main"]

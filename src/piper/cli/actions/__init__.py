"""Do the work of the subcommands, a module for each: they print results and write folders.

They may import the files of `piper.cli` but for `commands` and `entry`, and every other room of `piper`.
"""

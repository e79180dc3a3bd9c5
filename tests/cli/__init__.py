"""The command line and the front door: messages, refusals, examples, exit codes."""

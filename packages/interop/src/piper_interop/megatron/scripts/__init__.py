"""Read shell scripts that start Megatron-LM, without running them: words, conditions, variables, the launched command.

May import: nothing of megatron.
"""

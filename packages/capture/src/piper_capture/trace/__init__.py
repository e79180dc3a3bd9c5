"""Trace a model and its loss with Dynamo as one graph of torch's operations.

May import: torch_api, values, module, steps.
"""

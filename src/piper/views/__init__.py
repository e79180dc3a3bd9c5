"""Show results to people: tables, texts and drawings of plans, predictions, explanations, searches and costs.

This room may import `piper.api` and every package of Piper. It computes nothing that a program would want without the
text.
"""

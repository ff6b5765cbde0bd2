"""Structured output: from a JSON schema, regex or Lark text to a matcher that masks logits.

Compilation is llguidance's; here are the checks before it and the automaton after it.
Free of PyTorch.
"""

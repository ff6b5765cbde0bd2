"""OpenAI's APIs: chat completions, completions, responses, embeddings.

Beside each route stand its types and what writes its answers and events.
"""

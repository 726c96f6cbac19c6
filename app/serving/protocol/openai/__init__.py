"""OpenAI's API, which most clients of language models speak: bodies and events, without a server.

https://developers.openai.com/api/reference

``embeddings``, ``models`` and ``errors`` are the objects of its routes.
"""

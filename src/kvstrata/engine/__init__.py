"""The KV engine: one block store that many cache servers share over HTTP and RESP (docs/engine.md).

It imports the store, and nothing of vLLM or LMCache.
"""

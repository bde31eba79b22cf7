"""The block store: KV blocks as files, capped, checked, exact after any crash.

It imports nothing else of the project.
"""

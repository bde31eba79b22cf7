"""The proof: does this stack really reuse KV across restarts, with the same answer, and is it worth it?"""

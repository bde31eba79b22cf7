"""What is measured, what is shown of it, and the proof that neither is empty.

The names of metrics stand once, in `catalog`; dashboards, rules, docs and `check` take them from there.
"""

from hypothesis import settings

# No test of ours is judged by how long it took on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

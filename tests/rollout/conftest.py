"""Makes the fakes in `engine_fakes.py` importable by every test below this folder."""

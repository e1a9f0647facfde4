"""Every performance claim of this project, as a benchmark that anyone can run: `python -m bench NAME`."""

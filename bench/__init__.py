"""Every performance claim, as a runnable benchmark with its peers side by side."""

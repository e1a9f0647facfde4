"""Files and trees that cross a sandbox's boundary, checked on both sides."""

"""Trees of files across the boundary: checked tar data here, records in the pipe to and from the inside."""

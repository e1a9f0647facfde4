"""Commands in a live sandbox: from a request to streams, measurements and one outcome."""

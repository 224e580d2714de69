"""The id side: requests in, step plans out, results back in. Never imports the worker, the front or the server."""

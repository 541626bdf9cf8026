"""The base class of all docks, and the worker that runs their slow jobs."""

"""Batch jobs: a file of requests in, a file of results out, in the same order, resumed where the job stopped.

A job runs on an engine of its own or on a server. It knows both as a `RequestRunner`, and knows no schedule.
"""

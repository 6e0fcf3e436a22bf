"""Access to a server's rpcs: tokens and their tenants, certificates, and the policy of each rpc.

Knows paths and metadata of calls, never their messages, and nothing of engines.
"""

"""Requests on their way to an engine, and their streams on the way back.

Holds the live requests of one served model, the engines that they can go to, and all decisions between the two:
validation, routing, failover, delivery and accounting. Knows engines through `EngineClient` alone, and knows neither
gRPC nor torch.
"""

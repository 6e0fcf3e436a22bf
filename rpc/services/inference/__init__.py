"""The Open Inference Protocol with Triton's extensions: `inference.GRPCInferenceService` over a `Frontend`."""

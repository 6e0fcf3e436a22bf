"""The Open Inference Protocol with Triton's extensions: `inference.GRPCInferenceService` over a `Frontend`.

Names of tensors and parameters are those of Triton's vLLM back end. The frontend knows nothing of this protocol.
"""
